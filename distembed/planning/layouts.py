"""The ways in which a table may be divided on a cluster, as its composition, the config and the ranks allow.

==================== ======================================================== ==========================================
sharding type        ways                                                     unless the config says otherwise
==================== ======================================================== ==========================================
``table_wise``       whole, on one rank                                       always
``column_wise``      in 2 or more equal ranges of columns, on as many ranks   with several ranks; not of sequences
``row_wise``         by rows, over all ranks                                  with several ranks
``table_row_wise``   by rows, over the ranks of a node                        with several nodes of several ranks
``grid_shard``       in ranges of columns, each on a node                     with several nodes of several ranks
``data_parallel``    a copy on every rank                                     with several ranks
==================== ======================================================== ==========================================

``table_column_wise``, in a range of columns for each rank of a node, is one where the config says so.

Sequences of one collection have ranges of one width in TorchRec, so that the widest that divides all of them is taken.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import gcd

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.exchange import INT8_NUMBERS, VectorExchange
from distembed.errors import UserError
from distembed.names import one_of
from distembed.planning.config import TablePlanConfig
from distembed.planning.costs import Layout, divided_table
from distembed.planning.lookups import is_on_every_rank
from distembed.planning.request import PlanRequest
from distembed.sharding.groups import fused_refusal, reason_not_fused
from distembed.sharding.placement import BY_ROWS, IN_HOST_MEMORY, SHARDING_TYPES, WITHIN_NODES, can_be_placed
from distembed.sharding.table_slice import TableSlice, is_pooled, slice_table, width
from distembed.units import format_ranges

_VECTOR = 4
"""Numbers that FBGEMM's kernels read at once: the narrowest range of columns."""
_LINE_BYTES = {"cuda": 128, "cpu": 64}
"""Bytes that a cache reads at once: the narrowest range unless the config names a width or a sharding by columns."""
_BY_COLUMNS = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
_GRID = ShardingType.GRID_SHARD.value

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


