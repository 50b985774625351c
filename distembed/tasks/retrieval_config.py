"""The section of the task ``retrieval``."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

import pydantic.dataclasses
from pydantic import model_validator

from distembed.base.errors import UserError
from distembed.base.lazy import imported
from distembed.base.names import STRICT, one_of
from distembed.base.validation import Count
from distembed.data.dataset.schema import USER, Schema
from distembed.optim.config import NonNegativeNumber
from distembed.tasks.pair_columns import PairColumns
from distembed.tasks.recommending_config import Cutoffs, RecommendingConfig

if TYPE_CHECKING:
    from distembed.models.config import ItemModelConfig
    from distembed.tasks.base import Task


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class RetrievalConfig(RecommendingConfig):
    """The section of :class:`distembed.tasks.RetrievalTask`; the metric is the recall at the last cutoff unless set.

    Attributes:
        name: The task's name, ``retrieval``.
        loss: ``in_batch``, a softmax over the items of a step's rows; or ``sampled``, over these and drawn items.
        num_negatives: Number of items that ``sampled`` draws for a step, which all rows of the step share.
        negative_exponent: Power of an item's number of training pairs with which ``sampled`` draws items: 0 for
            uniformly, 1 for by frequency. An item without a pair is drawn as if it had one.
        user: The categorical feature that tells users apart: an evaluation has a query for each user, and
            ``exclude_seen`` leaves out a user's items. Null for a query for each row, and no seen items.
        item: The feature whose ids are the items; it is taken from ``model.item``.
        item_features: The item's other features; they are taken from ``model.item_features``.
    """

    takes: ClassVar[str] = "towers"
    kinds = ("recall", "ndcg", "hr", "mrr")
    name: Literal["retrieval"] = "retrieval"
    loss: Literal["in_batch", "sampled"] = "in_batch"
    num_negatives: Count = 1024
    negative_exponent: NonNegativeNumber = 0.0
    user: str | None = USER
    cutoffs: Cutoffs = dataclasses.field(default_factory=lambda: [10, 100])
    item: str | None = None
    item_features: list[str] | None = None

    @model_validator(mode="after")
    def _settings_fit(self) -> "RetrievalConfig":
        if self.loss == "in_batch":
            for name, default in (("num_negatives", 1024), ("negative_exponent", 0.0)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name} is {getattr(self, name)} and loss is in_batch, which draws no items: set loss to "
                        f"sampled, or leave {name} out"
                    )
        if self.user is None and self.exclude_seen is True:
            raise ValueError(
                "exclude_seen is true and user is null, so that no items of a user are known: set user to the feature "
                "of users, or exclude_seen to false"
            )
        return self

    @property
    def excludes_seen(self) -> bool:
        """Whether seen items are left out, in a run that has started."""
        return self.user is not None and self.exclude_seen is not False

    @property
    def item_name(self) -> str:
        """The feature whose ids are the items."""
        assert self.item is not None, "a config takes it from the model's section"
        return self.item

    @property
    def item_side(self) -> list[str]:
        """The item and its other features."""
        return [self.item_name, *(self.item_features or ())]

    def user_side(self, schema: Schema) -> list[str]:
        """Returns the dataset's features that are not the item's."""
        return [name for name in (*schema.categorical_names, *schema.dense) if name not in self.item_side]

    def for_model(self, model: "ItemModelConfig") -> "RetrievalConfig":
        """Returns the section with the model's ``item`` and ``item_features``; refuses others."""
        for name in ("item", "item_features"):
            task_value, model_value = getattr(self, name), getattr(model, name)
            if task_value is not None and task_value != model_value:
                raise ValueError(
                    f"task.{name} is {task_value!r} and model.{name} is {model_value!r}; set model.{name}, and leave "
                    f"task.{name} out"
                )
        return dataclasses.replace(self, item=model.item, item_features=model.item_features)

    def pair_columns(self, schema: Schema) -> PairColumns:
        """Returns the columns of users and items, and of labels that are 0 or 1."""
        label = schema.label if schema.label_kind == "binary" else None
        return PairColumns(self.user, self.item_name, label)

    def build(self) -> "Task":
        task: Task = imported("distembed.tasks.retrieval:RetrievalTask")(self)
        return task

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the dataset's columns and a weight of each row of a query.

        Raises:
            UserError: The dataset lacks the item or the user, or has several of them in a row, or weights, or several
                labels, or a cutoff exceeds its items.
        """
        self.require_plain_rows(schema)
        features = {feature.name: feature for feature in schema.categorical}
        for setting, name in (("model.item", self.item_name), ("task.user", self.user)):
            if name is None:
                continue
            if name not in features:
                remedy = ", or set it to null for a query for each row" if setting == "task.user" else ""
                one_of(f"{setting} (name a feature of the dataset{remedy})", name, features)
            if features[name].multi_hot:
                raise UserError(f"{setting} is {name!r}, a list in each row; name a feature with one id a row.")
        if self.user in self.item_side:
            raise UserError(f"task.user is {self.user!r}, which is a feature of the item; name a feature of users.")
        self.require_items(features[self.item_name].num_embeddings)
        weight = "weight"
        while weight in schema.columns:
            weight += "_"
        return dataclasses.replace(schema, weight=weight)
