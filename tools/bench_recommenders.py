"""Trains MF, BPR and SASRec with several seeds, and reports the metrics of the papers' tables on the test split.

::

    python tools/bench_recommenders.py mf DATA --seeds 5 --output mf.json
    python tools/bench_recommenders.py bpr DATA --seeds 5
    python tools/bench_recommenders.py ml100k RECBOLE/dataset_example/ml-100k --seeds 5
    python tools/bench_recommenders.py beauty DATA --seeds 5

``mf`` predicts the ratings of MovieLens-1M, and ``bpr`` ranks the items rated 4 or 5, both in the split of SSE's
authors (files ``movielens1m_mf_train.csv.gz`` and ``movielens1m_mf_test.csv.gz`` of the folder). ``ml100k`` and
``ml100k-bpr`` use MovieLens-100k of RecBole 1.2.1's wheel, split at random into 0.8, 0.1 and 0.1. ``ml100k-next``
predicts each user's last item of MovieLens-100k, and ``beauty`` of Amazon Beauty, with replaced items (files
``amazon_beauty_sequences.txt.gz`` and ``amazon_beauty_item_attributes.json.gz``). ``beauty-output`` varies the losses
and tables. ``beauty-models`` and ``ml100k-models`` compare SASRec with HSTU.

Each row of a table is a config in ``configs/recommenders/``. Graphs join each user and item to its 20 nearest
neighbours: by shared training rows, or in ``ml100k`` items by shared entities of the knowledge graph. The graph of
Beauty joins items that share an attribute. All seeds are trained in one process, one after another.
"""

import dataclasses
import gzip
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from bench_commands import CONFIGS, bench_parser, deviation, mean_and_deviation, run_distembed, write_output
from bench_common import train_quietly
from knowledge_graph_attributes import item_attributes, write_attributes
from rich.console import Console
from rich.table import Table

from distembed.base.ranks import Ranks, process_group
from distembed.training.config import Config, load_config

FOLDER = CONFIGS / "recommenders"
RATING_METRICS = {"rmse": "RMSE", "mae": "MAE"}
NEXT_METRICS = {
    "ndcg@10": "NDCG@10",
    "hr@10": "HR@10",
    "ndcg@10_of_101": "NDCG@10 of 101",
    "hr@10_of_101": "HR@10 of 101",
}
RANKING_METRICS = {"precision@1": "P@1", "precision@5": "P@5", "precision@10": "P@10", "ndcg@10": "NDCG@10"}


@dataclasses.dataclass(frozen=True)
class Mode:
    """The rows of a table.

    Attributes:
        prepare: Makes the dataset and the graphs, given the folder of the data and the folder for them.
        metrics: Columns of the table, by the metrics' names.
        rows: Configs by title; an indented title is compared with the nearest title above it that is not indented.
    """

    prepare: Callable[[Path, Path], None]
    metrics: dict[str, str]
    rows: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of one config on the test split: each metric by seed, and the median speed in training."""

    name: str
    parameters: int
    samples_per_second: float
    values: dict[str, list[float]]


def prepare_ml1m(data: Path, folder: Path, *options: str) -> None:
    """Makes the dataset in the split of SSE's authors, with co-occurrence graphs."""
    files = [data / "movielens1m_mf_train.csv.gz", "--test", data / "movielens1m_mf_test.csv.gz"]
    columns = ["--no-header", "--user", "1", "--item", "2", "--rating", "3"]
    run_distembed("prepare", "ratings", *files, *columns, *options, "--output", folder / "data")
    _prepare_graphs(folder, "user", "item")


def prepare_ml100k(data: Path, folder: Path, *options: str) -> None:
    """Makes the dataset of RecBole's MovieLens-100k, with graphs of its knowledge graph and of co-occurring users."""
    columns = ["--user", "user_id", "--item", "item_id", "--rating", "rating", "--time", "timestamp"]
    columns += ["--split", "random:0.8,0.1,0.1"]
    run_distembed("prepare", "ratings", data / "ml-100k.inter", *columns, *options, "--output", folder / "data")
    _prepare_knowledge_graph(data, folder)
    _prepare_graphs(folder, "user")


def prepare_sequences_100k(data: Path, folder: Path, *options: str) -> None:
    """Makes the sequences of MovieLens-100k, in training rows of at most 50 items, with the knowledge graph."""
    columns = ["--user", "user_id", "--item", "item_id", "--time", "timestamp", "--windows", "all", *options]
    run_distembed("prepare", "sequences", data / "ml-100k.inter", *columns, "--output", folder / "data")
    _prepare_knowledge_graph(data, folder)


def prepare_beauty(data: Path, folder: Path) -> None:
    """Makes the sequences of Amazon Beauty, with a graph of items that share an attribute of at most 100 items."""
    lines = data / "amazon_beauty_sequences.txt.gz"
    run_distembed("prepare", "sequences", lines, "--format", "lists", "--output", folder / "data")
    with gzip.open(data / "amazon_beauty_item_attributes.json.gz") as file:
        _prepare_attributes(json.load(file), folder, "--max-shared", "100")


