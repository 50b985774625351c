"""Trains MF, BPR and SASRec with several seeds: the metrics of the papers' tables on the test split.

::

    python tools/bench_recommenders.py mf ../shared/data --seeds 5 --output mf.json
    python tools/bench_recommenders.py bpr ../shared/data --seeds 5
    python tools/bench_recommenders.py ml100k RECBOLE/dataset_example/ml-100k --seeds 5
    python tools/bench_recommenders.py beauty ../shared/data --seeds 5

``mf`` predicts the ratings of MovieLens-1M, ``bpr`` ranks what users rated 4 or 5, both in the split of the authors of
SSE (the files ``movielens1m_mf_train.csv.gz`` and ``movielens1m_mf_test.csv.gz`` of the folder). ``ml100k`` and
``ml100k-bpr`` do so on the MovieLens-100k that the wheel of RecBole 1.2.1 has, split at random into 0.8, 0.1 and 0.1;
``ml100k-next`` predicts each user's last item there. So does ``beauty`` on Amazon Beauty (the files
``amazon_beauty_sequences.txt.gz`` and ``amazon_beauty_item_attributes.json.gz``) with replaced items, and
``beauty-output`` with other losses and tables.

Each row of a table is a config in ``configs/recommenders/``. Graphs join users and items by what they have in common in
the training rows, or items by what they share in the knowledge graph of ``ml100k``: the 20 nearest each; those of
Beauty join items that share an attribute. All seeds are trained in one process, one after another.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_quality import CONFIGS, deviation, mean_and_deviation, run_distembed
from knowledge_graph_attributes import item_attributes
from rich.console import Console
from rich.table import Table

from distembed.base.files import write_json
from distembed.base.ranks import Ranks, process_group
from distembed.training.config import Config, load_config
from distembed.training.run import train_run
from distembed.training.start import RunOptions

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
        prepare: Makes the dataset and the graphs in a folder, of the folder of the data.
        metrics: The columns of the table, by the metrics' names.
        rows: The configs, by what a row is called; a row is compared with the first before it that is no variant.
    """

    prepare: Callable[[Path, Path], None]
    metrics: dict[str, str]
    rows: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """The results of one config on the test split: each metric of each seed, and the median speed in training."""

    name: str
    parameters: int
    samples_per_second: float
    values: dict[str, list[float]]


def prepare_ml1m(data: Path, folder: Path, *options: str) -> None:
    """Makes the dataset in the split of SSE's authors, with graphs of what occurs together in it."""
    files = [str(data / "movielens1m_mf_train.csv.gz"), "--test", str(data / "movielens1m_mf_test.csv.gz")]
    columns = ["--no-header", "--user", "1", "--item", "2", "--rating", "3"]
    run_distembed("prepare", "ratings", *files, *columns, *options, "--output", str(folder / "data"))
    _prepare_graphs(folder)


def prepare_implicit(data: Path, folder: Path) -> None:
    """Makes the dataset of ratings of 4 and 5 alone."""
    prepare_ml1m(data, folder, "--min-rating", "4")


def prepare_ml100k(data: Path, folder: Path, *options: str) -> None:
    """Makes the dataset of RecBole's MovieLens-100k, with a graph of items that share a tail of its knowledge graph."""
    columns = ["--user", "user_id", "--item", "item_id", "--rating", "rating", "--time", "timestamp"]
    split = ["--split", "random:0.8,0.1,0.1"]
    run_distembed(
        "prepare", "ratings", str(data / "ml-100k.inter"), *columns, *split, *options, "--output", str(folder / "data")
    )
    _prepare_knowledge_graph(data, folder)
    _prepare_graphs(folder, "user")


def prepare_implicit_100k(data: Path, folder: Path) -> None:
    """Makes the dataset of ratings of 4 and 5 of MovieLens-100k alone."""
    prepare_ml100k(data, folder, "--min-rating", "4")


def prepare_sequences_100k(data: Path, folder: Path) -> None:
    """Makes the sequences of MovieLens-100k, in rows of at most 50 items to train on, with that graph of items."""
    columns = ["--user", "user_id", "--item", "item_id", "--time", "timestamp", "--windows", "all"]
    run_distembed("prepare", "sequences", str(data / "ml-100k.inter"), *columns, "--output", str(folder / "data"))
    _prepare_knowledge_graph(data, folder)


