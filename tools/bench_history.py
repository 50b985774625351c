"""Trains DIN with each kind of history on clicks made of real sequences: AUC and logloss on the test split.

::

    pip download recbole==1.2.1 --no-deps && unzip recbole-*.whl 'recbole/dataset_example/ml-100k/*'
    OMP_NUM_THREADS=1 python tools/bench_history.py --beauty amazon_beauty_sequences.txt.gz \
        --movielens recbole/dataset_example/ml-100k/ml-100k.inter --seeds 3

A row is a user, an item and the items before it. Each item of a user makes two rows: one with the label 1, and one
with the label 0 and an item that is drawn uniformly among all items that the user never has. A user's last items are
the test split, the items before them the validation split, and some items before these the training split. MovieLens
has times, so its histories have the gap ``log(1 + seconds)`` between each item and the row. The config is
``configs/din.yaml``.
"""

import csv
import gzip
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from bench_commands import CONFIGS, bench_parser, kept_rows, mean_and_deviation, run_distembed, write_output
from bench_common import evaluate_run, train_quietly
from rich.console import Console
from rich.table import Table

from distembed.base.ranks import Ranks, process_group
from distembed.training.config import load_config

MAX_LENGTH = 30
NO_HISTORY = "no history"
_DCNV2 = ["model={name: dcnv2, deep: [128, 64], dropout: 0.1}", "train.sparse_optimizer.learning_rate=0.06"]
VARIANTS = {
    f"DCN V2, {NO_HISTORY}": _DCNV2,
    "DCN V2, sum": _DCNV2,
    "DIN, mean": ["model.history=mean", "model.side_features=false"],
    "DIN, attention": ["model.side_features=false"],
    "DIN, transformer": ["model.history=transformer", "model.side_features=false"],
    "DIN, mean, time gaps": ["model.history=mean"],
    "DIN, attention, time gaps": [],
    "DIN, transformer, time gaps": ["model.history=transformer"],
}
"""Settings of each variant."""


@dataclass(frozen=True)
class Clicks:
    """The sequences of a dataset, and how rows are made of them.

    Attributes:
        sequences: Items of each user in the order of time.
        times: Seconds of each item; None without times.
        num_held_out: Items of a user in the test split, and in the validation split.
        num_trained: Most items of a user in the training split.
    """

    sequences: Sequence[Sequence[int]]
    times: Sequence[Sequence[int]] | None
    num_held_out: int
    num_trained: int

    def rows(self, seed: int = 0) -> Iterator[dict[str, Any]]:
        """Yields two rows for each item: the item that the user has, and a drawn one."""
        rng = np.random.default_rng(seed)
        catalogue = np.unique(np.concatenate([np.asarray(items) for items in self.sequences]))
        for user, items in enumerate(self.sequences):
            own = set(items)
            times = None if self.times is None else self.times[user]
            first = max(1, len(items) - 2 * self.num_held_out - self.num_trained)
            for place in range(first, len(items)):
                left = len(items) - 1 - place
                split = "test" if left < self.num_held_out else "validation"
                history = slice(max(0, place - MAX_LENGTH), place)
                row = {
                    "split": split if left < 2 * self.num_held_out else "train",
                    "user": user,
                    "history": " ".join(map(str, items[history])),
                }
                if times is not None:
                    row |= {"at": times[place], "times": " ".join(map(str, times[history]))}
                drawn = items[place]
                while drawn in own:
                    drawn = int(rng.choice(catalogue))
                yield row | {"click": 1, "item": items[place]}
                yield row | {"click": 0, "item": drawn}


def read_beauty(file: Path) -> Clicks:
    """Reads lines of a user and the user's items, in the order of time."""
    with gzip.open(file, "rt") as lines:
        sequences = [[int(item) for item in line.split()[1:]] for line in lines]
    return Clicks([items for items in sequences if len(items) > 3], None, num_held_out=1, num_trained=4)


