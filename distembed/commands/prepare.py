"""The commands ``prepare criteo``, ``table``, ``schema`` and ``graph``, ``synthesize``, and ``data stats``."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distembed.base.files import require_file, write_text
from distembed.base.units import parse_bytes
from distembed.commands import prepare_interactions
from distembed.commands.preparation import (
    MaxRejectedOption,
    OutputOption,
    VocabularyOptions,
    WorkOptions,
    prepare_progress,
    say_dataset,
)
from distembed.commands.shared import JsonOption, OverwriteOption, console, errors, flattened, note, say

app = typer.Typer()
prepare_app = typer.Typer(
    no_args_is_help=True, help="Turn raw files into a dataset. Example: `distembed prepare criteo`."
)
app.add_typer(prepare_app, name="prepare")
table_app = typer.Typer()
prepare_app.add_typer(table_app)  # without a name: its commands become the group's own
prepare_app.add_typer(prepare_interactions.app)
data_app = typer.Typer(help="Look at a dataset's rows.", no_args_is_help=True)
app.add_typer(data_app, name="data")

_INPUTS = (
    "CSV, TSV, JSON lines or Parquet, plain, gzip or Zstandard: files, folders, patterns, URLs, pipes; - is stdin."
)
TableInputsArgument = Annotated[list[str], typer.Argument(metavar="INPUT...", help=_INPUTS)]


@dataclass(frozen=True)
class DatasetOptions:
    """How raw rows become a dataset."""

    min_count: Annotated[int, typer.Option(help="Ids seen less often in training are out of vocabulary.")] = 2
    hash_size: Annotated[int | None, typer.Option(help="Hash ids into so many instead of building a vocabulary.")] = (
        None
    )
    hash_seed: Annotated[int, typer.Option(help="Seed of the hash.")] = 0
    split: Annotated[
        str, typer.Option(help="Shares of training, validation and test in time order, `days`, `none`, or `test`.")
    ] = "0.8,0.1,0.1"
    max_rejected: MaxRejectedOption = 0.01
    missing: Annotated[
        str, typer.Option(help="Missing integers: `zero` makes them 0, `keep` null, for models with soft one-hot.")
    ] = "zero"


@dataclass(frozen=True)
class NodeOptions:
    """Which ids a graph is over."""

    data: Annotated[
        Path | None, typer.Option("--data", help="Prepared dataset: its vocabulary or hash gives the ids.")
    ] = None
    table: Annotated[str | None, typer.Option(help="The dataset's table whose ids are the nodes.")] = None
    num_embeddings: Annotated[
        int | None, typer.Option(help="Instead of --data and --table: values are ids below this.")
    ] = None


@dataclass(frozen=True)
class EdgeOptions:
    """How rows become the edges of a graph."""

    source: Annotated[str, typer.Option(help="Column of an edge's one end.")] = "source"
    target: Annotated[str, typer.Option(help="Column of its other end.")] = "target"
    weight: Annotated[str | None, typer.Option(help="Column of its weight.")] = None
    directed: Annotated[bool, typer.Option("--directed", help="The source is no neighbour of the target.")] = False
    attribute: Annotated[
        str | None, typer.Option(help="Column of an attribute: ids of SOURCE that share a value are neighbours.")
    ] = None
    max_shared: Annotated[int, typer.Option(help="Leave out values that more ids share.")] = 1000
    count_shared: Annotated[
        bool, typer.Option("--count-shared", help="Weigh an edge by the number of values shared.")
    ] = False
    co_occurrence: Annotated[
        bool,
        typer.Option("--co-occurrence", help="No files: ids that --data trains on together are neighbours."),
    ] = False
    within: Annotated[int | None, typer.Option(help="With --co-occurrence: only at most so many steps apart.")] = None
    min_shared: Annotated[int, typer.Option(help="Leave out edges of ids that share less.")] = 1
    measure: Annotated[str, typer.Option(help="What is shared: `count`, or `cosine`, over the ids' own counts.")] = (
        "count"
    )
    max_neighbors: Annotated[int | None, typer.Option(help="Keep so many neighbours of an id, the nearest.")] = None
    unknown: Annotated[str, typer.Option(help="`error`, or `drop` rows with a value that the table has no id for.")] = (
        "error"
    )


@prepare_app.command(
    "criteo",
    epilog="Example: `distembed prepare criteo day_0.gz day_1.gz --output criteo --split days`; "
    "`aws s3 cp s3://logs/day_0 - | distembed prepare criteo - --output criteo`",
)
@flattened
def prepare_criteo_command(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="TSV, plain, gzip or zstd: files, folders, patterns, URLs, pipes; - is stdin."
        ),
    ],
    output: OutputOption,
    *,
    dataset: DatasetOptions,
    vocabulary: VocabularyOptions,
    using: WorkOptions,
    overwrite: OverwriteOption = False,
) -> None:
    """Turn raw Criteo rows (label, 13 integers, 26 hex ids, tab-separated) into a Parquet dataset with a manifest."""
    from distembed.data.prepare import CriteoOptions, prepare_criteo

    limits, options = using.limits(), CriteoOptions(**vars(dataset), **vars(vocabulary))
    with prepare_progress(console) as progress:
        manifest = prepare_criteo(inputs, output, options, limits, overwrite=overwrite, progress=progress, note=note)
    say_dataset(manifest, output)


@dataclass(frozen=True)
class TableDatasetOptions:
    """Settings that replace the schema's."""

    split: Annotated[
        str | None,
        typer.Option(
            help="Shares of training, validation and test, `days`, `none`, `time:0.8,0.1,0.1`, `time:T1,T2`, "
            "`column:NAME` or, with --vocabulary, `validation` or `test`, in place of the schema's."
        ),
    ] = None
    min_count: Annotated[
        int | None, typer.Option(help="Values seen less often in training are out of vocabulary; the schema's.")
    ] = None
    hash_size: Annotated[int | None, typer.Option(help="Hash values into so many ids; the schema's.")] = None
    missing: Annotated[
        str | None, typer.Option(help="Missing numbers: `zero` makes them 0, `keep` null; the schema's.")
    ] = None
    max_rejected: MaxRejectedOption = 0.01


