"""A graph as a folder: raw little-endian arrays that are mapped into memory, and ``graph.json``, which describes them.

::

    GRAPH/graph.json     nodes, edges, checksums, and how the graph was prepared
    GRAPH/starts.bin     int64 [num_nodes + 1]: where the row of each node begins in the arrays below
    GRAPH/neighbors.bin  int32 [num_edges], or int64 with more than 2^31 nodes
    GRAPH/keep.bin       float64 [num_edges], weighted graphs only, see rows.py
    GRAPH/alias.bin      int32 [num_edges], weighted graphs only

``graph.json`` is written last: a folder without it is no graph. It carries its own checksum and two of each array:
XXH3, which is compared at the speed of memory when a graph is opened, and SHA-256, which identifies the graph.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distembed.base.checksums import KEY, FileChecksum, checksum_differs, running_checksum, with_checksum
from distembed.base.errors import UserError
from distembed.base.files import read_folder_json, require_inside, write_text
from distembed.base.version import __version__
from distembed.graph.rows import Edges, alias_tables, row_blocks

GRAPH_FILE = "graph.json"
FORMAT = "distembed graph"
GRAPH_VERSION = 2

_PIECE = 2**20
_WEIGHTS = ".weights"
REMEDY = "make the graph again with `distembed prepare graph`"


def array_types(num_nodes: int, weighted: bool) -> dict[str, np.dtype[Any]]:
    """Returns each array's name and little-endian dtype: neighbour ids take 32 bits up to 2^31 nodes."""
    types = {"starts": "<i8", "neighbors": "<i4" if num_nodes <= 2**31 else "<i8"}
    types |= {"keep": "<f8", "alias": "<i4"} if weighted else {}
    return {name: np.dtype(kind) for name, kind in types.items()}


def fingerprint(num_nodes: int, checksums: Mapping[str, str]) -> str:
    """Returns the SHA-256 of the node count and the arrays' SHA-256s, sorted by array name."""
    return hashlib.sha256(json.dumps([num_nodes, sorted(checksums.items())]).encode()).hexdigest()


@dataclass(frozen=True)
class StoredArray:
    """One array of the folder."""

    file: str  # name of the file
    dtype: str  # type of the numbers, as numpy writes it
    bytes: int  # size of the file
    sha256: str  # cryptographic checksum of the file, of which the graph's fingerprint is made
    checksum: str  # fast checksum of the file

    def problem(self, folder: Path) -> str | None:
        """Reads the file and returns a description of its damage, without the remedy; None for an undamaged file."""
        return FileChecksum(self.bytes, self.checksum).problem(folder / self.file)


