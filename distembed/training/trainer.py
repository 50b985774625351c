"""The training run: build, then step, with evaluations and checkpoints between segments of steps.

Steps are run in *segments* that end where something else is due (evaluation, checkpoint, end of an epoch). TorchRec's
pipeline works ahead of the step it trains on; at the end of a segment it is empty, so that nothing prepared for
training is left in it when the model is evaluated or saved.
"""

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from distembed.checkpoints.checkpoint import ResumedRun
from distembed.checkpoints.content import Progress
from distembed.checkpoints.places import checkpoint_place
from distembed.checkpoints.run_checkpoints import Checkpoints
from distembed.checkpoints.saved import STEPS_BEFORE
from distembed.config import Config
from distembed.data.reader import Batch, BatchOrder, BatchReader
from distembed.errors import Interrupted, RunError, UserError
from distembed.files import write_json
from distembed.planning import describe_plan
from distembed.planning.saved_plan import saved_plan_as_json
from distembed.ranks import Collectives, Ranks
from distembed.runs.folder import RunFolder
from distembed.sse import set_step
from distembed.tasks.base import BatchPosition, Outputs
from distembed.training.build import Blueprint, build_training_state
from distembed.training.evaluation import score_split
from distembed.training.interruption import Interruption
from distembed.training.metrics_window import MetricsWindow
from distembed.training.progress import TrainingProgress
from distembed.training.replaced_shares import replaced_counts, replaced_shares
from distembed.training.start import RunStart
from distembed.training.take_over import take_over


