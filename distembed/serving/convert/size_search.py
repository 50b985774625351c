"""``distembed compress-search``: the settings, the scheme and the size of each table within a budget of bytes.

A *combination* has settings common to all tables, such as the dimension, the type of numbers and the optimizer.

1. A run with full tables is trained for each combination, the config as given among them.
2. The cost of each size of each table is estimated in that run, without training (:mod:`.curvature`).
3. For each budget, tables take the steps along their hulls in the order of the cost that a byte saves
   (:mod:`.table_sizes`). Costs of several tables are taken to add up. Costs of two combinations cannot be compared.
4. The chosen tables of each combination are trained from the start. All points of the curve of quality by bytes are
   measured; few combinations are compared, since differences on the validation split are noisy.

::

    OUT/config.yaml       the best config within the budget, by the validation split
    OUT/curve.json, .svg  quality by bytes
    OUT/costs.jsonl       step 2, as it is computed
    OUT/runs/             all trainings, a folder as of `distembed sweep`

The same command continues an interrupted search. A search for another budget in the folder reuses its runs and costs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator
from rich.box import SIMPLE_HEAD
from rich.table import Table

from distembed.base.errors import UserError
from distembed.base.files import require_folder, write_json, write_text
from distembed.base.units import enumerate_names, format_bytes
from distembed.data.dataset.manifest import Manifest
from distembed.embedding.settings import TableConfig
from distembed.reports.pages import colour, render_svg
from distembed.serving.convert.combinations import Combination, find_combinations
from distembed.serving.convert.curvature import TrainedTables
from distembed.serving.convert.searched_tables import SearchedTable
from distembed.serving.convert.table_sizes import Option, TableSizes
from distembed.tasks import build_task
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training.config import Config, load_config
from distembed.training.run_folder.lock import LOCK_NAME, owned
from distembed.training.run_folder.record import RunRecord
from distembed.training.start import require_defined_headline, require_trainable
from distembed.training.sweeps.axes import NamedRun
from distembed.training.sweeps.sweep import Sweep, plan_run
from distembed.training.sweeps.train import train_sweep, validated

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CONFIG, _CURVE, _FIGURE, _COSTS, _RUNS = "config.yaml", "curve.json", "curve.svg", "costs.jsonl", "runs"
_OWN = {_CONFIG, _CURVE, _FIGURE, _COSTS, _RUNS, LOCK_NAME}
_IN_USE = "{folder} is in use by {owner}; wait for it to end, or give another --output."


@dataclass(frozen=True)
class SearchOptions:
    """How a search is made.

    Attributes:
        budget_bytes: The most training bytes of all tables together.
        output: The search's folder.
        curve: Further points: how many times fewer bytes than full tables of the config as given.
        workers: Number of runs that are trained at the same time.
        tries: Settings with one or several values, as of a sweep, separated by blanks: a combination for each product
            of values. None for the default ones.
    """

    budget_bytes: int
    output: Path
    curve: Sequence[float] = (4, 16, 60)
    workers: int = 1
    tries: Sequence[str] | None = None

    def __post_init__(self) -> None:
        wrong = [number for number in self.curve if not 1 < number < math.inf]
        if wrong:
            raise UserError(f"--curve has {wrong[0]:g}; give numbers above 1, such as 4,16,60.")
        require_folder("--output", self.output)
        others = sorted({*os.listdir(self.output)} - _OWN) if self.output.is_dir() else []
        if others:
            raise UserError(
                f"--output {self.output} is a folder with other files ({enumerate_names(others, most=3)}); give a new "
                "or empty folder, or that of a search."
            )


@dataclass(frozen=True)
class Point:
    """A config of the curve.

    Attributes:
        name: The name of its run: ``full`` or ``search-BYTES``, with the combination's name.
        combination: The name of the combination.
        config: The config.
        num_bytes: The training bytes of its tables.
        budgets: The budgets that it is for.
        cost: The sum of its tables' costs.
        validation: The metric on the validation split after training; NaN before.
        test: The reported metrics on the test split; none before training, and without the split.
    """

    name: str
    combination: str
    config: Config
    num_bytes: int
    budgets: set[int] = field(default_factory=set)
    cost: float = 0.0
    validation: float = math.nan
    test: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the point in plain values; ``tables`` are the tables with settings of their own."""
        names = ("partition", "composition", "collisions", "bounds")
        tables = {
            table: {name: getattr(own, name) for name in names} for table, own in self.config.embedding.tables.items()
        }
        values = {own.name: getattr(self, own.name) for own in dataclasses.fields(self) if own.name != "config"}
        return values | {"budgets": sorted(self.budgets), "tables": tables}


