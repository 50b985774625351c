"""Deep Interest Network (Zhou et al., KDD 2018): the items of a user's history, weighted by the item to be clicked.

A history is a list feature that shares the table of a single-valued feature, its target: the ids of both have vectors
e_1 .. e_n and t of one table. The row's interest is ``sum_j a(e_j, t) e_j``, where a network computes a of ``[e_j, t,
e_j - t, e_j * t]``, without a softmax (section 4.3). The interest, the target and the vectors of all other features go
into a deep network. With ``history: transformer``, the interest is the last state of a causal transformer over the
history (:mod:`distembed.models.sasrec`), which finds patterns in the order of items; unlike in BST (Chen et al., 2019)
the target is not part of the sequence. ``mean`` and ``sum`` pool the items without regard to the target, which takes
the least time.

Lists of numbers beside a history, such as the time between each item and the row, are encoded as soft one-hot vectors
(:mod:`distembed.models.soft_one_hot`) and added to the vectors of its items: e_j + g(x_j) takes the place of e_j. The
sum is one of the aggregations of Transformers4Rec (de Souza Pereira Moreira et al., RecSys 2021). Its others do not fit
attention to a target: a projection of the concatenation would take e_j out of the space of t, with which it is
compared. The vectors g start short, so that training starts from the model without them.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.data.dataset.schema import DENSE_SEQUENCES, CategoricalFeature, Schema
from distembed.embedding.bag import pool
from distembed.embedding.share import require_one_vector
from distembed.models.din_config import DINConfig
from distembed.models.inputs import ModelInputs
from distembed.models.layers import MLP
from distembed.models.sasrec import CausalTransformer
from distembed.models.sequences import QueriedRows, last_tokens
from distembed.models.soft_one_hot import SoftOneHotSum, start_short
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
        target = targets.repeat_interleave(lengths, dim=0, output_size=history.shape[0])
        weights = self.network(torch.cat([history, target, history - target, history * target], dim=1))
        return pool(weights * history, lengths, "sum")


class Pooled(nn.Module):
    """Sums or averages the vectors of each row's history; an empty history gives zeros.

    Args:
        is_mean: Whether to average the vectors.
        max_length: Most items of a history that are averaged, the last ones; None for all items.
    """

    def __init__(self, is_mean: bool, max_length: int | None) -> None:
        super().__init__()
        self._is_mean, self._max_length = is_mean, max_length

    def forward(
        self,
        history: Float[Tensor, "tokens dim"],
        lengths: Int[Tensor, " batch"],
        targets: Float[Tensor, "batch dim"],
    ) -> Float[Tensor, "batch dim"]:
        sums = pool(history, lengths, "sum")
        # on CUDA, tokens before the last ones are zeros, and lengths count them
        return sums / lengths.clamp(min=1, max=self._max_length).unsqueeze(1) if self._is_mean else sums


class LastState(nn.Module):
    """The state of a causal transformer at the last item of each row's history, zeros for an empty one."""

    def __init__(self, dim: int, max_length: int, config: DINConfig) -> None:
        super().__init__()
        self.transformer = CausalTransformer(dim, max_length, config.num_blocks, config.num_heads, config.dropout)
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


class History(nn.Module):
    """Maps the vectors of a history's items to one vector of each row.

    Args:
        feature: The history.
        dim: Dimension of a vector.
        config: The model's section, which has the history's kind and length.
        numbers: Names of the lists of numbers beside the history that are part of its items' vectors.
    """

    def __init__(self, feature: CategoricalFeature, dim: int, config: DINConfig, numbers: Sequence[str] = ()) -> None:
        super().__init__()
        self.name, self.target, self.numbers = feature.name, feature.table_name, list(numbers)
        self.encode: SoftOneHotSum | None = None
        if numbers:
            self.encode = SoftOneHotSum(*config.side_soft_one_hot.arguments(len(numbers), dim))
            start_short(self.encode)
            for place, name in enumerate(numbers):
                if name in config.side_value_ranges:
                    self.encode.start_bins(place, config.side_value_ranges[name])
        kind, max_length = config.kind(feature.name), config.max_length(feature.name, feature.max_ids_per_row)
        self.summary: nn.Module
        if kind == "transformer":
            assert max_length is not None, "a transformer has a greatest length"
            self.summary = LastState(dim, max_length, config)
        elif kind == "attention":
            self.summary = TargetAttention(dim, config.attention)
        else:
            self.summary = Pooled(kind == "mean", max_length)
        self._max_length = None if kind == "transformer" else max_length  # which leaves older tokens out itself

    def forward(
        self,
        items: JaggedTensor,
        targets: Float[Tensor, "batch dim"],
        dense_sequences: KeyedJaggedTensor | None,
    ) -> Float[Tensor, "batch dim"]:
        vectors, lengths = items.values(), items.lengths()
        if self.encode is not None:
            assert dense_sequences is not None, "a model with numbers is given their batch field"
            numbers = torch.stack([dense_sequences[name].values() for name in self.numbers], dim=1)
            vectors = vectors + self.encode(numbers).to(vectors.dtype)
        if self._max_length is not None:
            vectors, lengths = last_tokens(vectors, lengths, self._max_length)
        summary: Tensor = self.summary(vectors, lengths, targets)
        return summary


