"""The section of the task ``multi``."""

import dataclasses
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field, model_validator

from distembed.base.errors import UserError
from distembed.base.lazy import imported
from distembed.base.names import STRICT, one_of
from distembed.data.dataset.schema import Label, LabelKind, Schema
from distembed.optim.config import NonNegativeNumber
from distembed.tasks.click_config import NEED_BOTH_LABELS, ClickLossConfig
from distembed.tasks.rating_config import NumberConfig

if TYPE_CHECKING:
    from distembed.tasks.base import Task

CVR_AUC = "cvr_auc"
"""Name of the AUC of p(label) / p(label before it), among rows in which the label before it is 1."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class LabelConfig(ClickLossConfig, NumberConfig):
    """The settings of a label: the settings of its kind, binary or number, and these.

    Attributes:
        weight: Factor on the label's loss.
        after: For a binary label, the name of the binary label that precedes it, such as the click before a
            conversion: the label is 1 in rows where both are 1, and 0 in rows where the other is 0, also if the label
            is missing there. The other label may be after a third one. Null for the label as it is.
    """

    weight: NonNegativeNumber = 1.0
    after: Annotated[str, Field(min_length=1)] | None = None

    def settings(self, kind: type) -> dict[str, Any]:
        """Returns the settings of a kind of label, ``ClickLossConfig`` or ``NumberConfig``, by name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(kind)}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class MultiConfig:
    """The section of :class:`distembed.tasks.MultiTask`.

    Attributes:
        name: The task's name, ``multi``.
        labels: The settings of each label that the model learns, by name; empty for all labels of the dataset. A run's
            config names the labels that it learns.
        headline: Name of the metric by which models are compared, such as ``click.auc``; null for the AUC or RMSE of
            the first label, in the dataset's order.
    """

    takes: ClassVar[str] = "multi_logits"
    weighs_rows: ClassVar[bool] = True
    name: Literal["multi"] = "multi"
    labels: dict[str, LabelConfig] = field(default_factory=dict)
    headline: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _no_label_is_after_itself(self) -> "MultiConfig":
        for name in self.labels:
            chain = [name]
            while chain[-1] in self.labels and (after := self.labels[chain[-1]].after) is not None:
                if after in chain:
                    raise ValueError(
                        f"labels are after one another in a circle, {', '.join(chain)}; leave out the after of one"
                    )
                chain.append(after)
        return self

    def build_for(self, schema: Schema) -> "Task":
        """Builds the task for a dataset's columns."""
        task: Task = imported("distembed.tasks.multi:MultiTask")(self, schema)
        return task

    def with_labels(self, schema: Schema) -> "MultiConfig":
        """Returns the section with each label that the model learns in ``labels``."""
        labels = {label.name: self.labels.get(label.name, LabelConfig()) for label in self.chosen_labels(schema)}
        return dataclasses.replace(self, labels=labels)

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the dataset's columns, of its labels only the ones that the model learns."""
        labels = self.chosen_labels(schema)
        if len(labels) > 1:
            return dataclasses.replace(schema, labels=labels)
        return dataclasses.replace(schema, label=labels[0].name, label_kind=labels[0].kind, labels=())

    def labels_to_read(self, schema: Schema) -> tuple[str, ...]:
        """Returns the names of the labels that the model learns and of the labels that these are after."""
        after = [label.after for label in self.labels.values() if label.after is not None]
        return tuple(dict.fromkeys([*(label.name for label in self.chosen_labels(schema)), *after]))

    def headline_label(self, schema: Schema) -> tuple[Label, bool]:
        """Returns the label of the headline metric, and whether the metric needs rows with the labels 0 and 1."""
        labels = self.chosen_labels(schema)
        if self.headline is None:
            return labels[0], labels[0].kind == "binary"
        name, _, metric = self.headline.rpartition(".")
        names = [label.name for label in labels]
        needs_both = metric in (*NEED_BOTH_LABELS, CVR_AUC)
        return labels[names.index(one_of("label of task.headline", name, names))], needs_both

    def chosen_labels(self, schema: Schema) -> tuple[Label, ...]:
        """Returns the labels that the model learns, in the dataset's order.

        Raises:
            UserError: The dataset has no label, lacks one, or has another kind of label than the settings are for.
        """
        if not schema.all_labels:
            raise UserError(
                "task.name is 'multi', and the rows of this dataset have no label; prepare the data with "
                "`labels: {click: {}, rating: {kind: number}}` in the schema."
            )
        kinds = {label.name: label.kind for label in schema.all_labels}
        for name, settings in self.labels.items():
            _check_kind(one_of("label of task.labels", name, kinds), settings, kinds)
        chosen = tuple(label for label in schema.all_labels if not self.labels or label.name in self.labels)
        for name in (label.name for label in chosen):
            if f"{name}.label" in [label.name for label in chosen]:
                raise UserError(
                    f"the labels {name!r} and '{name}.label' cannot be learned together, since predictions have the "
                    f"label {name!r} in a column '{name}.label'; rename one in the schema, or leave it out of "
                    "task.labels."
                )
        return chosen


def _check_kind(name: str, label: LabelConfig, kinds: dict[str, LabelKind]) -> None:
    """Refuses settings of the other kind of label, and an ``after`` that is not another binary label."""
    defaults = LabelConfig()
    other = ClickLossConfig if kinds[name] == "number" else NumberConfig
    names = [*(each.name for each in dataclasses.fields(other)), *(["after"] if kinds[name] == "number" else [])]
    wrong = [each for each in names if getattr(label, each) != getattr(defaults, each)]
    if wrong:
        own = ClickLossConfig if kinds[name] == "binary" else NumberConfig
        allowed = ["weight", *(each.name for each in dataclasses.fields(own))]
        raise UserError(
            f"task.labels.{name} has {', '.join(wrong)}, and the label's kind is {kinds[name]!r}, which takes "
            f"{', '.join(allowed)}{', after' if kinds[name] == 'binary' else ''}; leave {wrong[0]} out."
        )
    if label.after is not None:
        binary = [other_name for other_name, kind in kinds.items() if kind == "binary" and other_name != name]
        one_of(f"task.labels.{name}.after, the name of another binary label,", label.after, binary)