def prepare_beauty(data: Path, folder: Path) -> None:
    """Makes the sequences of Amazon Beauty, with a graph of items that share an attribute of at most 100 items."""
    lines = str(data / "amazon_beauty_sequences.txt.gz")
    run_distembed("prepare", "sequences", lines, "--format", "lists", "--output", str(folder / "data"))
    run_distembed(
        *["prepare", "graph", str(data / "amazon_beauty_item_attributes.json.gz"), "--attribute", "any"],
        *["--max-shared", "100", "--count-shared"],
        *["--data", str(folder / "data"), "--table", "item", "--output", str(folder / "item")],
    )


def _prepare_knowledge_graph(data: Path, folder: Path) -> None:
    """Makes a graph of items that share a tail of RecBole's knowledge graph."""
    attributes = item_attributes(data / "ml-100k.kg", data / "ml-100k.link")
    (folder / "attributes.json").write_text(json.dumps(attributes), encoding="utf-8")
    run_distembed(
        *["prepare", "graph", str(folder / "attributes.json"), "--attribute", "entity", "--unknown", "drop"],
        *["--max-shared", "200", "--count-shared", "--max-neighbors", "20"],
        *["--data", str(folder / "data"), "--table", "item", "--output", str(folder / "item")],
    )


def _prepare_graphs(folder: Path, *tables: str) -> None:
    """Makes a graph of each table's ids that occur together in training."""
    for table in tables or ("user", "item"):
        run_distembed(
            *["prepare", "graph", "--co-occurrence", "--data", str(folder / "data"), "--table", table],
            *["--measure", "cosine", "--max-neighbors", "20", "--max-shared", "5000", "--output", str(folder / table)],
        )


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
        prepare_implicit,
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
        prepare_implicit_100k,
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
    """Returns a row's config on the prepared data, with the graphs that it names."""
    settings = [f"data.path={folder / 'data'}", f"train.seed={seed}"]
    for feature, own in load_config(FOLDER / name).sse.tables.items():
        if own.graph is not None:  # such as graphs/ml1m_item, that of negative items too
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
            evaluation = train_run(config, RunOptions(run), ranks, None, lambda _: None).evaluation
            parameters = json.loads((run / "run.json").read_text())["parameters"]
            speeds += training_speeds(run)
        assert evaluation is not None
        for name in mode.metrics:
            values[name].append(evaluation[name])
        print(
            f"{title.strip()}, seed {seed}: {' '.join(f'{evaluation[name]:.4f}' for name in mode.metrics)}", flush=True
        )
    return Row(title, parameters, statistics.median(speeds), values)


def training_speeds(run: Path) -> list[float]:
    """Returns the samples a second of the logged windows of a run's training."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["samples_per_second"] for line in lines if line["kind"] == "train"]


def difference(row: Row, baseline: Row, metric: str) -> str:
    """Returns the difference of two means, with how many of its standard errors it is."""
    own, other = row.values[metric], baseline.values[metric]
    change = statistics.mean(own) - statistics.mean(other)
    if len(own) < 2 or row is baseline:
        return "" if row is baseline else f"{change:+.4f}"
    error = ((deviation(own) ** 2 + deviation(other) ** 2) / len(own)) ** 0.5
    return f"{change:+.4f} ({change / error:+.1f})" if error else f"{change:+.4f}"


def main() -> None:
    """Prepares the data, trains every row and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("data", type=Path, help="folder of the data")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="", help="configs whose file name holds this text")
    parser.add_argument("--output", type=Path, help="JSON file to write")
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
        table.add_row(
            row.name,
            f"{row.parameters:,}",
            f"{row.samples_per_second:,.0f}",
            *cells,
            difference(row, baseline, headline),
        )
    Console(width=140).print(table)
    if options.output is not None:
        values: list[dict[str, Any]] = [dataclasses.asdict(row) for row in rows]
        write_json(options.output, values)


if __name__ == "__main__":
    main()
