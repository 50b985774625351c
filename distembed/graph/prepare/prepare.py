"""A knowledge graph over the ids of one table, from files of edges or of shared attributes.

Rows become edges between ids as they are read (``graph_input.py``, ``graph_ids.py``), are sorted in bounded memory
(``sorted_runs.py``), merged, and written as compressed sparse rows (``distembed/sse/graph_files.py``). The folder
appears under its name when it is complete, and not before (``staging.py``). Its bytes depend on the rows and the
options alone: not on the memory, nor, but for the checksums of the input, on the kind of file.

Trade-off: edges that do not fit in memory take 8 bytes each on the output's disk while it runs, 16 with weights.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distembed.data.prepare.criteo import ProgressUpdate
from distembed.data.prepare.raw import source_names
from distembed.data.prepare.sorted_runs import SortedRuns
from distembed.data.prepare.staging import staged_folder
from distembed.errors import RunError, UserError
from distembed.graph.edges import Edges, merge_equal, require_num_nodes
from distembed.graph.files import GRAPH_FILE, Description, GraphWriter
from distembed.graph.graph import Graph
from distembed.graph.prepare.ids import PlainIds, ValueMap, table_ids
from distembed.graph.prepare.input import list_tables
from distembed.graph.prepare.rows import GraphInput, GraphOptions, Report

LEAST_MEMORY_BYTES = 256 << 20

_DROPPED_WORDS = {
    "duplicates": "given before",
    "self_loops": "from an id to itself",
    "unknown": "with a value that the table has no id for",
    "missing": "without an attribute",
}


def prepare_graph(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    data: str | os.PathLike[str] | None = None,
    table: str | None = None,
    num_embeddings: int | None = None,
    source: str = "source",
    target: str = "target",
    weight: str | None = None,
    directed: bool = False,
    attribute: str | None = None,
    max_shared: int = 1000,
    count_shared: bool = False,
    unknown: str = "error",
    memory_limit_bytes: int = 2 << 30,
    overwrite: bool = False,
    progress: Report | None = None,
) -> Graph:
    """Prepare a graph over the ids of a table.

    Args:
        inputs: Parquet, CSV or TSV files (``.gz`` too), or folders of them. Text files begin with the columns' names.
        output: the folder to make.
        data: a prepared dataset, through whose vocabulary or hash the values of ``table`` become ids.
        table: the table's name there.
        num_embeddings: in place of both: values are ids below this.
        source: the column of one end of each edge; with ``attribute``, of the id.
        target: the column of the other end.
        weight: the column of the weight, finite and above 0; weights of an edge given several times are added up.
        directed: the target is a neighbour of the source, and not the other way round.
        attribute: a column of integers or texts; ids that share a value are neighbours, and no target is read.
        max_shared: values that more ids share are left out.
        count_shared: weigh an edge by the number of values that its ends share.
        unknown: ``error``, or ``drop`` rows with a value that the table has no id for.
        memory_limit_bytes: working memory, above what the interpreter itself takes.
        overwrite: replace a graph at ``output``.
        progress: called now and then.

    Returns:
        The graph, mapped from its folder. ``details`` says what was dropped.

    Raises:
        UserError: wrong options or input. Nothing was written.
        RunError: the disk is full. Nothing was left behind.
    """
    options = GraphOptions(source, target, weight, directed, attribute, max_shared, count_shared, unknown)
    if memory_limit_bytes < LEAST_MEMORY_BYTES:
        raise UserError(f"memory_limit_bytes is {memory_limit_bytes}: at least {LEAST_MEMORY_BYTES} (256 MiB)")
    values, ids_described = _value_map(data, table, num_embeddings)
    files = list_tables(inputs)
    _check_apart(files, Path(output))
    report = progress or (lambda update: None)
    with (
        staged_folder(Path(output), overwrite=overwrite, kind="graph", marker=GRAPH_FILE) as folder,
        _full_disk_explained(Path(output), folder),
    ):
        scratch = folder / ".scratch"
        scratch.mkdir()
        preparation = GraphInput(files, options, values, scratch, memory_limit_bytes, report)
        read = preparation.edges if attribute is None else preparation.shared
        writer = _write(folder, values.num_nodes, options, read(), preparation, report)
        shutil.rmtree(scratch)
        arrays = writer.finish()
        details = {
            "ids": ids_described,
            "options": options.described(),
            "num_rows": sum(preparation.num_rows.values()),
            "num_connected": writer.num_connected,
            "largest_degree": writer.largest_degree,
            "dropped": preparation.dropped.described(options),
            "sources": _sources(preparation.num_rows),
        }
        Description(values.num_nodes, writer.num_edges, directed, options.weighted, arrays, details).save(folder)
    return Graph.open(output)


def describe_graph(graph: Graph) -> list[str]:
    """What was made of which rows, in lines of text."""
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
    return lines


def _value_map(
    data: str | os.PathLike[str] | None, table: str | None, num_embeddings: int | None
) -> tuple[ValueMap, Mapping[str, Any]]:
    if (data is None) != (table is None) or (data is None) == (num_embeddings is None):
        given = {"data": data, "table": table, "num_embeddings": num_embeddings}
        listed = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None) or "neither"
        raise UserError(f"give data and table, or num_embeddings: which ids there are. Received: {listed}")
    if data is None or table is None:
        return PlainIds(require_num_nodes("num_embeddings", num_embeddings)), {"num_embeddings": num_embeddings}
    values, described = table_ids(data, table)
    require_num_nodes(f"num_embeddings of table {table!r}", values.num_nodes)
    return values, described


def _check_apart(files: Sequence[Path], output: Path) -> None:
    for file in files:
        if file.resolve().is_relative_to(output.resolve()):
            raise UserError(f"the input {file} lies inside the output {output}: name another output")


def _write(
    folder: Path, num_nodes: int, options: GraphOptions, runs: SortedRuns, preparation: GraphInput, report: Report
) -> GraphWriter:
    writer = GraphWriter(folder, num_nodes, options.weighted)
    done = 0
    for columns in runs.merged():
        writer.append(merge_equal(Edges(columns[0], columns[1] if options.weighted else None)))
        done += len(columns[0])
        report(ProgressUpdate("write", done * 8, runs.num_records * 8, done))
    if options.attribute is None:
        repeated = runs.num_records - writer.num_edges
        preparation.dropped.duplicates = repeated if options.directed else repeated // 2
    if not writer.num_edges:
        dropped = preparation.dropped.described(options)
        listed = ", ".join(f"{name} {count:,}" for name, count in dropped.items())
        rows = sum(preparation.num_rows.values())
        raise UserError(f"the graph has no edge left: {rows:,} rows were read; dropped: {listed}. Give other rows")
    return writer


def _sources(num_rows: Mapping[Path, int]) -> list[dict[str, Any]]:
    sources = []
    for name, (file, rows) in zip(source_names(list(num_rows)), num_rows.items(), strict=True):
        with open(file, "rb") as content:
            checksum = hashlib.file_digest(content, "sha256").hexdigest()
        sources.append({"name": name, "bytes": file.stat().st_size, "sha256": checksum, "num_rows": rows})
    return sources


@contextmanager
def _full_disk_explained(output: Path, folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        raise RunError(
            f"{output} could not be written ({error.strerror}): {shutil.disk_usage(folder).free >> 20:,} MiB were free "
            f"after the first {written >> 20:,} MiB of it. Nothing was left behind; free more space, or name an output "
            "elsewhere"
        ) from error
