"""Models that predict the next item at each item of a sequence: the items' vectors, a network over them, the catalogue.

The models differ in the network, which maps the vectors of all tokens to states at the places where a next item is
asked for: the last tokens of each row, as many as the row has targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import DENSE_SEQUENCES, ITEM, ITEM_NEGATIVE, ITEM_TARGET, SPARSE_FEATURES, Schema
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.share import require_one_vector
from distembed.models.base import Model
from distembed.models.inputs import ModelInputs
from distembed.models.layers import make_linear
from distembed.models.queries import Catalogue, Items, Queries
from distembed.models.sequences import QueriedRows, feature_lengths, feature_values

_OUTPUT = "_output"
"""Suffix of the name of an output table that is not the table of items itself."""


@dataclass(frozen=True)
class ItemCollections:
    """The collections in which a model of sequences looks items up.

    Attributes:
        embeddings: Maps a KeyedJaggedTensor to a dictionary of JaggedTensors by feature: items, and side features.
        outputs: Maps ids of targets and negatives in the same way; None where ``embeddings`` does that too (tied).
        table: The table of the items to choose from.
        max_length: Most items of a row.
    """

    embeddings: nn.Module
    outputs: nn.Module | None
    table: CompositionalEmbeddingConfig
    max_length: int


def item_collections(inputs: ModelInputs, tied: bool, beside: Sequence[str] = ()) -> ItemCollections:
    """Returns the collections of items and of the side features named in ``beside``.

    If ``tied``, one table holds input items, targets and negatives. Else targets and negatives have a second table of
    the same settings, which has no rule of SSE.

    Raises:
        UserError: Batches have no sequences of items with a greatest length, or an id has several vectors.
    """
    item = next((feature for feature in inputs.schema.categorical if feature.name == ITEM), None)
    if item is None or item.max_ids_per_row is None:
        raise UserError(
            f"the model needs sequences of the feature {ITEM!r} with a greatest length, and batches have "
            f"{', '.join(inputs.schema.categorical_names) or 'no ids'}; train it for the task next_item, on a dataset "
            "of `distembed prepare sequences`."
        )
    names, table = [ITEM, *beside], inputs.table(ITEM)
    for name in names:
        require_one_vector(inputs.table(name))
    if tied:
        return ItemCollections(inputs.sequence_embeddings(names)[0], None, table, item.max_ids_per_row)
    candidates = [name for name in table.feature_names if name != ITEM] or [ITEM_TARGET]
    outputs, _ = inputs.sequence_embeddings([ITEM], _OUTPUT, {ITEM: candidates})
    embeddings, _ = inputs.sequence_embeddings(names, looked_up={ITEM: [ITEM]})
    output_table = replace(table, name=ITEM + _OUTPUT, feature_names=candidates, sse=None)
    return ItemCollections(embeddings, outputs, output_table, item.max_ids_per_row)


class NextItems(Model):
    """Maps sequences of items to queries for the next one, at each target.

    Args:
        items: The collections of items and side features.
        states: Maps vectors of tokens [tokens, dim], and the places asked for, to states [queries, dim].
        tokens: Makes vectors of tokens from the collection's vectors.
        bias: Whether each item has an output bias.
        times: Name of the column of times [tokens] that ``states`` takes too; None for none.
    """

    batch_fields: ClassVar[tuple[str, ...]] = (SPARSE_FEATURES,)

    def __init__(
        self,
        items: ItemCollections,
        states: nn.Module,
        tokens: "TokenVectors",
        bias: bool,
        times: str | None = None,
    ) -> None:
        super().__init__()
        self.embeddings = items.embeddings
        self.outputs = items.outputs
        is_tied = items.outputs is None
        catalogue = Catalogue(self, "embeddings" if is_tied else "outputs", items.table, bias, is_tied=is_tied)
        self.network = _Network(tokens, states, catalogue, times)

    def forward(self, sparse_features: KeyedJaggedTensor, dense_sequences: KeyedJaggedTensor | None = None) -> Queries:
        """Returns a query for each target, row after row, with the batch's candidates that are looked up."""
        embedded = self.embeddings(sparse_features)
        candidates = embedded if self.outputs is None else self.outputs(sparse_features)
        queries: Queries = self.network(embedded, candidates, sparse_features, dense_sequences)
        return queries

    def lists_read(self, schema: Schema) -> tuple[str, ...]:
        return (ITEM, *self.network.tokens.features, *self.network.numbers)


