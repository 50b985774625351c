"""All that ``distembed plan`` finds out: an assessment, remedies, the smallest cluster, the cost of training."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from distembed.base.units import format_duration
from distembed.optim.table_storage import TableStorage
from distembed.planning.devices import Cluster
from distembed.planning.request import pipeline_depth
from distembed.planning.saved_plan import saved_plan_as_json
from distembed.planning.storage import PlannedRank
from distembed.reports.plan.assessment import AssessedTable, Assessment, assess
from distembed.reports.plan.plannable import Plannable
from distembed.reports.plan.remedies import Remedies, Smallest, find_remedies, find_smallest

# relative error that most estimates of ``tools/bench_estimates.py`` stay within; no GPU has been compared
_CATALOGUE_ERROR = 0.3


@dataclass(frozen=True)
class TrainingRun:
    """A training run whose time and price are asked for."""

    num_rows: int  # rows read in all epochs together
    price: float | None = None  # of one device for an hour


@dataclass(frozen=True)
class TrainingCost:
    """Time and money of a training run; the fields of money are None without a price."""

    num_rows: int
    num_steps: int
    error: float  # relative: the true time is taken to lie within a factor of 1 + error
    is_calibrated: bool  # whether the error is the device file's
    hours: float
    least_hours: float
    most_hours: float
    device_hours: float
    price: float | None  # of a device-hour
    money: float | None
    least_money: float | None
    most_money: float | None

    @property
    def lines(self) -> list[str]:
        """Two lines: the run's time and money, and the origin of their range."""
        hours = (self.hours, self.least_hours, self.most_hours)
        duration, least, most = (format_duration(3600 * number) for number in hours)
        money = ""
        if self.money is not None:
            money = f", {self.money:,.2f} at {self.price:g} each ({self.least_money:,.2f} to {self.most_money:,.2f})"
        reason = (
            f"half of the steps that calibrated the device were within {self.error:.0%}"
            if self.is_calibrated
            else f"most estimates of steps on CPU ranks were within {self.error:.0%}, and none was compared on a GPU"
        )
        return [
            f"training on {self.num_rows:,} rows: {self.num_steps:,} step(s), {duration} ({least} to {most}), "
            f"{self.device_hours:,.2f} device-hours{money}",
            f"ranges: {reason}; evaluations, checkpoints and waiting for rows are not counted",
        ]


def training_cost(assessment: Assessment, run: TrainingRun) -> TrainingCost:
    """Returns steps, hours and price of a run under a plan that fits, by the slowest rank's step.

    With relative error e, hours and money range from 1 / (1 + e) to 1 + e times the estimate.
    """
    cluster = assessment.cluster
    error = cluster.device.error
    factor = 1 + (_CATALOGUE_ERROR if error is None else error)
    num_steps = math.ceil(run.num_rows / assessment.workload.batch_size)
    hours = num_steps * max(rank.times.total for rank in assessment.ranks) / 3.6e6
    device_hours, money = hours * cluster.world_size, list[float | None]([None] * 3)
    if run.price is not None:
        money = [device_hours * run.price, device_hours * run.price / factor, device_hours * run.price * factor]
    range_hours = (hours, hours / factor, hours * factor)
    is_calibrated = error is not None
    return TrainingCost(
        run.num_rows, num_steps, factor - 1, is_calibrated, *range_hours, device_hours, run.price, *money
    )