@table_app.command(
    "table",
    epilog="Example: `distembed prepare table day_*.csv.gz --schema schema.yaml --output clicks`; "
    "`distembed prepare table s3://logs/clicks/ --schema avazu --output avazu --split time:0.8,0.1,0.1`",
)
@flattened
def prepare_table_command(
    inputs: TableInputsArgument,
    output: OutputOption,
    *,
    schema: Annotated[
        str | None,
        typer.Option(
            "--schema",
            help="YAML file of the columns, or a shipped name: `criteo` ...; that of --vocabulary unless given.",
        ),
    ] = None,
    dataset: TableDatasetOptions,
    vocabulary: VocabularyOptions,
    using: WorkOptions,
    overwrite: OverwriteOption = False,
) -> None:
    """Turn tables of any columns into a Parquet dataset with a manifest, as a schema says."""
    from distembed.data.prepare.table import TableOptions, prepare_table

    limits, options = using.limits(), TableOptions(**vars(dataset), **vars(vocabulary))
    with prepare_progress(console) as progress:
        manifest = prepare_table(
            inputs, output, schema, options, limits, overwrite=overwrite, progress=progress, note=note
        )
    say_dataset(manifest, output)


@table_app.command(
    "schema",
    epilog="Example: `distembed prepare schema clicks.csv --output schema.yaml`",
)
def prepare_schema_command(
    inputs: TableInputsArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; unless given, the schema is printed.")
    ] = None,
    rows: Annotated[int, typer.Option(help="About how many rows are looked at.", min=1)] = 100_000,
    overwrite: OverwriteOption = False,
) -> None:
    """Guess the schema of a table from its first rows, and write it with comments on the values."""
    from distembed.data.prepare.table.guess import guess_schema
    from distembed.data.prepare.table.inputs import find_inputs

    if output is not None:
        require_file("--output", output, overwrite)
    text = guess_schema(find_inputs(inputs, note), rows)
    if output is None:
        print(text, end="")
    else:
        write_text(output, text)
        say(f"schema {output}: read it, and correct mistakes")


