"""Collects the losses and the task's sums of the steps since the last line of training metrics, and shows the lines.

Everything stays on the device, and the host waits for nothing, until the line is due. A checkpoint between two lines
keeps the window's contents (:meth:`MetricsWindow.tensors`), so that a resumed run prints the line that an uninterrupted
run prints, to the bit.
"""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from distembed.base.ranks import Ranks
from distembed.data.dataset.periods import MOST_PERIODS, StepPeriods
from distembed.sse import take_counts
from distembed.tasks.base import Outputs, Sums, Task
from distembed.training.managed_ids import managed_tables
from distembed.training.period_metrics import PERIOD_TOTALS, period_sums

_LOSS, _SUM, _CUMULATIVE = "loss", "sum:", "cumulative"
_REPLACED, _SLOTS = "replaced", "slot"  # kinds of counts, before a colon and the name of a table
_NAMES_OF_SHARES = {_REPLACED: "replaced_share", _SLOTS: "hit_rate"}


@dataclass
class MetricsWindow:
    """The steps since the last line of metrics.

    Attributes:
        loss: The sum over the steps of this rank's loss times the step's rows on all ranks, float64; None before the
            first step. A rank's loss is its share of the batch's mean loss times the number of ranks.
        sums: The task's sums over the steps' rows on this rank, by name.
        counts: :func:`id_counts` of this rank.
        rows: Number of rows of all steps on all ranks.
        period_rows: Number of these rows by period, of a stream with metrics by period.
        started: When the first step began, in seconds of ``time.perf_counter``.
        paused: Seconds spent on evaluations and checkpoints since then.
    """

    loss: Tensor | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)
    rows: int = 0
    period_rows: dict[int, int] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    paused: float = 0.0
    _unseen_losses: list[Tensor] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The seconds spent on training, without evaluations and checkpoints."""
        return time.perf_counter() - self.started - self.paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leaves the time of the block out of :attr:`seconds`."""
        started = time.perf_counter()
        yield
        self.paused += time.perf_counter() - started

    def add(self, loss: Tensor, sums: Outputs, rows: int) -> None:
        """Adds a step: this rank's loss, the task's sums over this rank's rows, and the number of rows on all ranks."""
        self.rows += rows
        self._unseen_losses.append(loss)
        weighted = loss.double() * rows
        self.loss = weighted if self.loss is None else self.loss + weighted
        self.sums = _added(self.sums, sums)

    def has_room(self, periods: StepPeriods) -> bool:
        """Returns whether a step's periods fit beside earlier ones; else :meth:`take_periods` makes room."""
        return len(self.period_rows.keys() | periods.num_rows.keys()) <= MOST_PERIODS

    def add_periods(self, periods: StepPeriods) -> None:
        """Adds a step's numbers of rows by period; the step's largest period becomes the last key."""
        for number, count in reversed(list(periods.num_rows.items())):
            self.period_rows[number] = self.period_rows.pop(number, 0) + count

    def take_periods(self) -> tuple[dict[int, int], dict[str, Tensor]]:
        """Moves the periods out of the window, and returns their rows on all ranks and their sums on this rank.

        The names of sums and their order are equal on all ranks, also where a rank has no rows of a period.
        """
        num_rows, taken = self.period_rows, period_sums(self.sums, self.period_rows)
        self.sums = {name: total for name, total in self.sums.items() if name not in taken}
        self.period_rows = {}
        return num_rows, taken

    def add_counts(self, counts: Mapping[str, Tensor]) -> None:
        """Adds the counts of ids by table, as :func:`id_counts` returns them."""
        self.counts = _added(self.counts, counts)

    def first_not_finite(self) -> tuple[int, float] | None:
        """Returns how many steps ago the loss was not finite for the first time, and that loss; None if all are finite.

        Each loss is looked at once: a call covers the steps since the last call.
        """
        losses, self._unseen_losses = self._unseen_losses, []
        if not losses:
            return None
        on_host = torch.stack(losses).tolist()  # one copy for all of them
        first = next((i for i, loss in enumerate(on_host) if not math.isfinite(loss)), None)
        return None if first is None else (len(on_host) - 1 - first, on_host[first])

    def values(self, world_size: int) -> dict[str, Any]:
        """Returns the values that all ranks share, for JSON; ``world_size`` is the number of ranks."""
        values = {"rows": self.rows, "seconds": self.seconds, "world_size": world_size}
        return {**values, "period_rows": list(self.period_rows.items())} if self.period_rows else values

    def tensors(self) -> dict[str, Tensor]:
        """Returns this rank's part of the window, by names; nothing where there are no steps."""
        if self.loss is None:
            return {}
        tensors = {_LOSS: self.loss.reshape(1)}
        return tensors | {f"{_SUM}{name}": total for name, total in self.sums.items()} | self.counts

    @classmethod
    def restored(
        cls,
        values: Mapping[str, Any],
        tensors: Mapping[str, list[Tensor]],
        world_size: int,
        device: torch.device,
    ) -> "MetricsWindow":
        """Returns the window that a checkpoint was saved in.

        Args:
            values: The saved :meth:`values`.
            tensors: The saved :meth:`tensors` of the ranks that this rank takes over, by name.
            world_size: Number of ranks now.
            device: The device of this rank.
        """
        period_rows = dict(values.get("period_rows", ()))
        window = cls(rows=values["rows"], period_rows=period_rows, started=time.perf_counter() - values["seconds"])
        for name, rank_tensors in tensors.items():
            on_device = [saved.to(device) for saved in rank_tensors]
            if name.startswith((_CUMULATIVE, PERIOD_TOTALS)):
                continue
            if name == _LOSS:
                total = torch.stack(on_device).sum(0)[0]
                # each saved loss is a share times the old number of ranks; this rank's has to be times the new number
                is_same_size = world_size == values["world_size"]
                window.loss = total if is_same_size else total * world_size / values["world_size"]
            elif name.startswith(_SUM):
                window.sums[name.removeprefix(_SUM)] = torch.stack(on_device).sum(0)
            else:
                window.counts[name] = torch.stack(rank_tensors).sum(0)
        return window


