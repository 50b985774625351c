"""Compares training day after day with growing tables, and training on all days at once: logloss on the next day.

::

    python tools/bench_grow.py train.tsv.gz --seeds 3 --output bench_grow.json
    OMP_NUM_THREADS=1 python tools/bench_grow.py train.tsv.gz --days 7 --trained-days 3 --only quotient

The rows, in order of time, are cut into days of equal length. *By day*, each day's vocabulary is grown from the day
before, and its run starts from the weights and optimizer states of the previous run (``--init-from``). *At once*, one
vocabulary is made of all trained days, and one run trains on them, with as many buckets in each table as by day, where
the first day's ids set the number of buckets. Both are evaluated on the rows of the next day, whose unseen values are
out of vocabulary. Settings are from ``configs/criteo_sample.yaml``. ``--later`` changes settings of the runs that start
from another run's weights, whose networks are already trained: no warm-up and a lower learning rate::

    --later train.dense_optimizer.schedule.warmup=0.0 train.dense_optimizer.learning_rate=0.0003
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_commands import bench_parser, kept_rows, read_lines, write_output
from bench_common import evaluate_run, train_sample
from rich.console import Console
from rich.table import Table

from distembed.base.ranks import Ranks, process_group
from distembed.data.prepare.table.preparation import CriteoOptions, prepare_criteo
from distembed.training.config import load_config

SCHEMES = {
    "full": ["embedding.default.partition=naive"],
    "quotient-remainder, product, 4": ["embedding.default.partition=quotient_remainder"],
    "quotient-remainder, concatenation, 4": [
        "embedding.default.partition=quotient_remainder",
        "embedding.default.composition=concat",
    ],
    "mixed radix, product, 2": ["embedding.default.partition=mixed_radix"],
    "hashed, 4": ["embedding.default.partition=remainder"],
}


@dataclass(frozen=True)
class Days:
    """Datasets of the days.

    Attributes:
        each: The trained days; each vocabulary is grown from the previous day's.
        after: The next day with the last day's vocabulary.
        at_once: All trained days.
        after_at_once: The next day with the vocabulary of ``at_once``.
    """

    each: list[Path]
    after: Path
    at_once: Path
    after_at_once: Path


@dataclass
class Row:
    """Logloss and AUC of a scheme on the next day, by seed, and numbers in the tables by day and at once."""

    scheme: str
    parameters: tuple[int, int] = (0, 0)
    by_day: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    at_once: list[tuple[float, float]] = dataclasses.field(default_factory=list)


def cut_days(rows: Path, folder: Path, num_days: int) -> list[Path]:
    """Writes one file for each day."""
    lines, files = read_lines(rows), []
    for day in range(num_days):
        own = lines[day * len(lines) // num_days : (day + 1) * len(lines) // num_days]
        files.append(folder / f"day_{day}.tsv")
        files[-1].write_bytes(b"".join(own))
    return files


def prepare_days(options: argparse.Namespace, folder: Path) -> Days:
    """Prepares the trained days and the next day, by day and at once."""
    files = cut_days(options.rows, folder, options.days)
    trained, after = files[: options.trained_days], files[options.trained_days]

    def prepare(files: Sequence[Path], name: str, vocabulary: Path | None = None, grow: bool = False) -> Path:
        own = CriteoOptions(min_count=options.min_count, split="none", vocabulary=vocabulary, grow=grow)
        prepare_criteo(files, folder / name, own)
        return folder / name

    each = [prepare(trained[:1], "day-0")]
    for day, file in enumerate(trained[1:], start=1):
        each.append(prepare([file], f"day-{day}", each[-1], grow=True))
    at_once = prepare(trained, "at-once")
    return Days(each, prepare([after], "after", each[-1]), at_once, prepare([after], "after-at-once", at_once))


def train_by_day(settings: Sequence[str], later: Sequence[str], days: Days, runs: Path, ranks: Ranks) -> Path:
    """Trains one day after the other; returns the folder of the last run."""
    run = train_sample(settings, days.each[0], runs / "day-0", ranks)
    for number, dataset in enumerate(days.each[1:], start=1):
        run = train_sample([*settings, *later, f"train.init_from={run}"], dataset, runs / f"day-{number}", ranks)
    return run


def same_buckets(run: Path) -> list[str]:
    """Returns the settings that give another run's tables the full tables and the buckets of this run."""
    tables = load_config(run / "config.yaml").embedding.tables
    kept: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        if table.partition == "naive":
            kept[name] = {"partition": "naive"}
        elif table.num_buckets is not None:
            kept[name] = {"num_buckets": table.num_buckets, "force": True}
    return [f"embedding.tables={json.dumps(kept)}"]


