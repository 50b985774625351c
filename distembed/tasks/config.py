"""The ``task`` section of a config: one frozen pydantic dataclass for each task, which builds it.

They are apart from the tasks, so that a config is read and checked without torch.
"""

import dataclasses
from dataclasses import Field as DataclassField
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import pydantic.dataclasses
from pydantic import AfterValidator, Field, Strict, field_validator, model_validator

from distembed.base.bounds import Count
from distembed.base.errors import UserError
from distembed.base.names import STRICT, nearest
from distembed.base.units import enumerate_names
from distembed.data.dataset.schema import ITEM, ITEM_NEGATIVE, ITEM_TARGET, USER, CategoricalFeature, Schema
from distembed.optim.config import NonNegativeNumber
from distembed.tasks.reported_metrics import ranking_metric_names

if TYPE_CHECKING:
    from distembed.tasks.auc import Floats
    from distembed.tasks.base import Task


def _rising(cutoffs: list[int]) -> list[int]:
    if cutoffs != sorted(set(cutoffs)):
        raise ValueError(f"cutoffs is {cutoffs}; give each number once, in rising order")
    return cutoffs


RANKING_KINDS = ("ndcg", "hr", "precision", "mrr")
NEXT_ITEM_KINDS = ("ndcg", "hr", "mrr")
SAMPLED_KINDS = ("ndcg", "hr")
"""Kinds of metrics that tasks report: of the ranking task; of next items, among all items and among drawn ones."""

ExcludeSeen = Literal["auto"] | bool
"""Whether evaluations and predictions leave out items that a user has; see :mod:`distembed.tasks.seen_items`.

A run's config has the decision in the place of ``auto``. Runs of earlier versions have none: they exclude seen items.
"""

Cutoffs = Annotated[list[Count], Field(min_length=1), AfterValidator(_rising)]
"""The numbers k of metrics of the best k items."""


class TaskConfig(Protocol):
    """A task's section of a config: a frozen pydantic dataclass that builds the task."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def name(self) -> str:
        """The task's name in ``TASKS``."""

    def build(self) -> "Task":
        """Builds the task."""