def _prepare_knowledge_graph(data: Path, folder: Path) -> None:
    """Makes a graph of items that share a tail of RecBole's knowledge graph."""
    attributes = item_attributes(data / "ml-100k.kg", data / "ml-100k.link")
    _prepare_attributes(attributes, folder, "--unknown", "drop", "--max-shared", "200", "--max-neighbors", "20")


def _prepare_attributes(attributes: Mapping[str, Sequence[str | int]], folder: Path, *options: str) -> None:
    """Makes a graph of items that share attributes."""
    write_attributes(attributes, lines := folder / "attributes.jsonl")
    columns = ["--source", "item", "--attribute", "attribute", "--count-shared", *options]
    table = ["--data", folder / "data", "--table", "item", "--output", folder / "item"]
    run_distembed("prepare", "graph", lines, *columns, *table)


def _prepare_graphs(folder: Path, *tables: str) -> None:
    """Makes a co-occurrence graph of each table's ids in the training split."""
    for table in tables:
        run_distembed(
            *["prepare", "graph", "--co-occurrence", "--data", folder / "data", "--table", table],
            *["--measure", "cosine", "--max-neighbors", "20", "--max-shared", "5000", "--output", folder / table],
        )


def _only_rated_4_and_5(prepare: Callable[..., None]) -> Callable[[Path, Path], None]:
    return lambda data, folder: prepare(data, folder, "--min-rating", "4")


MODES = {
    "mf": Mode(
        prepare_ml1m,
        RATING_METRICS,
        {
            "their model, lambda of the sum": "ml1m_mf_paper.yaml",
            "  SSE-SE 0.005": "ml1m_mf_paper_se.yaml",
            "  SSE-Graph 0.005": "ml1m_mf_paper_graph.yaml",
            "  SSE-SE 0.05": "ml1m_mf_paper_se_05.yaml",
            "their model, lambda of a row": "ml1m_mf_paper_row.yaml",
            "  SSE-SE 0.005 ": "ml1m_mf_paper_row_se.yaml",
            "  SSE-Graph 0.005 ": "ml1m_mf_paper_row_graph.yaml",
            "with biases": "ml1m_mf.yaml",
            "  SSE-SE": "ml1m_mf_se.yaml",
            "  SSE-Graph": "ml1m_mf_graph.yaml",
            "  quotient-remainder, 4": "ml1m_mf_qr4.yaml",
            "  quotient-remainder, 16": "ml1m_mf_qr16.yaml",
        },
    ),
    "bpr": Mode(
        _only_rated_4_and_5(prepare_ml1m),
        RANKING_METRICS,
        {
            "none": "ml1m_bpr.yaml",
            "  dropout 0.2": "ml1m_bpr_dropout.yaml",
            "  SSE-SE 0.05": "ml1m_bpr_se.yaml",
            "lambda 0.003": "ml1m_bpr_weak_l2.yaml",
            "  dropout 0.2 ": "ml1m_bpr_weak_l2_dropout.yaml",
            "  SSE-SE 0.05 ": "ml1m_bpr_weak_l2_se.yaml",
            "lambda 0.01": "ml1m_bpr_l2.yaml",
            "  dropout 0.2  ": "ml1m_bpr_l2_dropout.yaml",
            "  SSE-SE 0.05  ": "ml1m_bpr_l2_se.yaml",
            "  SSE-Graph 0.05": "ml1m_bpr_l2_graph.yaml",
            "  SSE-SE 0.05 and dropout 0.2": "ml1m_bpr_l2_se_dropout.yaml",
        },
    ),
    "ml100k": Mode(
        prepare_ml100k,
        RATING_METRICS,
        {
            "MF": "ml100k_mf.yaml",
            "  SSE-SE": "ml100k_mf_se.yaml",
            "  SSE-Graph": "ml100k_mf_graph.yaml",
        },
    ),
    "ml100k-bpr": Mode(
        _only_rated_4_and_5(prepare_ml100k),
        RANKING_METRICS,
        {
            "BPR": "ml100k_bpr.yaml",
            "  SSE-SE": "ml100k_bpr_se.yaml",
            "  SSE-Graph": "ml100k_bpr_graph.yaml",
        },
    ),
    "ml100k-next": Mode(
        prepare_sequences_100k,
        NEXT_METRICS,
        {
            "SASRec": "ml100k_sasrec.yaml",
            "  SSE-SE": "ml100k_sasrec_se.yaml",
            "  SSE-Graph": "ml100k_sasrec_graph.yaml",
            "GRU": "ml100k_gru.yaml",
            "  SSE-SE ": "ml100k_gru_se.yaml",
            "  SSE-Graph ": "ml100k_gru_graph.yaml",
        },
    ),
    "ml100k-models": Mode(
        lambda data, folder: prepare_sequences_100k(data, folder, "--dense", "timestamp"),
        NEXT_METRICS,
        {"SASRec": "ml100k_sasrec.yaml", "  HSTU": "ml100k_hstu.yaml", "  HSTU with times": "ml100k_hstu_times.yaml"},
    ),
    "beauty-models": Mode(prepare_beauty, NEXT_METRICS, {"SASRec": "beauty_sasrec.yaml", "  HSTU": "beauty_hstu.yaml"}),
    "beauty": Mode(
        prepare_beauty,
        NEXT_METRICS,
        {
            "SASRec": "beauty_sasrec.yaml",
            "  p_x 0.1": "beauty_sasrec_px.yaml",
            "  p_y 0.1": "beauty_sasrec_py.yaml",
            "  p_x 0.1, p_y 0.1": "beauty_sasrec_px_py.yaml",
            "  SSE-Graph, p_x 0.2": "beauty_sasrec_graph.yaml",
            "dropout 0.1, 10 epochs": "beauty_sasrec_long.yaml",
            "  p_x 0.1 ": "beauty_sasrec_long_px.yaml",
            "  p_y 0.1 ": "beauty_sasrec_long_py.yaml",
            "  p_x 0.1, p_y 0.1 ": "beauty_sasrec_long_px_py.yaml",
        },
    ),
    "beauty-output": Mode(
        prepare_beauty,
        NEXT_METRICS,
        {
            "in-batch softmax, tied, bias": "beauty_sasrec.yaml",
            "  without bias": "beauty_sasrec_no_bias.yaml",
            "  untied": "beauty_sasrec_untied.yaml",
            "  quotient-remainder, 4": "beauty_sasrec_qr4.yaml",
            "  quotient-remainder, 16": "beauty_sasrec_qr16.yaml",
            "  full softmax": "beauty_sasrec_softmax.yaml",
            "  32 uniform negatives": "beauty_sasrec_uniform.yaml",
            "  binary": "beauty_sasrec_binary.yaml",
        },
    ),
}


