"""The training run: build, then step, with evaluations and checkpoints between segments of steps.

Steps are run in *segments* that end where something else is due (evaluation, checkpoint, end of an epoch). TorchRec's
pipeline works ahead of the step it trains on; at the end of a segment it is empty, so that nothing prepared for
training is left in it when the model is evaluated or saved.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from distembed.checkpoints.run_checkpoints import Checkpoints, checkpoint_place
from distembed.config.train import TrainConfig
from distembed.data.reader import Batch, BatchOrder, BatchReader
from distembed.embedding import EmbeddingConfig
from distembed.errors import Interrupted, RunError, UserError
from distembed.files import write_json
from distembed.models.config import DCNConfig, DLRMConfig
from distembed.planning import PlanConfig, describe_plan, plan_as_json
from distembed.planning.saved_plan import SavedPlan
from distembed.ranks import Ranks
from distembed.runs.folder import RunFolder
from distembed.sse import SSE, set_step
from distembed.tasks.binary_metrics import exact_auc
from distembed.training.build import build_training_state
from distembed.training.evaluation import gather_rows, score_split
from distembed.training.interruption import Interruption
from distembed.training.progress import TrainingProgress
from distembed.training.replaced_shares import replaced_shares


@dataclass(frozen=True)
class RunSettings:
    """What a training run is given, whole.

    Attributes:
        dataset: the prepared dataset's folder.
        splits: names of the training, validation and test split; the last two may be None.
        sse: by table, how ids are replaced in training.
        saved_plan: where tables go, if that was decided before; else they are planned.
        previous_plan: of the run that is resumed, taken up where it was made for what runs now.
        config_yaml: the resolved config, kept in the run folder.
        info: what else the run folder's ``run.json`` records.
    """

    dataset: str
    splits: tuple[str, str | None, str | None]
    model: DLRMConfig | DCNConfig
    embedding: EmbeddingConfig
    train: TrainConfig
    plan: PlanConfig
    sse: Mapping[str, SSE]
    config_yaml: str
    info: Mapping[str, Any]
    saved_plan: SavedPlan | None = None
    previous_plan: SavedPlan | None = None


@dataclass
class _Window:
    """Steps since the last line of metrics."""

    losses: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)
    rows: int = 0
    started: float = field(default_factory=time.perf_counter)
    paused: float = 0.0

    @property
    def seconds(self) -> float:
        """Time spent training, without evaluations and checkpoints."""
        return time.perf_counter() - self.started - self.paused


class Run:
    """One training run on this rank; all ranks construct it and call :meth:`train` together."""

    def __init__(
        self,
        settings: RunSettings,
        folder: RunFolder,
        processes: Ranks,
        resume: bool,
        console: Console | None,
        wait_seconds: float,
    ) -> None:
        train = settings.train
        self._settings = settings
        self._folder = folder
        self._processes = processes
        self._console = console if processes.is_first else None
        self._reader = self._make_reader()
        if self._reader.num_rows == 0:
            raise UserError(f"split {settings.splits[0]!r} of {settings.dataset} has no rows to train on.")
        place = checkpoint_place(folder.path, train.checkpoint_dir)
        owner = None if train.checkpoint_dir is None else str(folder.path.absolute())
        self._checkpoints = Checkpoints(place, train.keep_checkpoints, processes, owner)
        if processes.is_first:
            folder.require_free(wait_seconds)
        checkpoint = self._checkpoints.newest()
        if checkpoint is not None and not resume:
            raise UserError(
                f"train.checkpoint_dir is {train.checkpoint_dir!r}, but {place} holds checkpoints of another run; give "
                "an empty place, or none for the run's own folder."
            )
        self.num_steps = train.epochs * self._reader.batches_per_epoch
        if train.max_steps is not None:
            self.num_steps = min(self.num_steps, train.max_steps)
        self._training_state = build_training_state(
            settings.model,
            settings.embedding,
            train,
            settings.plan,
            self._reader.schema,
            processes,
            self.num_steps,
            settings.sse,
            settings.saved_plan,
            settings.previous_plan,
        )
        self._step = 0
        self._samples = 0
        self._seconds = 0.0
        self._handed_out = 0
        self._window = _Window()
        if checkpoint is not None:
            self._restore(checkpoint)

    def _make_reader(self, prefetch_batches: int = 4) -> BatchReader:
        return BatchReader(
            self._settings.dataset,
            self._settings.splits[0],
            BatchOrder(self._settings.train.batch_size, seed=self._settings.train.seed),
            rank=self._processes.rank,
            world_size=self._processes.world_size,
            prefetch_batches=prefetch_batches,
        )

    @property
    def step(self) -> int:
        """Steps done."""
        return self._step

    @property
    def precision(self) -> str:
        """What the networks compute in: ``bf16`` or ``fp32``."""
        return "bf16" if self._training_state.bf16 else "fp32"

    def train(self) -> None:
        """Trains to the end, or until interrupted, and saves a checkpoint either way.

        Raises:
            Interrupted: after Ctrl-C or SIGTERM, once the checkpoint is written.
            RunError: on a loss that is not finite, or a checkpoint that could not be written.
            UserError: where there is no place for checkpoints.
        """
        self._checkpoints.require_usable()
        if self._processes.is_first:
            plan_inputs, plan = self._training_state.plan_inputs, self._training_state.plan
            write_json(self._folder.path / "plan.json", {"made_for": plan_inputs.as_json(), "plan": plan_as_json(plan)})
            if self._step == self.num_steps:
                self._folder.drop_evaluations(self._settings.splits[2])
        with (
            TrainingProgress(self._console, self.num_steps) as self._progress,
            Interruption(self._processes) as stop,
            self._checkpoints,
        ):
            self._say_start()
            self._window = _Window()
            while self._step < self.num_steps:
                if self._run_segment(stop):
                    self._save()
                    self._checkpoints.wait()
                    raise Interrupted(f"interrupted after step {self._step}; go on with --resume.")
                self._between_segments()
        self._reader.close()

    def evaluate(self, split: str) -> dict[str, Any]:
        """Metrics of a whole split, on rank 0 (elsewhere of no rows); all ranks call it."""
        started = time.perf_counter()
        scores = score_split(self._training_state, self._settings.dataset, split, self._processes)
        values = {"split": split, "samples": self._samples, **dataclasses.asdict(scores.metrics())}
        values["seconds"] = time.perf_counter() - started
        if self._processes.is_first:
            self._folder.record("eval", self._step, values)
        return {**values, "step": self._step, "calibration_bins": scores.calibration_bins()}

    def _run_segment(self, stop: Interruption) -> bool:
        """Steps until something else is due; returns whether to stop."""
        end = self._end_of_segment()
        self._handed_out = 0
        set_step(self._training_state.model, self._step)
        for loss, logits, labels in self._training_state.pipeline.outputs(self._batches(end - self._step)):
            self._step += 1
            self._handed_out -= 1
            self._account(loss, logits, labels)
            if self._step % self._settings.train.log_every == 0 or self._step == self.num_steps:
                self._log()
            self._progress.advance(self._step)
            if stop.requested(self._step):
                return True
            self._set_learning_rates()
        return False

    def _batches(self, count: int) -> Iterator[Batch]:
        self._set_learning_rates()
        for batch in islice(iter(self._reader), count):
            self._handed_out += 1
            yield batch

    def _set_learning_rates(self) -> None:
        self._learning_rate = self._training_state.optimizers.set_learning_rates(self._step)

    def _end_of_segment(self) -> int:
        train = self._settings.train
        per_epoch = self._reader.batches_per_epoch
        ends = [self.num_steps, (self._step // per_epoch + 1) * per_epoch]
        ends += [(self._step // every + 1) * every for every in (train.evaluate_every, train.checkpoint_every) if every]
        return min(ends)

    def _between_segments(self) -> None:
        started = time.perf_counter()
        train, split = self._settings.train, self._settings.splits[1]
        at_epoch_end = self._step % self._reader.batches_per_epoch == 0 or self._step == self.num_steps
        if at_epoch_end or (train.checkpoint_every and self._step % train.checkpoint_every == 0):
            self._save()
        if split is not None and (at_epoch_end or (train.evaluate_every and self._step % train.evaluate_every == 0)):
            values = self.evaluate(split)
            self._progress.say(f"step {self._step}/{self.num_steps}  {describe_metrics(values)}")
        self._window.paused += time.perf_counter() - started

    def _account(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        rows = min(
            self._settings.train.batch_size,
            self._reader.num_rows - (self._step - 1) % self._reader.batches_per_epoch * self._settings.train.batch_size,
        )
        self._samples += rows
        self._window.rows += rows
        self._window.losses.append(loss * rows)
        self._window.logits.append(logits)
        self._window.labels.append(labels)
        if loss.device.type == "cpu":  # on a GPU looking stops the stream: there the window is looked at as a whole
            self._require_finite()

    def _require_finite(self) -> None:
        """Stops at the first step of the window whose loss on this rank is not finite."""
        losses = self._window.losses
        for_now = losses[-1:] if losses and losses[-1].device.type == "cpu" else losses
        if not for_now:
            return
        bad = ~torch.isfinite(torch.stack(for_now))
        if bad.any():
            first = int(bad.nonzero()[0])
            self._fail_not_finite(float(for_now[first]), self._step - len(for_now) + first + 1)

    def _log(self) -> None:
        self._require_finite()
        window = self._window
        replaced = replaced_shares(self._training_state.model, self._processes)
        losses = gather_rows(torch.stack(window.losses).sum().unsqueeze(0), self._processes)
        logits = gather_rows(torch.cat(window.logits), self._processes)
        labels = gather_rows(torch.cat(window.labels), self._processes)
        seconds = window.seconds
        self._seconds += seconds
        self._window = _Window()
        if not self._processes.is_first:
            return
        # each rank's loss is its share times the number of ranks
        loss = float(np.sum(losses, dtype=np.float64)) / window.rows / self._processes.world_size
        values = {
            "epoch": (self._step - 1) // self._reader.batches_per_epoch,
            "samples": self._samples,
            "seconds": self._seconds,
            "loss": loss,
            "auc": exact_auc(logits, labels),
            "samples_per_second": window.rows / seconds,
            "learning_rate": self._learning_rate,
            **({"replaced_share": replaced} if replaced else {}),
        }
        self._folder.record("train", self._step, values)
        self._progress.show(self._step, {**values, "batch_size": self._settings.train.batch_size})

    def _fail_not_finite(self, loss: float, step: int) -> None:
        epoch, batch = divmod(step - 1, self._reader.batches_per_epoch)
        path = self._folder.path / f"not-finite-step-{step}-rank-{self._processes.rank}.npz"
        self._write_batch(epoch, batch, path)
        raise RunError(
            f"The loss is {loss} at step {step} (epoch {epoch}, batch {batch}, rank {self._processes.rank}). "
            f"This rank's rows of that batch are in {path}; look for extreme values among the dense features. "
            "Checkpoints are from before it. Try lower train.dense_optimizer.learning_rate and "
            "train.sparse_optimizer.learning_rate, a warm-up (train.dense_optimizer.schedule.warmup=0.1), "
            "or train.precision=fp32."
        )

    def _write_batch(self, epoch: int, batch: int, path: Path) -> None:
        state = {**self._reader.state_dict(), "epoch": epoch, "batch": batch}
        reader = self._make_reader(prefetch_batches=0)
        reader.load_state_dict(state)
        rows = next(iter(reader))
        features = rows.sparse_features
        np.savez(
            path,
            dense_features=rows.dense_features.numpy(),
            labels=rows.labels.numpy(),
            feature_names=np.array(features.keys()),
            ids=features.values().numpy(),
            lengths=features.lengths().numpy(),
        )

    def _save(self) -> None:
        self._require_finite()  # weights that have met a NaN must not replace good ones
        progress = {
            "step": self._step,
            "samples": self._samples,
            "seconds": self._seconds,
            "reader": self._reader.state_dict(in_flight=self._handed_out),
        }
        step, training_state = f"step {self._step}/{self.num_steps}", self._training_state
        self._checkpoints.save(
            self._step,
            training_state.model,
            training_state.optimizers.combined,
            progress,
            say=lambda text: self._progress.say(f"{step}  {text}"),
        )

    def _restore(self, checkpoint: str) -> None:
        progress = self._checkpoints.load(
            checkpoint, self._training_state.model, self._training_state.optimizers.combined
        )
        self._reader.load_state_dict(progress["reader"])
        self._step, self._samples, self._seconds = progress["step"], progress["samples"], progress["seconds"]

    def _say_start(self) -> None:
        where = f"{self._processes.world_size} x {self._processes.device.type}"
        begin = f"resuming at step {self._step} of" if self._step else "training"
        self._progress.say(
            f"{begin} {self.num_steps} steps of {self._settings.train.batch_size} rows on {where} in {self.precision}; "
            f"run folder {self._folder.path}"
        )
        self._progress.say(f"plan: {describe_plan(self._training_state.plan)}")
        previous = self._settings.previous_plan
        changed = [] if previous is None else previous.plan_inputs.differences(self._training_state.plan_inputs)
        if changed:
            self._progress.say(f"planned anew, since the run's plan was made for something else: {'; '.join(changed)}")
        if self._settings.sse:
            rates = sorted({rule.p0 for rule in self._settings.sse.values()})
            self._progress.say(f"ids replaced: {len(self._settings.sse)} tables, p0 {', '.join(map(str, rates))}")


def describe_metrics(values: Mapping[str, Any]) -> str:
    """One line of an evaluation."""
    return (
        f"{values['split']}: logloss {values['logloss']:.4f}  AUC {values['auc']:.4f}  "
        f"normalised entropy {values['normalized_entropy']:.4f}  calibration {values['calibration']:.4f}  "
        f"accuracy {values['accuracy']:.4f}  ({values['rows']:,} rows)"
    )


def run_training(
    settings: RunSettings,
    run_dir: Path,
    processes: Ranks,
    resume: bool,
    console: Console | None,
    wait_seconds: float = 0.0,
) -> dict[str, Any] | None:
    """Trains, evaluates on the test split and returns that evaluation; all ranks call it.

    Args:
        settings: what is trained.
        run_dir: the run's folder.
        processes: the ranks.
        resume: whether to go on from the newest checkpoint, if there is one.
        console: where rank 0 shows how it goes.
        wait_seconds: for which another process that trains into the folder is waited for.
    """
    folder = RunFolder(run_dir)
    # what the settings cannot do is found here, before anything is written
    run = Run(settings, folder, processes, resume, console, wait_seconds)
    if not processes.is_first:
        return _train_and_evaluate(run, settings.splits[2])
    info = {
        **settings.info,
        "world_size": processes.world_size,
        "device": processes.device.type,
        "precision": run.precision,
    }
    with folder.open(settings.config_yaml, info, run.step):
        evaluation = _train_and_evaluate(run, settings.splits[2])
        if evaluation is not None:
            write_json(folder.path / "evaluation.json", evaluation)
        folder.end("finished")
        return evaluation


def _train_and_evaluate(run: Run, test_split: str | None) -> dict[str, Any] | None:
    run.train()
    return run.evaluate(test_split) if test_split is not None else None