@dataclass(frozen=True)
class GraphDescription:
    """The contents of ``graph.json``."""

    num_nodes: int  # number of nodes
    num_edges: int  # number of edges stored; an undirected edge counts twice
    directed: bool  # whether edges were stored one way only
    weighted: bool  # whether neighbours are drawn in proportion to weights
    arrays: Mapping[str, StoredArray]  # arrays by name
    details: Mapping[str, Any] = field(default_factory=dict)  # how the graph was prepared, in plain JSON values

    @property
    def fingerprint(self) -> str:
        """Checksum of the arrays' contents."""
        return fingerprint(self.num_nodes, {name: array.sha256 for name, array in self.arrays.items()})

    def save(self, folder: Path) -> None:
        """Writes ``graph.json`` whole or not at all."""
        content = {
            "format": FORMAT,
            "format_version": GRAPH_VERSION,
            "tool_version": __version__,
            "num_nodes": self.num_nodes,
            "num_edges": self.num_edges,
            "directed": self.directed,
            "weighted": self.weighted,
            "fingerprint": self.fingerprint,
            "arrays": {name: asdict(array) for name, array in self.arrays.items()},
            "details": dict(self.details),
        }
        write_text(folder / GRAPH_FILE, json.dumps(with_checksum(content), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> GraphDescription:
        """Reads ``graph.json`` alone; a UserError if it is damaged, of another version, or not a graph's."""
        path = folder / GRAPH_FILE
        value = read_folder_json(path, "graph", REMEDY)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise UserError(f"{path} does not describe a graph of distembed's; {REMEDY}.")
        version = value.get("format_version")
        if version != GRAPH_VERSION:
            raise UserError(
                f"{path} has format_version {version!r}, written by distembed {value.get('tool_version')!r}; this "
                f"distembed reads {GRAPH_VERSION}: {REMEDY}."
            )
        if KEY not in value or checksum_differs(value):
            raise UserError(f"{path} is damaged: its checksum is missing or is not that of its values; {REMEDY}.")
        try:
            arrays = {name: StoredArray(**array) for name, array in value["arrays"].items()}
            counts = int(value["num_nodes"]), int(value["num_edges"])
            description = cls(*counts, bool(value["directed"]), bool(value["weighted"]), arrays, value["details"])
            description._require_consistent()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {REMEDY}.") from error
        for name, array in arrays.items():
            require_inside(array.file, f"arrays.{name}.file", path)
        if description.fingerprint != value.get("fingerprint"):
            raise UserError(f"{path} is damaged: its checksums do not give its fingerprint; {REMEDY}.")
        return description

    def _require_consistent(self) -> None:
        """Raises ValueError where an array is missing or has another type or size than the graph's."""
        types = array_types(self.num_nodes, self.weighted)
        if {name: np.dtype(array.dtype) for name, array in self.arrays.items()} != types:
            raise ValueError(f"arrays {sorted(self.arrays)} where {sorted(types)} belong, or other types")
        for name, dtype in types.items():
            length = self.num_nodes + 1 if name == "starts" else self.num_edges
            if self.arrays[name].bytes != length * dtype.itemsize:
                raise ValueError(f"{name} of {self.arrays[name].bytes} bytes for {length} numbers")


def map_array(folder: Path, stored: StoredArray) -> NDArray[Any]:
    """Maps an array's file copy-on-write; a UserError if the file is missing or its size is not the recorded one."""
    path = folder / stored.file
    if not path.is_file():
        raise UserError(f"{path} is missing: the graph is not whole; {REMEDY}.")
    size = path.stat().st_size
    if size != stored.bytes:
        raise UserError(f"{path} has {size:,} bytes where {GRAPH_FILE} says {stored.bytes:,}: it is damaged; {REMEDY}.")
    # torch refuses read-only arrays; writes to this one would never reach the file
    return np.memmap(path, np.dtype(stored.dtype), "c")


class ArrayWriter:
    """Writes one array part by part, with its checksums."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any]) -> None:
        self._path, self._dtype = folder / f"{name}.bin", dtype
        self._sha256, self._checksum = hashlib.sha256(), running_checksum()
        self._bytes = 0

    def append(self, values: NDArray[Any]) -> None:
        """Writes numbers at the end of the file."""
        content = np.ascontiguousarray(values, self._dtype).data.cast("B")
        _append(self._path, content)
        self._sha256.update(content)
        self._checksum.update(content)
        self._bytes += len(content)

    def finish(self) -> StoredArray:
        """Returns the description of the file."""
        checksums = self._sha256.hexdigest(), self._checksum.hexdigest()
        return StoredArray(self._path.name, self._dtype.str, self._bytes, *checksums)


class GraphWriter:
    """Writes a graph from its edges, which come in ascending order, into an empty folder.

    Memory holds the edges of one call, and for a weighted graph its longest row. Once the graph is finished,
    ``num_connected`` is the number of nodes with neighbours, and ``largest_degree`` the largest number of neighbours.
    """

    def __init__(self, folder: Path, num_nodes: int, weighted: bool) -> None:
        self.num_edges = self.num_connected = self.largest_degree = 0
        self._folder, self._num_nodes, self._weighted = folder, num_nodes, weighted
        types = array_types(num_nodes, weighted)
        self._writers = {name: ArrayWriter(folder, name, kind) for name, kind in types.items()}
        self._next_node = self._last_start = 0

    def append(self, edges: Edges) -> None:
        """Writes distinct edges in ascending order of their keys over all calls; a row may span calls."""
        if not len(edges):
            return
        sources = edges.keys // self._num_nodes
        self._write_starts(sources, int(sources[-1]) + 1)
        self._writers["neighbors"].append(edges.keys - sources * self._num_nodes)
        if edges.weights is not None:
            _append(self._folder / _WEIGHTS, edges.weights.data.cast("B"))
        self.num_edges += len(edges)

    def _write_starts(self, sources: NDArray[np.int64], end: int) -> None:
        """Writes ``starts`` of the nodes from the first unwritten one up to ``end``, exclusive.

        ``sources`` are the ascending sources of the edges that follow the ``num_edges`` edges already written.
        """
        while self._next_node < end:
            nodes = np.arange(self._next_node, min(end, self._next_node + _PIECE))
            # starts[v] = number of edges of sources below v: the written ones, and those before v in this call
            starts = self.num_edges + np.searchsorted(sources, nodes)
            self._writers["starts"].append(starts)
            # starts[v] - starts[v - 1] is the degree of node v - 1; the previous call's last start completes the first
            degrees = np.diff(starts, prepend=self._last_start)
            self.num_connected += int(np.count_nonzero(degrees))
            self.largest_degree = max(self.largest_degree, int(degrees.max()))
            self._next_node, self._last_start = int(nodes[-1]) + 1, int(starts[-1])

    def finish(self) -> dict[str, StoredArray]:
        """Writes the remaining starts and the alias tables; returns the arrays' descriptions for ``graph.json``."""
        # Nodes after the last source have no edges; entry num_nodes of ``starts`` is the end of the last row.
        self._write_starts(np.zeros(0, np.int64), self._num_nodes + 1)
        if self._weighted:
            self._write_alias_tables()
        return {name: writer.finish() for name, writer in self._writers.items()}

    def _write_alias_tables(self) -> None:
        """Computes ``keep`` and ``alias`` from the weights of a temporary file, then removes the file."""
        weights = np.memmap(self._folder / _WEIGHTS, np.float64, "r")
        starts = map_array(self._folder, self._writers["starts"].finish())
        for start, stop in row_blocks(starts):
            row_starts = starts[start : stop + 1]
            keep, alias = alias_tables(row_starts - row_starts[0], weights[row_starts[0] : row_starts[-1]])
            self._writers["keep"].append(keep)
            self._writers["alias"].append(alias)
        (self._folder / _WEIGHTS).unlink()


def _append(path: Path, content: memoryview) -> None:
    with open(path, "ab") as file:
        file.write(content)
