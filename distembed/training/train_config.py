"""The ``train`` section of a config: when it asks for evaluations and checkpoints, and which evaluation is the best.

An evaluation is better than all before it where its metric improves by more than ``train.min_improvement`` (other
libraries' ``min_delta``); training stops after ``train.stop_after_evaluations`` in a row without improvement
(``patience``). An evaluation whose metric is not defined (the AUC of one class) counts neither way. The best evaluation
is part of the training state, so that a resumed run stops where it would have stopped.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Literal

import pydantic.dataclasses
from pydantic import AfterValidator, Field

from distembed.base.errors import UserError
from distembed.base.names import STRICT, one_of
from distembed.base.validation import Count, Interval
from distembed.embedding.settings import QuantizedCommsConfig
from distembed.optim.config import DenseOptimizerConfig, EMAConfig, NonNegativeNumber, SparseOptimizerConfig
from distembed.optim.declared import TableOptimizers
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training.loggers import LOGGERS


def _named_once(names: list[str]) -> list[str]:
    if len(set(names)) < len(names):
        raise ValueError(f"loggers is {names}; name each once")
    return names


def _known_logger(name: str) -> str:
    return one_of("loggers", name, LOGGERS)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ReclusterConfig:
    """When tables of the partition ``clustered`` are re-clustered (:mod:`distembed.training.recluster`).

    Attributes:
        every: Steps between two clusterings.
        until: The last step that is followed by a clustering; null for no limit. Vectors need some steps more to
            leave their centroids, so the last steps of a run are best left without.
    """

    every: Count
    until: Count | None = None

    def is_due(self, step: int) -> bool:
        """Returns whether tables are re-clustered at the end of a step; the first step of a run is 1."""
        return step > 0 and step % self.every == 0 and (self.until is None or step <= self.until)


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """How a model is trained.

    Attributes:
        batch_size: Rows of a step on all ranks.
        epochs: How many times each training row is read.
        max_steps: Number of steps after which training ends, even within an epoch; null for no limit.
        seed: Seed of the weights, the order of rows and everything else that is random.
        dense_optimizer: Optimizer of the networks.
        sparse_optimizer: Optimizer of the embedding tables.
        ema: Moving averages of the networks' weights, which evaluations, exports and predictions are made with in place
            of the weights that are trained; null for none. Tables are not averaged.
        recluster: When tables of the partition ``clustered`` are re-clustered; null for never.
        precision: Arithmetic of the networks: ``bf16`` for autocast, ``fp32``, ``tf32`` for float32 whose products of
            matrices a GPU computes from 10 bits of each factor's fraction, or ``auto`` for bf16 where every
            rank's device multiplies matrices faster in it, else fp32.
        device: Type of the ranks' devices: ``cpu``, ``cuda``, or ``auto`` for CUDA where there is a device.
        quantized_comms: Rounding of composed vectors and their gradients while they are sent.
        log_every: Steps between two lines of metrics.
        loggers: Where metrics go beside ``metrics.jsonl``: any of ``tensorboard``, ``wandb``, ``mlflow``, or a name
            that was added to ``distembed.training.loggers.LOGGERS``.
        evaluate_every: Steps between two evaluations on the validation split; 0 for the end of each epoch only.
        stop_after_evaluations: Number of evaluations in a row without a better value of the task's headline metric
            after which training stops; null for never.
        min_improvement: Difference by which a better value exceeds the best one.
        keep_best: Whether the checkpoint of the best evaluation is kept beside the newest ones, and is the one that the
            final evaluation and everything later is made with.
        checkpoint_every: Steps between two checkpoints; 0 for the end of each epoch only.
        keep_checkpoints: Number of the newest checkpoints that are not removed.
        checkpoint_dir: Folder for checkpoints, relative to the run's if not absolute, or any URL that fsspec knows,
            for example ``s3://bucket/folder``; null for ``checkpoints`` in the run's folder.
        half_life_days: Age in days at which a training row weighs half as much in the loss as the newest row; null for
            no weights by age. See :mod:`distembed.data.reader.age`.
        init_from: Folder of a run, or folder or URL of one of its checkpoints, whose weights and optimizer states
            training begins with; null for initial weights.
    """

    batch_size: Count = 128
    epochs: Count = 1
    max_steps: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    dense_optimizer: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    sparse_optimizer: SparseOptimizerConfig = field(default_factory=SparseOptimizerConfig)
    ema: EMAConfig | None = None
    recluster: ReclusterConfig | None = None
    precision: Literal["auto", "bf16", "tf32", "fp32"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    quantized_comms: QuantizedCommsConfig = field(default_factory=QuantizedCommsConfig)
    log_every: Count = 100
    loggers: Annotated[list[Annotated[str, AfterValidator(_known_logger)]], AfterValidator(_named_once)] = field(
        default_factory=lambda: ["tensorboard"]
    )
    evaluate_every: Interval = 0
    stop_after_evaluations: Count | None = None
    min_improvement: NonNegativeNumber = 0.0
    keep_best: bool = False
    checkpoint_every: Interval = 0
    keep_checkpoints: Count = 2
    checkpoint_dir: Annotated[str, Field(min_length=1)] | None = None
    half_life_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    init_from: Annotated[str, Field(min_length=1)] | None = None

    @property
    def table_optimizers(self) -> TableOptimizers:
        """The names of the optimizers that train the tables, and whether FBGEMM fuses the sparse one."""
        return TableOptimizers(self.sparse_optimizer.name, self.dense_optimizer.name, self.sparse_optimizer.is_fused)

    @property
    def compares_evaluations(self) -> bool:
        """Whether evaluations decide which checkpoint is kept, or when training ends."""
        return self.keep_best or self.stop_after_evaluations is not None


@dataclass(frozen=True)
class DueSteps:
    """The steps after which a run evaluates and saves: at the intervals of ``train``, and after each epoch and the run.

    ``evaluates`` tells whether there is a split to evaluate on while training; ``evictions`` are the numbers of steps
    between evictions of tables with managed ids.
    """

    train: TrainConfig
    batches_per_epoch: int
    num_steps: int
    evaluates: bool
    evictions: Collection[int] = ()

    def checkpoint(self, step: int) -> bool:
        return self._is_due(step, self.train.checkpoint_every)

    def evaluation(self, step: int) -> bool:
        return self.evaluates and self._is_due(step, self.train.evaluate_every)

    def evaluation_before_checkpoint(self, step: int) -> bool:
        """Whether the checkpoint of ``step`` has to wait for the evaluation of ``step``, whose outcome it stores."""
        return self.train.compares_evaluations and self.evaluation(step)

    def clustering(self, step: int) -> bool:
        """Whether tables are re-clustered at the end of a step."""
        return self.train.recluster is not None and self.train.recluster.is_due(step)

    def require_clusterings(self) -> None:
        """Raises a :class:`UserError` if ``train.recluster`` is set and is due after no step."""
        recluster = self.train.recluster
        if recluster is not None and not self._clusterings:
            raise UserError(
                f"train.recluster never clusters: every is {recluster.every}, until is {recluster.until}, and the run "
                f"has {self.num_steps} steps; lower every to at most the others, or leave train.recluster out."
            )

    def notes_on_clusterings(self) -> Iterator[str]:
        """Yields a line for a clustering after which the run does not train, or is evaluated at once."""
        if self.num_steps in self._clusterings:
            yield (
                f"note: tables are re-clustered after the last step, {self.num_steps}, and end as bare centroids; set "
                "train.recluster.until to an earlier step"
            )
        both = next((step for step in islice(self._clusterings, 10_000) if self.evaluation(step)), None)
        if both is not None:
            yield (
                f"note: step {both} ends with a clustering, and its evaluation is of bare centroids; choose "
                "train.recluster.every and train.evaluate_every without common steps"
            )

    @property
    def _clusterings(self) -> range:
        """The steps after which tables are re-clustered."""
        if self.train.recluster is None:
            return range(0)
        every, until = self.train.recluster.every, self.train.recluster.until
        return range(every, min(self.num_steps, until or self.num_steps) + 1, every)

    def next_step(self, step: int) -> int:
        """Returns the step after which something is due next."""
        ends = [self.num_steps, (step // self.batches_per_epoch + 1) * self.batches_per_epoch]
        every = 0 if self.train.recluster is None else self.train.recluster.every
        intervals = self.train.evaluate_every, self.train.checkpoint_every, every, *self.evictions
        return min([*ends, *((step // every + 1) * every for every in intervals if every)])

    def _is_due(self, step: int, every: int) -> bool:
        """Returns whether an action of this interval is due; 0 is for the end of each epoch only."""
        at_epoch_end = step % self.batches_per_epoch == 0 or step == self.num_steps
        return step > 0 and (at_epoch_end or (every > 0 and step % every == 0))


@dataclass(frozen=True)
class BestEvaluation:
    """The best evaluation on the validation split until now.

    Attributes:
        step: Number of steps until it; None before any.
        value: Its headline metric; None before any.
        last_step: Number of steps until the last evaluation; 0 before any.
        evaluations_since: Number of evaluations since the best one whose metric is defined.
    """

    step: int | None = None
    value: float | None = None
    last_step: int = 0
    evaluations_since: int = 0

    def after(self, step: int, value: float, metric: ReportedMetric, min_improvement: float) -> "BestEvaluation":
        """Returns the best evaluation after a further one.

        A step that was counted before changes nothing. A value that is not finite is neither better nor worse.

        Args:
            step: Number of steps until the evaluation.
            value: Its headline metric.
            metric: The headline metric; it says whether higher or lower values are better.
            min_improvement: The difference by which a better value exceeds the best one.
        """
        if step <= self.last_step:
            return self
        if not math.isfinite(value):
            return dataclasses.replace(self, last_step=step)
        if self._is_better(value, metric.better, min_improvement):
            return BestEvaluation(step, value, last_step=step)
        return dataclasses.replace(self, last_step=step, evaluations_since=self.evaluations_since + 1)

    def _is_better(self, value: float, better: Literal["higher", "lower"] | None, min_improvement: float) -> bool:
        if self.value is None:
            return True
        improvement = value - self.value if better == "higher" else self.value - value
        return improvement > min_improvement

    def is_reason_to_stop(self, train: TrainConfig) -> bool:
        """Returns whether training stops, since none of the last evaluations was better."""
        if self.step is None or train.stop_after_evaluations is None:
            return False
        return self.evaluations_since >= train.stop_after_evaluations

    def reason_to_stop(self, metric: ReportedMetric) -> str:
        """Returns why training stops, in words."""
        return (
            f"stopped: {self.evaluations_since} evaluations in a row had no better {metric.name} than step {self.step}"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns plain values, which :meth:`from_json` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> "BestEvaluation":
        """Returns the evaluation of :meth:`to_json`; one before any evaluation where a run has recorded none."""
        return cls() if values is None else cls(**values)


def require_comparable(metric: ReportedMetric) -> None:
    """Refuses a headline metric without a better direction."""
    if metric.better is None:
        raise UserError(
            f"train.keep_best and train.stop_after_evaluations compare evaluations by {metric.name!r}, of which "
            "neither higher nor lower values are better; leave both out for this task."
        )
