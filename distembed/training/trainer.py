"""The training run: build, then step, with evaluations and checkpoints between segments of steps.

Steps are run in *segments* that end where something else is due (evaluation, checkpoint, end of an epoch). TorchRec's
pipeline works ahead of the step it trains on; at the end of a segment it is empty, so that nothing prepared for
training is left in it when the model is evaluated or saved.
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

from rich.console import Console
from torch import Tensor

from distembed.base.errors import Interrupted, RunError, UserError
from distembed.base.files import write_json
from distembed.base.ranks import Collectives, Ranks
from distembed.checkpoints.checkpoint import ResumedRun, load_checkpoint
from distembed.checkpoints.content import Progress
from distembed.checkpoints.run_checkpoints import Checkpoints
from distembed.checkpoints.saved import STEPS_BEFORE
from distembed.checkpoints.store import BEST, checkpoint_place
from distembed.data.dataset.periods import StepPeriods
from distembed.data.reader import Batch
from distembed.data.stream.reader import ENDLESS, StreamReader
from distembed.embedding.occurrences import id_occurrences
from distembed.planning import describe_plan
from distembed.planning.saved_plan import saved_plan_as_json
from distembed.sse import set_step
from distembed.tasks import batch_schema
from distembed.tasks.base import BatchPosition
from distembed.tasks.seen_items import describe_seen_items
from distembed.training.build import Blueprint, TrainingState, build_training_state, take_over
from distembed.training.inference import score_split
from distembed.training.interruption import Interruption
from distembed.training.managed_ids import evict_ids, managed_tables
from distembed.training.metrics_window import TrainingProgress, at_step
from distembed.training.pipeline import prepared_batch, training_reader
from distembed.training.recluster import clustered_tables, recluster_tables
from distembed.training.run_folder.folder import RunFolder
from distembed.training.start import RunStart
from distembed.training.train_config import BestEvaluation, DueSteps, require_comparable
from distembed.training.training_log import TrainingLog


class Trainer:
    """Trains a config's model on this rank; all ranks construct it and call its methods.

    A run that cannot be trained is refused at construction, before anything is written.

    Args:
        start: The start of the run, with its config.
        folder: The run's folder.
        ranks: This rank among all.
        console: Where rank 0 shows the progress; None for nowhere.
        evaluated: Is called on rank 0 after each evaluation during training; see
            :func:`~distembed.training.run.train_run`.

    Attributes:
        precision: The arithmetic of the networks: ``bf16``, ``tf32`` or ``fp32``.

    Raises:
        UserError: There are no rows to train on, the folder is in use, the place for checkpoints holds another run's,
            the device lacks the precision, or the inputs of a required plan differ.
        InsufficientMemory: The tables do not fit into the memory of the ranks.
    """

    def __init__(
        self,
        start: RunStart,
        folder: RunFolder,
        ranks: Ranks,
        console: Console | None,
        evaluated: Callable[[int, float], None] | None = None,
    ) -> None:
        self._config = config = start.config
        self._dataset = config.data.require_path()
        self._folder = folder
        self._ranks = ranks
        self._start = start
        self._console = console if ranks.is_first else None
        self._evaluated = evaluated
        self._reader = training_reader(config, ranks, folder.path)
        if self._reader.num_rows == 0:
            raise UserError(f"split {config.data.train!r} of {self._dataset} has no rows to train on.")
        train = config.train
        self._place = checkpoint_place(folder.path, train.checkpoint_dir)
        # in a place outside of the run's folder, checkpoints say which run they belong to
        owner = None if train.checkpoint_dir is None else str(folder.path.absolute())
        self._checkpoints = Checkpoints(self._place, train.keep_checkpoints, ranks, owner, train.keep_best)
        Collectives().on_first(lambda: folder.require_free(start.wait_seconds))
        if not start.resume and self._checkpoints.newest() is not None:
            raise UserError(
                f"train.checkpoint_dir is {train.checkpoint_dir!r}, but {self._place} holds checkpoints of another "
                "run; give an empty place, or none for the run's own folder."
            )
        self.num_steps = min(train.epochs * self._reader.batches_per_epoch, train.max_steps or ENDLESS)
        has_validation = config.data.validation is not None
        blueprint = Blueprint.for_ranks(config, self._reader.schema, ranks, start.sse)
        self.precision = blueprint.precision
        self._state = build_training_state(blueprint, ranks, self._scheduled_steps(), start.plans)
        managed = managed_tables(self._state.model)
        evictions = {own.sizes.config.eviction.every for _, _, own in managed}
        self._due = DueSteps(train, self._reader.batches_per_epoch, self.num_steps, has_validation, evictions)
        self._has_managed_ids, self._noted_tables = bool(managed), set[str]()
        self._state.task.start(blueprint.task_context(self._dataset, ranks))
        if config.train.compares_evaluations:
            require_comparable(self._state.task.headline)
        if config.train.recluster is not None:
            clustered_tables(self._state.model)  # refuses a model without them
            self._due.require_clusterings()
            self._on_hosts = Collectives.in_own_group()
        self._step = 0
        self._best = BestEvaluation()
        self._evaluated_step: int | None = None
        self._validated_step = 0
        self._id_counts: dict[str, Tensor] | None = None
        self._rows_in_flight = deque[
            tuple[int, StepPeriods | None]
        ]()  # of the steps whose batches the pipeline has taken
        self._stops = False
        self._log = TrainingLog(config, folder, ranks, self._state, self._reader)
        self._resumed = self._restore() if start.resume else None
        if self._resumed is None and start.initial is not None:
            self._state.optimizers.steps_before = take_over(start.initial, blueprint, self._state)

    @property
    def step(self) -> int:
        return self._step

    @property
    def unreadable(self) -> dict[str, str]:
        """The reason for each row group that any rank could not read, by its name."""
        return self._log.unreadable

    @property
    def is_finished(self) -> bool:
        """Whether training ends here: all steps are done, or ``train.stop_after_evaluations`` says so."""
        return self._step >= self.num_steps or self._best.is_reason_to_stop(self._config.train)

    @property
    def repeats_evaluations(self) -> bool:
        """Whether recorded evaluations of the current step are removed when the run resumes, and made again.

        They are made again at the end of a run, which a stream may reach without a further step, and where the loaded
        checkpoint was saved before they were compared.
        """
        is_uncounted = self._config.train.compares_evaluations and self._best.last_step != self._step
        return self.is_finished or is_uncounted or isinstance(self._reader, StreamReader)

    @property
    def best(self) -> BestEvaluation | None:
        """The best evaluation until now; None where the config does not compare evaluations."""
        return self._best if self._config.train.compares_evaluations else None

    def train(self) -> None:
        """Trains to the end, or until interrupted, and saves a checkpoint either way.

        Raises:
            Interrupted: Ctrl-C or a signal came; raised after a checkpoint is written.
            RunError: The loss is not finite, or a checkpoint cannot be written.
            UserError: The place for checkpoints cannot be used, or a stream; in the latter case after a checkpoint.
        """
        self._checkpoints.require_usable()
        if self._ranks.is_first:
            plan_inputs, plan = self._state.plan_inputs, self._state.plan
            write_json(self._folder.path / "plan.json", saved_plan_as_json(plan_inputs, plan))
        if self._resumed is not None:
            self._checkpoints.tidy(self._say)
        with (
            TrainingProgress(self._console, self._shown_steps) as self._progress,
            Interruption(self._ranks) as stop,
            self._checkpoints,
            closing(self._reader),
        ):
            self._say_start()
            if isinstance(self._reader, StreamReader):
                self._reader.say, kept = self._progress.say, self._checkpoints.kept_progress
                self._reader.kept_states = lambda: [progress["reader"] for progress in kept()]
            state = self._state
            self._checkpoints.require_room(
                state.model, state.optimizers.combined, state.averages.values, self._progress.say
            )
            self._log.begin(self._progress, self._resumed)
            if self._resumed is not None:
                # the run may have ended between its checkpoint and the evaluation
                split = self._config.data.validation
                self._save_and_evaluate(Collectives().on_first(lambda: self._folder.has_evaluation(self._step, split)))
            while not self.is_finished:
                end = self._due.next_step(self._step)
                is_interrupted = self._run_segment(end, stop)
                failure: RunError | UserError | None = None
                if isinstance(self._reader, StreamReader):
                    failure = self._reader.failure
                    if self._reader.is_ended:
                        self._end_here()
                    elif self._step < end and not is_interrupted and failure is None:
                        is_interrupted = stop.requested_now()
                        if not is_interrupted:
                            continue  # the stream has no rows now
                if self._step == end and self._due.clustering(self._step):
                    self._recluster()
                if self._step == end and self._has_managed_ids:
                    notes = evict_ids(state.model, state.optimizers.combined, self._step)
                    for table in notes.keys() - self._noted_tables:
                        self._progress.say(notes[table])
                    self._noted_tables |= notes.keys()
                if is_interrupted or failure is not None:
                    waits = self._due.evaluation_before_checkpoint(self._step)
                    if self._step:
                        self._save(is_due=self._due.checkpoint(self._step) and not waits)
                    self._checkpoints.wait()
                    raise failure or Interrupted(f"interrupted after step {self._step}; go on with --resume.")
                if self.is_finished and self._log.has_steps:
                    self._log.write(self._step, self._learning_rate)  # a stream may end, or stop, between two lines
                if self.is_finished:
                    self._log.end(self._step)
                self._save_and_evaluate()
            self._log.end(self._step)  # after an evaluation that stops the run
            if self._step < self.num_steps:
                reason = self._best.reason_to_stop(self._state.task.headline)
                self._progress.say(f"{self._at_step}  {reason}")
            if self._config.train.keep_best and self._best.step is None:
                name = self._state.task.headline.name
                self._progress.say(
                    f"note: {name} was not defined in any evaluation, so train.keep_best kept no best checkpoint; the "
                    "last weights are used"
                )

    def load_best(self) -> None:
        """Loads the weights of the best evaluation's checkpoint, if ``train.keep_best``, for the final evaluation.

        All ranks call it, after training. Later evaluations record the step of that checkpoint. Nothing is loaded if
        the last step is the best.

        Raises:
            UserError: The checkpoint is damaged or cannot be reached.
        """
        step = self._best.step
        if self._config.train.keep_best and step is not None and step != self._step:
            load_checkpoint(self._checkpoints.path_of_step(step), self._state.model)
            self._evaluated_step = step

    def evaluate(self, split: str) -> dict[str, Any]:
        """Evaluates a whole split and records its metrics; all ranks call it.

        Returns:
            The metrics on rank 0, and nothing on other ranks.
        """
        started = time.perf_counter()
        task, averages = self._state.task, self._state.averages
        # load_best has loaded averages already
        with averages.in_use() if self._evaluated_step is None else nullcontext():
            rows = score_split(self._state, self._dataset, split, self._ranks)
        if not self._ranks.is_first:
            return {}
        values = {"split": split, "samples": self._log.samples, **task.metrics(rows)}
        if self._evaluated_step is not None:
            values["checkpoint_step"] = self._evaluated_step
        values["seconds"] = time.perf_counter() - started
        self._folder.record("eval", self._step, values)
        return {**values, "step": self._step, **task.details(rows)}

    def _run_segment(self, end: int, stop: Interruption) -> bool:
        """Steps until step ``end``, or until a stream has no rows; returns whether the run was interrupted before."""
        self._rows_in_flight.clear()
        set_step(self._state.model, self._step)
        for _, _, managed in managed_tables(self._state.model):
            managed.step = self._step
        for loss, outputs in self._state.pipeline.outputs(self._batches(end - self._step)):
            self._step += 1
            self._state.averages.update(self._step)
            self._log.add_step(self._step, loss, outputs, *self._rows_in_flight.popleft())
            if self._step % self._config.train.log_every == 0 or self._step == self.num_steps:
                self._log.write(self._step, self._learning_rate)
            self._progress.advance(self._step)
            if stop.requested(self._step):
                # batches in flight have admitted their ids: they are trained before a checkpoint is made
                self._stops = True
                if not self._has_managed_ids:
                    return True
            self._set_learning_rates()
        return self._stops

    def _batches(self, count: int) -> Iterator[Batch]:
        """Yields the next ``count`` batches to the pipeline, which reads ahead of its steps.

        A batch is in flight from here until its step is done. A checkpoint counts batches in flight as unread.
        """
        self._set_learning_rates()
        batches, step = islice(iter(self._reader), count), self._step
        while not self._stops and (batch := next(batches, None)) is not None:
            self._rows_in_flight.append((batch.global_batch_size, batch.periods))
            first_row = self._ranks.rank * batch.global_batch_size // self._ranks.world_size
            yield prepared_batch(self._state.task, batch, BatchPosition(step, first_row), self._ranks.device)
            step += 1

    def _scheduled_steps(self) -> int:
        """Returns the number of steps that learning rates follow: a stream's may be known by its rows."""
        stream = self._config.data.stream
        if stream is None or stream.max_rows is None:
            return self.num_steps
        return min(self.num_steps, math.ceil(stream.max_rows / self._config.train.batch_size))

    def _end_here(self) -> None:
        """Makes the current step the last one, since a stream has ended."""
        self.num_steps = self._step
        self._due = dataclasses.replace(self._due, num_steps=self._step)

    def _set_learning_rates(self) -> None:
        self._learning_rate = self._state.optimizers.set_learning_rates(self._step)

    def _save_and_evaluate(self, has_evaluated: bool = False) -> None:
        """Saves a checkpoint and evaluates on the validation split, each if it is due after the current step.

        If evaluations are compared, the evaluation comes first, since the checkpoint stores its outcome; a new best one
        is saved even if no checkpoint is due. Else the checkpoint is written in the background of the evaluation.
        ``has_evaluated``: a resumed run has recorded the evaluation of this step already, and does not repeat it. Nor
        is it repeated where a stream ends after a step at which it was due.
        """
        has_evaluated = has_evaluated or self._validated_step == self._step > 0
        evaluates_first = self._due.evaluation_before_checkpoint(self._step)
        if evaluates_first and not has_evaluated:
            self._validate()
        is_best = self._config.train.keep_best and self._best.step == self._step
        if self._due.checkpoint(self._step) or is_best or self.is_finished:
            with self._log.pause():
                self._save()
        if self._due.evaluation(self._step) and not evaluates_first and not has_evaluated:
            self._validate()

    def _recluster(self) -> None:
        """Re-clusters the model's clustered tables, as the end of the current step; all ranks call it."""
        self._log.require_finite(self._step)
        config, manifest, state = self._config, self._start.manifest, self._state
        started = time.perf_counter()
        with self._log.pause():
            tables, schema = clustered_tables(state.model), batch_schema(config.task, manifest.schema)

            def counts() -> dict[str, Tensor]:
                if self._id_counts is None:
                    self._id_counts = id_occurrences(self._dataset, manifest, schema, tables, config.data.train)
                return self._id_counts

            optimizer, device = state.optimizers.combined, self._ranks.device
            recluster_tables(state.model, optimizer, counts, config.train.seed, self._on_hosts, device)
        seconds = time.perf_counter() - started
        self._progress.say(f"{self._at_step}  re-clustered {len(tables)} tables in {seconds:.1f} s")

    def _validate(self) -> None:
        """Evaluates on the validation split and shows the metrics; all ranks call it.

        Updates the best evaluation, if evaluations are compared, and calls ``evaluated`` on rank 0.
        """
        split = self._config.data.validation
        assert split is not None
        with self._log.pause():
            values = self.evaluate(split)
        self._validated_step = self._step
        if values:
            self._progress.say(f"{self._at_step}  {split}: {self._state.task.describe(values)}")
        if self._config.train.compares_evaluations:
            metric = self._state.task.headline
            value = Collectives().on_first(lambda: float(values[metric.name]))
            if not math.isfinite(value):
                self._progress.say(f"note: {metric.name} is not defined on {split}; the evaluation is not compared")
            self._best = self._best.after(self._step, value, metric, self._config.train.min_improvement)
            if self.is_finished and self._log.has_steps:
                # training stops here: no later step would log the steps since the last line
                self._log.write(self._step, self._learning_rate)
        if values and self._evaluated is not None:
            self._evaluated(self._step, float(values[self._state.task.headline.name]))

    def _save(self, is_due: bool = True) -> None:
        """Starts to save a checkpoint of the current step in the background; all ranks call it.

        ``is_due`` is false for the checkpoint of an interruption, which an uninterrupted run would not write. RunError
        is raised if a loss is not finite.
        """
        values = {
            "run": self._start.run_id,
            "step": self._step,
            STEPS_BEFORE: self._state.optimizers.steps_before,
            "reader": self._reader.state_dict(in_flight=len(self._rows_in_flight)),
            **self._log.values(self._step),
            **({BEST: self._best.to_json()} if self._config.train.compares_evaluations else {}),
        }
        step, state = self._at_step, self._state
        self._checkpoints.save(
            self._step,
            state.model,
            state.optimizers.combined,
            Progress(values, self._log.tensors(), state.averages.values),
            say=lambda text: self._progress.say(f"{step}  {text}"),
            is_due=is_due,
        )

    def _restore(self) -> ResumedRun | None:
        """Loads the newest checkpoint and returns it; None if there is none. All ranks call it.

        It restores model, optimizers, reader and counters. A checkpoint of another run is refused.
        """
        state = self._state
        resumed = self._checkpoints.restore(state.model, state.optimizers.combined, self._say, state.averages.values)
        if resumed is not None:
            values = resumed.values
            if values.get("run", self._start.run_id) != self._start.run_id:
                raise UserError(
                    f"--resume: {self._place} holds checkpoints of another run than {self._folder.path}; give the "
                    "place of its own as train.checkpoint_dir."
                )
            self._reader.load_state_dict(values["reader"])
            self._log.restore(values)
            self._best = BestEvaluation.from_json(values.get(BEST))
            self._state.optimizers.steps_before = values.get(STEPS_BEFORE, 0)  # checkpoints of early versions lack it
            self._step = values["step"]
        return resumed

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _say_start(self) -> None:
        """Prints from which step to which the run trains, with which plan and which replaced ids."""
        where = f"{self._ranks.world_size} x {self._ranks.device.type}"
        begin = f"resuming at step {self._step} of" if self._step else "training"
        self._progress.say(
            f"{begin} {self._shown_steps or 'a stream in'} steps of {self._config.train.batch_size} rows on {where} in "
            f"{self.precision}; "
            f"run folder {self._folder.path}"
        )
        if (ages := self._reader.ages) is not None:
            self._progress.say(
                f"by age ({ages.half_life_days:g} days of half-life), the {self._reader.num_rows:,} rows count as "
                f"{ages.effective_rows:,.0f} rows of equal weight"
            )
        for line in (*_start_lines(self._start, self._state), *self._due.notes_on_clusterings()):
            self._progress.say(line)

    @property
    def _shown_steps(self) -> int | None:
        """Number of steps of the run; None where nobody knows it."""
        return self.num_steps if self.num_steps < ENDLESS else None

    @property
    def _at_step(self) -> str:
        return at_step(self._step, self._shown_steps)


def _start_lines(start: RunStart, state: TrainingState) -> Iterator[str]:
    """Yields the lines that rank 0 prints before the first step."""
    if start.initial is not None:
        yield f"weights and optimizer states are those of {start.initial.checkpoint}"
    yield f"plan: {describe_plan(state.plan)}"
    changed = start.plans.reasons_to_replan(state.plan_inputs)
    if changed:
        yield f"planned anew, since the run's plan was made for something else: {'; '.join(changed)}"
    if start.sse:
        rates = sorted({rule.p0 for rule in start.sse.values()})
        yield f"ids replaced: {len(start.sse)} tables, p0 {', '.join(map(str, rates))}"
    if start.seen_items is not None:
        yield describe_seen_items(start.seen_items)
    yield from state.task.start_lines()
