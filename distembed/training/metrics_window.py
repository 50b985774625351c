"""The losses, and what a task has summed up, of the steps from which the next line of training metrics is computed.

Everything stays on the device, and nothing is asked of it, until the line is due.

A checkpoint may be due between two lines. It keeps what the window holds (:meth:`MetricsWindow.tensors`), so that the
next line of a run that goes on from there is, to the bit, the one that it would have been.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distembed.tasks.base import Outputs

_LOSS, _SUM, _REPLACED = "loss", "sum:", "replaced:"
_OUTPUT = "output:"  # of checkpoints of early versions, which kept the outputs of all rows


@dataclass
class MetricsWindow:
    """The steps since the last line of metrics.

    Attributes:
        loss: The sum over the steps of the loss times the step's rows, float64: this rank's share times the number of
            ranks; None before the first step.
        sums: What the task has summed up of the steps' rows on this rank, by name.
        replaced: How many ids were replaced on this rank, and how many there were, by table.
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
        """Adds a step with its loss, what the task has summed up of it on this rank, and its rows on all ranks."""
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

        Only steps since the last call are looked at.
        """
        losses, self._unseen_losses = self._unseen_losses, []
        if not losses:
            return None
        on_host = torch.stack(losses).tolist()  # one copy for all of them
        first = next((i for i, loss in enumerate(on_host) if not math.isfinite(loss)), None)
        return None if first is None else (len(on_host) - 1 - first, on_host[first])

    def values(self, world_size: int) -> dict[str, Any]:
        """Returns what is the same on all ranks, as JSON holds it; ``world_size`` is their number."""
        return {"rows": self.rows, "seconds": self.seconds, "world_size": world_size}

    def tensors(self) -> dict[str, Tensor]:
        """Returns what this rank has of the window, by names; nothing where there are no steps."""
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
        sums_of: Callable[[Outputs], Outputs],
    ) -> "MetricsWindow":
        """Returns the window that a checkpoint was saved in.

        Args:
            values: What :meth:`values` returned.
            tensors: What :meth:`tensors` returned on the ranks whose part this one takes over, by name.
            world_size: Number of ranks now.
            device: The device of this rank.
            sums_of: The task's :meth:`~distembed.tasks.base.Task.training_sums`.
        """
        outputs: dict[str, Tensor] = {}
        window = cls(rows=values["rows"], started=time.perf_counter() - values["seconds"])
        for name, parts in tensors.items():
            found = [part.to(device) for part in parts]
            if name == _LOSS:
                total = torch.stack(found).sum(0)[0]
                # a rank's loss is its share times the number of ranks
                same = world_size == values["world_size"]
                window.loss = total if same else total * world_size / values["world_size"]
            elif name.startswith(_OUTPUT):
                outputs[name.removeprefix(_OUTPUT)] = torch.cat(found)
            elif name.startswith(_SUM):
                window.sums[name.removeprefix(_SUM)] = torch.stack(found).sum(0)
            else:
                window.replaced[name.removeprefix(_REPLACED)] = torch.stack(parts).sum(0)
        if outputs:
            window.sums = dict(sums_of(outputs))
        return window


def _added(totals: Mapping[str, Tensor], numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the sums by name; the tensors that are given stay as they are, as a checkpoint may be reading them."""
    return {**totals, **{name: totals[name] + own if name in totals else own for name, own in numbers.items()}}
