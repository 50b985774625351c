"""A knowledge graph over the ids of one table, in compressed sparse rows: an id's neighbours are one slice.

The neighbours of node v are ``neighbors[starts[v] : starts[v + 1]]``; in a weighted graph ``keep`` and ``alias`` at the
same positions draw one of them in proportion to its weight (``rows.py``)::

    edges 0-1 1-2 1-4        starts     0 1     4 5 5 6
    (undirected, 5 nodes)    neighbors  1 0 2 4 1   1
                             node       0 1     2 3 4

A graph is built in memory from arrays, or mapped from a folder that ``distembed prepare graph`` made: only the pages
that are read take memory, and the processes of one machine share them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.base.checksums import Verification
from distembed.base.errors import UserError
from distembed.graph.folder import (
    GRAPH_FILE,
    REMEDY,
    ArrayWriter,
    GraphDescription,
    array_types,
    fingerprint,
    map_array,
)
from distembed.graph.rows import alias_tables, merge_equal, require_num_nodes, row_blocks, sort_edges, stored_edges

_PIECE = 2**20


@dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """Neighbours of every id; :meth:`from_edges` and :meth:`open` make one. Nothing may write to its arrays."""

    num_nodes: int  # number of ids, which lie in ``[0, num_nodes)``
    # Where the row of each node begins, and where the last one ends, int64 ``[num_nodes + 1]``.
    starts: NDArray[np.int64]
    # Neighbours, row after row, int32 (int64 with more than 2^31 nodes) ``[num_edges]``; those of a row are ascending
    # and distinct, and never the node itself.
    neighbors: NDArray[np.integer[Any]]
    # Probability that an edge's slot gives the edge itself, float64 ``[num_edges]``; weighted graphs only.
    keep: NDArray[np.float64] | None = None
    # Position in the row that the slot gives otherwise, int32 ``[num_edges]``; weighted graphs only.
    alias: NDArray[np.integer[Any]] | None = None
    directed: bool = False  # whether edges were stored one way only
    folder: Path | None = None  # folder that the graph is mapped from; None for a graph in memory
    description: GraphDescription | None = None  # content of ``graph.json`` in that folder

    def __eq__(self, other: object) -> bool:
        """Compares node count, direction, neighbours and alias tables; the folder and its description do not count."""
        if not isinstance(other, Graph):
            return NotImplemented
        arrays = ("num_nodes", "directed", "starts", "neighbors", "keep", "alias")
        return self is other or all(np.array_equal(getattr(self, name), getattr(other, name)) for name in arrays)

    def __hash__(self) -> int:
        return hash((self.num_nodes, len(self.neighbors)))

    @classmethod
    def from_edges(
        cls, num_nodes: int, sources: Any, targets: Any, weights: Any | None = None, directed: bool = False
    ) -> Graph:
        """Builds a graph in memory.

        Args:
            num_nodes: Number of ids, which lie in ``[0, num_nodes)``.
            sources: One end of each edge: integers, as an array, a tensor or a list.
            targets: The other end of each edge.
            weights: Weight of each edge, finite and above 0; the weights of a repeated edge are added.
            directed: Stores each edge at its source alone; otherwise at both ends.

        Raises:
            UserError: An id or weight is invalid, the arrays differ in length, or no edge is left after self-loops
                (edges from a node to itself) have been dropped.
        """
        num_nodes = require_num_nodes("num_nodes", num_nodes)
        source_ids, target_ids = _ids("sources", sources, num_nodes), _ids("targets", targets, num_nodes)
        weight_values = None if weights is None else _weights(weights)
        arrays = {"sources": source_ids, "targets": target_ids, "weights": weight_values}
        lengths = {name: len(array) for name, array in arrays.items() if array is not None}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{length} {name}" for name, length in lengths.items())
            raise UserError(f"there are {listed}; give one of each an edge.")
        edges = merge_equal(sort_edges(stored_edges(num_nodes, source_ids, target_ids, weight_values, directed)))
        if not len(edges):
            raise UserError(
                f"the graph has no edge: {len(source_ids)} were given, and those from a node to itself are dropped. "
                "Give edges between distinct ids."
            )
        sources = edges.keys // num_nodes
        neighbors = (edges.keys - sources * num_nodes).astype(array_types(num_nodes, False)["neighbors"])
        starts = np.zeros(num_nodes + 1, np.int64)
        np.cumsum(np.bincount(sources, minlength=num_nodes), out=starts[1:])
        keep, alias = (None, None) if edges.weights is None else _all_alias_tables(starts, edges.weights)
        return cls(num_nodes, starts, neighbors, keep, alias, directed)

    @classmethod
    def open(cls, path: str | os.PathLike[str], verified: bool = True) -> Graph:
        """Maps a graph from its folder.

        Args:
            path: The folder.
            verified: Compares every file with its checksum and every neighbour with the range of ids, which reads all
                files whole. False checks only the sizes of the files and the two ends of ``starts``.

        Raises:
            UserError: The folder is no graph, or a file is missing, damaged or cut short.
        """
        folder = Path(path)
        description = GraphDescription.load(folder)
        arrays = {name: map_array(folder, stored) for name, stored in description.arrays.items()}
        num_nodes, directed = description.num_nodes, description.directed
        graph = cls(num_nodes, **arrays, directed=directed, folder=folder, description=description)
        if verified:
            graph.verify()
        if graph.starts[0] != 0 or graph.starts[-1] != description.num_edges:
            raise UserError(f"{folder} is damaged: its rows do not cover its edges; make the graph again.")
        if verified:
            graph.require_own_ids()
        return graph

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the graph to a new or empty folder, for :meth:`open`.

        Raises:
            UserError: The folder exists and is not empty.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(
                f"{folder} is not empty, so no graph is written there; name a new folder or empty this one."
            )
        stored = {}
        for name, array in self._arrays().items():
            writer = ArrayWriter(folder, name, array.dtype)
            writer.append(array)
            stored[name] = writer.finish()
        counts = self.num_nodes, self.num_edges
        GraphDescription(*counts, self.directed, self.weighted, stored, self.details).save(folder)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        """Returns this graph, not a copy, since nothing may write to its arrays: copied models share one graph."""
        return self

    def __reduce__(self) -> Any:
        """Pickles a mapped graph as its path; the process that unpickles it maps the files without reading them."""
        if self.folder is not None:
            return Graph.open, (self.folder, False)
        return super().__reduce__()

    @property
    def num_edges(self) -> int:
        """Number of edges stored; an undirected edge counts twice."""
        return len(self.neighbors)

    @property
    def weighted(self) -> bool:
        """Whether neighbours are drawn in proportion to weights."""
        return self.keep is not None

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes; does not load a mapped graph's pages."""
        return sum(array.nbytes for array in self._arrays().values())

    @property
    def details(self) -> Mapping[str, Any]:
        """How the graph was prepared, from ``graph.json``; empty for a graph that was built in memory."""
        return {} if self.description is None else self.description.details

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the checksums of the arrays: equal for equal graphs, in memory or on disk."""
        if self.description is not None:
            return self.description.fingerprint
        checksums = {name: hashlib.sha256(array.data.cast("B")).hexdigest() for name, array in self._arrays().items()}
        return fingerprint(self.num_nodes, checksums)

    def neighbors_of(self, node: int) -> NDArray[np.integer[Any]]:
        """Returns the neighbours of a node, ascending, as a view; a UserError where the graph lacks the node."""
        if not 0 <= node < self.num_nodes:
            raise UserError(f"node is {node}; the graph has the nodes 0 to {self.num_nodes - 1}.")
        return self.neighbors[self.starts[node] : self.starts[node + 1]]

    def degrees(self) -> NDArray[np.int64]:
        """Returns the number of neighbours of each node, ``[num_nodes]``."""
        return np.diff(self.starts)

    def verify(self) -> None:
        """Compares every file of the folder with its checksum; does nothing for a graph in memory.

        Raises:
            UserError: A file differs from its checksum.
        """
        if self.folder is not None and self.description is not None:
            for stored in self.description.arrays.values():
                if (problem := stored.problem(self.folder)) is not None:
                    raise UserError(f"{problem}; {REMEDY}.")

    def require_own_ids(self) -> None:
        """Checks that ``starts`` never decreases and that every neighbour lies in ``[0, num_nodes)``.

        Training uses a drawn neighbour as a table row without a bounds check. Checksums do not find an invalid id that
        another program wrote together with a matching checksum.

        Raises:
            UserError: Rows overlap, or a neighbour is not an id of the graph.
        """
        subject = "the graph" if self.folder is None else self.folder
        # Pieces bound the memory of the temporary arrays; the files may be larger than memory.
        for begin in range(0, self.num_nodes, _PIECE):
            if (np.diff(self.starts[begin : begin + _PIECE + 1]) < 0).any():
                raise UserError(f"{subject} is damaged: its rows overlap; make the graph again.")
        for begin in range(0, self.num_edges, _PIECE):
            some_neighbors = self.neighbors[begin : begin + _PIECE]
            if some_neighbors.min() < 0 or some_neighbors.max() >= self.num_nodes:
                largest_id = self.num_nodes - 1
                raise UserError(
                    f"{subject} is damaged: it has neighbours outside of its ids, 0 to {largest_id}; make it again."
                )

    def _arrays(self) -> dict[str, NDArray[Any]]:
        names = array_types(self.num_nodes, self.weighted)
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        kind = f"{'directed' if self.directed else 'undirected'}{', weighted' if self.weighted else ''}"
        folder_text = "" if self.folder is None else f", folder={str(self.folder)!r}"
        return f"Graph(num_nodes={self.num_nodes}, num_edges={self.num_edges}, {kind}{folder_text})"


def _all_alias_tables(
    starts: NDArray[np.int64], weights: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Computes ``keep`` and ``alias`` of all edges, block by block of whole rows, which bounds temporary memory."""
    keep, alias = np.empty(len(weights), np.float64), np.empty(len(weights), np.int32)
    for start, stop in row_blocks(starts):
        begin, end = starts[start], starts[stop]
        keep[begin:end], alias[begin:end] = alias_tables(starts[start : stop + 1] - begin, weights[begin:end])
    return keep, alias