class Layouts:
    """Ways to divide the tables of a request.

    Args:
        request: Model, cluster and config.

    Raises:
        UserError: The config names a table that does not exist.
    """

    def __init__(self, request: PlanRequest) -> None:
        self._request, self._config, self._cluster = request, request.config, request.cluster
        by_collection = request.tables_by_collection
        names = [table.name for tables in by_collection.values() for table in tables]
        for name in self._config.tables:
            one_of("plan.tables", name, names)
        self._together: dict[str, list[str]] = {}
        for group in self._config.together:
            for name in group:
                one_of("plan.together", name, names)
                if name in self._together:
                    raise UserError(f"plan.together has table {name!r} twice; make one group of all tables beside it.")
                self._together[name] = group
        self._sequence_width = {
            path: self._common_width([table for table in tables if not is_pooled(table)], path)
            for path, tables in by_collection.items()
        }

    def of_unit(self, members: Sequence[tuple[CompositionalEmbeddingConfig, str]]) -> list[list[Layout]]:
        """Returns the ways to divide tables that lie together, or a table alone: way after way of each table.

        Args:
            members: The tables, each with the path of its collection within the model.

        Raises:
            UserError: The config allows none.
        """
        ranks = self.ranks(table for table, _ in members)
        by_key = [{_shape(layout): layout for layout in self._of(table, path, ranks)} for table, path in members]
        common = [key for key in by_key[0] if all(key in own for own in by_key)]
        if not common:
            ways = "; ".join(
                f"{table.name!r} can be {', '.join(dict.fromkeys(key[0] for key in own))}"
                for (table, _), own in zip(members, by_key, strict=True)
            )
            raise UserError(
                f"plan.together: the tables cannot be divided alike: {ways}. Allow one sharding type for all of them "
                "in plan.tables.NAME.sharding_types, or take one out of the group."
            )
        return [[own[key] for key in common] for own in by_key]

    def ranks(self, tables: Iterable[CompositionalEmbeddingConfig]) -> tuple[int, ...]:
        """Returns the ranks that tables of one unit are pinned to, in order; none where they may lie anywhere.

        Raises:
            UserError: They have no rank in common, or a rank does not exist.
        """
        pinned = {table.name: own for table in tables if (own := self.own(table).ranks) is not None}
        for name, own in pinned.items():
            if max(own) >= self._cluster.world_size:
                raise UserError(
                    f"plan.tables.{name}.ranks has rank {max(own)}, and there are {self._cluster.world_size} ranks; "
                    f"name ranks from 0 to {self._cluster.world_size - 1}."
                )
        if not pinned:
            return ()
        common = set.intersection(*map(set, pinned.values()))
        if not common:
            listed = ", ".join(f"{name!r} to ranks {format_ranges(sorted(own))}" for name, own in pinned.items())
            raise UserError(
                f"plan.together: tables that lie together are pinned to different ranks: {listed}. Give them a rank in "
                "common in plan.tables.NAME.ranks, or take one out of the group."
            )
        return tuple(sorted(common))

    def together_with(self, table: CompositionalEmbeddingConfig) -> list[str]:
        """Returns the names of the tables that lie where a table does, itself among them."""
        return self._together.get(table.name, [table.name])

    def own(self, table: CompositionalEmbeddingConfig) -> TablePlanConfig:
        """Returns the settings of one table."""
        return self._config.tables.get(table.name, TablePlanConfig())

    def _of(self, table: CompositionalEmbeddingConfig, collection: str, ranks: Sequence[int]) -> list[Layout]:
        """Returns all ways to divide a table on some ranks; on all where none are named."""
        types = self._allowed_types(table, collection)
        layouts = [layout for name in types for layout in self._layouts(table, name, collection)]
        if not layouts:
            raise UserError(self._no_layout(table, types))
        layouts = self._in_one_pass(table, layouts) if table.kernel == "fused" else layouts
        possible = [layout for layout in layouts if self._has_places(layout, ranks)]
        if not possible:
            own, ways = f"plan.tables.{table.name}", dict.fromkeys(layout.sharding_type for layout in layouts)
            raise UserError(
                f"plan: table {table.name!r} is pinned to ranks {format_ranges(ranks)} of {self._cluster.world_size}, "
                f"and {', '.join(ways)} needs more of them. Name more ranks in {own}.ranks, or allow table_wise in "
                f"{own}.sharding_types."
            )
        return possible

    def _has_places(self, layout: Layout, ranks: Sequence[int]) -> bool:
        """Returns whether all shards of a layout have places on some ranks."""
        if not ranks or len(set(ranks)) == self._cluster.world_size:
            return True
        if is_on_every_rank(layout.sharding_type):
            return False
        size, num_places = self._cluster.ranks_per_node, len(layout.columns)
        is_column_wise = layout.sharding_type == ShardingType.TABLE_COLUMN_WISE.value and self._cluster.nodes > 1
        if layout.sharding_type in WITHIN_NODES or (is_column_wise and num_places > 1):
            full = [
                node for node in range(self._cluster.nodes) if set(range(node * size, (node + 1) * size)) <= {*ranks}
            ]
            return len(full) >= (1 if is_column_wise else num_places)
        return len(ranks) >= num_places

    def only_type_because(self, table: CompositionalEmbeddingConfig) -> str:
        """Returns why a table had one sharding type only; empty where it had several."""
        own = self.own(table).sharding_types
        for name, allowed in ((f"plan.tables.{table.name}", own), ("plan", self._config.sharding_types)):
            if allowed:
                return f"of {', '.join(allowed)}, as {name}.sharding_types has it"
        return "there is one rank" if self._cluster.world_size == 1 else ""

    def _allowed_types(self, table: CompositionalEmbeddingConfig, collection: str) -> list[str]:
        chosen = self.own(table).sharding_types or self._config.sharding_types
        allowed = chosen or self._default_types(table)
        possible = [name for name in allowed if can_be_placed(table, name)]
        if not possible:
            raise UserError(
                f"plan: table {table.name!r} may only be placed {', '.join(allowed)}, but it cannot be: "
                f"{_hindrance(table, allowed)}. Allow {_remedy(table)} in plan.tables.{table.name}.sharding_types."
            )
        self._require_kernel(table, [*possible] if chosen else [])
        return self._sent_in_int8(table, possible, collection)

    def _require_kernel(self, table: CompositionalEmbeddingConfig, chosen: Sequence[str]) -> None:
        """Refuses tables that FBGEMM cannot look up on CPUs, unless they are to be data-parallel alone."""
        if table.data_type != "BF16" or self._cluster.device.kind != "cpu" or chosen == [_DATA_PARALLEL]:
            return
        raise UserError(
            f"table {table.name!r} has data_type bf16, and FBGEMM has no kernel for bfloat16 on the CPU: set "
            f"embedding.default.data_type, or embedding.tables.{table.name}.data_type, to fp16 or fp32; or have torch "
            "look it up, with a copy on every rank, by plan.sharding_types=[data_parallel]."
        )

    def _sent_in_int8(self, table: CompositionalEmbeddingConfig, types: list[str], collection: str) -> list[str]:
        """Returns those types whose vectors can be sent as they are set to be; all of them where that is no int8."""
        exchange = self._request.exchanges.get(collection, VectorExchange())
        if not exchange.has_int8 or self._cluster.world_size == 1:
            return types
        # int8 is not added up, and sums are what tables whose rows are divided send
        possible = [name for name in types if name not in BY_ROWS or not is_pooled(table)]
        if not possible or (width(table) % INT8_NUMBERS and possible != [_DATA_PARALLEL]):
            lacking = "sums of several ranks are no int8" if not possible else f"it has {width(table)} columns"
            raise UserError(
                f"train.quantized_comms sends vectors in int8, {INT8_NUMBERS} numbers at a time, which table "
                f"{table.name!r} does not allow: {lacking}. Take fp16 or bf16; or an embedding_dim that is a multiple "
                f"of {INT8_NUMBERS}, and table_wise or column_wise among plan.sharding_types."
            )
        return possible

    def _default_types(self, table: CompositionalEmbeddingConfig) -> list[str]:
        """Returns the sharding types of a table of which the config says nothing."""
        if self._cluster.world_size == 1:
            # one that FBGEMM cannot look up is left to torch
            return ["table_wise"] if can_be_placed(table, "table_wise") else [_DATA_PARALLEL]
        types = ["table_wise", *(["column_wise"] if is_pooled(table) else []), "row_wise", _DATA_PARALLEL]
        has_levels = min(self._cluster.nodes, self._cluster.ranks_per_node) > 1
        return types + [name for name in WITHIN_NODES if has_levels and name in SHARDING_TYPES]

    def _layouts(self, table: CompositionalEmbeddingConfig, sharding_type: str, collection: str) -> Iterator[Layout]:
        columns = width(table)
        for num_ranges in self._numbers_of_ranges(table, sharding_type, collection):
            wide = columns // num_ranges
            ranges = tuple((start, start + wide) for start in range(0, columns, wide))
            for kernel in self._kernels(table, sharding_type):
                yield Layout(sharding_type, kernel, ranges)

    def _kernels(self, table: CompositionalEmbeddingConfig, sharding_type: str) -> list[str]:
        own, is_cuda = self.own(table).compute_kernels, self._cluster.device.kind == "cuda"
        if sharding_type == _DATA_PARALLEL or not self._request.table_optimizers.for_table(table).is_fused:
            possible = [EmbeddingComputeKernel.DENSE.value]
        else:
            has_host = is_cuda and (self._config.host_memory or own is not None)
            possible = [EmbeddingComputeKernel.FUSED.value, *(IN_HOST_MEMORY if has_host else ())]
        return possible if own is None else [name for name in possible if name in own]

    def _in_one_pass(self, table: CompositionalEmbeddingConfig, layouts: Sequence[Layout]) -> list[Layout]:
        """Returns those layouts whose columns are looked up in one pass on every rank.

        Raises:
            UserError: There is none.
        """
        kind, optimizer = self._cluster.device.kind, self._request.table_optimizers.for_table(table).sparse
        possible, reasons = [], []
        for layout in layouts:
            slices, _ = divided_table(table, layout)
            against = [reason for own in slices if (reason := reason_not_fused(own, kind, optimizer)) is not None]
            reasons += against
            if not against:
                possible.append(layout)
        if not possible:
            raise fused_refusal(table, reasons[0])
        return possible

    def _numbers_of_ranges(
        self, table: CompositionalEmbeddingConfig, sharding_type: str, collection: str
    ) -> Sequence[int]:
        """Returns in how many ranges of columns a table may be."""
        if sharding_type not in (*_BY_COLUMNS, _GRID):
            return [1]
        most, columns = self._most_ranges(sharding_type), width(table)
        if not is_pooled(table):
            wide = self._sequence_width[collection]
            return [columns // wide] if columns // wide <= most else []
        # one range is table-wise by another name, for those that may have no other
        is_forced = sharding_type in (self.own(table).sharding_types or self._config.sharding_types or ())
        in_line = _VECTOR if is_forced else _LINE_BYTES[self._cluster.device.kind] // table.bytes_per_number
        narrowest = max(_VECTOR, self._min_partition(table) or in_line)
        numbers = [
            number
            for number in range(2, most + 1)
            if columns % number == 0
            and columns // number >= narrowest
            and columns // number % self._sent_together(collection) == 0
            and _are_vectors(table, columns // number)
        ]
        if sharding_type == ShardingType.TABLE_COLUMN_WISE.value and self._cluster.nodes > 1:
            # the ranks of a node have a range each, alike
            numbers = [number for number in numbers if number == most and _are_alike(table, columns // number)]
        return numbers or ([1] if is_forced else [])

    def _sent_together(self, collection: str) -> int:
        """Returns of how many columns a range has to be a multiple, so that each rank's can be sent."""
        return INT8_NUMBERS if self._request.exchanges.get(collection, VectorExchange()).has_int8 else 1

    def _most_ranges(self, sharding_type: str) -> int:
        if sharding_type == _GRID:
            return self._cluster.nodes
        if sharding_type == ShardingType.TABLE_COLUMN_WISE.value:
            return self._cluster.ranks_per_node
        return self._cluster.world_size

    def _min_partition(self, table: CompositionalEmbeddingConfig) -> int:
        """Returns the fewest columns of a range that the config names for a table, or 0."""
        return self.own(table).min_partition or self._config.min_partition or 0

    def _common_width(self, tables: Sequence[CompositionalEmbeddingConfig], collection: str) -> int:
        """Returns the width of the ranges of all sequences of a collection that may be divided by columns."""
        allowed = [table for table in tables if "column_wise" in self._allowed_types(table, collection)]
        if not allowed:
            return 1
        common = gcd(*(width(table) for table in allowed))
        narrowest = max(_VECTOR, self._sent_together(collection), *(self._min_partition(table) for table in allowed))
        widths = [wide for wide in range(common, narrowest - 1, -_VECTOR) if common % wide == 0]
        widths = [wide for wide in widths if wide % self._sent_together(collection) == 0]
        widths = [wide for wide in widths if all(_are_vectors(table, wide) for table in allowed)]
        # divided if it can be, in as few ranges as all of them may have
        divided = [wide for wide in widths if any(wide < width(table) for table in allowed)]
        most = self._cluster.world_size
        enough = [wide for wide in divided if all(width(table) // wide <= most for table in allowed)]
        return next(iter(enough or widths), common)

    def _no_layout(self, table: CompositionalEmbeddingConfig, types: Sequence[str]) -> str:
        kernels, own = self.own(table).compute_kernels, f"plan.tables.{table.name}"
        named = "" if kernels is None else f" by the kernels {', '.join(kernels)}"
        return (
            f"plan: table {table.name!r} may only be placed {', '.join(types)}{named}, but {width(table)} columns "
            f"cannot be divided so among {self._cluster.world_size} ranks. Allow table_wise in {own}.sharding_types"
            f"{'' if kernels is None else f', or fused and dense in {own}.compute_kernels'}."
        )


def _shape(layout: Layout) -> tuple[str, int, str]:
    """Returns what layouts of tables that lie together have in common."""
    in_host_memory = layout.compute_kernel if layout.compute_kernel in IN_HOST_MEMORY else ""
    return layout.sharding_type, len(layout.columns), in_host_memory


def _are_vectors(table: CompositionalEmbeddingConfig, wide: int) -> bool:
    """Returns whether each partition's columns in every range of so many are whole vectors of FBGEMM."""
    return all(own.num_columns % _VECTOR == 0 for table_slice in _slices(table, wide) for own in table_slice.partitions)


def _are_alike(table: CompositionalEmbeddingConfig, wide: int) -> bool:
    """Returns whether the same partitions, with as many columns, take part in every range of so many columns."""
    return len({table_slice.shape for table_slice in _slices(table, wide)}) == 1


def _slices(table: CompositionalEmbeddingConfig, wide: int) -> Iterator[TableSlice]:
    """Yields ranges of so many columns."""
    parts = table.partition_tables()
    kernels = [None] * len(parts)
    return (slice_table(table, parts, (at, at + wide), kernels) for at in range(0, width(table), wide))


def _hindrance(table: CompositionalEmbeddingConfig, allowed: Sequence[str]) -> str:
    if any(part.dim % _VECTOR for part in table.lookup_tables()):
        return "FBGEMM has vectors of a multiple of 4 numbers only"
    if not can_be_placed(table, "column_wise"):
        return f"{table.combine.name} needs all columns on one rank"
    if not is_pooled(table):
        return "TorchRec has no such sharding of sequences"
    if table.all_scored and set(allowed) <= set(WITHIN_NODES):
        return "all of its vectors are scored, which takes whole tables, or columns or rows over all ranks"
    return "a maximum needs all ids of a bag on one rank"


def _remedy(table: CompositionalEmbeddingConfig) -> str:
    return " or ".join(name for name in ("table_wise", _DATA_PARALLEL) if can_be_placed(table, name))
