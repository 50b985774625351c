"""A window of metrics that is saved and restored in its middle is the window that it would have been."""

import json

import numpy as np
import pytest
import torch
from torch import Tensor

from distembed.tasks.base import Outputs
from distembed.training.metrics_window import MetricsWindow

ROWS = 8
CPU = torch.device("cpu")


def steps(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """A loss and the outputs of each step on a rank; steps are of unequally many rows."""
    draw = torch.Generator().manual_seed(rank)
    return [(torch.rand((), generator=draw), torch.rand(1 + i % 3, generator=draw)) for i in range(count)]


def sums_of(outputs: Outputs) -> Outputs:
    """What a task sums up: a number of rows, and a sum whose rounding shows the order of the steps."""
    logits = outputs["a.logits"]
    return {"a.rows": logits.new_full((2,), len(logits), dtype=torch.long), "logits": logits.double().exp().sum()}


def fill(window: MetricsWindow, rank: int, start: int, stop: int) -> MetricsWindow:
    for loss, outputs in steps(rank, stop)[start:]:
        window.add(loss, sums_of({"a.logits": outputs}), ROWS)
        window.add_counts({"replaced:C1": torch.tensor([rank, 5]), "slot:a.b": torch.tensor([1, 2])})
    return window


def save(windows: list[MetricsWindow]) -> tuple[dict[str, object], list[dict[str, Tensor]]]:
    values = json.loads(json.dumps(windows[0].values(len(windows))))
    return values, [window.tensors() for window in windows]


@pytest.mark.parametrize("stop", [0, 1, 4])
def test_the_same_ranks_go_on_to_the_bit(stop: int) -> None:
    windows = [fill(MetricsWindow(), rank, 0, stop) for rank in range(3)]
    values, tensors = save(windows)
    for rank, saved in enumerate(tensors):
        parts = {name: [tensor] for name, tensor in saved.items()}
        restored = fill(MetricsWindow.restored(values, parts, 3, CPU), rank, stop, 9)
        whole = fill(MetricsWindow(), rank, 0, 9)
        assert restored.rows == whole.rows == 9 * ROWS
        assert restored.loss is not None and whole.loss is not None and torch.equal(restored.loss, whole.loss)
        assert restored.sums.keys() == whole.sums.keys() == {"a.rows", "logits"}
        assert all(torch.equal(restored.sums[name], total) for name, total in whole.sums.items())
        assert whole.sums["a.rows"].tolist() == [sum(1 + i % 3 for i in range(9))] * 2
        assert {name: count.tolist() for name, count in restored.counts.items()} == {
            "replaced:C1": [9 * rank, 45],
            "slot:a.b": [9, 18],
        }


@pytest.mark.parametrize(("before", "now"), [(3, 2), (2, 3), (1, 4), (4, 1)])
def test_other_ranks_go_on_with_the_same_sums(before: int, now: int) -> None:
    values, tensors = save([fill(MetricsWindow(), rank, 0, 5) for rank in range(before)])
    mean, total, num_rows, seen = 0.0, 0.0, 0, np.zeros(2, np.int64)
    for rank in range(now):
        taken = tensors[rank::now]
        parts = {name: [saved[name] for saved in taken] for name in (taken[0] if taken else {})}
        window = MetricsWindow.restored(values, parts, now, CPU)
        assert window.rows == 5 * ROWS
        mean += 0.0 if window.loss is None else float(window.loss) / window.rows / now
        num_rows += int(window.sums["a.rows"][0]) if window.sums else 0
        total += float(window.sums["logits"]) if window.sums else 0.0
        seen += sum((count.numpy() for count in window.counts.values()), np.zeros(2, np.int64))
    drawn = [steps(rank, 5) for rank in range(before)]
    assert mean == pytest.approx(np.mean([[float(loss) for loss, _ in own] for own in drawn]), rel=1e-12)
    expected = torch.cat([outputs for own in drawn for _, outputs in own])
    assert num_rows == len(expected) and total == pytest.approx(float(expected.double().exp().sum()), rel=1e-12)
    assert seen.tolist() == [5 * sum(range(before)) + 5 * before, 5 * 7 * before]


def test_a_window_that_is_saved_is_not_written_to_by_later_steps() -> None:
    window = fill(MetricsWindow(), 0, 0, 3)
    saved = window.tensors()
    before = {name: tensor.clone() for name, tensor in saved.items()}
    fill(window, 0, 3, 6)
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())
