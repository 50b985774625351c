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
from distembed.sse import take_counts
from distembed.tasks.base import Outputs, Sums, Task

_LOSS, _SUM, _REPLACED, _CUMULATIVE = "loss", "sum:", "replaced:", "cumulative"


@dataclass
class MetricsWindow:
    """The steps since the last line of metrics.

    Attributes:
        loss: The sum over the steps of this rank's loss times the step's rows on all ranks, float64; None before the
            first step. A rank's loss is its share of the batch's mean loss times the number of ranks.
        sums: The task's sums over the steps' rows on this rank, by name.
        replaced: Number of replaced ids, and of all ids, on this rank, by table.
        rows: Number of rows of all steps on all ranks.
        started: When the first step began, in seconds of ``time.perf_counter``.
        paused: Seconds spent on evaluations and checkpoints since then.
    """

    loss: Tensor | None = None
    sums: dict[str, Tensor] = field(default_factory=dict)
    replaced: dict[str, Tensor] = field(default_factory=dict)
    rows: int = 0
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

    def add_replaced(self, counts: Mapping[str, Tensor]) -> None:
        """Adds counts of replaced ids and of all ids, by table."""
        self.replaced = _added(self.replaced, counts)

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
        return {"rows": self.rows, "seconds": self.seconds, "world_size": world_size}

    def tensors(self) -> dict[str, Tensor]:
        """Returns this rank's part of the window, by names; nothing where there are no steps."""
        if self.loss is None:
            return {}
        tensors = {_LOSS: self.loss.reshape(1)}
        tensors |= {f"{_SUM}{name}": total for name, total in self.sums.items()}
        return tensors | {f"{_REPLACED}{table}": count for table, count in self.replaced.items()}

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
        window = cls(rows=values["rows"], started=time.perf_counter() - values["seconds"])
        for name, rank_tensors in tensors.items():
            on_device = [saved.to(device) for saved in rank_tensors]
            if name.startswith(_CUMULATIVE):
                continue
            if name == _LOSS:
                total = torch.stack(on_device).sum(0)[0]
                # each saved loss is a share times the old number of ranks; this rank's has to be times the new number
                is_same_size = world_size == values["world_size"]
                window.loss = total if is_same_size else total * world_size / values["world_size"]
            elif name.startswith(_SUM):
                window.sums[name.removeprefix(_SUM)] = torch.stack(on_device).sum(0)
            else:
                window.replaced[name.removeprefix(_REPLACED)] = torch.stack(rank_tensors).sum(0)
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


def replaced_counts(model: nn.Module, until_step: int) -> dict[str, Tensor]:
    """Returns each table's number of replaced ids and of all ids on this rank, int64 ``[2]``, since the last call.

    The pipeline works ahead; the counts of steps after ``until_step`` are left for the next call.
    """
    return {table: torch.tensor(counts) for table, counts in take_counts(model, until_step).items()}


def replaced_shares(counts: dict[str, Tensor], ranks: Ranks) -> dict[str, float]:
    """Returns, on rank 0, the share of replaced ids on all ranks, by table; an empty dictionary on other ranks.

    ``counts`` are this rank's :func:`replaced_counts`. Tables that saw no ids are left out. All ranks call it.
    """
    # a row of zeros, which zip ignores below, since a model without tables has nothing to stack
    totals = ranks.sum(torch.stack([*counts.values(), torch.zeros(2, dtype=torch.long)]))
    if not ranks.is_first:
        return {}
    by_table = zip(counts, totals.tolist(), strict=False)
    return {table: replaced / num_seen for table, (replaced, num_seen) in by_table if num_seen}


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
