"""Hours and money of a training run: by hand, with the range of the device's error, in each output of the command."""

import dataclasses
import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from distembed.base.errors import UserError
from distembed.commands import cli
from distembed.planning.devices import Cluster, find_device
from distembed.reports.plan.page import render_capacity_page
from distembed.reports.plan.report import CapacityReport, TrainingRun, report_as_json, training_cost
from distembed.reports.plan.terminal import print_capacity_report
from tests.capacity.plan_values import plan_assessment, without_plan


def report(num_rows: int, price: float | None, device: str = "h100-80gb") -> CapacityReport:
    found = dataclasses.replace(plan_assessment(2, 4), cluster=Cluster(find_device(device), 2, 4))
    return CapacityReport(found, training_run=TrainingRun(num_rows, price))


@pytest.mark.parametrize(("device", "error"), [("h100-80gb", 0.3), ("h100-80gb,error=0.5", 0.5)])
def test_hours_and_money_are_those_of_the_slowest_ranks_steps(device: str, error: float) -> None:
    made = report(10_000_000, 2.5, device)
    hours = 153 * max(rank.times.total for rank in made.assessment.ranks) / 1000 / 3600  # 152.6 steps of 65,536 rows
    cost = report_as_json(made)["training_run"]
    assert (cost["num_steps"], cost["error"]) == (153, pytest.approx(error))
    expected = [hours, hours / (1 + error), hours * (1 + error)]
    assert [cost[name] for name in ("hours", "least_hours", "most_hours")] == pytest.approx(expected)
    assert cost["device_hours"] == pytest.approx(8 * hours)
    money = [cost[name] for name in ("money", "least_money", "most_money")]
    assert money == pytest.approx([8 * 2.5 * each for each in expected])
    assert made.assessment.rows_per_second == pytest.approx(65_536 * 153 / hours / 3600)


def test_the_cost_is_printed_and_on_the_page() -> None:
    made, printed = report(10**12, 2.5), io.StringIO()
    print_capacity_report(made, Console(file=printed, width=200))
    for line in training_cost(made.assessment, TrainingRun(10**12, 2.5)).lines:
        assert line in printed.getvalue() and line in render_capacity_page(made)
    assert " device-hours, " in printed.getvalue() and " rows (samples) a second" in printed.getvalue()


def test_no_money_without_a_price_and_no_cost_without_a_plan() -> None:
    cost = report_as_json(report(1, None))["training_run"]
    assert cost["num_steps"] == 1 and cost["money"] is cost["least_money"] is cost["most_money"] is None
    unfit = dataclasses.replace(without_plan(plan_assessment()), training_run=TrainingRun(1, 1.0))
    assert unfit.cost is None and unfit.assessment.rows_per_second is None
    json.dumps(report_as_json(unfit))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rows", "5", f"--price={price}"], f"--price is {price}; give a number above 0")
        for price in (math.nan, math.inf, 0.0, -2.0)
    ]
    + [(["--price", "3"], "--price needs --rows as well")],
)
def test_prices_that_cannot_be_are_refused(options: list[Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        cli.app(["plan", "nowhere.yaml", *options], standalone_mode=False)
