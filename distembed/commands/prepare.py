"""The commands ``distembed prepare criteo``, ``prepare graph`` and ``synthesize``: from raw files to a dataset."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distembed.base.units import parse_bytes
from distembed.commands import prepare_interactions, prepare_table
from distembed.commands.parameters import flattened
from distembed.commands.shared import console, note, say
from distembed.commands.vocabulary_options import VocabularyOptions
from distembed.commands.work_options import OutputOption, WorkOptions

app = typer.Typer()
prepare_app = typer.Typer(
    no_args_is_help=True, help="Turn raw files into a dataset. Example: `distembed prepare criteo`."
)
app.add_typer(prepare_app, name="prepare")
prepare_app.add_typer(prepare_table.app)  # without a name: its commands become the group's own
prepare_app.add_typer(prepare_interactions.app)


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
    max_rejected: Annotated[float, typer.Option(help="Share of malformed rows, above which nothing is written.")] = 0.01
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
    known: VocabularyOptions,
    using: WorkOptions,
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is there.")] = False,
) -> None:
    """Turn raw Criteo rows (label, 13 integers, 26 hex ids, tab-separated) into a Parquet dataset with a manifest."""
    from distembed.commands.prepare_progress import prepare_progress, say_dataset
    from distembed.data.prepare import CriteoOptions, prepare_criteo

    limits, options = using.limits(), CriteoOptions(**vars(dataset), **vars(known))
    with prepare_progress(console) as progress:
        manifest = prepare_criteo(inputs, output, options, limits, overwrite=overwrite, progress=progress, note=note)
    say_dataset(manifest, output)


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
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is there.")] = False,
) -> None:
    """Turn edges, or shared attributes, into a graph over a table's ids, for SSE-Graph."""
    from distembed.commands.prepare_progress import prepare_progress
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


@app.command("synthesize", epilog="Example: `distembed synthesize criteo.tsv --rows 1000000 --seed 0`")
def synthesize_command(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="File to write; ending in .gz it is compressed.")],
    rows: Annotated[int, typer.Option(help="Number of rows.")] = 200_000,
    seed: Annotated[int, typer.Option(help="Same seed, same file.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is there.")] = False,
) -> None:
    """Make a file in Criteo's format: skewed ids, a planted signal of known Bayes logloss, a time order."""
    from distembed.data.prepare import synthesize_criteo

    summary = synthesize_criteo(output, num_rows=rows, seed=seed, overwrite=overwrite)
    say(
        f"{output}: {rows:,} rows; the best possible logloss is {summary.bayes_logloss:.4f}, "
        f"AUC {summary.bayes_auc:.4f}"
    )