def _ids(name: str, values: Any, num_nodes: int) -> NDArray[np.int64]:
    """Converts one end of the edges to int64; refuses other types, and the first id outside ``[0, num_nodes)``."""
    array = _array(name, values)
    # An empty list becomes a float array, so the type of an empty array says nothing.
    if array.size and array.dtype.kind not in "iu":
        raise UserError(f"{name} are of type {array.dtype}; give integers, the ids of an edge's ends.")
    outside = (array < 0) | (array >= num_nodes) if array.size else np.zeros(0, bool)
    if outside.any():
        first = int(outside.argmax())
        raise UserError(
            f"{name}[{first}] is {array[first]}; ids lie in 0 to {num_nodes - 1} for num_nodes={num_nodes} "
            f"({np.count_nonzero(outside)} do not)."
        )
    return array.astype(np.int64)


def _weights(values: Any) -> NDArray[np.float64]:
    array = _array("weights", values)
    if array.size and array.dtype.kind not in "iuf":
        raise UserError(f"weights are of type {array.dtype}; give numbers above 0.")
    array = array.astype(np.float64)
    wrong = ~(np.isfinite(array) & (array > 0))
    if wrong.any():
        first, count = int(wrong.argmax()), np.count_nonzero(wrong)
        raise UserError(f"weights[{first}] is {array[first]}; a weight is finite and above 0 ({count} are not).")
    return array


