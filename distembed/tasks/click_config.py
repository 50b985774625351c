"""The section of the task ``click``."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field, model_validator

from distembed.base.errors import UserError
from distembed.base.lazy import imported
from distembed.base.names import STRICT, nearest
from distembed.base.units import enumerate_names
from distembed.data.dataset.schema import Schema
from distembed.tasks.config import require_one_label

if TYPE_CHECKING:
    from distembed.tasks.base import Task
    from distembed.tasks.binary_metrics import Floats


NEED_BOTH_LABELS = ("auc", "gauc", "normalized_entropy")
"""Metrics of clicks that are defined only on rows with the labels 0 and 1."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ClickLossConfig:
    """The settings of the loss of a label of 0 and 1.

    Attributes:
        label_smoothing: The share e of the training labels that is taken away: y (1 - e) + e / 2 in the place of y.
        positive_weight: Factor on the training loss of rows with the label 1.
        focal_gamma: The power g of the focal loss (Lin et al., ICCV 2017): the training loss of a row is multiplied by
            (1 - p)^g, where p is the predicted probability of its label. 0 for the usual loss.
    """

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    positive_weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    focal_gamma: Annotated[float, Field(ge=0, le=100)] = 0.0


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ClickConfig(ClickLossConfig):
    """The section of :class:`distembed.tasks.ClickTask`.

    Attributes:
        name: The task's name, ``click``.
        group: Name of a single-valued feature, for example the user, within whose values the metric ``gauc`` orders
            clicks; null for no GAUC. Rows whose value is missing or out of vocabulary are in no group.
        headline: Name of the metric by which models are compared; ``gauc`` with a group alone.
    """

    takes: ClassVar[str] = "logits"
    weighs_rows: ClassVar[bool] = True
    name: Literal["click"] = "click"
    group: Annotated[str, Field(min_length=1)] | None = None
    headline: Literal["auc", "gauc", "logloss", "normalized_entropy"] = "auc"

    @model_validator(mode="after")
    def _headline_is_computed(self) -> "ClickConfig":
        if self.headline == "gauc" and self.group is None:
            raise ValueError("headline is 'gauc', which needs a group; name a feature as group, such as the user")
        return self

    def build(self) -> "Task":
        task: Task = imported("distembed.tasks.click:ClickTask")(self)
        return task

    @property
    def needs_both_labels(self) -> bool:
        """Whether the headline metric is defined only on rows with and without clicks."""
        return self.headline in NEED_BOTH_LABELS

    def check_labels(self, labels: "Floats", where: str) -> None:
        """Refuses labels other than 0 and 1, also fractions, for which no AUC is defined."""
        require_binary(
            labels,
            f"task.name is 'click', which takes labels of 0 and 1, and {where}",
            "Prepare the data with `label: {column: ..., at_least: 4}` in the schema, which makes 0 and 1 of numbers; "
            "or predict the number by task={name: rating} and model.name=mf.",
        )

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the dataset's columns; it refuses several labels, and a group that is no single-valued feature."""
        require_one_label(self.name, schema)
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


def require_binary(labels: "Floats", rule: str, remedy: str) -> None:
    """Refuses labels [N] other than 0, 1 and NaN, with the rule that they break, up to their place, and the remedy."""
    is_wrong = (labels != 0) & (labels != 1) & (labels == labels)
    if is_wrong.any():
        wrong_labels = [f"{value:g}" for value in sorted(set(labels[is_wrong].tolist()))]
        raise UserError(f"{rule} has {enumerate_names(wrong_labels, most=5)}. {remedy}")