class Trainer:
    """Trains a config's model on this rank; all ranks construct it and call its methods.

    What cannot be trained is refused at construction, before anything is written.

    Args:
        config: The whole config.
        folder: The run's folder.
        ranks: This rank among all.
        start: What the run starts with.
        console: Where rank 0 shows the progress; None for nowhere.

    Raises:
        UserError: There are no rows to train on, the folder is in use, the place for checkpoints holds another run's,
            or the inputs of a required plan differ.
        InsufficientMemory: The tables do not fit into the memory of the ranks.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        ranks: Ranks,
        start: RunStart,
        console: Console | None,
    ) -> None:
        self._config = config
        self._dataset = config.data.require_path()
        self._folder = folder
        self._ranks = ranks
        self._start = start
        self._sse = start.sse
        self._console = console if ranks.is_first else None
        self._reader = self._make_reader()
        if self._reader.num_rows == 0:
            raise UserError(f"split {config.data.train!r} of {self._dataset} has no rows to train on.")
        self._checkpoints = self._make_checkpoints()
        Collectives().on_first(lambda: folder.require_free(start.wait_seconds))
        self._require_own_checkpoints()
        self.num_steps = self._count_steps()
        blueprint = Blueprint.for_ranks(config, self._reader.schema, ranks, start.sse)
        self._state = build_training_state(blueprint, ranks, self.num_steps, start.plans)
        self._state.task.start(blueprint.task_context(self._dataset, ranks))
        self._step = 0
        self._samples = 0
        self._seconds = 0.0
        self._num_in_flight = 0
        self._window = MetricsWindow()
        self._resumed = self._restore() if start.resume else None
        if self._resumed is None and start.initial is not None:
            self._state.optimizers.steps_before = take_over(start.initial, blueprint, self._state)

    def _make_reader(self, prefetch_batches: int = 4) -> BatchReader:
        """Returns a reader of this rank's rows of the training split, at its beginning."""
        return BatchReader(
            self._dataset,
            self._config.data.train,
            BatchOrder(self._config.train.batch_size, seed=self._config.train.seed),
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            prefetch_batches=prefetch_batches,
            decode_threads=self._config.data.threads_of_rank(self._ranks.local_world_size) if prefetch_batches else 0,
        )

    def _make_checkpoints(self) -> Checkpoints:
        """Returns the run's checkpoints; in a place of their own they say which run they belong to."""
        train, folder = self._config.train, self._folder.path
        owner = None if train.checkpoint_dir is None else str(folder.absolute())
        return Checkpoints(checkpoint_place(folder, train.checkpoint_dir), train.keep_checkpoints, self._ranks, owner)

    def _require_own_checkpoints(self) -> None:
        """Makes sure that a run which is not resumed has an empty place for checkpoints; all ranks call it.

        Raises:
            UserError: There are checkpoints.
        """
        if not self._start.resume and self._checkpoints.newest() is not None:
            checkpoint_dir = self._config.train.checkpoint_dir
            raise UserError(
                f"train.checkpoint_dir is {checkpoint_dir!r}, but "
                f"{checkpoint_place(self._folder.path, checkpoint_dir)} holds checkpoints of another run; give an "
                "empty place, or none for the run's own folder."
            )

    def _count_steps(self) -> int:
        """Returns the number of steps of the whole run."""
        train = self._config.train
        num_steps = train.epochs * self._reader.batches_per_epoch
        return num_steps if train.max_steps is None else min(num_steps, train.max_steps)

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self._step

    @property
    def precision(self) -> str:
        """The number format that the networks compute in: ``bf16`` or ``fp32``."""
        return "bf16" if self._state.bf16 else "fp32"

    def train(self) -> None:
        """Trains to the end, or until interrupted, and saves a checkpoint either way.

        Raises:
            Interrupted: Ctrl-C or a signal came; the checkpoint is written by then.
            RunError: The loss is not finite, or a checkpoint cannot be written.
            UserError: The place for checkpoints cannot be used.
        """
        self._checkpoints.require_usable()
        if self._ranks.is_first:
            plan_inputs, plan = self._state.plan_inputs, self._state.plan
            write_json(self._folder.path / "plan.json", saved_plan_as_json(plan_inputs, plan))
        if self._resumed is not None:
            self._checkpoints.tidy(self._say)
        with (
            TrainingProgress(self._console, self.num_steps) as self._progress,
            Interruption(self._ranks) as stop,
            self._checkpoints,
        ):
            self._say_start()
            self._checkpoints.require_room(self._state.model, self._state.optimizers.combined, self._progress.say)
            if self._evaluation_is_due() and not self._has_evaluated():
                self._validate()  # the run was ended between its checkpoint and this
            self._window = self._restored_window()
            while self._step < self.num_steps:
                if self._run_segment(stop):
                    self._save()
                    self._checkpoints.wait()
                    raise Interrupted(f"interrupted after step {self._step}; go on with --resume.")
                self._save_and_evaluate()
        self._reader.close()

    def evaluate(self, split: str) -> dict[str, Any]:
        """Evaluates a whole split and records its metrics; all ranks call it.

        Returns:
            The metrics on rank 0, and nothing on other ranks.
        """
        started = time.perf_counter()
        task, rows = self._state.task, score_split(self._state, self._dataset, split, self._ranks)
        if not self._ranks.is_first:
            return {}
        values = {"split": split, "samples": self._samples, **task.metrics(rows)}
        values["seconds"] = time.perf_counter() - started
        self._folder.record("eval", self._step, values)
        return {**values, "step": self._step, **task.details(rows)}

    def _run_segment(self, stop: Interruption) -> bool:
        """Steps until something else is due; returns whether the run was interrupted."""
        end = self._end_of_segment()
        self._num_in_flight = 0
        set_step(self._state.model, self._step)
        for loss, outputs in self._state.pipeline.outputs(self._batches(end - self._step)):
            self._step += 1
            self._num_in_flight -= 1
            self._record_step(loss, outputs)
            if self._step % self._config.train.log_every == 0 or self._step == self.num_steps:
                self._log()
            self._progress.advance(self._step)
            if stop.requested(self._step):
                return True
            self._set_learning_rates()
        return False

    def _batches(self, count: int) -> Iterator[Batch]:
        """Yields the next batches, each of which is in flight until its step is done."""
        self._set_learning_rates()
        for step, batch in enumerate(islice(iter(self._reader), count), start=self._step):
            self._num_in_flight += 1
            first_row = self._ranks.rank * batch.global_batch_size // self._ranks.world_size
            yield self._state.task.prepare_batch(batch, BatchPosition(step, first_row))

    def _set_learning_rates(self) -> None:
        """Sets the learning rates of the next step."""
        self._learning_rate = self._state.optimizers.set_learning_rates(self._step)

    def _end_of_segment(self) -> int:
        """Returns the step after which something else is due next."""
        train = self._config.train
        per_epoch = self._reader.batches_per_epoch
        ends = [self.num_steps, (self._step // per_epoch + 1) * per_epoch]
        ends += [(self._step // every + 1) * every for every in (train.evaluate_every, train.checkpoint_every) if every]
        return min(ends)

    def _save_and_evaluate(self) -> None:
        """Saves a checkpoint and evaluates on the validation split, where they are due after this step."""
        started = time.perf_counter()
        if self._is_due(self._config.train.checkpoint_every):
            self._save()
        if self._evaluation_is_due():
            self._validate()
        self._window.paused += time.perf_counter() - started

    def _is_due(self, every: int) -> bool:
        """Returns whether what is done every so many steps, and at the end of each epoch, is due after this step."""
        at_epoch_end = self._step % self._reader.batches_per_epoch == 0 or self._step == self.num_steps
        return self._step > 0 and (at_epoch_end or (every > 0 and self._step % every == 0))

    def _evaluation_is_due(self) -> bool:
        return self._config.data.validation is not None and self._is_due(self._config.train.evaluate_every)

    def _has_evaluated(self) -> bool:
        """Returns whether the evaluation after this step is recorded already; all ranks call it."""
        split = self._config.data.validation
        return Collectives().on_first(lambda: self._folder.has_evaluation(self._step, split))

    def _validate(self) -> None:
        """Evaluates on the validation split, and shows the metrics; all ranks call it."""
        split = self._config.data.validation
        assert split is not None
        values = self.evaluate(split)
        if values:
            self._progress.say(f"step {self._step}/{self.num_steps}  {split}: {self._state.task.describe(values)}")

    def _record_step(self, loss: Tensor, outputs: Outputs) -> None:
        """Adds the step that was just done to the next line of metrics."""
        batch_size = self._config.train.batch_size
        done = (self._step - 1) % self._reader.batches_per_epoch * batch_size
        rows = min(batch_size, self._reader.num_rows - done)
        self._samples += rows
        self._window.add(loss, outputs, rows)
        # a look at a GPU's tensor waits for its stream: those are looked at once a line of metrics
        if loss.device.type == "cpu":
            self._require_finite()

    def _require_finite(self) -> None:
        """Stops at the first step of the window whose loss on this rank is not finite."""
        found = self._window.first_not_finite()
        if found is not None:
            steps_ago, loss = found
            self._fail_not_finite(loss, self._step - steps_ago)

    def _log(self) -> None:
        """Records and shows a line of metrics of the steps since the last one; all ranks call it."""
        self._require_finite()
        window = self._window
        window.add_replaced(replaced_counts(self._state.model, self._step))
        replaced = replaced_shares(window.replaced, self._ranks)
        assert window.loss is not None
        losses = self._ranks.gather_rows(window.loss.unsqueeze(0))
        rows = {name: self._ranks.gather_rows(torch.cat(values)) for name, values in window.outputs.items()}
        seconds = window.seconds
        self._seconds += seconds
        self._window = MetricsWindow()
        if not self._ranks.is_first:
            return
        # each rank's loss is its share times the number of ranks
        loss = float(np.sum(losses)) / window.rows / self._ranks.world_size
        values: dict[str, Any] = {
            "epoch": (self._step - 1) // self._reader.batches_per_epoch,
            "samples": self._samples,
            "seconds": self._seconds,
            "loss": loss,
            **self._state.task.training_metrics(rows),
            "samples_per_second": window.rows / seconds,
            "learning_rate": self._learning_rate,
            **({"replaced_share": replaced} if replaced else {}),
        }
        self._folder.record("train", self._step, values)
        self._progress.show(
            self._step, self._shown(values), values["samples_per_second"] / self._config.train.batch_size
        )

    def _fail_not_finite(self, loss: float, step: int) -> None:
        """Writes this rank's rows of the step to a file and raises the RunError that names it."""
        epoch, batch = divmod(step - 1, self._reader.batches_per_epoch)
        path = self._folder.path / f"not-finite-step-{step}-rank-{self._ranks.rank}.npz"
        reader = self._make_reader(prefetch_batches=0)
        reader.load_state_dict({**self._reader.state_dict(), "epoch": epoch, "batch": batch})
        next(iter(reader)).write(path)
        raise RunError(
            f"The loss is {loss} at step {step} (epoch {epoch}, batch {batch}, rank {self._ranks.rank}). "
            f"This rank's rows of that batch are in {path}; look for extreme values among the dense features. "
            "Checkpoints are from before it. Try lower train.dense_optimizer.learning_rate and "
            "train.sparse_optimizer.learning_rate, a warm-up (train.dense_optimizer.schedule.warmup=0.1), "
            "or train.precision=fp32."
        )

    def _save(self) -> None:
        """Begins to save a checkpoint after this step; all ranks call it."""
        self._require_finite()  # weights that have met a NaN must not replace good ones
        self._window.add_replaced(replaced_counts(self._state.model, self._step))
        values = {
            "run": self._start.run_id,
            "step": self._step,
            STEPS_BEFORE: self._state.optimizers.steps_before,
            "samples": self._samples,
            "seconds": self._seconds,
            "reader": self._reader.state_dict(in_flight=self._num_in_flight),
            "window": self._window.values(self._ranks.world_size),
        }
        step, state = f"step {self._step}/{self.num_steps}", self._state
        self._checkpoints.save(
            self._step,
            state.model,
            state.optimizers.combined,
            Progress(values, self._window.tensors()),
            say=lambda text: self._progress.say(f"{step}  {text}"),
            is_due=self._is_due(self._config.train.checkpoint_every),
        )

    def _restore(self) -> ResumedRun | None:
        """Loads the newest checkpoint, if there is one, so that the run continues after its step; all ranks call it."""
        resumed = self._checkpoints.restore(self._state.model, self._state.optimizers.combined, self._say)
        if resumed is not None:
            values = resumed.values
            if values.get("run", self._start.run_id) != self._start.run_id:
                place = checkpoint_place(self._folder.path, self._config.train.checkpoint_dir)
                raise UserError(
                    f"--resume: {place} holds checkpoints of another run than {self._folder.path}; give the place of "
                    "its own as train.checkpoint_dir."
                )
            self._reader.load_state_dict(values["reader"])
            self._state.optimizers.steps_before = values.get(STEPS_BEFORE, 0)  # early versions had none
            self._step, self._samples, self._seconds = values["step"], values["samples"], values["seconds"]
        return resumed

    def _restored_window(self) -> MetricsWindow:
        """Returns the window of metrics in which the run was saved, or an empty one."""
        # checkpoints of early versions have none
        values = None if self._resumed is None else self._resumed.values.get("window")
        if self._resumed is None or values is None:
            return MetricsWindow()
        return MetricsWindow.restored(values, self._resumed.tensors, self._ranks.world_size, self._ranks.device)

    def _say(self, text: str) -> None:
        """Prints a line before training begins, on rank 0."""
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _say_start(self) -> None:
        """Prints from which step to which the run trains, with which plan and which replaced ids."""
        where = f"{self._ranks.world_size} x {self._ranks.device.type}"
        begin = f"resuming at step {self._step} of" if self._step else "training"
        self._progress.say(
            f"{begin} {self.num_steps} steps of {self._config.train.batch_size} rows on {where} in {self.precision}; "
            f"run folder {self._folder.path}"
        )
        if self._start.initial is not None:
            self._progress.say(f"weights and optimizer states are those of {self._start.initial.checkpoint}")
        self._progress.say(f"plan: {describe_plan(self._state.plan)}")
        changed = self._start.plans.reasons_to_replan(self._state.plan_inputs)
        if changed:
            self._progress.say(f"planned anew, since the run's plan was made for something else: {'; '.join(changed)}")
        if self._sse:
            rates = sorted({rule.p0 for rule in self._sse.values()})
            self._progress.say(f"ids replaced: {len(self._sse)} tables, p0 {', '.join(map(str, rates))}")

    def _shown(self, values: Mapping[str, Any]) -> str:
        """Returns training metrics as the line that is shown."""
        return (
            f"loss {values['loss']:.4f}  {self._state.task.describe_training(values)}  "
            f"{values['samples_per_second']:,.0f} samples/s  lr {values['learning_rate']:.3g}"
        )
