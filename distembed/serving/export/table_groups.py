"""Tables of an exported model: how they are stored, on which server, and how tables of one kind are looked up at once.

A group has one weight for each partition, which holds the rows of its tables one after another::

    table   C1            C2                  C3
    rows    0 ... 99      100 ... 349         350 ... 353        row r of C2 is row 100 + r of the weight

Trade-off: for a single row of 26 tables starting an operation costs more than the operation itself, and a group needs a
few operations for all of its tables. Stacking the weights takes their memory once more during an export.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.base.units import format_bytes
from distembed.composition import Product
from distembed.embedding.composed_vectors import composed_chunks
from distembed.embedding.config import CompositionalEmbeddingConfig, FeatureIds
from distembed.embedding.managed import ManagedIds, find_slots
from distembed.partitions import Naive
from distembed.serving.model_folder.identities import SORTED_IDS, SORTED_SLOTS, sort_ids
from distembed.serving.model_folder.manifest import Precision, TableForm

Materialise = Literal["auto", "never", "always"]
"""Which tables are stored as the vector of each id: the ones that become smaller by it, none, or all."""
_IDS_AT_ONCE = 1 << 16
_BYTES_OF_SCALE_AND_OFFSET = 8


@dataclass(frozen=True)
class ExportStorage:
    """How the tables of an export are stored; functions of paths stay in float32.

    With ``on_demand`` rows are stored as they are read, so that no second copy of all tables is made.
    """

    precision: Precision = "fp32"
    materialise: Materialise = "auto"
    on_demand: bool = False

    def bytes_by_form(self, table: CompositionalEmbeddingConfig) -> dict[TableForm, int]:
        """Returns the bytes of a table with its partitions, and with the vector of each id, in this precision."""
        parts = [
            _stored_bytes(part.num_rows, part.dim, "fp32" if part.is_function else self.precision)
            for part in table.partition_tables()
        ]
        width = table.num_vectors * table.embedding_dim
        full = _stored_bytes(table.num_embeddings, width, self.precision)
        slots = 0 if table.managed is None else table.managed.sizes.serving_bytes
        return {
            "compositional": sum(parts) + table.scheme.assignment_bytes + slots,
            "materialised": full + slots,
        }

    def form(self, table: CompositionalEmbeddingConfig) -> TableForm:
        """Returns the form in which a table is stored."""
        if self.materialise == "auto":
            sizes = self.bytes_by_form(table)
            return "materialised" if sizes["materialised"] < sizes["compositional"] else "compositional"
        return "materialised" if self.materialise == "always" else "compositional"

    def bytes(self, table: CompositionalEmbeddingConfig) -> int:
        """Returns the bytes of a table in the form in which it is stored."""
        return self.bytes_by_form(table)[self.form(table)]


def _stored_bytes(num_rows: int, num_columns: int, precision: Precision) -> int:
    if precision == "int8":
        return num_rows * (num_columns + _BYTES_OF_SCALE_AND_OFFSET)
    return num_rows * num_columns * (2 if precision == "fp16" else 4)


def divide_tables(table_bytes: Mapping[str, int], server_bytes: int) -> list[list[str]]:
    """Returns the names of the tables on each server: few servers of about equal bytes, each with whole tables.

    Args:
        table_bytes: The bytes of each table; at least one table.
        server_bytes: The most bytes of a server; a larger table is a :class:`UserError`.
    """
    largest = max(table_bytes, key=lambda name: table_bytes[name])
    if table_bytes[largest] > server_bytes:
        raise UserError(
            f"--server-memory is {format_bytes(server_bytes)}, and the table {largest!r} alone takes "
            f"{format_bytes(table_bytes[largest])}; tables are not divided: give more, store it with --precision int8, "
            "or train it further compressed."
        )
    # largest table first, each on the least loaded server; the fewest servers are total / capacity, rounded up, and one
    # more is tried until all tables fit
    for num_servers in range(-(-sum(table_bytes.values()) // server_bytes), len(table_bytes) + 1):
        loads, servers = [0] * num_servers, [list[str]() for _ in range(num_servers)]
        for name in sorted(table_bytes, key=lambda name: -table_bytes[name]):
            least = loads.index(min(loads))
            loads[least] += table_bytes[name]
            servers[least].append(name)
        if max(loads) <= server_bytes:
            return [server for server in servers if server]
    raise AssertionError("a server for each table has room, as none is larger")


class FloatWeight(nn.Module):
    """A weight whose numbers are stored in float32 or float16 and read in float32."""

    def __init__(self, weight: Float[Tensor, "rows columns"], dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().to(dtype))

    def take(self, rows: Int64[Tensor, "*shape"]) -> Float[Tensor, "*shape columns"]:
        """Returns rows of the weight in float32."""
        return nn.functional.embedding(rows, cast(Tensor, self.weight)).float()

    def between(self, first: int, stop: int) -> Float[Tensor, "rows columns"]:
        """Returns the rows from ``first`` to ``stop`` - 1 in float32; a weight that is stored so is not copied."""
        return cast(Tensor, self.weight)[first:stop].float()


class Int8Weight(nn.Module):
    """A weight whose numbers are stored in 8 bits: ``number = code * scale + offset``, with a scale and offset a row.

    The codes of a row span its range, as in FBGEMM's row-wise quantisation: the offset is the smallest number, and the
    scale is the range divided by 255. The error of a number is at most half a step, a 510th of its row's range.
    """

    def __init__(self, weight: Float[Tensor, "rows columns"]) -> None:
        super().__init__()
        weight = weight.detach().float()
        offset = weight.amin(dim=1)
        scale = (weight.amax(dim=1) - offset) / 255
        steps = torch.where(scale > 0, scale, 1.0).unsqueeze(1)  # a row of equal numbers has the scale 0
        codes = ((weight - offset.unsqueeze(1)) / steps).round_().clamp_(0, 255).to(torch.uint8)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("offset", offset)

    def take(self, rows: Int64[Tensor, "*shape"]) -> Float[Tensor, "*shape columns"]:
        """Returns rows of the weight, decoded to float32."""
        codes, scale, offset = (cast(Tensor, buffer) for buffer in (self.codes, self.scale, self.offset))
        flat = rows.flatten()
        row_codes = codes[flat]
        numbers = torch.addcmul(offset[flat].unsqueeze(1), row_codes.float(), scale[flat].unsqueeze(1))
        return numbers.view(*rows.shape, codes.shape[1])

    def between(self, first: int, stop: int) -> Float[Tensor, "rows columns"]:
        """Returns the rows from ``first`` to ``stop`` - 1, decoded to float32."""
        codes, scale, offset = (cast(Tensor, buffer)[first:stop] for buffer in (self.codes, self.scale, self.offset))
        return torch.addcmul(offset.unsqueeze(1), codes.float(), scale.unsqueeze(1))


class RowsOnDemand(nn.Module):
    """A weight that stores rows when they are read: the rows of all ``weights``, one weight after the other.

    It has no tensors of its own in ``state_dict``. Rows are stored alone as they are stored among others, since each
    row has its own scale and offset.
    """

    def __init__(self, weights: Sequence[Float[Tensor, "rows columns"]], precision: Precision) -> None:
        super().__init__()
        self._weights, self._precision = weights, precision
        self._stops = torch.tensor([len(weight) for weight in weights]).cumsum(0)
        self.num_rows = int(self._stops[-1])

    def stored(self, first: int, stop: int) -> dict[str, Tensor]:
        """Returns the stored tensors, by name, of the rows from ``first`` to ``stop`` - 1."""
        pieces, start = [], 0
        for weight, weight_stop in zip(self._weights, self._stops.tolist(), strict=True):
            if start < stop and first < weight_stop:
                pieces.append(weight[max(first - start, 0) : stop - start])
            start = weight_stop
        return dict(_store_weight(pieces, self._precision).state_dict())

    def take(self, rows: Int64[Tensor, "*shape"]) -> Float[Tensor, "*shape columns"]:
        """Returns rows as a stored weight gives them, in float32."""
        flat = rows.flatten()
        taken = torch.empty(len(flat), self._weights[0].shape[1])
        owners = torch.searchsorted(self._stops, flat, right=True)
        for number, (stop, weight) in enumerate(zip(self._stops.tolist(), self._weights, strict=True)):
            own = owners == number
            taken[own] = weight[flat[own] - (stop - len(weight))].float()
        return _store_weight([taken], self._precision).between(0, len(flat)).view(*rows.shape, -1)

    def between(self, first: int, stop: int) -> Float[Tensor, "rows columns"]:
        """Returns the rows from ``first`` to ``stop`` - 1 as a stored weight gives them, in float32."""
        return self.take(torch.arange(first, min(stop, self.num_rows)))


StoredWeight = FloatWeight | Int8Weight | RowsOnDemand


def _store_weight(weights: Sequence[Float[Tensor, "rows columns"]], precision: Precision) -> FloatWeight | Int8Weight:
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))  # one piece is not copied
    if precision == "int8":
        return Int8Weight(weight)
    return FloatWeight(weight, torch.float16 if precision == "fp16" else torch.float32)


@dataclass(frozen=True, eq=False)
class StoredTable:
    """A table in its stored form: its config, and the weight of each partition.

    A materialised table is a plain table here: its config has one partition, with a row for each id.
    """

    config: CompositionalEmbeddingConfig
    weights: Sequence[Tensor]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Key of the tables that one group can look up: equal computation, widths and treatment of foreign ids."""
        config, combine = self.config, self.config.combine
        settings = tuple(combine.setting_values().values())
        shape = tuple(weight.shape[1] for weight in self.weights)
        ids = config.pre_hash is not None, config.managed is not None, config.id_policy
        return type(config.scheme), type(combine), settings, shape, *ids


