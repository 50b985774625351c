"""The section of the task ``ranking``."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.base.errors import UserError
from distembed.base.lazy import imported
from distembed.base.names import STRICT
from distembed.data.dataset.schema import ITEM, ITEM_NEGATIVE, USER, CategoricalFeature, Schema
from distembed.optim.config import NonNegativeNumber
from distembed.tasks.recommending_config import RecommendingConfig

if TYPE_CHECKING:
    from distembed.tasks.base import Task


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class RankingConfig(RecommendingConfig):
    """The section of :class:`distembed.tasks.RankingTask`; the metric is the NDCG at the last cutoff unless set.

    Attributes:
        name: The task's name, ``ranking``.
        regularization: Factor of the squares of a row's vectors in its loss.
        num_negatives: Number of negative items of each row.
        negative_exponent: Power of an item's number of users with which negative items are drawn: 0 for uniformly, 1
            for by frequency.
    """

    takes: ClassVar[str] = "pairs"
    kinds = ("ndcg", "hr", "precision", "mrr")
    name: Literal["ranking"] = "ranking"
    regularization: NonNegativeNumber = 0.0
    num_negatives: Annotated[int, Field(gt=0, le=10_000)] = 1
    negative_exponent: NonNegativeNumber = 0.0

    def build(self) -> "Task":
        task: Task = imported("distembed.tasks.ranking:RankingTask")(self)
        return task

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the dataset's columns and the negative items, which are looked up in the table of items.

        Raises:
            UserError: The dataset has no users or items, or several in a row, or weights, or several labels, or a
                cutoff exceeds its items.
        """
        self.require_plain_rows(schema)
        features = {feature.name: feature for feature in schema.categorical}
        for name in (USER, ITEM):
            if name not in features or features[name].multi_hot:
                raise UserError(
                    f"task.name is 'ranking', which takes one {name} of each row, and the rows of this dataset have "
                    f"{'several' if name in features else 'none'}; make a dataset with `distembed prepare ratings`."
                )
        multi_hot, num_items = self.num_negatives > 1, features[ITEM].num_embeddings
        self.require_items(num_items)
        negatives = CategoricalFeature(ITEM_NEGATIVE, num_items, multi_hot, float(self.num_negatives), table=ITEM)
        return dataclasses.replace(schema, categorical=(*schema.categorical, negatives))
