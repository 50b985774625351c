"""Progressive metrics by the day or hour of a stream's rows: each row counts for the period of its own time.

A step's sums are a task's :meth:`~distembed.tasks.base.Task.training_sums`, of the rows of each period apart::

    rows of the step      1st  1st  2nd  1st  2nd        sums of rows 0 1 3 for the 1st, of rows 2 4 for the 2nd

They are added up beside the sums of all rows, under other names. With a line of training metrics, and before a 33rd
period since then, they are moved to rank 0's totals. The line of a period is recorded when a row of a new period has
come, and again, with all rows, where later rows came for it. At most 32 periods are kept: the one without rows for the
longest time is closed, and later rows of it are counted as rows without a period.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distembed.data.dataset.periods import MOST_PERIODS, PeriodKind, StepPeriods, period_name
from distembed.tasks.base import Outputs, Task

_PERIOD = "period:"
PERIOD_TOTALS = "total period:"
"""Beginning of the names of rank 0's totals in checkpoints."""
_MOST_CLOSED = 10_000  # closed periods that are remembered, first the periods of the most rows


def sums_by_period(task: Task, outputs: Outputs, sums: Outputs, periods: StepPeriods) -> dict[str, Tensor]:
    """Returns the task's sums over this rank's rows of each period of a step.

    Args:
        task: The task.
        outputs: The outputs of this rank's rows.
        sums: The task's sums over all of these rows.
        periods: The periods of the step's rows.
    """
    named: dict[str, Tensor] = {}
    device = next(iter(outputs.values())).device
    for number in periods.num_rows:
        is_inside = periods.of_rows == number
        if is_inside.all():
            named |= {f"{_PERIOD}{number}:{name}": total for name, total in sums.items()}
            continue
        rows = torch.from_numpy(np.flatnonzero(is_inside))
        # a copy from page-locked memory does not wait for the GPU
        rows = rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows
        own = {name: values.index_select(0, rows) for name, values in outputs.items()}
        named |= {f"{_PERIOD}{number}:{name}": total for name, total in task.training_sums(own).items()}
    return named


def period_sums(sums: Mapping[str, Tensor], numbers: Iterable[int]) -> dict[str, Tensor]:
    """Returns the sums of periods, 0 where this rank lacks one: names and their order are equal on all ranks."""
    whole = {name: total for name, total in sums.items() if not name.startswith(_PERIOD)}
    names = {f"{_PERIOD}{number}:{name}": total for number in sorted(numbers) for name, total in whole.items()}
    return {name: sums.get(name, torch.zeros_like(total)) for name, total in names.items()}


class PeriodMetrics:
    """The sums of each period of a stream until the last line of metrics, on rank 0; other ranks have none.

    Args:
        kind: The periods.

    Attributes:
        kind: The periods.
        rows_without_period: Number of rows that no period counts: of closed periods, and of periods beyond a step's
            32 largest.
    """

    def __init__(self, kind: PeriodKind) -> None:
        self.kind: PeriodKind = kind
        self.rows_without_period = 0
        self._totals: dict[int, dict[str, Any]] = {}  # the period with the latest rows is the last
        self._num_rows: dict[int, int] = {}
        self._changed: set[int] = set()  # since their last lines
        self._closed: dict[int, int] = {}  # rows by period

    def add(self, task: Task, num_rows: Mapping[int, int], sums: dict[str, Any]) -> list[dict[str, Any]]:
        """Adds a window of steps: its rows by period, and sums, which lose the sums of periods.

        Returns:
            The lines that are due.
        """
        opened = []
        for number, count in num_rows.items():
            prefix = f"{_PERIOD}{number}:"
            own = {name.removeprefix(prefix): sums.pop(name) for name in list(sums) if name.startswith(prefix)}
            if number in self._closed:
                self.rows_without_period += count
                continue
            if number not in self._totals:
                opened.append(number)
            totals = self._totals.pop(number, {})
            self._totals[number] = {name: totals.get(name, 0) + total for name, total in own.items()}
            self._num_rows[number] = self._num_rows.get(number, 0) + count
            self._changed.add(number)
        if not opened:
            return []
        lines = self.changed_lines(task, leave_out=max(opened))  # more rows of that one will come
        for number in list(self._totals)[:-MOST_PERIODS]:
            del self._totals[number]
            self._closed[number] = self._num_rows.pop(number)
        if len(self._closed) > 2 * _MOST_CLOSED:  # wrong times close one period after another, of few rows each
            largest = sorted(self._closed, key=self._closed.__getitem__, reverse=True)[:_MOST_CLOSED]
            self._closed = {number: self._closed[number] for number in largest}
        return lines

    def changed_lines(self, task: Task, leave_out: int | None = None) -> list[dict[str, Any]]:
        """Returns the line of each period that has changed since its last line, in the order of time."""
        lines = []
        for number in sorted(self._changed - {leave_out}):
            metrics = task.training_metrics(self._totals[number])
            lines.append({"period": period_name(number, self.kind), "rows": self._num_rows[number], **metrics})
        self._changed &= {leave_out}
        return lines

    def to_json(self) -> dict[str, Any]:
        """Returns the counts for a checkpoint, in plain values."""
        num_rows = [[number, self._num_rows[number]] for number in self._totals]
        return {
            "kind": self.kind,
            "num_rows": num_rows,
            "changed": sorted(self._changed),
            "closed": list(self._closed.items()),
            "rows_without_period": self.rows_without_period,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Returns the sums for a checkpoint, by name."""
        return {
            f"{PERIOD_TOTALS}{number}:{name}": torch.from_numpy(np.asarray(total))
            for number, totals in self._totals.items()
            for name, total in totals.items()
        }

    def restore(self, values: Mapping[str, Any], tensors: Mapping[str, list[Tensor]]) -> None:
        """Takes the counts of a checkpoint, and the sums of the ranks that this rank takes over, by name."""
        self._num_rows = dict(values["num_rows"])
        self._changed = set(values["changed"])
        self._closed, self.rows_without_period = dict(values["closed"]), values["rows_without_period"]
        self._totals = {number: {} for number in self._num_rows}
        for key, (total, *_) in tensors.items():
            if key.startswith(PERIOD_TOTALS):
                number, _, name = key.removeprefix(PERIOD_TOTALS).partition(":")
                self._totals[int(number)][name] = total.cpu().numpy()
