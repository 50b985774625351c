"""The section of the task ``next_item``."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import Field, model_validator

from distembed.base.errors import UserError
from distembed.base.lazy import imported
from distembed.base.names import STRICT
from distembed.base.validation import Count
from distembed.data.dataset.schema import ITEM, ITEM_NEGATIVE, ITEM_TARGET, Schema
from distembed.optim.config import NonNegativeNumber
from distembed.tasks.recommending_config import RecommendingConfig
from distembed.tasks.reported_metrics import ranking_metric_names

if TYPE_CHECKING:
    from distembed.tasks.base import Task

SAMPLED_KINDS = ("ndcg", "hr")
"""Kinds of metrics that the task reports among drawn items."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class NextItemConfig(RecommendingConfig):
    """The section of :class:`distembed.tasks.NextItemTask`; the metric is the NDCG at the last cutoff unless set.

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
    """

    takes: ClassVar[str] = "sequences"
    kinds = ("ndcg", "hr", "mrr")
    name: Literal["next_item"] = "next_item"
    max_length: Count = 50
    loss: Literal["softmax", "sampled_softmax", "binary"] = "softmax"
    negatives: Literal["drawn", "in_batch"] = "drawn"
    num_negatives: Annotated[int, Field(gt=0, le=10_000)] = 1
    negative_exponent: NonNegativeNumber = 0.0
    sampled_candidates: Annotated[int, Field(ge=0, le=10_000)] = 100

    @model_validator(mode="after")
    def _negatives_fit_loss_and_cutoffs(self) -> "NextItemConfig":
        if self.negatives == "in_batch" and self.loss != "sampled_softmax":
            raise ValueError(f"negatives is in_batch, which loss {self.loss} does not support; use sampled_softmax")
        if 0 < self.sampled_candidates < self.cutoffs[-1]:
            raise ValueError(
                f"sampled_candidates is {self.sampled_candidates}, among which no target could miss the first "
                f"{self.cutoffs[-1]} of cutoffs; draw more candidates, or give 0 for none"
            )
        return self

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that the task computes."""
        return super().metric_names + self._sampled_metrics

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

    def build(self) -> "Task":
        task: Task = imported("distembed.tasks.next_item:NextItemTask")(self)
        return task

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the dataset's columns with lists cut to ``max_length``, and columns of targets and drawn negatives.

        Raises:
            UserError: The dataset has no sequences of items, or has weights or several labels, or a cutoff exceeds its
                items.
        """
        self.require_plain_rows(schema)
        items = next((feature for feature in schema.categorical if feature.name == ITEM and feature.multi_hot), None)
        if items is None:
            raise UserError(
                f"task.name is 'next_item', and this dataset has no lists of the feature {ITEM!r}; make one with "
                "`distembed prepare sequences`."
            )
        self.require_items(items.num_embeddings)
        per_row = min(max(items.mean_ids_per_row - 1, 0.0), self.max_length)
        input_features = [
            dataclasses.replace(feature, mean_ids_per_row=per_row, max_ids_per_row=self.max_length)
            if feature.multi_hot
            else feature
            for feature in schema.categorical
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
        target_features = [target, negative] if self.draws_negatives else [target]
        return dataclasses.replace(schema, categorical=(*input_features, *target_features))