@dataclass(frozen=True)
class SearchResult:
    """The trained points of a search's curve, the full one of the config as given first; the chosen one; the metric."""

    points: Sequence[Point]
    chosen: Point
    metric: ReportedMetric

    def to_json(self) -> dict[str, Any]:
        """Returns the curve in plain values."""
        points = [point.to_json() for point in self.points]
        return {"metric": self.metric.name, "chosen": self.chosen.name, "points": points}

    def table(self) -> Table:
        """Returns the points as a table for the terminal, the largest first."""
        headline = self.metric.heading
        rows = Table("tables", "bytes", "times smaller", "cost", f"{headline}, validation", "test", box=SIMPLE_HEAD)
        for point in sorted(self.points, key=lambda own: -own.num_bytes):
            form, test = self.metric.number_format, point.test.get(self.metric.name, math.nan)
            rows.add_row(
                point.name,
                format_bytes(point.num_bytes),
                f"{self.points[0].num_bytes / point.num_bytes:.2f}",
                f"{point.cost:.3g}",
                f"{point.validation:{form}}",
                f"{test:{form}}",
            )
        return rows

    def draw(self, figure: Figure) -> None:
        """Draws the metric on the validation split against the training bytes, in a figure."""
        axes = figure.add_subplot()
        for number, name in enumerate(dict.fromkeys(point.combination for point in self.points)):
            own = sorted((point for point in self.points if point.combination == name), key=lambda each: each.num_bytes)
            values = [each.num_bytes for each in own], [each.validation for each in own]
            axes.plot(*values, marker="o", markersize=5, label=name, color=colour(number))
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(EngFormatter("B"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("training bytes of all tables")
        axes.set_ylabel(f"{self.metric.heading} (validation)")
        axes.legend(frameon=False)


def search_sizes(
    config_file: Path, overrides: Sequence[str], options: SearchOptions, say: Callable[[str], None]
) -> SearchResult:
    """Chooses the tables of a config for a budget, trains them, and writes the config and the curve.

    Args:
        config_file: The config, whose tables without settings of their own are chosen.
        overrides: Settings that replace the config's, as ``dotted.key=value``.
        options: The budget and the folder.
        say: Prints a line.

    Raises:
        UserError: The config cannot be trained or searched, the budget is below the smallest sizes or above full
            tables, or another process searches in the folder.
        RunError: A run did not finish.
        Interrupted: After a signal. The same call continues the search.
    """
    config = load_config(config_file, overrides)
    metric = _comparable_metric(config)
    combinations = find_combinations(config_file, overrides, options.tries, say)
    budgets = _budgets(combinations, options)
    options.output.mkdir(parents=True, exist_ok=True)
    with owned(options.output, refusal=_IN_USE):
        full = {own.name: _point(own, "full", own.tables.full) for own in combinations}
        _train(list(full.values()), config_file, metric, options, say)
        points = {point.config.to_yaml(): point for point in full.values()}  # equal configs once
        for own in combinations:
            with _one_thread():
                sizes = _costs(own, options, say)
            for budget in budgets:
                if own.tables.smallest_bytes <= budget:
                    found = sizes.within(budget - own.tables.kept_bytes)
                    cost = sum(option.distortion for option in found)
                    point = _point(own, f"search-{budget}", [option.choice for option in found], cost)
                    points.setdefault(point.config.to_yaml(), point).budgets.add(budget)
        trained = _train(list(points.values()), config_file, metric, options, say)
        sign = -1 if metric.better == "higher" else 1
        within = [point for point in trained if options.budget_bytes in point.budgets]
        result = SearchResult(trained, min(within, key=lambda point: sign * point.validation), metric)
        write_text(options.output / _CONFIG, result.chosen.config.to_yaml())
        write_json(options.output / _CURVE, result.to_json())
        write_text(options.output / _FIGURE, render_svg(result.draw, (5.6, 3.5)))
    return result


@contextmanager
def _one_thread() -> Iterator[None]:
    """Has torch compute in one thread within the block: a process forked from one with OpenMP threads would hang."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _comparable_metric(config: Config) -> ReportedMetric:
    """Returns the metric that tables are compared by: the logloss of the headline's label, else the headline metric.

    Raises:
        UserError: The dataset lacks a split, or the metric cannot be compared on the validation split.
    """
    dataset = config.data.require_path()
    if config.data.validation is None:
        raise UserError(
            "data.validation is null, and compress-search compares tables on the validation split; name a split of "
            f"{dataset}, or prepare it with one (--split 0.8,0.1,0.1)."
        )
    require_trainable(config, dataset)
    require_defined_headline(
        config.task, Manifest.load(dataset), config.data.validation, "compress-search compares tables",
        "Use `distembed plan --compress`, which needs no metric",
    )  # fmt: skip
    task = build_task(config.task, config.data.load_schema())
    metric = task.headline.of_same_label("logloss", task.reported_metrics) or task.headline
    if metric.better is None:
        raise UserError(
            f"compress-search compares tables by {metric.name!r}, and neither higher nor lower values of it are "
            "better; use `distembed plan --compress`, which needs no metric."
        )
    return metric


def _point(combination: Combination, kind: str, chosen: Sequence[TableConfig], cost: float = 0.0) -> Point:
    """Returns a point of a combination, with settings for each searched table."""
    tables = combination.tables
    name = combination.run_name(kind)
    return Point(name, combination.name, tables.config_of(chosen), tables.num_bytes(chosen), set(), cost)


def _budgets(combinations: Sequence[Combination], options: SearchOptions) -> list[int]:
    """Returns the budgets in bytes, the given one first; budgets of the curve below the smallest sizes are left out.

    Raises:
        UserError: The given budget is below the smallest sizes, or no table needs to be smaller for it.
    """
    budget, full = options.budget_bytes, combinations[0].tables.full_bytes
    smallest = min(own.tables.smallest_bytes for own in combinations)
    sizes = f"{full:,} ({format_bytes(full)}) when they are full and {smallest:,} ({format_bytes(smallest)}) at least"
    if not smallest <= budget < full:
        remedy = "give more, or lower embedding.default.threshold" if budget < smallest else "give less"
        raise UserError(f"--budget is {budget:,} bytes, and all tables take {sizes}, with optimizer states; {remedy}.")
    of_curve = [int(full / times) for times in options.curve]
    return list(dict.fromkeys([budget, *(size for size in of_curve if size >= smallest)]))


def _costs(combination: Combination, options: SearchOptions, say: Callable[[str], None]) -> TableSizes[TableConfig]:
    """Returns the sizes of all tables with their costs in the run of full tables, from the file where it has them."""
    file = options.output / _COSTS
    costs = _read_costs(file)
    write_text(file, "".join(_line(size, cost) for size, cost in costs.items()))  # without a line that was cut short
    run = TrainedTables(options.output / _RUNS / combination.run_name("full"))
    sizes = []
    with file.open("a", encoding="utf-8", buffering=1) as opened:
        for table in combination.tables.tables:
            candidates = {
                f"{run.identity} {_key(combination, table, own)}": (own, size) for own, size in table.candidates()
            }
            full, *smaller = candidates
            missing = [key for key in smaller if key not in costs]
            trained = {name: run.table(name, config) for name, config in table.full.items()} if missing else {}
            for key in missing:
                built = table.tables(candidates[key][0])
                costs[key] = sum(trained[name].cost(config) for name, config in built.items())
                opened.write(_line(key, costs[key]))
            if missing:
                say(f"costs of {len(missing)} sizes of table {table.feature.name}, {combination.name}")
            at = costs | {full: 0.0}
            sizes.append([Option(own, num_bytes, at[key]) for key, (own, num_bytes) in candidates.items()])
    return TableSizes(sizes)


def _key(combination: Combination, table: SearchedTable, settings: TableConfig) -> str:
    """Returns the name of a size in the file of costs, beside the identity of the run's checkpoint."""
    size = settings.collisions or settings.bounds
    return f"{combination.name} {table.feature.name} {settings.partition} {settings.composition} {size}"


def _line(size: str, cost: float) -> str:
    return json.dumps({"size": size, "cost": cost}) + "\n"


def _read_costs(file: Path) -> dict[str, float]:
    """Returns the costs of a search that was interrupted; a line that was cut short is left out."""
    costs = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            read = json.loads(line)
            costs[read["size"]] = float(read["cost"])
    return costs


def _train(
    points: Sequence[Point],
    config_file: Path,
    metric: ReportedMetric,
    options: SearchOptions,
    say: Callable[[str], None],
) -> list[Point]:
    """Trains the points that are not trained yet, and returns all with their metrics."""
    folder = options.output / _RUNS
    runs = [plan_run(NamedRun(own.name, own.name, (f"tables={own.name}",), ()), own.config, folder) for own in points]
    sweep = Sweep(config_file, [], folder, runs)
    sweep.require_all_finished(train_sweep(sweep, options.workers, say))
    trained = []
    for point, run in zip(points, runs, strict=True):
        record = RunRecord.read(run.folder)
        reported = () if record.evaluation is None else record.info.metrics
        metrics = {own.name: record.evaluation.metric(own.name) for own in reported if record.evaluation is not None}
        trained.append(dataclasses.replace(point, validation=validated(run, metric)[1], test=metrics))
    return trained
