"""Trains day after day with growing tables, and on all days at once: logloss and AUC on the day after.

::

    python tools/bench_grow.py train.tsv.gz --seeds 3 --output bench_grow.json
    OMP_NUM_THREADS=1 python tools/bench_grow.py train.tsv.gz --days 7 --trained-days 3 --only quotient

The rows, in the order of time, are cut into days of equal length. Day by day, each day's vocabulary is grown from that
of the day before, and its run begins with the weights and optimizer states of the run before (``--init-from``). At
once, one vocabulary is made of all trained days, and one run has as many epochs over them, with as many buckets in each
table: what is computed from the first day's ids stays. Both are evaluated on the rows of the next day, whose unseen
values are out of vocabulary. Settings are those of ``configs/criteo_sample.yaml``; ``--later`` gives others to the runs
that begin with another's weights, such as no warm-up and a lower learning rate, since their networks are trained::

    --later train.dense_optimizer.schedule.warmup=0.0 train.dense_optimizer.learning_rate=0.0003
"""

import argparse
import dataclasses
import gzip
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from distembed.base.files import write_json
from distembed.base.ranks import Ranks, process_group
from distembed.data.prepare.table.preparation import CriteoOptions, prepare_criteo
from distembed.training.config import load_config
from distembed.training.inference import evaluate_split, load_training_state
from distembed.training.run import train_run
from distembed.training.start import RunOptions

CONFIG = Path(__file__).parents[1] / "configs" / "criteo_sample.yaml"
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
    """The prepared days.

    Attributes:
        each: Datasets of the trained days, each of whose vocabularies is grown from the one before.
        after: The next day with the last of these vocabularies.
        at_once: The dataset of all trained days.
        after_at_once: The next day with its vocabulary.
    """

    each: list[Path]
    after: Path
    at_once: Path
    after_at_once: Path


@dataclass
class Row:
    """A scheme's metrics on the day after, a value a seed.

    Attributes:
        scheme: The scheme's name.
        by_day: Logloss and AUC of the run that went on day after day.
        at_once: The same of the run on all days.
        parameters: Numbers in the tables of the last of the runs day by day, and of the run on all days.
    """

    scheme: str
    parameters: tuple[int, int] = (0, 0)
    by_day: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    at_once: list[tuple[float, float]] = dataclasses.field(default_factory=list)


def cut_days(rows: Path, folder: Path, num_days: int) -> list[Path]:
    """Writes the rows of each day to a file of its own."""
    opener = gzip.open if rows.suffix == ".gz" else open
    with opener(rows, "rb") as file:
        lines = list(file)
    files = []
    for day in range(num_days):
        own = lines[day * len(lines) // num_days : (day + 1) * len(lines) // num_days]
        files.append(folder / f"day_{day}.tsv")
        files[-1].write_bytes(b"".join(own))
    return files


def prepare(
    files: Sequence[Path], output: Path, min_count: int, vocabulary: Path | None = None, grow: bool = False
) -> Path:
    """Makes a dataset without validation and test of some days."""
    prepare_criteo(files, output, CriteoOptions(min_count=min_count, split="none", vocabulary=vocabulary, grow=grow))
    return output


def prepare_days(options: argparse.Namespace, folder: Path) -> Days:
    """Prepares the trained days and the next one, in both ways."""
    files, least = cut_days(options.rows, folder, options.days), options.min_count
    trained, after = files[: options.trained_days], files[options.trained_days]
    each = [prepare(trained[:1], folder / "day-0", least)]
    for day, file in enumerate(trained[1:], start=1):
        each.append(prepare([file], folder / f"day-{day}", least, each[-1], grow=True))
    at_once = prepare(trained, folder / "at-once", least)
    return Days(
        each,
        prepare([after], folder / "after", least, each[-1]),
        at_once,
        prepare([after], folder / "after-at-once", least, at_once),
    )


def train(settings: Sequence[str], dataset: Path, run: Path, ranks: Ranks) -> Path:
    """Trains one epoch of a dataset; returns the run's folder."""
    splits = [f"data.path={dataset}", "data.validation=null", "data.test=null"]
    train_run(load_config(CONFIG, [*settings, *splits]), RunOptions(run), ranks, None, lambda _: None)
    return run


def train_by_day(settings: Sequence[str], later: Sequence[str], days: Days, runs: Path, ranks: Ranks) -> Path:
    """Trains one day after the other; returns the folder of the last run."""
    run = train(settings, days.each[0], runs / "day-0", ranks)
    for number, dataset in enumerate(days.each[1:], start=1):
        goes_on = [*settings, *later, f"train.init_from={run}"]
        run = train(goes_on, dataset, runs / f"day-{number}", ranks)
    return run


def same_buckets(run: Path) -> list[str]:
    """Returns the settings of tables that stayed full in a run, or have buckets, as those of another."""
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
    state, _ = load_training_state(run, str(dataset), load_config(run / "config.yaml"), ranks)
    metrics = evaluate_split(state, str(dataset), "train", ranks)
    return metrics["logloss"], metrics["auc"]


def train_schemes(days: Days, options: argparse.Namespace, ranks: Ranks) -> Iterator[Row]:
    """Trains every scheme in both ways with each seed."""
    for scheme in (name for name in SCHEMES if options.only in name):
        row = Row(scheme)
        for seed in range(options.seeds):
            settings = [*SCHEMES[scheme], f"train.seed={seed}"]
            with tempfile.TemporaryDirectory() as name:
                last = train_by_day(settings, options.later, days, Path(name), ranks)
                row.by_day.append(evaluate(last, days.after, ranks))
                whole = train([*settings, *same_buckets(last)], days.at_once, Path(name) / "at-once", ranks)
                row.at_once.append(evaluate(whole, days.after_at_once, ranks))
                row.parameters = table_parameters(last), table_parameters(whole)
            print(f"{scheme}, seed {seed}: by day {row.by_day[-1]}, at once {row.at_once[-1]}", flush=True)
        yield row


def mean_and_deviation(values: Sequence[float]) -> str:
    """Returns mean and standard deviation as a cell of the table."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{deviation}"


def main() -> None:
    """Prepares the days, trains every scheme and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="file of Criteo rows in the order of time, plain or gzip")
    parser.add_argument("--days", type=int, default=7, help="days that the rows are cut into")
    parser.add_argument("--trained-days", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="schemes whose name holds this text")
    parser.add_argument("--later", nargs="*", default=[], help="settings of the runs that begin with another's weights")
    parser.add_argument("--min-count", type=int, default=2, help="as of `distembed prepare criteo`")
    parser.add_argument("--output", type=Path, help="JSON file to write")
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
    if options.output is not None:
        write_json(options.output, [dataclasses.asdict(row) for row in rows])


if __name__ == "__main__":
    main()