@prepare_app.command(
    "graph",
    epilog="Example: `distembed prepare graph edges.csv --output graphs/C3 --data criteo --table C3`; "
    "`distembed prepare graph films.csv --source film --attribute actor --num-embeddings 1683 --output graphs/film`; "
    "`distembed prepare graph --co-occurrence --data ratings --table item --max-neighbors 50 --output graphs/item`",
)
@flattened
def prepare_graph_command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make; it appears whole or not at all.")],
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[EDGES...]",
            help="Parquet, CSV, TSV or JSON files or pipes (gzip too), or folders; with column names; - is stdin.",
        ),
    ] = None,
    *,
    nodes: NodeOptions,
    edges: EdgeOptions,
    memory_limit: Annotated[str, typer.Option(help="Memory to stay within, such as 2GB.")] = "2GB",
    overwrite: OverwriteOption = False,
) -> None:
    """Turn edges, or shared attributes, into a graph over a table's ids, for SSE-Graph."""
    from distembed.graph.prepare import LEAST_MEMORY_BYTES, GraphOptions, NodeIds, describe_graph, prepare_graph

    memory_limit_bytes = parse_bytes("--memory-limit", memory_limit, LEAST_MEMORY_BYTES)
    options, node_ids = GraphOptions(**vars(edges)), NodeIds(**vars(nodes))
    with prepare_progress(console) as progress:
        graph = prepare_graph(
            inputs or [],
            output,
            node_ids,
            options,
            memory_limit_bytes=memory_limit_bytes,
            overwrite=overwrite,
            progress=progress,
            note=note,
        )
    for line in describe_graph(graph):
        say(line)
    say(f"graph {output}")


@prepare_app.command(
    "attributes", epilog="Example: `distembed prepare attributes ml-100k.kg ml-100k.link --output attributes.jsonl`"
)
def prepare_attributes_command(
    graph: Annotated[Path, typer.Argument(help="Triples of RecBole (.kg), or attributes by item as JSON (.json.gz).")],
    links: Annotated[Path | None, typer.Argument(help="Items and their entities (.link).")] = None,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON lines to write, for `prepare graph`.")],
    overwrite: OverwriteOption = False,
) -> None:
    """Turn a knowledge graph into the attributes of items, which `prepare graph --attribute` reads."""
    from distembed.graph.prepare.knowledge_graph import write_attributes

    require_file("--output", output, overwrite)
    say(f"{output}: attributes of {write_attributes(graph, links, output):,} items")


@app.command("synthesize", epilog="Example: `distembed synthesize criteo.tsv --rows 1000000 --seed 0`")
def synthesize_command(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="File to write; ending in .gz it is compressed.")],
    rows: Annotated[int, typer.Option(help="Number of rows.")] = 200_000,
    seed: Annotated[int, typer.Option(help="Same seed, same file.")] = 0,
    overwrite: OverwriteOption = False,
) -> None:
    """Make a file in Criteo's format: skewed ids, a planted signal of known Bayes logloss, a time order."""
    from distembed.data.prepare import synthesize_criteo

    summary = synthesize_criteo(output, num_rows=rows, seed=seed, overwrite=overwrite)
    say(
        f"{output}: {rows:,} rows; the best possible logloss is {summary.bayes_logloss:.4f}, "
        f"AUC {summary.bayes_auc:.4f}"
    )


@data_app.callback()
def _group() -> None:
    """Makes ``data`` a group of commands, although it has one alone."""


@data_app.command("stats", epilog="Example: `distembed data stats criteo --output statistics.html`")
def stats_command(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Folder or URL of a dataset.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML file with plots to write; one that is there is replaced."),
    ] = None,
    as_json: JsonOption = False,
    memory_limit: Annotated[str, typer.Option(help="Memory that counts of ids may take, such as 2GB.")] = "2GB",
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT, even if another program made it.")] = False,
) -> None:
    """Count a dataset's rows: labels over time, skew of ids, numbers, and missing, unseen and equal rows."""
    from rich.progress import Progress

    from distembed.reports.statistics import dataset_statistics
    from distembed.reports.statistics.page import print_statistics, render_page

    memory_bytes = parse_bytes("--memory-limit", memory_limit)
    if output is not None:
        require_file("--output", output, overwrite, may_replace_own=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("reading")
        statistics = dataset_statistics(
            dataset, memory_bytes, lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        print(json.dumps(statistics.as_json(), indent=2))
    else:
        print_statistics(statistics, console)
    if output is not None:
        write_text(output, render_page(statistics), make_folder=True)
        if not as_json:
            say(f"page {output}")