def _array(name: str, values: Any) -> NDArray[Any]:
    on_cpu = values.detach().cpu() if hasattr(values, "detach") else values  # a tensor, without importing torch
    try:
        array = np.asarray(on_cpu)
    except ValueError as error:  # lists of unequal length
        raise UserError(f"{name} cannot be read as an array: {error}.") from error
    if array.ndim != 1:
        raise UserError(f"{name} have the shape {array.shape}; give one number an edge.")
    return array


def verify_graph(folder: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> Verification:
    """Compares every file of a graph with its checksum, in constant memory, and returns all problems.

    Where all checksums match, also checks that rows do not overlap and that every neighbour is an id of the graph.

    Args:
        folder: Folder that ``distembed prepare graph`` made.
        progress: Function that is called after each file with the number of bytes read so far.
    """
    folder = Path(folder)
    description = GraphDescription.load(folder)
    verification = Verification()
    verification.add((), folder / GRAPH_FILE)
    for stored in description.arrays.values():
        problem = stored.problem(folder)
        verification.add([] if problem is None else [f"{problem}; {REMEDY}."], folder / stored.file)
        if progress is not None:
            progress(verification.num_bytes)
    if not verification.problems:
        try:
            Graph.open(folder, verified=False).require_own_ids()
        except UserError as error:
            verification.problems.append(str(error))
    return verification