class CumulativeSums:
    """The sums of all steps of a stream until the last line of metrics, on rank 0; other ranks have none."""

    def __init__(self) -> None:
        self._loss = 0.0
        self._sums: dict[str, npt.NDArray[Any]] = {}

    def add(self, loss: float, sums: Sums) -> None:
        """Adds a window: the sum over its rows of the loss, and the task's sums."""
        self._loss += loss
        self._sums = {name: self._sums[name] + total if self._sums else total for name, total in sums.items()}

    def metrics(self, task: Task, rows: int) -> dict[str, float]:
        """Returns the training metrics of ``rows`` rows, all until now, by their names after ``cumulative_``."""
        metrics = {"loss": self._loss / rows, **task.training_metrics(self._sums)}
        return {f"cumulative_{name}": value for name, value in metrics.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the sums for a checkpoint, by name; nothing before the first window."""
        sums = {f"{_CUMULATIVE}{_SUM}{name}": torch.from_numpy(total) for name, total in self._sums.items()}
        return sums | ({_CUMULATIVE: torch.tensor([self._loss], dtype=torch.float64)} if sums else {})

    @classmethod
    def restored(cls, tensors: Mapping[str, list[Tensor]]) -> "CumulativeSums":
        """Returns the sums of a checkpoint's tensors of the ranks that this rank takes over, by name."""
        restored = cls()
        for name, saved in tensors.items():
            if name == _CUMULATIVE:
                restored._loss = float(saved[0])
            elif name.startswith(_CUMULATIVE):
                restored._sums[name.removeprefix(f"{_CUMULATIVE}{_SUM}")] = saved[0].cpu().numpy()
        return restored


def at_step(step: int, num_steps: int | None) -> str:
    """Returns the beginning of a line after a step; ``num_steps`` is None where nobody knows the run's steps."""
    return f"step {step}" if num_steps is None else f"step {step}/{num_steps}"


def _added(totals: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns sums by name as new tensors: a checkpoint may still be reading the tensors of ``totals``."""
    return {**totals, **{name: totals[name] + number if name in totals else number for name, number in numbers.items()}}


def id_counts(model: nn.Module, until_step: int) -> dict[str, Tensor]:
    """Returns counts of ids on this rank since the last call, int64 ``[2]``, by ``replaced:TABLE`` and ``slot:TABLE``.

    The counts are of replaced ids and of all ids, and of managed ids with a slot and of all that are not missing. The
    pipeline works ahead; the counts of steps after ``until_step`` are left for the next call.
    """
    replaced = {f"{_REPLACED}:{table}": counts for table, counts in take_counts(model, until_step).items()}
    managed = {f"{_SLOTS}:{table.name}": own.take_counts(until_step) for _, table, own in managed_tables(model)}
    return {name: torch.tensor(counts) for name, counts in (replaced | managed).items()}


def id_shares(counts: dict[str, Tensor], ranks: Ranks) -> dict[str, dict[str, float]]:
    """Returns, on rank 0, ``replaced_share`` and ``hit_rate``, each by table; nothing on other ranks.

    ``counts`` are this rank's :func:`id_counts`. Tables that saw no ids are left out. All ranks call it.
    """
    # a row of zeros, which zip ignores below, since a model without tables has nothing to stack
    totals = ranks.sum(torch.stack([*counts.values(), torch.zeros(2, dtype=torch.long)]))
    shares: dict[str, dict[str, float]] = {}
    for name, (count, num_ids) in zip(counts, totals.tolist() if ranks.is_first else (), strict=False):
        if num_ids:
            kind, _, table = name.partition(":")
            shares.setdefault(_NAMES_OF_SHARES[kind], {})[table] = count / num_ids
    return shares


class TrainingProgress:
    """Shows how far a run is: a live bar in a terminal, plain lines elsewhere, nothing for no console."""

    def __init__(self, console: Console | None, num_steps: int | None) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._num_steps = num_steps
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]train"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[at]} {task.fields[shown]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("train", total=num_steps, shown="", at="")

    def __enter__(self) -> "TrainingProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Moves the bar to ``step``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, at=at_step(step, self._num_steps))

    def show(self, step: int, shown: str, steps_per_second: float) -> None:
        """Shows a line of training metrics; the speed of the latest steps estimates the time that is left."""
        if self._bar is not None:
            self._bar.update(self._task, shown=shown)
        else:
            left = ""
            if self._num_steps is not None:
                seconds = (self._num_steps - step) / steps_per_second if steps_per_second else 0.0
                left = f"  {seconds:,.0f} s left"
            self.say(f"{at_step(step, self._num_steps)}  {shown}{left}")
