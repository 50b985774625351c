"""Compares training day after day with training from scratch, by the AUC and the logloss of the next day.

::

    OMP_NUM_THREADS=1 python tools/bench_days.py train.tsv.gz --seeds 3 --output bench_days.json

Criteo rows, in the order of time, are cut into days of equally many rows, which get made-up times. Values are hashed,
so that all days have equal ids. A model that is trained until a day is evaluated on the next day:

======================= ============================================================================================
incremental             the last day's rows, from the weights and optimizer states of the day before
incremental, 3 days     the last three days' rows, weighted by age, from the weights of the day before
scratch                 all days' rows, from initial weights
scratch, half-life      all days' rows, weighted by age
scratch, 3 days         the last three days' rows
stream                  all rows once; each is scored before it is trained, so also by earlier rows of its own day
======================= ============================================================================================
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_commands import bench_parser, kept_rows, mean_and_deviation, read_lines, write_output
from bench_common import evaluate_run, train_sample
from rich.console import Console
from rich.table import Table

from distembed.base.ranks import Ranks, process_group
from distembed.data.dataset.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from distembed.data.prepare.table import prepare_table
from distembed.data.table.schema import TableSchema
from distembed.training.run_folder.record import RunRecord

_DAY, _START = 86_400, 1_767_225_600  # seconds; 2026-01-01
_KEPT_DAYS = 3
_LATER = ["train.dense_optimizer.schedule.warmup=0.0", "train.dense_optimizer.learning_rate=0.0003"]
_CONSTANT = "train.dense_optimizer.schedule={warmup: 0, decay: none}"
Scores = dict[str, list[tuple[float, float]]]  # by way of training: AUC and logloss of each next day


def schema(hash_size: int) -> TableSchema:
    """Returns the schema of Criteo's columns after a column of times."""
    values: Mapping[str, Any] = {
        "label": {"column": "label"},
        "time": {"column": "at", "format": "seconds"},
        "dense": {name: {"transform": "log"} for name in CRITEO_DENSE},
        "categorical": {name: {"kind": "string", "hash_size": hash_size} for name in CRITEO_CATEGORICAL},
        "split": "none",
        "text": {"header": False, "columns": ["at", "label", *CRITEO_DENSE, *CRITEO_CATEGORICAL]},
    }
    return TableSchema.from_json(values, "bench_days")


def write_days(rows: Path, folder: Path, num_days: int) -> list[Path]:
    """Writes a file for each day, with times that are spread over the day."""
    lines, files = read_lines(rows), []
    folder.mkdir()
    for day in range(num_days):
        own = lines[day * len(lines) // num_days : (day + 1) * len(lines) // num_days]
        times = (_START + day * _DAY + row * _DAY // len(own) for row in range(len(own)))
        files.append(folder / f"day-{day}.tsv")
        files[-1].write_bytes(b"".join(b"%d\t%s" % each for each in zip(times, own, strict=True)))
    return files


class Days:
    """Datasets of consecutive days, each prepared when it is first asked for."""

    def __init__(self, files: Sequence[Path], folder: Path, hash_size: int) -> None:
        self._files, self._folder, self._schema = files, folder, schema(hash_size)

    def dataset(self, first: int, last: int) -> Path:
        """Returns the dataset of the days from ``first``, 0 at least, to ``last``."""
        path = self._folder / f"days-{max(0, first)}-{last}"
        if not path.exists():
            prepare_table(self._files[max(0, first) : last + 1], path, self._schema)
        return path


def train_days(days: Days, num_days: int, options: argparse.Namespace, seed: int, runs: Path, ranks: Ranks) -> Scores:
    """Trains in each way until each day but the last, and evaluates each model on the next day."""
    scores: Scores = {}
    half_life, own = f"train.half_life_days={options.half_life}", f"train.seed={seed}"

    def train(way: str, first: int, last: int, *settings: str, continues: bool = False) -> None:
        if continues and last:
            settings = (*settings, *_LATER, f"train.init_from={runs / f'{way} {last - 1}'}")
        run = train_sample([own, *settings], days.dataset(first, last), runs / f"{way} {last}", ranks)
        (metrics,) = evaluate_run(run, days.dataset(last + 1, last + 1), ["train"], ranks)
        scores.setdefault(way, []).append((metrics["auc"], metrics["logloss"]))

    for day in range(num_days - 1):
        train("incremental", day, day, continues=True)
        train("incremental, 3 days", day - _KEPT_DAYS + 1, day, half_life, continues=True)
        train("scratch", 0, day)
        train("scratch, half-life", 0, day, half_life)
        train("scratch, 3 days", day - _KEPT_DAYS + 1, day)
    source = f"data.stream={{source: '{days.dataset(0, 0).parent / 'raw'}', until_idle: 2, metrics_by: day}}"
    stream = RunRecord.read(train_sample([own, _CONSTANT, source], days.dataset(0, 0), runs / "stream", ranks))
    scores["stream"] = [(line.metric("auc"), line.metric("logloss")) for line in stream.periods[1:]]
    return scores


def main() -> None:
    """Prepares the days, trains in all ways with each seed, and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("rows", type=Path, help="file of Criteo rows in the order of time, plain or gzip")
    parser.add_argument("--days", type=int, default=7, help="days that the rows are cut into")
    parser.add_argument("--half-life", type=float, default=2.0, help="half-life of rows, in days")
    parser.add_argument("--hash-size", type=int, default=2**14, help="ids of each table")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, process_group("cpu") as ranks:
        files = write_days(options.rows, Path(name) / "raw", options.days)
        days = Days(files, Path(name), options.hash_size)
        measures = {
            f"seed {seed}": partial(train_days, days, options.days, options, seed, Path(name) / f"runs-{seed}", ranks)
            for seed in range(options.seeds)
        }
        by_seed: list[Scores] = [*kept_rows(options, measures).values()]
    table = Table("AUC of", *(f"day {day + 1}" for day in range(1, options.days)), "mean", "logloss, mean")
    for way in by_seed[0]:
        scores = np.array([seed[way] for seed in by_seed])  # [seeds, days, 2]
        by_day, means = scores[:, :, 0].mean(axis=0), scores.mean(axis=1).T.tolist()
        table.add_row(way, *(f"{auc:.4f}" for auc in by_day), *map(mean_and_deviation, means))
    Console(width=140).print(table)
    write_output(options, by_seed)


if __name__ == "__main__":
    main()
