"""The fewest bytes of codes within a loss of the headline metric: bisection over sizes, with an evaluation of each."""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.base.units import format_bytes
from distembed.data.dataset.kept import kept_dataset
from distembed.data.dataset.manifest import Manifest
from distembed.partitions.explicit import forget_files
from distembed.serving.convert.code_options import CodedRun, CodeOption, MetricChange
from distembed.serving.convert.table_codes import CodeShape
from distembed.serving.convert.table_sizes import TableSizes
from distembed.training.inference import evaluate_split, load_training_state
from distembed.training.resume import choose_dataset, load_run_config
from distembed.training.start import require_defined_headline, require_labels, require_splits
from distembed.training.trained_run import TrainedRun

_COMPARED, _REMEDY = "--max-loss compares the codes", "Use --budget"


@dataclass(frozen=True)
class Validation:
    """The rows on which a run is compared with the runs of its codes."""

    dataset: str
    split: str

    @classmethod
    def of(cls, run: TrainedRun) -> Validation:
        """Returns the validation split of a run's dataset, or of the dataset that was given for the run.

        Raises:
            UserError: The dataset or the split is not here, has other ids or wrong labels, or leaves the task's
                headline metric undefined.
        """
        split = run.config.data.validation or "validation"
        is_own = kept_dataset(run.folder) == Path(run.dataset)
        dataset = choose_dataset(run.folder, run.config, None if is_own else run.dataset)
        require_splits(dataset, {"data.validation": split})
        require_labels(run.config.task, dataset, [split])
        require_defined_headline(run.config.task, Manifest.load(dataset), split, _COMPARED, _REMEDY)
        return cls(dataset, split)

    def headline(self, run: Path, ranks: Ranks, checkpoint: str | None = None) -> Headline:
        """Returns the headline metric of a run; all ranks call it.

        Raises:
            UserError: Neither higher nor lower values of the metric are better.
        """
        state, _ = load_training_state(run, self.dataset, load_run_config(run), ranks, checkpoint)
        metric = state.task.headline
        if metric.better is None:
            raise UserError(
                f"--max-loss compares {metric.name!r}, and neither higher nor lower values of it are better; use "
                "--budget."
            )
        value = float(evaluate_split(state, self.dataset, self.split, ranks)[metric.name])
        return Headline(metric.name, value, metric.better == "higher")


@dataclass(frozen=True)
class Headline:
    """The value of a headline metric."""

    name: str
    value: float
    is_higher_better: bool

    def loss_to(self, after: Headline) -> float:
        """Returns how much worse another value is; NaN where it is undefined."""
        return self.value - after.value if self.is_higher_better else after.value - self.value


@dataclass(frozen=True)
class LossSearch:
    """Bisection over the sizes of a run's codes.

    The loss is taken to fall as bytes are added, which it does but for noise.

    Attributes:
        validation: The rows on which runs are compared.
        run: The folder of the compressed run.
        checkpoint: The compressed checkpoint, as ``--checkpoint`` takes it.
        max_loss: The most that the headline metric loses.
        say: Prints a line of progress.
    """

    validation: Validation
    run: Path
    checkpoint: str
    max_loss: float
    say: Callable[[str], None]

    def smallest(
        self,
        sizes: TableSizes[CodeShape | None],
        write: Callable[[Sequence[CodeOption], Path], CodedRun],
        folder: Path,
        ranks: Ranks,
    ) -> CodedRun:
        """Writes the run of the fewest bytes within the loss.

        Args:
            sizes: The sizes that the tables may have.
            write: Writes a run with an option for each table into a new folder.
            folder: The empty folder that becomes the run; trials are folders beside it.
            ranks: The ranks that compute.

        Raises:
            UserError: The metric of the run is undefined, or all codes lose more.
        """
        before = self.validation.headline(self.run, ranks, self.checkpoint)
        split, best = self.validation.split, None
        if not math.isfinite(before.value):
            raise UserError(
                f"--max-loss compares {before.name!r}, which is {before.value} for {self.run} on the split {split!r}, "
                f"so no loss can be told. {_REMEDY}, or name a split that defines it."
            )
        self.say(f"{split}: {before.name} {before.value:.6f}")
        low, high = 0, sizes.num_steps + 1
        while low < high:
            middle = (low + high) // 2
            chosen = sizes.after(middle)
            if all(option.choice is None for option in chosen):
                low = middle + 1
                continue
            trial = folder.with_name(f"trial-{middle}")
            written = write(chosen, trial)
            after = self.validation.headline(trial, ranks)
            forget_files()  # each trial has codes of its own, which no later trial reads
            is_within = before.loss_to(after) <= self.max_loss
            quality = "" if is_within else ", too low a quality"
            self.say(f"{format_bytes(written.table_bytes)}: {before.name} {after.value:.6f}{quality}")
            if is_within:
                change = MetricChange(split, before.name, before.value, after.value)
                high, best = middle, dataclasses.replace(written, metric=change)
                shutil.rmtree(folder)
                trial.rename(folder)
            else:
                low = middle + 1
                shutil.rmtree(trial)
        if best is None:
            raise UserError(
                f"--max-loss is {self.max_loss}, and all codes that were tried lose more of {before.name}; allow a "
                "larger loss, or let fewer ids share their codes by a smaller --min-count."
            )
        return best