class Interests(nn.Module):
    """Maps the vectors of items and histories to vectors [batch, items + histories, dim].

    It is a module of its own, since TorchRec's pipeline does not trace into modules without tables.

    Args:
        items: Names of the features with one item a row, targets among them.
        histories: A module for each history.
    """

    def __init__(self, items: Sequence[str], histories: Sequence[History]) -> None:
        super().__init__()
        self._items = list(items)
        self._names = [(history.name, history.target) for history in histories]
        self.histories = nn.ModuleList(histories)

    def forward(
        self, embedded: Mapping[str, JaggedTensor], dense_sequences: KeyedJaggedTensor | None
    ) -> Float[Tensor, "batch vectors dim"]:
        items = {item: embedded[item].values() for item in self._items}
        interests = [
            history(embedded[name], items[target], dense_sequences)
            for history, (name, target) in zip(self.histories, self._names, strict=True)
        ]
        return torch.stack([*items.values(), *interests], dim=1)


class DIN(FeatureVectorModel):
    """A deep network over the vectors of all features, in which histories are summed by the row's target."""

    def __init__(self, inputs: ModelInputs, config: DINConfig) -> None:
        found = find_histories(inputs)
        for setting, value in (("history", config.history), ("history_length", config.history_length)):
            for name in value if isinstance(value, dict) else ():
                one_of(f"a history of model.{setting}", name, [feature.name for feature in found])
        targets = list(dict.fromkeys(feature.table_name for feature in found))
        super().__init__(inputs, config.soft_one_hot, [name for name in inputs.tables if name not in targets])
        for target in targets:
            require_one_vector(inputs.table(target))
        dim = inputs.embedding_dim
        self.item_embeddings, _ = inputs.sequence_embeddings(targets)
        items = [
            feature.name
            for feature in inputs.schema.categorical
            if feature.table_name in targets and feature.is_looked_up and not feature.multi_hot
        ]
        numbers = numbers_beside(inputs) if config.side_features else {}
        for name in config.side_value_ranges:
            one_of("a list of model.side_value_ranges", name, [own for each in numbers.values() for own in each])
        self.interests = Interests(
            items, [History(feature, dim, config, numbers.get(feature.name, ())) for feature in found]
        )
        self.vector_names = [*self.vector_names, *items, *(feature.name for feature in found)]
        self.num_inputs = len(self.vector_names) * dim
        self.deep = MLP(self.num_inputs, [*config.deep, 1], last_is_linear=True, dropout=config.dropout)

    def forward(
        self,
        dense_features: Float[Tensor, "batch dense"],
        sparse_features: KeyedJaggedTensor,
        dense_sequences: KeyedJaggedTensor | None = None,
    ) -> Float[Tensor, " batch"]:
        interests = self.interests(self.item_embeddings(sparse_features), dense_sequences)
        return self.logits(join([*self.feature_vectors(dense_features, sparse_features), interests]))

    def lists_read(self, schema: Schema) -> tuple[str, ...]:
        numbers = {name for history in self.interests.histories for name in cast(History, history).numbers}
        unread = set(schema.dense_sequences) - numbers
        return tuple(name for name in super().lists_read(schema) if name not in unread)

    def logits(self, vectors: Float[Tensor, "batch vectors dim"]) -> Float[Tensor, " batch"]:
        return self.deep(vectors.flatten(1)).squeeze(1)


class DINWithNumbers(DIN):
    """:class:`DIN` with lists of numbers beside histories."""

    batch_fields = (*DIN.batch_fields, DENSE_SEQUENCES)


def numbers_beside(inputs: ModelInputs) -> dict[str, list[str]]:
    """Returns the names of the lists of numbers beside each history."""
    schema = inputs.schema
    return {
        feature.name: [name for name in schema.dense_sequences if feature.name in schema.lists_beside(name)]
        for feature in find_histories(inputs)
    }


def find_histories(inputs: ModelInputs) -> list[CategoricalFeature]:
    """Returns the histories: the list features that share the table of a single-valued feature, their target.

    Raises:
        UserError: There is no history.
    """
    features = {feature.name: feature for feature in inputs.schema.categorical}
    histories = [
        feature
        for feature in features.values()
        if feature.table is not None
        and feature.multi_hot
        and feature.is_looked_up
        and not features[feature.table].multi_hot
    ]
    if not histories:
        raise UserError(
            "model.name is 'din', which weighs the items of a history by the row's item, and no list feature of this "
            "dataset shares the table of a single-valued one: prepare it with `vocabulary: ITEM` in the history's "
            "column of the schema, or use another model, such as dcnv2."
        )
    return histories
