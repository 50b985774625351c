"""The most memory of a training step on the device is what the plan counts, within the bounds of its bench."""

import importlib
from pathlib import Path

import pytest

from distembed.base.ranks import Ranks

TOOLS = Path(__file__).parents[2] / "tools"
ROWS = {"cuda": 16_384, "cpu": 2_048}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["product, table-wise", "path_mlp, table-wise"])
def test_a_step_takes_what_the_plan_counts(name: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    memory, bench = importlib.import_module("gpu.memory"), importlib.import_module("bench_memory")
    (case,) = [case for case in memory.cases() if case.name == name]
    blueprint = bench.blueprint_of(case, ROWS[ranks.device.type], ranks)
    planned, measured = memory.planned_and_measured(blueprint, ranks)
    assert bench.LEAST <= sum(planned.values()) / measured <= bench.MOST, (planned, measured)
