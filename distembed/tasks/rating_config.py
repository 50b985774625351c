"""The section of the task ``rating``."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Strict, field_validator

from distembed.base.errors import UserError
from distembed.base.lazy import imported
from distembed.base.names import STRICT
from distembed.data.dataset.schema import Schema
from distembed.optim.config import NonNegativeNumber
from distembed.tasks.config import require_one_label

if TYPE_CHECKING:
    from distembed.tasks.base import Task


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class NumberConfig:
    """The settings of a label of any number.

    Attributes:
        subtract_mean: Whether the model predicts the difference of a label from the mean of the training labels.
        clip: The lowest and the highest number that is predicted in evaluations; null for any number.
    """

    subtract_mean: bool = True
    clip: Annotated[tuple[float, float], Strict(False)] | None = None  # YAML has no tuples

    @field_validator("clip")
    @classmethod
    def _rising(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError(f"clip is {list(value)}; give the lowest rating, then the highest")
        return value


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class RatingConfig(NumberConfig):
    """The section of :class:`distembed.tasks.RatingTask`.

    Attributes:
        name: The task's name, ``rating``.
        regularization: Factor of the squares of a row's vectors in its loss.
        headline: Name of the metric by which models are compared.
    """

    takes: ClassVar[str] = "pairs"
    weighs_rows: ClassVar[bool] = True
    name: Literal["rating"] = "rating"
    regularization: NonNegativeNumber = 0.0
    headline: Literal["rmse", "mae"] = "rmse"

    def build(self) -> "Task":
        task: Task = imported("distembed.tasks.rating:RatingTask")(
            self.regularization, self.subtract_mean, self.clip, self.headline
        )
        return task

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the dataset's columns; it refuses a dataset without ratings, or with several labels."""
        require_one_label(self.name, schema)
        if schema.label is None or schema.label_kind != "number":
            raise UserError(
                "task.name is 'rating', and the rows of this dataset have "
                f"{'no label' if schema.label is None else f'a label {schema.label!r} of 0 and 1'}; make a dataset "
                "with `distembed prepare ratings`."
            )
        return schema