def config_of_seed(name: str, folder: Path, seed: int) -> Config:
    """Returns a row's config on the prepared data and graphs."""
    settings = [f"data.path={folder / 'data'}", f"train.seed={seed}"]
    for feature, own in load_config(FOLDER / name).sse.tables.items():
        if own.graph is not None:  # graphs/ml1m_item, of negative items too
            settings.append(f"sse.tables.{feature}.graph={folder / own.graph.rpartition('_')[2]}")
    return load_config(FOLDER / name, settings)


def train_row(title: str, mode: Mode, folder: Path, seeds: int, ranks: Ranks) -> Row:
    """Trains one config with each seed."""
    values: dict[str, list[float]] = {name: [] for name in mode.metrics}
    parameters, speeds = 0, list[float]()
    for seed in range(seeds):
        config = config_of_seed(mode.rows[title], folder, seed)
        with tempfile.TemporaryDirectory() as runs:
            run = Path(runs) / "run"
            evaluation = train_quietly(config, run, ranks)
            parameters = json.loads((run / "run.json").read_text())["parameters"]
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            speeds += [line["samples_per_second"] for line in lines if line["kind"] == "train"]
        assert evaluation is not None
        for name in mode.metrics:
            values[name].append(evaluation[name])
        found = " ".join(f"{evaluation[name]:.4f}" for name in mode.metrics)
        print(f"{title.strip()}, seed {seed}: {found}", flush=True)
    return Row(title, parameters, statistics.median(speeds), values)


def difference(row: Row, baseline: Row, metric: str) -> str:
    """Returns the difference of two means, in brackets in standard errors."""
    own, other = row.values[metric], baseline.values[metric]
    change = statistics.mean(own) - statistics.mean(other)
    if len(own) < 2 or row is baseline:
        return "" if row is baseline else f"{change:+.4f}"
    error = ((deviation(own) ** 2 + deviation(other) ** 2) / len(own)) ** 0.5
    return f"{change:+.4f} ({change / error:+.1f})" if error else f"{change:+.4f}"


def main() -> None:
    """Prepares the data, trains every row and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("data", type=Path, help="folder of the data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="configs whose file name contains this text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mode = MODES[options.mode]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as ranks:
        mode.prepare(options.data, folder := Path(name))
        for title, config in mode.rows.items():
            if options.only in config:
                rows.append(train_row(title, mode, folder, options.seeds, ranks))
    headline = next(iter(mode.metrics))
    table = Table(
        "row", "parameters", "samples/s", *mode.metrics.values(), f"{mode.metrics[headline]} against the base (errors)"
    )
    baseline = rows[0]
    for row in rows:
        baseline = baseline if row.name.startswith(" ") else row
        cells = [mean_and_deviation(values) for values in row.values.values()]
        sizes = f"{row.parameters:,}", f"{row.samples_per_second:,.0f}"
        table.add_row(row.name, *sizes, *cells, difference(row, baseline, headline))
    Console(width=140).print(table)
    write_output(options, [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
    main()