class NextItemsWithNumbers(NextItems):
    """:class:`NextItems` with side features that are numbers, or with times."""

    batch_fields = (SPARSE_FEATURES, DENSE_SEQUENCES)


class TokenVectors(nn.Module):
    """The vector of each item of a sequence, alone or projected together with the vectors of its side features.

    Vectors of tables, whose numbers are small in a large table, are multiplied by ``sqrt(dim)``, as in Vaswani et al.
    (NeurIPS 2017). Numbers get soft one-hot vectors.

    Args:
        dim: Dimension of a vector.
        features: Names of the side features that are lists of ids.
        numbers: Names of the side features that are lists of numbers.
        encode: Maps numbers [tokens, numbers] to vectors [tokens, numbers, dim]; needed where there are any.
    """

    def __init__(
        self, dim: int, features: Sequence[str] = (), numbers: Sequence[str] = (), encode: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.features, self.numbers, self.encode = list(features), list(numbers), encode
        self.scale = dim**0.5
        num_vectors = 1 + len(self.features) + len(self.numbers)
        self.project = make_linear(num_vectors * dim, dim) if num_vectors > 1 else None

    def forward(
        self, embedded: Mapping[str, JaggedTensor], numbers: Mapping[str, Float[Tensor, " tokens"]]
    ) -> Float[Tensor, "tokens dim"]:
        """Returns the vector of each token of the batch, row after row."""
        vectors = [embedded[name].values() * self.scale for name in (ITEM, *self.features)]
        if self.encode is not None:
            vectors.append(self.encode(torch.stack([numbers[name] for name in self.numbers], dim=1)).flatten(1))
        if self.project is None:
            return vectors[0]
        projected: Tensor = self.project(torch.cat(vectors, dim=1))
        return projected


class _Network(nn.Module):
    """Makes queries from looked-up vectors, at the last tokens of each row, as many as the row has targets.

    It is one module, since TorchRec's pipeline does not trace into modules without tables.
    """

    def __init__(self, tokens: TokenVectors, states: nn.Module, catalogue: Catalogue, times: str | None) -> None:
        super().__init__()
        self.tokens, self.states, self.catalogue, self.times = tokens, states, catalogue, times
        self.numbers = [*tokens.numbers, *([] if times is None else [times])]

    def forward(
        self,
        embedded: Mapping[str, JaggedTensor],
        candidates: Mapping[str, JaggedTensor],
        sparse_features: KeyedJaggedTensor,
        dense_sequences: KeyedJaggedTensor | None,
    ) -> Queries:
        targets = feature_values(sparse_features, ITEM_TARGET)
        lengths, num_targets = (feature_lengths(sparse_features, name) for name in (ITEM, ITEM_TARGET))
        numbers = {}
        if dense_sequences is not None:
            numbers = {name: feature_values(dense_sequences, name) for name in self.numbers}
        tokens, rows = self.tokens(embedded, numbers), QueriedRows(lengths, num_targets, len(targets))
        states = self.states(tokens, rows) if self.times is None else self.states(tokens, rows, numbers[self.times])
        items = {
            name: Items(feature_values(sparse_features, name), candidates[name].values())
            for name in (ITEM_TARGET, ITEM_NEGATIVE)
            if name in self.catalogue.table.feature_names
        }
        return Queries(states, self.catalogue, items)