@dataclass(frozen=True)
class CapacityReport:
    """Whether a model fits a cluster, and remedies that make it fit."""

    assessment: Assessment
    remedies: Remedies = Remedies()  # none where it fits
    smallest: Smallest | None = None  # how the cluster was found, where the smallest one was asked for
    training_run: TrainingRun | None = None  # to cost, where one was asked for

    @property
    def cost(self) -> TrainingCost | None:
        """Hours and money of the training run; None where no run is given, or the model does not fit."""
        if self.training_run is None or not self.assessment.fits:
            return None
        return training_cost(self.assessment, self.training_run)

    @property
    def lines(self) -> list[str]:
        """Lines of the training run's cost, and of the search for the smallest cluster."""
        return [line for part in (self.cost, self.smallest) if part is not None for line in part.lines]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the assessment, and one more where the search for remedies was cut short."""
        unfinished = "more remedies were not looked for: planning takes too long here"
        return (*self.assessment.notes, *([] if self.remedies.is_complete else [unfinished]))


def report_capacity(
    plannable: Plannable, cluster: Cluster, memory_is_given: bool, find_cluster: bool = False
) -> CapacityReport:
    """Plans a model for a cluster, and looks for remedies where the model does not fit.

    With ``find_cluster`` it plans the smallest cluster that fits instead, if there is one. ``memory_is_given`` says
    that ``--memory`` was typed: remedies then name a larger memory and no other device.
    """
    smallest = find_smallest(plannable, cluster) if find_cluster else None
    smallest_fitting = None if smallest is None else smallest.assessment
    assessment = smallest_fitting or assess(plannable, cluster)
    remedies = Remedies() if assessment.fits else find_remedies(plannable, cluster, memory_is_given, assessment)
    return CapacityReport(assessment, remedies, smallest)


def report_as_json(report: CapacityReport) -> dict[str, Any]:
    """Returns the assessment's values, with all notes, remedies, the smallest cluster and the training run."""
    values = assessment_as_json(report.assessment)
    values |= {"notes": list(report.notes), "remedies": list(report.remedies.arguments)}
    if (smallest := report.smallest) is not None:
        answer, one_less = smallest.assessment, smallest.one_less
        values["smallest"] = {
            "found": None if answer is None else _cluster_values(answer.cluster),
            "proven": smallest.is_proven,
            "tried": [{**_cluster_values(cluster), "fits": fits} for cluster, fits in smallest.tried],
            "untried": smallest.num_untried,
            "one_less": None if one_less is None else _cluster_values(one_less),
            "shortage": list(smallest.shortage),
        }
    return values | ({} if report.cost is None else {"training_run": dataclasses.asdict(report.cost)})


def assessment_as_json(assessment: Assessment) -> dict[str, Any]:
    """Returns the values of a saved plan: the plan, its inputs, and the memory and time of every rank."""
    cluster = assessment.cluster
    return {
        "fits": assessment.fits,
        "device": dataclasses.asdict(cluster.device),
        **_cluster_values(cluster),
        "batch_size": assessment.workload.batch_size,
        "pipeline_depth": pipeline_depth(cluster.device.kind, cluster.world_size),
        "reserve": assessment.reserve,
        "needed_by_tables": _storage_values(assessment.one_copy),
        "kept_by_tables": assessment.size.as_json(),
        "host_capacity": cluster.host_bytes_per_rank,
        "beside_tables": assessment.bytes_beside_tables,
        "left_for_tables": assessment.bytes_left_for_tables,
        "planner_says": assessment.planner_error,
        "rows_per_second": assessment.rows_per_second,
        "lower_bound_ms": assessment.lower_bound_ms,
        "search_complete": assessment.is_search_complete,
        "ranks": [_rank_values(rank) for rank in assessment.ranks],
        "tables": [_table_values(table) for table in assessment.tables],
        "notes": list(assessment.notes),
        **saved_plan_as_json(assessment.plan_inputs, assessment.plan),
    }


def _cluster_values(cluster: Cluster) -> dict[str, int]:
    return {"nodes": cluster.nodes, "gpus": cluster.ranks_per_node}


def _rank_values(rank: PlannedRank) -> dict[str, Any]:
    storage = rank.storage
    return {
        "rank": rank.rank,
        "memory": rank.memory,
        "fullest_moment": rank.moment,
        "total": rank.total_bytes,
        "capacity": rank.capacity_bytes,
        "host_memory": {"table_weights": storage.host_weights, "table_optimizer_state": storage.host_optimizer_state},
        "host_capacity": rank.host_capacity_bytes,
        "milliseconds": {**dataclasses.asdict(rank.times), "total": rank.times.total},
        "sent_bytes": dataclasses.asdict(rank.sent),
        "tables": {name: _storage_values(storage) for name, storage in rank.tables.items()},
    }


def _table_values(table: AssessedTable) -> dict[str, Any]:
    """Returns the values of one table; the values of its place are empty where there is no plan."""
    return {
        "name": table.name,
        "scheme": table.scheme,
        "composition": table.composition,
        "num_embeddings": table.num_embeddings,
        "rows": list(table.num_rows),
        "ids_per_row": table.ids_per_row,
        **table.size.as_json(),
        "bytes_of_one_copy": table.one_copy.total,
        "bytes_on_all_ranks": table.storage.total,
        "host_bytes": table.storage.host,
        "cache_bytes": table.storage.cache,
        "sharding_type": table.sharding_type,
        "compute_kernel": table.compute_kernel,
        "ranks": list(table.ranks),
        "columns": list(map(list, table.columns)),
        "why": table.why,
        "alternatives": list(map(dataclasses.asdict, table.alternatives)),
    }


def _storage_values(storage: TableStorage) -> dict[str, int]:
    return {name: getattr(storage, name) for name in ("weights", "optimizer_state", "gradients", "cache", "host")}
