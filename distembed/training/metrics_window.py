"""The losses and outputs of the steps from which the next line of training metrics is computed.

A checkpoint may be due between two lines. It keeps what the window holds (:meth:`MetricsWindow.tensors`), so that the
next line of a run that goes on from there is, to the bit, the one that it would have been.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from distembed.tasks.base import Outputs

_LOSS, _OUTPUT, _REPLACED = "loss", "output:", "replaced:"


@dataclass
class MetricsWindow:
    """The steps since the last line of metrics.

    Attributes:
        loss: The sum over the steps of the loss times the step's rows, float64: this rank's share times the number of
            ranks; None before the first step.
        outputs: The task's outputs of each step, by name.
        replaced: How many ids were replaced on this rank, and how many there were, by table.
        rows: Number of rows of all steps on all ranks.
        started: When the first step began, in seconds of ``time.perf_counter``.
        paused: Seconds spent on evaluations and checkpoints since then.
    """

    loss: Tensor | None = None
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    replaced: dict[str, Tensor] = field(default_factory=dict)
    rows: int = 0
    started: float = field(default_factory=time.perf_counter)
    paused: float = 0.0
    _unseen_losses: list[Tensor] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The seconds spent on training, without evaluations and checkpoints."""
        return time.perf_counter() - self.started - self.paused

    def add(self, loss: Tensor, outputs: Outputs, rows: int) -> None:
        """Adds a step with its loss and outputs on this rank and its rows on all ranks."""
        self.rows += rows
        self._unseen_losses.append(loss)
        weighted = loss.double() * rows
        self.loss = weighted if self.loss is None else self.loss + weighted
        for name, values in outputs.items():
            self.outputs.setdefault(name, []).append(values)

    def add_replaced(self, counts: Mapping[str, Tensor]) -> None:
        """Adds counts of replaced ids and of all ids, by table."""
        for table, count in counts.items():
            self.replaced[table] = self.replaced[table] + count if table in self.replaced else count

    def first_not_finite(self) -> tuple[int, float] | None:
        """Returns how many steps ago the loss was not finite for the first time, and that loss; None if all are finite.

        Only steps since the last call are looked at.
        """
        losses, self._unseen_losses = self._unseen_losses, []
        if not losses:
            return None
        bad = ~torch.isfinite(torch.stack(losses))
        if not bad.any():
            return None
        first = int(bad.nonzero()[0])
        return len(losses) - 1 - first, float(losses[first])

    def values(self, world_size: int) -> dict[str, Any]:
        """Returns what is the same on all ranks, as JSON holds it; ``world_size`` is their number."""
        return {"rows": self.rows, "seconds": self.seconds, "world_size": world_size}

    def tensors(self) -> dict[str, Tensor]:
        """Returns what this rank has of the window, by names; nothing where there are no steps."""
        if self.loss is None:
            return {}
        tensors = {_LOSS: self.loss.reshape(1)}
        tensors |= {f"{_OUTPUT}{name}": torch.cat(values) for name, values in self.outputs.items()}
        return tensors | {f"{_REPLACED}{table}": count for table, count in self.replaced.items()}

    @classmethod
    def restored(
        cls, values: Mapping[str, Any], tensors: Mapping[str, list[Tensor]], world_size: int, device: torch.device
    ) -> "MetricsWindow":
        """Returns the window that a checkpoint was saved in.

        Args:
            values: What :meth:`values` returned.
            tensors: What :meth:`tensors` returned on the ranks whose part this one takes over, by name.
            world_size: Number of ranks now.
            device: The device of this rank.
        """
        window = cls(rows=values["rows"], started=time.perf_counter() - values["seconds"])
        for name, parts in tensors.items():
            found = [part.to(device) for part in parts]
            if name == _LOSS:
                total = torch.stack(found).sum(0)[0]
                # a rank's loss is its share times the number of ranks
                same = world_size == values["world_size"]
                window.loss = total if same else total * world_size / values["world_size"]
            elif name.startswith(_OUTPUT):
                window.outputs[name.removeprefix(_OUTPUT)] = found
            else:
                window.add_replaced({name.removeprefix(_REPLACED): part for part in [torch.stack(parts).sum(0)]})
        return window
