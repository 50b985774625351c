"""Tables of an exported model, looked up in groups of like ones: a few operations for all tables of a group.

A group has one weight for each partition, in which the rows of its tables lie one after another::

    table   C1            C2                  C3
    rows    0 ... 99      100 ... 349         350 ... 353        row r of C2 is row 100 + r of the weight

Trade-off: for a single row of 26 tables starting operations costs more than what they do; stacking the weights costs
their memory once more, while a model is exported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from distembed.composition import Product
from distembed.embedding.composed_vectors import composed_chunks
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.partitions import Naive
from distembed.serving.export.stored_weights import StoredWeight, store_weight, stored_bytes
from distembed.serving.model_folder.manifest import Precision, TableForm

Materialise = Literal["auto", "never", "always"]
"""Which tables are stored as the vector of each id: those that are smaller so, none, or all."""
_IDS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class TableStorage:
    """How tables are stored.

    Attributes:
        precision: How their numbers are stored; functions of paths stay in float32.
        materialise: Which tables are stored as the vector of each id.
    """

    precision: Precision = "fp32"
    materialise: Materialise = "auto"

    def bytes_by_form(self, table: CompositionalEmbeddingConfig) -> dict[TableForm, int]:
        """Returns the bytes of a table in each form."""
        parts = [
            stored_bytes(part.num_rows, part.dim, "fp32" if part.is_function else self.precision)
            for part in table.partition_tables()
        ]
        width = table.num_vectors * table.embedding_dim
        full = stored_bytes(table.num_embeddings, width, self.precision)
        return {"compositional": sum(parts), "materialised": full}

    def form(self, table: CompositionalEmbeddingConfig) -> TableForm:
        """Returns the form in which a table is stored."""
        if self.materialise == "auto":
            sizes = self.bytes_by_form(table)
            return "materialised" if sizes["materialised"] < sizes["compositional"] else "compositional"
        return "materialised" if self.materialise == "always" else "compositional"

    def bytes(self, table: CompositionalEmbeddingConfig) -> int:
        """Returns the bytes of a table in the form in which it is stored."""
        return self.bytes_by_form(table)[self.form(table)]


@dataclass(frozen=True, eq=False)
class StoredTable:
    """A table as it is stored.

    Attributes:
        config: The table; one that is materialised has one partition, a row for each id.
        weights: The weight of each partition.
    """

    config: CompositionalEmbeddingConfig
    weights: Sequence[Tensor]

    @property
    def likeness(self) -> tuple[Any, ...]:
        """What tables of a group have in common."""
        config, combine = self.config, self.config.combine
        settings = tuple(combine.setting_values().values())
        shape = tuple(weight.shape[1] for weight in self.weights)
        return type(config.scheme), type(combine), settings, shape, config.pre_hash is not None, config.id_policy


def stored_table(table: CompositionalEmbeddingConfig, weights: Sequence[Tensor], form: TableForm) -> StoredTable:
    """Returns a table in the form in which it is stored.

    Args:
        table: The table.
        weights: The weight of each of its partitions.
        form: The form.
    """
    if form == "compositional":
        return StoredTable(table, weights)
    width = table.num_vectors * table.embedding_dim
    plain = replace(table, pre_hash=None, id_policy="error")  # all ids of the table, as they lie in it
    vectors = torch.empty(table.num_embeddings, width)
    for ids, chunk in composed_chunks(plain, weights, None, _IDS_AT_ONCE):
        vectors[ids] = chunk
    full = replace(table, partition=Naive(table.num_embeddings), composition=Product(), embedding_dim=width)
    return StoredTable(full, [vectors])


class TableGroup(nn.Module):
    """Like tables, whose ids are looked up and composed at once.

    An id outside of its table is hashed, taken modulo, or replaced by the id of unknown values, as the table's settings
    say; where these say that it is an error, it is replaced too: nothing outside of the weights is ever read.

    Args:
        tables: Tables of one :attr:`StoredTable.likeness`.
        precision: How their numbers are stored.
    """

    def __init__(self, tables: Sequence[StoredTable], precision: Precision) -> None:
        super().__init__()
        self._configs = [table.config for table in tables]
        first = self._configs[0]
        functions = [part.is_function for part in first.partition_tables()]
        stacked = [torch.cat(list(weights)) for weights in zip(*(table.weights for table in tables), strict=True)]
        self.weights = nn.ModuleList(
            store_weight(weight, "fp32" if is_function else precision)
            for weight, is_function in zip(stacked, functions, strict=True)
        )
        num_rows = torch.tensor([[len(weight) for weight in table.weights] for table in tables]).T
        self._first_rows = num_rows.cumsum(1) - num_rows  # [partitions, tables]
        self._combine = first.combine
        self._map = _id_map(first)

    def forward(self, ids: Int64[Tensor, "lines ids"], tables: Sequence[int]) -> Float[Tensor, "lines ids width"]:
        """Returns the composed vectors of ids, of which each line is looked up in the table of this number."""
        return self.vectors(self._map([self._configs[table] for table in tables], ids), tables)

    def vectors(self, ids: Int64[Tensor, "lines ids"], tables: Sequence[int]) -> Float[Tensor, "lines ids width"]:
        """Returns the composed vectors of ids that lie within their tables, as they are: not hashed, for one."""
        schemes = [self._configs[table].scheme for table in tables]
        rows = type(schemes[0]).rows_of_tables(schemes, ids)
        rows = rows + self._first_rows[:, list(tables)].unsqueeze(2)
        taken = [cast(StoredWeight, weight).take(own) for weight, own in zip(self.weights, rows.unbind(0), strict=True)]
        return self._combine.compose(taken)

    @property
    def is_full(self) -> bool:
        """Whether the vectors lie in the weight as they are, in the order of ids."""
        return isinstance(self._configs[0].scheme, Naive)

    def vectors_between(self, first: int, stop: int) -> Float[Tensor, "ids width"]:
        """Returns the vectors of ids that follow each other, of a group of one table that is full."""
        return self._combine.compose([cast(StoredWeight, self.weights[0]).between(first, stop)])


_IdMap = Callable[[Sequence[CompositionalEmbeddingConfig], Int64[Tensor, "lines ids"]], Int64[Tensor, "lines ids"]]


def _id_map(table: CompositionalEmbeddingConfig) -> _IdMap:
    """Returns what maps ids into tables like this one."""
    if table.pre_hash is not None:
        return _hashed
    return _modulo if table.id_policy == "modulo" else _known_or_unknown


def _hashed(tables: Sequence[CompositionalEmbeddingConfig], ids: Int64[Tensor, "lines ids"]) -> Tensor:
    hashes = [
        table.pre_hash.ids(own, table.num_embeddings) for table, own in zip(tables, ids, strict=True) if table.pre_hash
    ]
    return torch.stack(hashes)


def _modulo(tables: Sequence[CompositionalEmbeddingConfig], ids: Int64[Tensor, "lines ids"]) -> Tensor:
    return ids % _column(table.num_embeddings for table in tables)


def _known_or_unknown(tables: Sequence[CompositionalEmbeddingConfig], ids: Int64[Tensor, "lines ids"]) -> Tensor:
    is_known = (ids >= 0) & (ids < _column(table.num_embeddings for table in tables))
    return torch.where(is_known, ids, _column(table.oov_id or 0 for table in tables))


def _column(numbers: Any) -> Int64[Tensor, "lines 1"]:
    return torch.tensor(list(numbers)).unsqueeze(1)