def stored_table(table: CompositionalEmbeddingConfig, weights: Sequence[Tensor], form: TableForm) -> StoredTable:
    """Returns a table, given the weight of each partition, in ``form``: materialised, all ids are composed."""
    if form == "compositional":
        return StoredTable(table, weights)
    width = table.num_vectors * table.embedding_dim
    # composes all ids within the table as they are; raw ids are hashed or mapped into the table before the lookup, by
    # the settings that `full` keeps
    plain = replace(table, pre_hash=None, ids=None, id_policy="error")
    vectors = torch.empty(table.num_embeddings, width)
    for ids, chunk in composed_chunks(plain, weights, None, _IDS_AT_ONCE):
        vectors[ids] = chunk
    full = replace(table, partition=Naive(table.num_embeddings), composition=Product(), embedding_dim=width)
    return StoredTable(full, [vectors])


class SlotIds(nn.Module):
    """The identities of a table with managed ids: the raw ids in ascending order, and the slot of each.

    With ``on_demand`` it has no tensors in ``state_dict``.
    """

    def __init__(self, managed: ManagedIds, on_demand: bool) -> None:
        super().__init__()
        self._managed, self._on_demand = managed, on_demand
        if not on_demand:
            for name, tensor in zip((SORTED_IDS, SORTED_SLOTS), sort_ids(self.ids_by_slot()), strict=True):
                self.register_buffer(name, tensor)

    def ids_by_slot(self) -> Int64[Tensor, " slots"]:
        """Returns the raw id that has each slot; 0 for a slot that is free or reserved."""
        by_slot = torch.zeros(self._managed.sizes.config.size, dtype=torch.int64)
        ids, slots = self._managed.known()
        by_slot[torch.from_numpy(slots)] = torch.from_numpy(ids)
        return by_slot

    def forward(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
        """Returns the slots of raw ids; 1 for an id that has none."""
        if self._on_demand:
            return self._managed.lookup(ids)
        return find_slots(ids, cast(Tensor, self.sorted_ids), cast(Tensor, self.sorted_slots))


class TableGroup(nn.Module):
    """Tables of one :attr:`StoredTable.kind`, whose ids are looked up and composed at once.

    Tables that hash ids hash all of them, and managed ids are looked up among the ids that have slots. Otherwise an id
    outside of its table is taken modulo, or replaced by the id of unknown values (0 without one), as the tables'
    settings say. Where training would raise an error, the id is replaced too: a program never reads outside of its
    weights.
    """

    def __init__(self, tables: Sequence[StoredTable], storage: ExportStorage) -> None:
        super().__init__()
        self._configs = [table.config for table in tables]
        first = self._configs[0]
        functions = [part.is_function for part in first.partition_tables()]
        stacked = list(zip(*(table.weights for table in tables), strict=True))
        store = RowsOnDemand if storage.on_demand else _store_weight
        self.weights = nn.ModuleList(
            store(weights, "fp32" if is_function else storage.precision)
            for weights, is_function in zip(stacked, functions, strict=True)
        )
        num_rows = torch.tensor([[len(weight) for weight in table.weights] for table in tables]).T
        self._first_rows = num_rows.cumsum(1) - num_rows  # [partitions, tables]: where a table's rows begin
        self._combine = first.combine
        managed = {config.name: config.managed for config in self._configs if config.managed is not None}
        self.identities = nn.ModuleList(SlotIds(ids, storage.on_demand) for ids in managed.values())
        self._map = _id_map(first, dict(zip(managed, self.identities, strict=True)))

    def forward(
        self, ids: Int64[Tensor, "lines ids"], tables: Sequence[int], features: Sequence[str | None] = (None,)
    ) -> Float[Tensor, "lines ids width"]:
        """Returns the composed vectors of ids; line i holds ids of the group's table number ``tables[i]``.

        They are ids of the feature ``features[i]``; None for ids of the table itself.
        """
        configs = [self._configs[table] for table in tables]
        own = [config.ids_of(feature) for config, feature in zip(configs, features, strict=True)]
        mapped = self._map(configs, own, ids)
        if any(each.first for each in own):
            mapped = mapped + _column([each.first for each in own])
        return self.vectors(mapped, tables)

    def vectors(self, ids: Int64[Tensor, "lines ids"], tables: Sequence[int]) -> Float[Tensor, "lines ids width"]:
        """Returns the vectors as :meth:`forward` does, of ids that lie within their tables already."""
        schemes = [self._configs[table].scheme for table in tables]
        rows = type(schemes[0]).rows_of_tables(schemes, ids)
        rows = rows + self._first_rows[:, list(tables)].unsqueeze(2)
        weights = [cast(StoredWeight, weight) for weight in self.weights]
        return self._combine.compose([weight.take(r) for weight, r in zip(weights, rows.unbind(0), strict=True)])

    @property
    def is_full(self) -> bool:
        """Whether row i of the weight is the vector of id i, so that nothing has to be composed."""
        return isinstance(self._configs[0].scheme, Naive)

    def vectors_between(self, first: int, stop: int) -> Float[Tensor, "ids width"]:
        """Returns the vectors of the ids from ``first`` to ``stop`` - 1; needs one table and :attr:`is_full`."""
        return self._combine.compose([cast(StoredWeight, self.weights[0]).between(first, stop)])


_IdMap = Callable[
    [Sequence[CompositionalEmbeddingConfig], Sequence[FeatureIds], Int64[Tensor, "lines ids"]],
    Int64[Tensor, "lines ids"],
]


def _id_map(table: CompositionalEmbeddingConfig, identities: Mapping[str, nn.Module]) -> _IdMap:
    if table.managed is not None:
        return partial(_in_slots, identities)
    if table.pre_hash is not None:
        return _hashed
    return _modulo if table.id_policy == "modulo" else _known_or_unknown


def _hashed(
    tables: Sequence[CompositionalEmbeddingConfig], own: Sequence[FeatureIds], ids: Int64[Tensor, "lines ids"]
) -> Tensor:
    hashes = []
    for table, each, line_ids in zip(tables, own, ids, strict=True):
        if table.pre_hash:
            hashes.append(table.pre_hash.ids(line_ids, each.num_ids))
    return torch.stack(hashes)


def _in_slots(
    identities: Mapping[str, nn.Module],
    tables: Sequence[CompositionalEmbeddingConfig],
    own: Sequence[FeatureIds],
    ids: Int64[Tensor, "lines ids"],
) -> Tensor:
    return torch.stack([identities[table.name](line) for table, line in zip(tables, ids, strict=True)])


def _modulo(
    tables: Sequence[CompositionalEmbeddingConfig], own: Sequence[FeatureIds], ids: Int64[Tensor, "lines ids"]
) -> Tensor:
    return ids % _column([each.num_ids for each in own])


def _known_or_unknown(
    tables: Sequence[CompositionalEmbeddingConfig], own: Sequence[FeatureIds], ids: Int64[Tensor, "lines ids"]
) -> Tensor:
    is_known = (ids >= 0) & (ids < _column([each.num_ids for each in own]))
    return torch.where(is_known, ids, _column([each.oov_id for each in own]))


def _column(numbers: Sequence[int]) -> Int64[Tensor, "lines 1"]:
    return torch.tensor(numbers).unsqueeze(1)
