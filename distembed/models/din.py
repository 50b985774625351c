"""Deep Interest Network (Zhou et al., KDD 2018): the items of a user's history, weighted by the item to be clicked.

A history is a list feature that shares the table of a single-valued feature, its target: the ids of both have vectors
e_1 .. e_n and t of one table. The row's interest is ``sum_j a(e_j, t) e_j``, where a network computes a of ``[e_j, t,
e_j - t, e_j * t]``, without a softmax (section 4.3). The interest, the target and the vectors of all other features go
into a deep network. With ``history: transformer``, the interest is the last state of a causal transformer over the
history (:mod:`distembed.models.sasrec`), which finds patterns in the order of items; unlike in BST (Chen et al., 2019)
the target is not part of the sequence.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.embedding.share import require_one_vector
from distembed.models.din_config import DINConfig
from distembed.models.inputs import ModelInputs
from distembed.models.layers import MLP
from distembed.models.sasrec import CausalTransformer
from distembed.models.sequences import QueriedRows
from distembed.models.vectors import FeatureVectorModel, join


class TargetAttention(nn.Module):
    """Sums the vectors of each row's history, each multiplied by a number that a network gives it for the target."""

    def __init__(self, dim: int, sizes: list[int]) -> None:
        super().__init__()
        self.network = MLP(4 * dim, [*sizes, 1], last_is_linear=True)

    def forward(
        self,
        history: Float[Tensor, "tokens dim"],
        lengths: Int[Tensor, " batch"],
        targets: Float[Tensor, "batch dim"],
    ) -> Float[Tensor, "batch dim"]:
        """Returns the interest of each row, zeros for an empty history; tokens are row after row."""
        rows = torch.arange(targets.shape[0], device=lengths.device)
        rows = rows.repeat_interleave(lengths, output_size=history.shape[0])
        target = targets.index_select(0, rows)
        weights = self.network(torch.cat([history, target, history - target, history * target], dim=1))
        weighted = weights * history
        return weighted.new_zeros(targets.shape).index_add(0, rows, weighted)


class LastState(nn.Module):
    """The state of a causal transformer at the last item of each row's history, zeros for an empty one."""

    def __init__(self, dim: int, config: DINConfig) -> None:
        super().__init__()
        self.transformer = CausalTransformer(
            dim, config.history_length, config.num_blocks, config.num_heads, config.dropout
        )
        self._scale = dim**0.5

    def forward(
        self,
        history: Float[Tensor, "tokens dim"],
        lengths: Int[Tensor, " batch"],
        targets: Float[Tensor, "batch dim"],
    ) -> Float[Tensor, "batch dim"]:
        states: Tensor = self.transformer(
            history * self._scale, QueriedRows(lengths, torch.ones_like(lengths), targets.shape[0])
        )
        return states


class Interests(nn.Module):
    """Maps the vectors of items and histories to vectors [batch, items + histories, dim].

    It is a module of its own, since TorchRec's pipeline does not trace into modules without tables.

    Args:
        items: Names of the features with one item a row, targets among them.
        target_of: The target of each history, by name.
        summaries: For each history, the module that makes one vector of it.
    """

    def __init__(self, items: Sequence[str], target_of: Mapping[str, str], summaries: Sequence[nn.Module]) -> None:
        super().__init__()
        self._items, self._target_of = list(items), dict(target_of)
        self.summaries = nn.ModuleList(summaries)

    def forward(self, embedded: Mapping[str, JaggedTensor]) -> Float[Tensor, "batch vectors dim"]:
        items = {item: embedded[item].values() for item in self._items}
        interests = [
            summary(embedded[history].values(), embedded[history].lengths(), items[target])
            for summary, (history, target) in zip(self.summaries, self._target_of.items(), strict=True)
        ]
        return torch.stack([*items.values(), *interests], dim=1)


class DIN(FeatureVectorModel):
    """A deep network over the vectors of all features, in which histories are summed by the row's target."""

    def __init__(self, inputs: ModelInputs, config: DINConfig) -> None:
        target_of = targets_of_histories(inputs)
        targets = list(dict.fromkeys(target_of.values()))
        super().__init__(inputs, config.soft_one_hot, [name for name in inputs.tables if name not in targets])
        for target in targets:
            require_one_vector(inputs.tables[target])
        dim = inputs.embedding_dim
        self.item_embeddings, _ = inputs.sequence_embeddings(targets)
        summaries = [
            LastState(dim, config) if config.history == "transformer" else TargetAttention(dim, config.attention)
            for _ in target_of
        ]
        items = [
            feature.name
            for feature in inputs.schema.categorical
            if feature.table_name in targets and feature.is_looked_up and not feature.multi_hot
        ]
        self.interests = Interests(items, target_of, summaries)
        self.vector_names = [*self.vector_names, *items, *target_of]
        self.num_inputs = len(self.vector_names) * dim
        self.deep = MLP(self.num_inputs, [*config.deep, 1], last_is_linear=True, dropout=config.dropout)

    def forward(
        self, dense_features: Float[Tensor, "batch dense"], sparse_features: KeyedJaggedTensor
    ) -> Float[Tensor, " batch"]:
        interests = self.interests(self.item_embeddings(sparse_features))
        return self.logits(join([*self.feature_vectors(dense_features, sparse_features), interests]))

    def logits(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, " batch"]:
        return self.deep(vectors.flatten(1)).squeeze(1)


def targets_of_histories(inputs: ModelInputs) -> dict[str, str]:
    """Returns the target of each history: the single-valued feature with the table that the list feature shares.

    Raises:
        UserError: There is no history.
    """
    features = {feature.name: feature for feature in inputs.schema.categorical}
    target_of = {
        name: feature.table
        for name, feature in features.items()
        if feature.table is not None
        and feature.multi_hot
        and feature.is_looked_up
        and not features[feature.table].multi_hot
    }
    if not target_of:
        raise UserError(
            "model.name is 'din', which weighs the items of a history by the row's item, and no list feature of this "
            "dataset shares the table of a single-valued one: prepare it with `vocabulary: ITEM` in the history's "
            "column of the schema, or use another model, such as dcnv2."
        )
    return target_of
