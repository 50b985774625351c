"""Lines of training metrics: of the steps since the last line, and of all rows that were trained.

Each rank has a :class:`TrainingLog`; rank 0 records and shows its lines.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from distembed.base.ranks import Collectives, Ranks
from distembed.checkpoints.checkpoint import ResumedRun
from distembed.data.dataset.periods import StepPeriods
from distembed.data.reader import BatchReader
from distembed.data.stream.reader import StreamReader
from distembed.tasks.base import Outputs
from distembed.training.build import TrainingState
from distembed.training.config import Config
from distembed.training.managed_ids import evicted_ids
from distembed.training.metrics_window import (
    CumulativeSums,
    MetricsWindow,
    TrainingProgress,
    id_counts,
    id_shares,
)
from distembed.training.period_metrics import PeriodMetrics, sums_by_period
from distembed.training.pipeline import gather_unreadable, keep_batch
from distembed.training.run_folder.folder import RunFolder

_LOSSES = "weighted losses"  # a name that no task's own sums have


class TrainingLog:
    """Counts trained rows, collects their losses and sums, and records lines of metrics.

    Args:
        config: The run's config.
        folder: The run's folder.
        ranks: This rank among all.
        state: The model in training.
        reader: The reader of training rows.

    Attributes:
        progress: Where rank 0 shows lines; :meth:`begin` gives it.
        samples: Number of rows trained on all ranks.
        unreadable: The reason for each row group that any rank could not read, by its name.
    """

    progress: TrainingProgress

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        ranks: Ranks,
        state: TrainingState,
        reader: BatchReader | StreamReader,
    ) -> None:
        self._config = config
        self._folder = folder
        self._ranks = ranks
        self._state = state
        self._reader = reader
        self._window = MetricsWindow()
        self._cumulative = CumulativeSums()
        stream = config.data.stream
        self._periods = None if stream is None or stream.metrics_by is None else PeriodMetrics(stream.metrics_by)
        self._seconds = 0.0
        self.samples = 0
        self.unreadable: dict[str, str] = {}

    @property
    def has_steps(self) -> bool:
        """Whether steps were trained since the last line."""
        return self._window.loss is not None

    def begin(self, progress: TrainingProgress, resumed: ResumedRun | None) -> None:
        """Starts the time of the first line, or goes on with a checkpoint's time; ``progress`` shows the lines.

        All ranks call it.
        """
        self.progress = progress
        self._window = MetricsWindow()
        if resumed is not None:
            values, tensors = resumed.values["window"], resumed.tensors
            world_size, device = self._ranks.world_size, self._ranks.device
            self._window = MetricsWindow.restored(values, tensors, world_size, device)
            if values["world_size"] < world_size:  # a rank that takes over no part of the window has zeros
                parts = self._window.tensors()
                zeros = Collectives().on_first(lambda: {name: [torch.zeros_like(parts[name]).cpu()] for name in parts})
                if not self.has_steps:
                    self._window = MetricsWindow.restored(values, zeros, world_size, device)
            self._cumulative = CumulativeSums.restored(tensors)
            saved = resumed.values.get("periods")
            if self._periods is None or saved is None or saved.get("kind") != self._periods.kind:
                self._window.take_periods()  # data.stream.metrics_by has changed: count rows from here on
            elif self._ranks.is_first:
                self._periods.restore(saved, tensors)

    def pause(self) -> AbstractContextManager[None]:
        """Leaves the time of the block out of the speed of training."""
        return self._window.pause()

    def add_step(self, step: int, loss: Tensor, outputs: Outputs, rows: int, periods: StepPeriods | None) -> None:
        """Adds step ``step``, of ``rows`` rows on all ranks; on a CPU refuses a loss that is not finite.

        All ranks call it: the step may have more periods than the window has room for.
        """
        self.samples += rows
        task = self._state.task
        sums = task.training_sums(outputs)
        if periods is not None and self._periods is not None:
            if not self._window.has_room(periods):
                num_rows, by_period = self._window.take_periods()
                earlier = self._ranks.sum_all(by_period)
                if self._ranks.is_first:
                    self._write_periods(step, self._periods.add(task, num_rows, earlier))
            self._window.add_periods(periods)
            self._periods.rows_without_period += rows - sum(periods.num_rows.values())
            sums = {**sums, **sums_by_period(task, outputs, sums, periods)}
        self._window.add(loss, sums, rows)
        # reading a GPU's tensor waits for its stream: losses on a GPU are checked once for each line of metrics
        if loss.device.type == "cpu":
            self.require_finite(step)

    def require_finite(self, step: int) -> None:
        """Raises RunError, and keeps the batch in a file, if a loss of this rank since the last call is not finite.

        ``step`` is the last step that was added.
        """
        not_finite = self._window.first_not_finite()
        if not_finite is not None:
            steps_ago, loss = not_finite
            step -= steps_ago
            raise keep_batch(self._config, self._ranks, self._folder.path, step, loss, self._reader.ages)

    def write(self, step: int, learning_rate: float) -> None:
        """Records and shows the line of the steps since the last line; ``step`` is the last of them.

        All ranks call it. Refuses losses that are not finite, and too many unreadable row groups.
        """
        self.require_finite(step)
        most_unreadable = self._config.data.skip_unreadable
        if most_unreadable and isinstance(self._reader, BatchReader):
            self.unreadable = gather_unreadable(self.unreadable, self._reader, most_unreadable, self.progress.say)
        window = self._window
        window.add_counts(id_counts(self._state.model, step))
        shares = id_shares(window.counts, self._ranks)
        evicted = evicted_ids(self._state.model, self._ranks)
        assert window.loss is not None
        period_rows, by_period = window.take_periods()
        sums = self._ranks.sum_all({**window.sums, **by_period, _LOSSES: window.loss})
        seconds = window.seconds
        self._seconds += seconds
        self._window = MetricsWindow()
        if not self._ranks.is_first:
            return
        # each rank's loss is its share of the mean loss times the number of ranks
        losses = float(sums.pop(_LOSSES)) / self._ranks.world_size
        task = self._state.task
        progressive: dict[str, Any] = {}
        period_lines = [] if self._periods is None else self._periods.add(task, period_rows, sums)
        if isinstance(self._reader, StreamReader):
            self._cumulative.add(losses, sums)
            progressive = self._cumulative.metrics(task, self.samples) | self._reader.counts
        if self._periods is not None:
            progressive["rows_without_period"] = self._periods.rows_without_period
        values: dict[str, Any] = {
            "epoch": (step - 1) // self._reader.batches_per_epoch,
            "samples": self.samples,
            "seconds": self._seconds,
            "loss": losses / window.rows,
            **task.training_metrics(sums),
            "samples_per_second": window.rows / seconds,
            "learning_rate": learning_rate,
            **shares,
            **({"evicted_ids": evicted} if evicted else {}),
            **({"unreadable_row_groups": len(self.unreadable)} if self.unreadable else {}),
            **progressive,
        }
        self._folder.record("train", step, values)
        speed = values["samples_per_second"]
        shown = (
            f"loss {values['loss']:.4f}  {task.describe_training(values)}  {speed:,.0f} samples/s  "
            f"lr {learning_rate:.3g}"
        )
        self.progress.show(step, shown, speed / self._config.train.batch_size)
        self._write_periods(step, period_lines)

    def end(self, step: int) -> None:
        """Records, at the end of a stream after step ``step``, the lines of periods that have changed."""
        if self._periods is not None and self._ranks.is_first:
            self._write_periods(step, self._periods.changed_lines(self._state.task))

    def _write_periods(self, step: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Records and shows lines of periods."""
        for line in lines:
            self._folder.record("period", step, line)
            shown = self._state.task.describe_training(line)
            self.progress.say(f"{line['period']}  {shown}  ({line['rows']:,} rows)")

    def values(self, step: int) -> dict[str, Any]:
        """Returns the values that all ranks share after step ``step``, for a checkpoint.

        Call it before :meth:`tensors`, since it takes counts of ids into the window.
        RunError is raised if a loss is not finite: weights that have met a NaN must not replace good ones.
        """
        self.require_finite(step)
        self._window.add_counts(id_counts(self._state.model, step))
        return {
            "samples": self.samples,
            "seconds": self._seconds,
            "window": self._window.values(self._ranks.world_size),
            **({"unreadable": self.unreadable} if self.unreadable else {}),
            **({} if self._periods is None else {"periods": self._periods.to_json()}),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Returns this rank's sums for a checkpoint, by name."""
        by_period = {} if self._periods is None else self._periods.tensors()
        return {**self._window.tensors(), **self._cumulative.tensors(), **by_period}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restores the counts of a checkpoint's :meth:`values`; :meth:`begin` restores its sums."""
        self.samples, self._seconds = values["samples"], values["seconds"]
        self.unreadable = dict(values.get("unreadable", {}))
