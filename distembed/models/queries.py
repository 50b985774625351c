"""What a model of users and items returns to its task: queries, and the batch's own items to score them with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float, Int64
from torch import Tensor

from distembed.models.catalogue import Catalogue


@dataclass(frozen=True)
class Items:
    """Items of a batch, as many for each query.

    Attributes:
        ids: Their ids, query after query.
        vectors: Their vectors.
    """

    ids: Int64[Tensor, " items"]
    vectors: Float[Tensor, "items dim"]


@dataclass(frozen=True)
class Queries:
    """Queries that are scored against items: the score of item i for query h is ``h . u_i + b_i + offset_h``.

    Attributes:
        vectors: The vector h of each query.
        catalogue: The items to choose from, with their biases.
        items: Items of the batch by feature, such as ``item_target`` and ``item_negative``.
        offsets: What is added to all scores of a query; None for nothing.
        looked_up: Vectors that were looked up for the batch, whose squares a task may penalise.
        known_scores: Scores that the model made already, by feature.
    """

    vectors: Float[Tensor, "queries dim"]
    catalogue: Catalogue
    items: Mapping[str, Items] = field(default_factory=dict)
    offsets: Float[Tensor, " queries"] | None = None
    looked_up: tuple[Float[Tensor, "*ids dim"], ...] = ()
    known_scores: Mapping[str, Float[Tensor, "queries items"]] = field(default_factory=dict)

    def scores(self, feature: str) -> Float[Tensor, "queries items"]:
        """Returns the score of each query with each of its items of a feature."""
        if feature in self.known_scores:
            return self.known_scores[feature]
        items = self.items[feature]
        dim = self.vectors.shape[1]
        vectors = items.vectors.view(len(self.vectors), -1, dim) if len(self.vectors) else items.vectors.view(0, 1, dim)
        scores = (self.vectors.unsqueeze(1) * vectors).sum(2)
        if self.catalogue.bias is not None:
            scores = scores + self.catalogue.bias[items.ids].view_as(scores)
        return scores if self.offsets is None else scores + self.offsets.unsqueeze(1)
