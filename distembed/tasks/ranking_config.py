"""The section of the task ``ranking``."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field, model_validator

from distembed.base.errors import UserError
from distembed.base.lazy import imported
from distembed.base.names import STRICT
from distembed.data.dataset.schema import ITEM, ITEM_NEGATIVE, USER, CategoricalFeature, Schema
from distembed.optim.config import NonNegativeNumber
from distembed.tasks.config import (
    Cutoffs,
    ExcludeSeen,
    require_among,
    require_below,
    require_no_weights,
    require_one_label,
)
from distembed.tasks.reported_metrics import ranking_metric_names

if TYPE_CHECKING:
    from distembed.tasks.base import Task

RANKING_KINDS = ("ndcg", "hr", "precision", "mrr")
"""Kinds of metrics that the task reports."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class RankingConfig:
    """The section of :class:`distembed.tasks.RankingTask`.

    Attributes:
        name: The task's name, ``ranking``.
        regularization: Factor of the squares of a row's vectors in its loss.
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
        require_among(self.headline, ranking_metric_names(RANKING_KINDS, self.cutoffs))
        return self

    @property
    def excludes_seen(self) -> bool:
        """Whether seen items are left out, in a run that has started."""
        return self.exclude_seen is not False

    def build(self) -> "Task":
        task: Task = imported("distembed.tasks.ranking:RankingTask")(self)
        return task

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the dataset's columns and the negative items, which are looked up in the table of items.

        Raises:
            UserError: The dataset has no users or items, or several in a row, or weights, or several labels, or a
                cutoff exceeds its items.
        """
        require_no_weights(self.name, schema)
        require_one_label(self.name, schema)
        features = {feature.name: feature for feature in schema.categorical}
        for name in (USER, ITEM):
            if name not in features or features[name].multi_hot:
                raise UserError(
                    f"task.name is 'ranking', which takes one {name} of each row, and the rows of this dataset have "
                    f"{'several' if name in features else 'none'}; make a dataset with `distembed prepare ratings`."
                )
        multi_hot, num_items = self.num_negatives > 1, features[ITEM].num_embeddings
        require_below(self.cutoffs, num_items)
        negatives = CategoricalFeature(ITEM_NEGATIVE, num_items, multi_hot, float(self.num_negatives), table=ITEM)
        return dataclasses.replace(schema, categorical=(*schema.categorical, negatives))