@runtime_checkable
class AddingTaskConfig(Protocol):
    """A task's section whose task adds columns to batches, such as negative items, or takes some away."""

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the columns of the batches that the model is given, of a dataset of these columns.

        Raises:
            UserError: The task cannot be learnt from such a dataset.
        """


@runtime_checkable
class LabelTaskConfig(Protocol):
    """A task's section that says which labels the task takes; of other tasks, any finite number is a label.

    Attributes:
        needs_both_labels: Whether the headline metric is defined only on rows of which some are 0 and others 1.
    """

    needs_both_labels: bool

    def check_labels(self, labels: "Floats", where: str) -> None:
        """Refuses labels that the task does not take.

        Args:
            labels: Labels of any rows [N]; NaN where a row's label is not known.
            where: The place of the rows, for the error.

        Raises:
            UserError: A label is not valid for the task.
        """


@runtime_checkable
class DeclaringTaskConfig(Protocol):
    """A task's section that says what the task takes of a model; a model that returns something else is refused.

    Attributes:
        takes: A word such as :class:`distembed.models.config.DeclaringModelConfig` has as its ``returns``.
    """

    takes: ClassVar[str]


def batch_schema(task: TaskConfig, schema: Schema) -> Schema:
    """Returns the columns of the batches that a task prepares of a dataset's rows."""
    return task.batch_schema(schema) if isinstance(task, AddingTaskConfig) else schema


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ClickConfig:
    """The section of :class:`distembed.tasks.ClickTask`.

    Attributes:
        name: The task's name, ``click``.
        group: Name of the feature within whose values clicks are ordered by the metric ``gauc``, such as the user; null
            for no such metric. Rows have one value of it, and those whose value is missing or out of vocabulary are of
            no group, since nothing says that they belong together.
        headline: Name of the metric by which models are compared; ``gauc`` with a group alone.
    """

    takes: ClassVar[str] = "logits"
    name: Literal["click"] = "click"
    group: Annotated[str, Field(min_length=1)] | None = None
    headline: Literal["auc", "gauc", "logloss", "normalized_entropy"] = "auc"

    @model_validator(mode="after")
    def _headline_is_computed(self) -> "ClickConfig":
        if self.headline == "gauc" and self.group is None:
            raise ValueError("headline is 'gauc', which needs a group; name a feature as group, such as the user")
        return self

    def build(self) -> "Task":
        """Builds the task."""
        from distembed.tasks.click import ClickTask

        return ClickTask(self)

    @property
    def needs_both_labels(self) -> bool:
        """Whether the headline metric is defined only on rows of which some are clicked and others are not."""
        return self.headline != "logloss"

    def check_labels(self, labels: "Floats", where: str) -> None:
        """Refuses labels other than 0 and 1; those between them too, of which no AUC is defined.

        Args:
            labels: Labels of any rows [N]; NaN where a row's label is not known.
            where: The place of the rows, for the error.

        Raises:
            UserError: A label is neither 0 nor 1.
        """
        is_wrong = (labels != 0) & (labels != 1) & (labels == labels)
        if is_wrong.any():
            found = [f"{value:g}" for value in sorted(set(labels[is_wrong].tolist()))]
            raise UserError(
                f"task.name is 'click', which takes labels of 0 and 1, and {where} has {enumerate_names(found, most=5)}"
                ". Prepare the data with `label: {column: ..., at_least: 4}` in the schema, which makes 0 and 1 of "
                "numbers; or predict the number by task={name: rating} and model.name=mf."
            )

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the columns of the dataset, which are all that the task needs.

        Raises:
            UserError: The group is no feature, or one of which rows have several values.
        """
        single = [feature.name for feature in schema.categorical if not feature.multi_hot]
        if self.group is not None and self.group not in single:
            is_list = self.group in schema.categorical_names
            guess = nearest(self.group, single)
            raise UserError(
                f"task.group is {self.group!r}, "
                f"{'of which rows have several values' if is_list else 'which is no feature of the dataset'}; name a "
                f"feature that has one value a row{'' if guess is None or is_list else f', such as {guess!r}'}: "
                f"{', '.join(single) or 'this dataset has none'}."
            )
        return schema


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class RatingConfig:
    """The section of :class:`distembed.tasks.RatingTask`.

    Attributes:
        name: The task's name, ``rating``.
        regularization: What the squares of the vectors that a row looks up are multiplied by in its loss.
        subtract_mean: Whether the model predicts by how much a rating differs from the mean of the training ratings,
            rather than the rating.
        clip: The lowest and the highest rating that is predicted in evaluations; null for any number.
        headline: Name of the metric by which models are compared.
    """

    takes: ClassVar[str] = "pairs"
    name: Literal["rating"] = "rating"
    regularization: NonNegativeNumber = 0.0
    subtract_mean: bool = True
    clip: Annotated[tuple[float, float], Strict(False)] | None = None  # YAML has no tuples
    headline: Literal["rmse", "mae"] = "rmse"

    @field_validator("clip")
    @classmethod
    def _rising(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"clip is {list(value)}; give the lowest rating, then the highest")
        return value

    def build(self) -> "Task":
        """Builds the task."""
        from distembed.tasks.rating import RatingTask

        return RatingTask(self.regularization, self.subtract_mean, self.clip, self.headline)

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the columns of the dataset, which are all that the task needs.

        Raises:
            UserError: The dataset has no ratings.
        """
        if schema.label is None or schema.label_kind != "number":
            raise UserError(
                "task.name is 'rating', and the rows of this dataset have "
                f"{'no label' if schema.label is None else f'a label {schema.label!r} of 0 and 1'}; make a dataset "
                "with `distembed prepare ratings`."
            )
        return schema


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class RankingConfig:
    """The section of :class:`distembed.tasks.RankingTask`.

    Attributes:
        name: The task's name, ``ranking``.
        regularization: What the squares of the vectors that a row looks up are multiplied by in its loss.
        num_negatives: Number of negative items of each row.
        negative_exponent: Power of an item's number of users with which negative items are drawn: 0 for uniformly, 1
            for by frequency.
        cutoffs: The numbers k of the metrics, in rising order.
        exclude_seen: Whether evaluations and predictions leave out the items that the user has in the splits before the
            one to predict; ``auto`` leaves them out unless users repeat items.
        headline: Name of the metric by which models are compared; null for the NDCG at the last cutoff.
    """

    takes: ClassVar[str] = "pairs"
    name: Literal["ranking"] = "ranking"
    regularization: NonNegativeNumber = 0.0
    num_negatives: Annotated[int, Field(gt=0, le=10_000)] = 1
    negative_exponent: NonNegativeNumber = 0.0
    cutoffs: Cutoffs = dataclasses.field(default_factory=lambda: [1, 5, 10])
    exclude_seen: ExcludeSeen = "auto"
    headline: str | None = None

    @model_validator(mode="after")
    def _headline_is_computed(self) -> "RankingConfig":
        _require_among(self.headline, ranking_metric_names(RANKING_KINDS, self.cutoffs))
        return self

    @property
    def excludes_seen(self) -> bool:
        """Whether seen items are left out, in a run that has started."""
        return self.exclude_seen is not False

    def build(self) -> "Task":
        """Builds the task."""
        from distembed.tasks.ranking import RankingTask

        return RankingTask(self)

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the columns of the dataset and the negative items, which are looked up in the table of items.

        Raises:
            UserError: The dataset has no users or no items, or several in a row, or a cutoff is above its items, or
                rows have weights.
        """
        _require_no_weights(self.name, schema)
        features = {feature.name: feature for feature in schema.categorical}
        for name in (USER, ITEM):
            if name not in features or features[name].multi_hot:
                raise UserError(
                    f"task.name is 'ranking', which takes one {name} of each row, and the rows of this dataset have "
                    f"{'several' if name in features else 'none'}; make a dataset with `distembed prepare ratings`."
                )
        several, num_items = self.num_negatives > 1, features[ITEM].num_embeddings
        _require_below(self.cutoffs, num_items)
        negatives = CategoricalFeature(ITEM_NEGATIVE, num_items, several, float(self.num_negatives), table=ITEM)
        return dataclasses.replace(schema, categorical=(*schema.categorical, negatives))


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class NextItemConfig:
    """The section of :class:`distembed.tasks.NextItemTask`.

    Attributes:
        name: The task's name, ``next_item``.
        max_length: Most items of a row that the model is shown, the most recent ones.
        loss: ``softmax`` over all items; ``sampled_softmax`` over the target and negatives, with their probabilities of
            being drawn corrected for; or ``binary``, which tells the target from negatives one by one.
        negatives: ``drawn`` for each target, none of them an item that its user has in training; or ``in_batch``, the
            targets of this rank's other queries, for ``sampled_softmax`` alone.
        num_negatives: Number of drawn negatives of each target.
        negative_exponent: Power of an item's number of users with which negatives are drawn: 0 for uniformly, 1 for by
            frequency.
        sampled_candidates: Number of items, uniformly drawn from all candidates but the target, among which targets are
            ranked in evaluations, beside the ranking among all; 0 for none.
        cutoffs: The numbers k of the metrics, in rising order.
        exclude_seen: Whether evaluations and predictions leave out the items that precede the one to predict; ``auto``
            leaves them out unless users repeat items.
        headline: Name of the metric by which models are compared; null for the NDCG at the last cutoff.
    """

    takes: ClassVar[str] = "sequences"
    name: Literal["next_item"] = "next_item"
    max_length: Count = 50
    loss: Literal["softmax", "sampled_softmax", "binary"] = "softmax"
    negatives: Literal["drawn", "in_batch"] = "drawn"
    num_negatives: Annotated[int, Field(gt=0, le=10_000)] = 1
    negative_exponent: NonNegativeNumber = 0.0
    sampled_candidates: Annotated[int, Field(ge=0, le=10_000)] = 100
    cutoffs: Cutoffs = dataclasses.field(default_factory=lambda: [1, 5, 10])
    exclude_seen: ExcludeSeen = "auto"
    headline: str | None = None

    @model_validator(mode="after")
    def _headline_is_computed(self) -> "NextItemConfig":
        _require_among(self.headline, ranking_metric_names(NEXT_ITEM_KINDS, self.cutoffs) + self._sampled_metrics)
        return self

    @model_validator(mode="after")
    def _negatives_fit_loss(self) -> "NextItemConfig":
        if self.negatives == "in_batch" and self.loss != "sampled_softmax":
            raise ValueError(f"negatives is in_batch, and loss {self.loss} has none of a batch; use sampled_softmax")
        if 0 < self.sampled_candidates < self.cutoffs[-1]:
            raise ValueError(
                f"sampled_candidates is {self.sampled_candidates}, among which no target could miss the first "
                f"{self.cutoffs[-1]} of cutoffs; draw more candidates, or give 0 for none"
            )
        return self

    @property
    def _sampled_metrics(self) -> list[str]:
        num_ranked = self.sampled_candidates + 1
        return ranking_metric_names(SAMPLED_KINDS, self.cutoffs, num_ranked) if self.sampled_candidates else []

    @property
    def headline_is_sampled(self) -> bool:
        """Whether the headline metric ranks targets among sampled candidates."""
        return self.headline in self._sampled_metrics

    @property
    def draws_negatives(self) -> bool:
        """Whether negatives are drawn for each target."""
        return self.loss != "softmax" and self.negatives == "drawn"

    @property
    def excludes_seen(self) -> bool:
        """Whether seen items are left out, in a run that has started."""
        return self.exclude_seen is not False

    def build(self) -> "Task":
        """Builds the task."""
        from distembed.tasks.next_item import NextItemTask

        return NextItemTask(self)

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the columns of the dataset, and those of targets and negatives.

        Raises:
            UserError: The dataset has no sequences of items, or rows have weights.
        """
        _require_no_weights(self.name, schema)
        items = next((each for each in schema.categorical if each.name == ITEM and each.multi_hot), None)
        if items is None:
            raise UserError(
                f"task.name is 'next_item', and this dataset has no lists of the feature {ITEM!r}; make one with "
                "`distembed prepare sequences`."
            )
        _require_below(self.cutoffs, items.num_embeddings)
        per_row = min(max(items.mean_ids_per_row - 1, 0.0), self.max_length)
        shown = [
            dataclasses.replace(each, mean_ids_per_row=per_row, max_ids_per_row=self.max_length)
            if each.multi_hot
            else each
            for each in schema.categorical
        ]
        target, negative = (
            dataclasses.replace(
                items,
                name=name,
                table=ITEM,
                mean_ids_per_row=per_row * count,
                max_ids_per_row=self.max_length * count,
                is_looked_up=self.loss != "softmax",
            )
            for name, count in ((ITEM_TARGET, 1), (ITEM_NEGATIVE, self.num_negatives))
        )
        added = [target, negative] if self.draws_negatives else [target]
        return dataclasses.replace(schema, categorical=(*shown, *added))


def _require_among(headline: str | None, known: list[str]) -> None:
    """Refuses a headline metric that the task does not compute."""
    if headline is not None and headline not in known:
        guess = nearest(headline, known)
        hint = "" if guess is None else f" (did you mean {guess!r}?)"
        raise ValueError(f"headline is {headline!r}, which is not known{hint}; known: {', '.join(known)}")


def _require_no_weights(task: str, schema: Schema) -> None:
    """Refuses rows with weights, which the task would not look at."""
    if schema.weight is not None:
        raise UserError(
            f"task.name is {task!r}, which takes all rows alike, and the rows of this dataset have weights, in the "
            f"column {schema.weight!r}; make a dataset without them."
        )


def _require_below(cutoffs: list[int], num_items: int) -> None:
    """Refuses metrics of longer lists than there are items."""
    if cutoffs[-1] > num_items:
        raise UserError(
            f"task.cutoffs has {cutoffs[-1]:,}, above the {num_items:,} ids of this dataset's items; lower it."
        )
