"""Settings that the sections of the tasks share which rank items."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import pydantic.dataclasses
from pydantic import AfterValidator, Field, model_validator

from distembed.base.errors import UserError
from distembed.base.names import STRICT, nearest
from distembed.base.validation import Count
from distembed.data.dataset.schema import Schema
from distembed.tasks.config import require_one_label
from distembed.tasks.reported_metrics import ranking_metric_names


def _rising(cutoffs: list[int]) -> list[int]:
    if cutoffs != sorted(set(cutoffs)):
        raise ValueError(f"cutoffs is {cutoffs}; give each number once, in rising order")
    return cutoffs


Cutoffs = Annotated[list[Count], Field(min_length=1), AfterValidator(_rising)]
"""The numbers k of metrics of the best k items."""


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class RecommendingConfig:
    """The settings that all sections of tasks that rank items share.

    Attributes:
        kinds: Kinds of metrics that the task reports.
        cutoffs: The numbers k of the metrics, in rising order.
        exclude_seen: Whether evaluations and predictions leave out items that the user has in the splits before the one
            to predict, or in a list before the item to predict; ``auto`` leaves them out unless users repeat items.
            A run's config has the decision in the place of ``auto``: see :mod:`distembed.tasks.seen_items`. Runs of
            earlier versions have none: they exclude seen items.
        headline: Name of the metric by which models are compared; null for the first kind at the last cutoff.
    """

    kinds: ClassVar[tuple[str, ...]]

    name: str = ""
    cutoffs: Cutoffs = dataclasses.field(default_factory=lambda: [1, 5, 10])
    exclude_seen: Literal["auto"] | bool = "auto"
    headline: str | None = None

    @model_validator(mode="after")
    def _headline_is_computed(self) -> "RecommendingConfig":
        known = self.metric_names
        if self.headline is not None and self.headline not in known:
            guess = nearest(self.headline, known)
            hint = "" if guess is None else f" (did you mean {guess!r}?)"
            raise ValueError(f"headline is {self.headline!r}, which is not known{hint}; known: {', '.join(known)}")
        return self

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics that the task computes."""
        return ranking_metric_names(self.kinds, self.cutoffs)

    @property
    def excludes_seen(self) -> bool:
        """Whether seen items are left out, in a run that has started."""
        return self.exclude_seen is not False

    def require_plain_rows(self, schema: Schema) -> None:
        """Refuses rows with weights, which the task would not look at, and rows with several labels."""
        if schema.weight is not None:
            raise UserError(
                f"task.name is {self.name!r}, which takes all rows alike, and the rows of this dataset have weights, "
                f"in the column {schema.weight!r}; make a dataset without them."
            )
        require_one_label(self.name, schema)

    def require_items(self, num_items: int) -> None:
        """Refuses metrics of longer lists than there are items."""
        if self.cutoffs[-1] > num_items:
            raise UserError(
                f"task.cutoffs has {self.cutoffs[-1]:,}, above the {num_items:,} ids of this dataset's items; lower it."
            )
