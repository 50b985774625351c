"""Prepares a knowledge graph over the ids of one table, from files of edges or of shared attributes.

Rows become edges between ids as they are read (``readers.py``), are sorted and merged by SQL in bounded memory
(``counted_edges.py``), and written as compressed sparse rows (:mod:`distembed.graph.folder`). The folder appears under
its name when it is complete, and not before (:mod:`distembed.data.prepare.staging`). Its bytes depend on the rows and
the options alone: not on the memory, nor, but for the checksums of the input, on the kind of file.

Trade-off: edges that do not fit in memory are on the output's disk while it runs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.base.files import require_free_space
from distembed.base.units import enumerate_names
from distembed.data.prepare.count import Database
from distembed.data.prepare.options import NoteCallback, ProgressCallback, ignore
from distembed.data.prepare.staging import require_outside, staged_folder
from distembed.data.prepare.table.inputs import find_inputs
from distembed.graph.csr import Graph
from distembed.graph.folder import GRAPH_FILE, GraphDescription, GraphWriter
from distembed.graph.prepare.counted_edges import EdgeTables
from distembed.graph.prepare.options import GraphOptions, NodeIds
from distembed.graph.prepare.readers import CoOccurrenceReader, EdgeReader
from distembed.graph.prepare.value_ids import ValueIds, plain_ids, table_ids
from distembed.graph.rows import Edges, require_num_nodes

LEAST_MEMORY_BYTES = 256 << 20

_DROPPED_WORDS = {
    "duplicates": "given before",
    "self_loops": "from an id to itself",
    "unknown": "with a value that the table has no id for",
    "missing": "without an attribute",
}
_WEAK_WORDS = {"rare": "between ids that share too little", "beyond": "beyond the most neighbours of an id"}


def prepare_graph(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    nodes: NodeIds,
    options: GraphOptions | None = None,
    *,
    memory_limit_bytes: int = 2 << 30,
    overwrite: bool = False,
    progress: ProgressCallback = ignore,
    note: NoteCallback = ignore,
) -> Graph:
    """Prepares a graph over the ids of a table.

    Args:
        inputs: Parquet, CSV, TSV or JSON lines files (``.gz`` too), folders of them, URLs, or pipes of text (``-`` is
            standard input); text begins with the columns' names. Or files of a JSON object of lists, whose keys are the
            first column and whose entries the second. Empty where a dataset's training split is read.
        output: Folder to make.
        nodes: The ids that are the graph's nodes, and how values of the columns become ids.
        options: How rows become edges; the default is undirected edges from columns ``source`` and ``target``.
        memory_limit_bytes: Working memory beyond the interpreter's own; 256 MiB or more.
        overwrite: Replaces a graph at ``output``.
        progress: Function that is called with the bytes and rows done.
        note: Function that is called with a text about the files of a folder that are not read.

    Returns:
        The graph, mapped from its folder. Its ``details`` count the dropped rows.

    Raises:
        UserError: The memory is too little, or the input cannot be read or has no edges. Nothing was written.
        RunError: The disk is full, or will not have room. Nothing was left behind.
    """
    options = options or GraphOptions()
    if memory_limit_bytes < LEAST_MEMORY_BYTES:
        raise UserError(f"memory_limit_bytes is {memory_limit_bytes}: at least {LEAST_MEMORY_BYTES} (256 MiB)")
    values, ids_described = _value_ids(nodes)
    if options.co_occurrence and (inputs or nodes.data is None):
        raise UserError(
            "co_occurrence reads the training split of a dataset (data, on the command line --data), and no files: "
            f"received {len(inputs)} files and data={nodes.data}"
        )
    files = [] if options.co_occurrence else find_inputs(inputs, note)
    require_outside([file.place for file in files], Path(output))
    with staged_folder(Path(output), overwrite=overwrite, kind="graph", marker=GRAPH_FILE) as folder:
        starts_bytes = 8 * (values.num_nodes + 1)
        require_free_space(Path(output), starts_bytes, "8 bytes for each id, besides the edges. Name another output")
        scratch = folder / ".scratch"
        reader: EdgeReader | CoOccurrenceReader
        if options.co_occurrence:
            reader = CoOccurrenceReader(Path(str(nodes.data)), str(nodes.table), options.within)
        else:
            reader = EdgeReader(files, options, values, memory_limit_bytes // 8)
        writer = GraphWriter(folder, values.num_nodes, options.weighted)
        with Database(scratch, memory_limit_bytes // 2) as database:
            tables = EdgeTables(database, values.num_nodes, options, memory_limit_bytes // 8, progress)
            for edges in reader.edges(tables):
                writer.append(edges if options.weighted else Edges(edges.keys, None))
        dropped = {name: tables.dropped[name] for name in options.droppable}
        if not writer.num_edges:
            listed = ", ".join(f"{name} {count:,}" for name, count in dropped.items())
            from_files = "" if reader.num_rows else f" of {enumerate_names([file.place for file in files])}"
            raise UserError(
                f"the graph has no edge left: {reader.num_rows:,} rows were read{from_files}; dropped: {listed}. Give "
                "other rows"
            )
        shutil.rmtree(scratch, ignore_errors=True)
        arrays = writer.finish()
        details = {
            "ids": ids_described,
            "options": options.to_json(),
            "num_rows": reader.num_rows,
            "num_connected": writer.num_connected,
            "largest_degree": writer.largest_degree,
            "dropped": dropped,
            "sources": reader.sources(),
        }
        counts = values.num_nodes, writer.num_edges
        GraphDescription(*counts, options.one_way, options.weighted, arrays, details).save(folder)
    return Graph.open(output, verified=False)


def describe_graph(graph: Graph) -> list[str]:
    """Describes a prepared graph and the rows that were left out of it, in lines of text."""
    details, dropped = graph.details, graph.details["dropped"]
    left_out = [f"{dropped[name]:,} {words}" for name, words in _DROPPED_WORDS.items() if dropped.get(name)]
    lines = [
        f"{graph.num_nodes:,} ids, {graph.num_edges:,} edges stored, {'one way' if graph.directed else 'both ways'}",
        f"{details['num_connected']:,} ids ({details['num_connected'] / graph.num_nodes:.1%}) have neighbours, "
        f"{details['largest_degree']:,} at most",
        f"{details['num_rows']:,} rows; left out: {', '.join(left_out) or 'none'}",
    ]
    if dropped.get("hubs"):
        lines.append(
            f"attribute values left out: {dropped['hubs']:,} that more than {details['options']['max_shared']:,} ids "
            f"share, {dropped['largest_hub']:,} at most"
        )
    if weak := [f"{dropped[name]:,} {words}" for name, words in _WEAK_WORDS.items() if dropped.get(name)]:
        lines.append(f"edges left out: {', '.join(weak)}")
    return lines


def _value_ids(nodes: NodeIds) -> tuple[ValueIds, Mapping[str, Any]]:
    """Returns the map from column values to ids, and its description for ``graph.json``; refuses too many ids."""
    if nodes.data is None or nodes.table is None:
        num_nodes = require_num_nodes("num_embeddings", nodes.num_embeddings)
        return plain_ids(num_nodes), {"num_embeddings": nodes.num_embeddings}
    values, described = table_ids(nodes.data, nodes.table)
    require_num_nodes(f"num_embeddings of table {nodes.table!r}", values.num_nodes)
    return values, described