def table_parameters(run: Path) -> int:
    """Returns how many numbers a run's tables have."""
    return int(json.loads((run / "run.json").read_text())["embedding_parameters"])


def evaluate(run: Path, dataset: Path, ranks: Ranks) -> tuple[float, float]:
    """Returns logloss and AUC of a run on a dataset."""
    (metrics,) = evaluate_run(run, dataset, ["train"], ranks)
    return metrics["logloss"], metrics["auc"]


def train_seed(scheme: str, seed: int, days: Days, later: Sequence[str], ranks: Ranks) -> dict[str, Any]:
    """Trains a scheme with a seed, by day and at once; returns both evaluations and the numbers of the tables."""
    settings = [*SCHEMES[scheme], f"train.seed={seed}"]
    with tempfile.TemporaryDirectory() as name:
        last = train_by_day(settings, later, days, Path(name), ranks)
        whole = train_sample([*settings, *same_buckets(last)], days.at_once, Path(name) / "at-once", ranks)
        return {
            "by_day": evaluate(last, days.after, ranks),
            "at_once": evaluate(whole, days.after_at_once, ranks),
            "parameters": [table_parameters(last), table_parameters(whole)],
        }


def train_schemes(days: Days, options: argparse.Namespace, ranks: Ranks) -> Iterator[Row]:
    """Trains every scheme with each seed, by day and at once."""
    schemes, seeds = [name for name in SCHEMES if options.only in name], range(options.seeds)
    measures = {
        f"{scheme}, seed {seed}": partial(train_seed, scheme, seed, days, options.later, ranks)
        for scheme in schemes
        for seed in seeds
    }
    found = kept_rows(options, measures)
    for scheme in schemes:
        runs = [found[f"{scheme}, seed {seed}"] for seed in seeds]
        by_day, at_once = ([run[key] for run in runs] for key in ("by_day", "at_once"))
        yield Row(scheme, runs[-1]["parameters"], by_day, at_once)


def mean_and_deviation(values: Sequence[float]) -> str:
    """Returns the mean and, of several seeds, the standard deviation as a cell of the table."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def main() -> None:
    """Prepares the days, trains every scheme and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("rows", type=Path, help="file of Criteo rows in the order of time, plain or gzip")
    parser.add_argument("--days", type=int, default=7, help="days that the rows are cut into")
    parser.add_argument("--trained-days", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="schemes whose name contains this text")
    parser.add_argument("--later", nargs="*", default=[], help="settings of runs that start from another run's weights")
    parser.add_argument("--min-count", type=int, default=2, help="option of `distembed prepare criteo`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, process_group("cpu") as ranks:
        days = prepare_days(options, Path(folder))
        rows = list(train_schemes(days, options, ranks))
    table = Table(
        "tables", "numbers, by day", "at once", "logloss, by day", "at once", "difference", "AUC, by day", "at once"
    )
    for row in rows:
        (by_day, by_day_auc), (at_once, at_once_auc) = (zip(*each, strict=True) for each in (row.by_day, row.at_once))
        difference = statistics.mean(by_day) - statistics.mean(at_once)
        cells = [mean_and_deviation(values) for values in (by_day, at_once, by_day_auc, at_once_auc)]
        table.add_row(
            row.scheme, *(f"{number:,}" for number in row.parameters), *cells[:2], f"{difference:+.4f}", *cells[2:]
        )
    Console(width=140).print(table)
    write_output(options, [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
    main()
