"""What a training run takes under a plan: hours and money, with the range that the estimate's error leaves open.

Steps alone are counted: no evaluations, no checkpoints, no waiting for rows.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distembed.base.units import format_duration

if TYPE_CHECKING:  # options are read before torch is loaded
    from distembed.reports.plan.assessment import Assessment

# relative error that most estimates of ``tools/bench_estimates.py`` stay within; no GPU has been compared
_CATALOGUE_ERROR = 0.3


@dataclass(frozen=True)
class TrainingRun:
    """A training run to cost."""

    num_rows: int  # epochs added up
    price: float | None = None  # of one device for an hour


@dataclass(frozen=True)
class TrainingCost:
    """What a training run takes; the fields of money are None without a price."""

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
        """A line of what the run takes, and one of where its range is from."""
        hours = (self.hours, self.least_hours, self.most_hours)
        duration, least, most = (format_duration(3600 * each) for each in hours)
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


def training_cost(assessment: "Assessment", run: TrainingRun) -> TrainingCost:
    """Returns steps, hours and price of a run under a plan that fits; all ranks wait for the slowest."""
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
