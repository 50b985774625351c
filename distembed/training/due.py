"""When a run evaluates and saves: every so many steps, at the end of each epoch, and at its end."""

from dataclasses import dataclass

from distembed.training.train_config import TrainConfig


@dataclass(frozen=True)
class DueSteps:
    """After which steps something is due.

    Attributes:
        train: The ``train`` section of the config.
        batches_per_epoch: Number of steps of an epoch.
        num_steps: Number of steps of the whole run.
        evaluates: Whether there is a split to evaluate on while training.
    """

    train: TrainConfig
    batches_per_epoch: int
    num_steps: int
    evaluates: bool

    def checkpoint(self, step: int) -> bool:
        """Returns whether a checkpoint is due after so many steps."""
        return self._is_due(step, self.train.checkpoint_every)

    def evaluation(self, step: int) -> bool:
        """Returns whether an evaluation on the validation split is due after so many steps."""
        return self.evaluates and self._is_due(step, self.train.evaluate_every)

    def evaluation_before_checkpoint(self, step: int) -> bool:
        """Returns whether the checkpoint after so many steps waits for an evaluation, which is part of its state."""
        return self.train.compares_evaluations and self.evaluation(step)

    def next_step(self, step: int) -> int:
        """Returns the step after which something is due next."""
        ends = [self.num_steps, (step // self.batches_per_epoch + 1) * self.batches_per_epoch]
        intervals = self.train.evaluate_every, self.train.checkpoint_every
        return min([*ends, *((step // every + 1) * every for every in intervals if every)])

    def _is_due(self, step: int, every: int) -> bool:
        """Returns whether what is done every so many steps, and at the end of each epoch, is due."""
        at_epoch_end = step % self.batches_per_epoch == 0 or step == self.num_steps
        return step > 0 and (at_epoch_end or (every > 0 and step % every == 0))
