"""The ``task`` section of a config: one frozen pydantic dataclass for each task, which builds it.

They are apart from the tasks, so that a config is read and checked without torch.
"""

from dataclasses import Field as DataclassField
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, runtime_checkable

import pydantic.dataclasses
from pydantic import Strict, field_validator

from distembed.data.dataset.schema import Schema
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