def read_movielens(file: Path) -> Clicks:
    """Reads RecBole's file of ratings; all ratings count as clicks."""
    with file.open() as lines:
        ratings = [(row[0], int(row[1]), int(float(row[3]))) for row in list(csv.reader(lines, delimiter="\t"))[1:]]
    by_user: dict[str, list[tuple[int, int]]] = {}
    for user, item, seconds in ratings:
        by_user.setdefault(user, []).append((seconds, item))
    ordered = [sorted(pairs) for pairs in by_user.values()]
    sequences, times = ([[pair[index] for pair in pairs] for pairs in ordered] for index in (1, 0))
    return Clicks(sequences, times, num_held_out=5, num_trained=60)


def prepare(clicks: Clicks, folder: Path) -> dict[bool, Path]:
    """Prepares the rows with and without histories, and returns the datasets."""
    rows = list(clicks.rows())
    with (folder / "clicks.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    schema: dict[str, Any] = {
        "label": {"column": "click"},
        "categorical": {"user": {"min_count": 1}, "item": {"min_count": 1}},
        "split": "column:split",
    }
    datasets = {}
    for has_history in (False, True):
        if has_history:
            schema["categorical"]["history"] = {"separator": " ", "vocabulary": "item", "max_length": MAX_LENGTH}
            if clicks.times is not None:
                gaps = {"column": "times", "beside": "history", "separator": " ", "gap_to": "at", "transform": "log"}
                schema["dense"] = {"gaps": gaps}
        file = folder / f"schema-{has_history}.yaml"
        file.write_text(yaml.safe_dump(schema))
        datasets[has_history] = folder / f"dataset-{has_history}"
        run_distembed("prepare", "table", folder / "clicks.csv", "--schema", file, "--output", datasets[has_history])
    return datasets


def train(settings: Sequence[str], run: Path, dataset: Path, split: str, ranks: Ranks) -> dict[str, float]:
    """Trains with settings, and returns the metrics of a split and the seconds of training."""
    splits = ["data.validation=null", "data.test=null"]
    started = time.perf_counter()
    train_quietly(load_config(CONFIGS / "din.yaml", [*settings, *splits]), run, ranks)
    seconds = time.perf_counter() - started
    (found,) = evaluate_run(run, dataset, [split], ranks)
    return {**{key: found[key] for key in ("auc", "logloss")}, "seconds": seconds}


def main() -> None:
    """Prepares the clicks, trains each variant with each seed and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--beauty", type=Path, help="lines of a user and the user's items, compressed by gzip")
    parser.add_argument("--movielens", type=Path, help="RecBole's ml-100k.inter")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="variants whose name contains this text")
    parser.add_argument("--split", default="test", help="split that is evaluated; settings were chosen on validation")
    parser.add_argument("--set", action="append", default=[], help="a further setting of all variants")
    options = parser.parse_args()
    measures: dict[str, Callable[[], dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary, process_group("cpu") as ranks:
        for name, read in (("beauty", read_beauty), ("movielens", read_movielens)):
            if (source := getattr(options, name)) is None:
                continue
            folder = Path(temporary) / name
            folder.mkdir()
            clicks = read(source)
            datasets = prepare(clicks, folder)
            for variant in VARIANTS:
                if options.only not in variant or (clicks.times is None and "gaps" in variant):
                    continue
                dataset = datasets[NO_HISTORY not in variant]
                for seed in range(options.seeds):
                    run = folder / "runs" / f"{variant}-{seed}"
                    settings = [*VARIANTS[variant], f"data.path={dataset}", f"train.seed={seed}", *options.set]
                    measures[f"{name}/{variant}/{seed}"] = partial(train, settings, run, dataset, options.split, ranks)
        rows = kept_rows(options, measures)
    results: list[dict[str, Any]] = []
    for (dataset_name, variant), group in groupby(rows, key=lambda title: title.split("/")[:2]):
        runs = [rows[title] for title in group]
        by_metric = {key: [run[key] for run in runs] for key in ("auc", "logloss", "seconds")}
        results.append({"dataset": dataset_name, "variant": variant, **by_metric})
    table = Table("clicks", "variant", f"{options.split} AUC", f"{options.split} logloss", "seconds")
    for row in results:
        numbers = [mean_and_deviation(row["auc"]), mean_and_deviation(row["logloss"])]
        table.add_row(row["dataset"], row["variant"], *numbers, f"{statistics.mean(row['seconds']):.0f}")
    Console(width=120).print(table)
    write_output(options, results)


if __name__ == "__main__":
    main()
