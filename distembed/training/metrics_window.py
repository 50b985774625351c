"""The losses and outputs of the steps from which the next line of training metrics is computed."""

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from distembed.tasks.base import Outputs


@dataclass
class MetricsWindow:
    """The steps since the last line of metrics.

    Attributes:
        losses: The loss of each step times its rows: this rank's share times the number of ranks.
        outputs: The task's outputs of each step, by name.
        rows: Number of rows of all steps on all ranks.
        started: When the first step began, in seconds of ``time.perf_counter``.
        paused: Seconds spent on evaluations and checkpoints since then.
    """

    losses: list[Tensor] = field(default_factory=list)
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    rows: int = 0
    started: float = field(default_factory=time.perf_counter)
    paused: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds spent on training, without evaluations and checkpoints."""
        return time.perf_counter() - self.started - self.paused

    def add(self, loss: Tensor, outputs: Outputs, rows: int) -> None:
        """Adds a step with its loss and outputs on this rank and its rows on all ranks."""
        self.rows += rows
        self.losses.append(loss * rows)
        for name, values in outputs.items():
            self.outputs.setdefault(name, []).append(values)

    def first_not_finite(self) -> tuple[int, float] | None:
        """Returns how many steps ago the loss was not finite for the first time, and that loss; None if all are finite.

        On a CPU, where this is called after every step, only the last loss is looked at.
        """
        losses = self.losses[-1:] if self.losses and self.losses[-1].device.type == "cpu" else self.losses
        if not losses:
            return None
        bad = ~torch.isfinite(torch.stack(losses))
        if not bad.any():
            return None
        first = int(bad.nonzero()[0])
        return len(losses) - 1 - first, float(losses[first])
