"""The ``task`` section of a config: one frozen pydantic dataclass for each task, which builds it.

They are apart from the tasks, so that a config is read and checked without torch.
"""

import dataclasses
from dataclasses import Field as DataclassField
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import pydantic.dataclasses
from pydantic import Field, Strict, field_validator

from distembed.bounds import Count
from distembed.data.dataset.schema import ITEM, ITEM_NEGATIVE, USER, CategoricalFeature, Schema
from distembed.errors import UserError
from distembed.names import STRICT
from distembed.optim.config import NonNegativeNumber

if TYPE_CHECKING:
    from distembed.tasks.base import Task


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
    """The section of :class:`distembed.tasks.ClickTask`, which has no settings."""

    takes: ClassVar[str] = "logits"
    name: Literal["click"] = "click"

    def build(self) -> "Task":
        """Builds the task."""
        from distembed.tasks.click import ClickTask

        return ClickTask()


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class RatingConfig:
    """The section of :class:`distembed.tasks.RatingTask`.

    Attributes:
        name: The task's name, ``rating``.
        regularization: What the squares of the vectors that a row looks up are multiplied by in its loss.
        subtract_mean: Whether the model predicts by how much a rating differs from the mean of the training ratings,
            rather than the rating.
        clip: The lowest and the highest rating that is predicted in evaluations; null for any number.
    """

    takes: ClassVar[str] = "pairs"
    name: Literal["rating"] = "rating"
    regularization: NonNegativeNumber = 0.0
    subtract_mean: bool = True
    clip: Annotated[tuple[float, float], Strict(False)] | None = None  # YAML has no tuples

    @field_validator("clip")
    @classmethod
    def _rising(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"clip is {list(value)}; give the lowest rating, then the highest")
        return value

    def build(self) -> "Task":
        """Builds the task."""
        from distembed.tasks.rating import RatingTask

        return RatingTask(self.regularization, self.subtract_mean, self.clip)

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
        cutoffs: The numbers k of the metrics, in rising order; models are compared by the NDCG at the last one.
    """

    takes: ClassVar[str] = "pairs"
    name: Literal["ranking"] = "ranking"
    regularization: NonNegativeNumber = 0.0
    num_negatives: Annotated[int, Field(gt=0, le=10_000)] = 1
    negative_exponent: NonNegativeNumber = 0.0
    cutoffs: Annotated[list[Count], Field(min_length=1)] = dataclasses.field(default_factory=lambda: [1, 5, 10])

    @field_validator("cutoffs")
    @classmethod
    def _rising(cls, value: list[int]) -> list[int]:
        if value != sorted(set(value)):
            raise ValueError(f"cutoffs is {value}; give each number once, in rising order")
        return value

    def build(self) -> "Task":
        """Builds the task."""
        from distembed.tasks.ranking import RankingTask

        return RankingTask(self)

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the columns of the dataset and the negative items, which are looked up in the table of items.

        Raises:
            UserError: The dataset has no users or no items, or several in a row, or a cutoff is above its items.
        """
        features = {feature.name: feature for feature in schema.categorical}
        for name in (USER, ITEM):
            if name not in features or features[name].multi_hot:
                raise UserError(
                    f"task.name is 'ranking', which takes one {name} of each row, and the rows of this dataset have "
                    f"{'several' if name in features else 'none'}; make a dataset with `distembed prepare ratings`."
                )
        several, num_items = self.num_negatives > 1, features[ITEM].num_embeddings
        if self.cutoffs[-1] > num_items:
            raise UserError(
                f"task.cutoffs has {self.cutoffs[-1]:,}, and this dataset has {num_items:,} items; lower it."
            )
        negatives = CategoricalFeature(ITEM_NEGATIVE, num_items, several, float(self.num_negatives), table=ITEM)
        return dataclasses.replace(schema, categorical=(*schema.categorical, negatives))
