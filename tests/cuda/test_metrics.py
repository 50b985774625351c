"""Lines of metrics on pretended CUDA: steps ask the device for nothing, and a line gathers no rows."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from sklearn.metrics import roc_auc_score
from torch import Tensor

from distembed.base.ranks import Ranks
from distembed.data.dataset.periods import StepPeriods, rows_by_period
from distembed.data.dataset.schema import WEIGHTS
from distembed.data.reader.batch import Batch
from distembed.tasks import ClickTask, NextItemConfig, RankingConfig, RatingTask, Task
from distembed.tasks.base import Outputs
from distembed.tasks.binary_metrics import exact_auc
from distembed.training import interruption
from distembed.training.interruption import Interruption
from distembed.training.metrics_window import MetricsWindow
from distembed.training.period_metrics import sums_by_period
from tests.cuda.pretend import CUDA, Refused, pretend_cuda
from tests.processes import run_processes
from tests.ranks import free_port, run_on_ranks
from tests.small_runs import config_values, run_command, write_dataset

ROWS = 12
TASKS: dict[str, tuple[Callable[[], Task], tuple[str, ...]]] = {
    "click": (ClickTask, ("logits", "labels")),
    "weighted click": (ClickTask, ("logits", "labels", WEIGHTS)),
    "rating": (RatingTask, ("predictions", "labels")),
    "weighted rating": (RatingTask, ("predictions", "labels", WEIGHTS)),
    "ranking": (RankingConfig().build, ("ordered",)),
    "next_item": (NextItemConfig().build, ()),
}


def outputs_of(names: tuple[str, ...]) -> Outputs:
    return {name: torch.rand(ROWS, device=CUDA) for name in names}


def never(origin: str) -> bool:
    return False


def steps_of(task: Task, names: tuple[str, ...]) -> MetricsWindow:
    window = MetricsWindow()
    with pretend_cuda(never):
        for _ in range(3):
            window.add(torch.rand((), device=CUDA), task.training_sums(outputs_of(names)), ROWS)
    return window


@pytest.mark.parametrize("name", TASKS)
def test_steps_are_summed_up_on_the_device_without_a_wait(name: str) -> None:
    make, outputs = TASKS[name]
    window = steps_of(make(), outputs)
    with pretend_cuda():
        assert all(total.device == CUDA for total in window.sums.values())
        assert window.loss is not None and window.loss.device == CUDA


@pytest.mark.parametrize("name", ["click", "rating"])
def test_rows_of_two_days_are_summed_up_on_the_device_without_a_wait(name: str) -> None:
    make, names = TASKS[name]
    with pretend_cuda(never):
        outputs = outputs_of(names)
    with pretend_cuda():
        task, days = make(), np.arange(ROWS) % 2
        by_day = sums_by_period(task, outputs, task.training_sums(outputs), StepPeriods(days, rows_by_period(days)))
        assert len(by_day) % 2 == 0 and all(total.device == CUDA for total in by_day.values())


def test_an_exact_area_after_each_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def exact(task: ClickTask, outputs: Outputs) -> Any:
        area = exact_auc(outputs["logits"].cpu().numpy(), outputs["labels"].cpu().numpy())
        return {"bins": torch.tensor(area)}

    monkeypatch.setattr(ClickTask, "training_sums", exact)
    with pytest.raises(Refused):
        steps_of(ClickTask(), ("logits", "labels"))


@pytest.mark.parametrize("losses", [[], [0.5, 0.25], [0.5, math.inf, math.nan, 1.0]])
def test_losses_are_looked_at_in_one_copy(losses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    window, looks = MetricsWindow(), []
    for loss in losses:
        window.add(torch.tensor(loss), {}, ROWS)
    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__float__", "__int__", "nonzero", "any"):
        stock = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor, name, lambda own, *given, stock=stock, name=name: looks.append(name) or stock(own, *given)
        )
    found = window.first_not_finite()
    assert len(looks) == (1 if losses else 0)
    assert found == ((2, math.inf) if math.inf in losses else None)
    assert window.first_not_finite() is None  # they were looked at


def sum_on(rank: int, world_size: int) -> None:
    ranks = Ranks(rank, world_size, world_size, torch.device("cpu"))
    given = {
        "rows": torch.tensor([[rank, 2], [3, 2**52]]),
        "loss": torch.tensor(0.5 + rank, dtype=torch.float64),
        "none": torch.zeros(0, dtype=torch.float64),
        "errors": torch.tensor([1.0, rank], dtype=torch.float64),
    }
    found = ranks.sum_all(given)
    if rank:
        assert found == {}
        return
    total = sum(range(world_size))
    assert found["rows"].tolist() == [[total, 2 * world_size], [3 * world_size, world_size * 2**52]]
    assert float(found["loss"]) == 0.5 * world_size + total
    assert found["none"].shape == (0,) and found["errors"].tolist() == [world_size, total]
    assert ranks.sum_all({}) == {}
    assert given["loss"] == 0.5  # what is given stays


def sum_on_first(rank: int, world_size: int) -> None:
    sum_on(rank, world_size)
    if rank:
        assert Ranks(rank, world_size, world_size, torch.device("cpu")).sum_all({}) == {}


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 3])
def test_rank_0_gets_the_sums_of_all_ranks(world_size: int) -> None:
    run_on_ranks(world_size, sum_on_first)


def train_without_gathering(rank: int, arguments: tuple[object, ...], folder: Path, ranks: int, port: int) -> None:
    """Trains while each step's rows are kept in files, and while no rows can be gathered."""

    def refuse(*given: Any) -> None:
        raise AssertionError("rows are gathered")

    stock, steps = ClickTask.step, itertools.count(1)

    def step(task: ClickTask, outputs: Tensor, batch: Batch) -> tuple[Tensor, Outputs]:
        loss, rows = stock(task, outputs, batch)
        if type(loss) is not Tensor:  # a plan's example of a step
            return loss, rows
        np.savez(folder / f"{next(steps)}-{rank}", logits=rows["logits"].detach(), labels=rows["labels"])
        return loss, rows

    Ranks.gather_rows = Ranks.gather_parts = refuse  # type: ignore[assignment, method-assign]
    ClickTask.step = step  # type: ignore[method-assign, assignment]
    run_command(rank, arguments, folder, ranks, port)


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_line_gathers_no_rows_and_has_nearly_the_exact_area(tmp_path: Path) -> None:
    values = config_values(write_dataset(tmp_path / "data"))
    values["data"] |= {"test": None, "validation": None}
    values["train"] |= {"log_every": 4, "max_steps": 8}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    arguments = ("train", tmp_path / "config.yaml", "--run-dir", tmp_path / "run")
    run_processes(2, train_without_gathering, arguments, tmp_path, 2, free_port())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = [line["auc"] for line in lines if line["kind"] == "train"]
    assert len(found) == 2
    for i, area in enumerate(found):
        rows = [np.load(tmp_path / f"{4 * i + j}-{rank}.npz") for j in range(1, 5) for rank in range(2)]
        logits, labels = (np.concatenate([own[name] for own in rows]) for name in ("logits", "labels"))
        assert len(logits) == 4 * 64
        # the chance error of an area of so many rows without a signal (Hanley and McNeil, 1982)
        chance = math.sqrt((1 / labels.sum() + 1 / (1 - labels).sum()) / 12)
        assert area == pytest.approx(roc_auc_score(labels, logits), abs=chance / 10)


def test_ranks_agree_on_an_end_without_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[str] = []
    reduced: list[tuple[str, Any]] = []
    monkeypatch.setattr(interruption.dist, "new_group", lambda backend: groups.append(backend) or "hosts")
    monkeypatch.setattr(
        interruption.dist, "all_reduce", lambda flags, op, group: reduced.append((flags.device.type, group))
    )
    stop = Interruption(Ranks(1, 4, 4, CUDA))
    with pretend_cuda(never):
        assert not any(stop.requested(step) for step in range(1, 31))
    assert groups == ["gloo"] and reduced == [("cpu", "hosts")] * 3
