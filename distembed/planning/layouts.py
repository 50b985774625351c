"""The layouts of a table on a cluster, as its composition, the config and the ranks allow.

==================== ======================================================== ==========================================
sharding type        layouts                                                  unless the config says otherwise
==================== ======================================================== ==========================================
``table_wise``       whole, on one rank                                       always
``column_wise``      in 2 or more equal ranges of columns, on as many ranks   with several ranks; not of sequences
``row_wise``         by rows, over all ranks                                  with several ranks
``table_row_wise``   by rows, over the ranks of a node                        with several nodes of several ranks
``grid_shard``       in ranges of columns, each on a node                     with several nodes of several ranks
``data_parallel``    a copy on every rank                                     with several ranks
==================== ======================================================== ==========================================

``table_column_wise``, a range of columns for each rank of a node, needs the config's permission.

TorchRec divides all sequences of a collection into ranges of one width: the widest that divides all of them.
"""

from collections.abc import Iterable, Sequence
from math import gcd

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.base.units import format_ranges
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.settings import INT8_NUMBERS
from distembed.planning.config import TablePlanConfig
from distembed.planning.costs import Layout, divided_table
from distembed.planning.request import PlanRequest
from distembed.planning.times import is_on_every_rank
from distembed.sharding.groups import fused_refusal, reason_not_fused
from distembed.sharding.placement import BY_ROWS, IN_HOST_MEMORY, WITHIN_NODES, can_be_placed
from distembed.sharding.table_slice import is_pooled, partition_slices, width

_VECTOR = 4
"""Numbers that FBGEMM's kernels read at once: the narrowest range of columns."""
_LINE_BYTES = {"cuda": 128, "cpu": 64}
"""Bytes of a cache line: the narrowest range, unless the config names a width or only types by columns."""
_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


class Layouts:
    """Layouts of the tables of a request.

    Construction and methods raise a ``UserError`` for a name in the config that no table has, a table in two groups of
    ``plan.together``, pins that contradict each other, and a table without any allowed layout.
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
                    raise UserError(f"plan.together has table {name!r} twice; make one group of all its tables.")
                self._together[name] = group
        self._sequence_width = {
            path: self._common_width([table for table in tables if not is_pooled(table)], path)
            for path, tables in by_collection.items()
        }

    def for_unit(self, members: Sequence[tuple[CompositionalEmbeddingConfig, str]]) -> list[list[Layout]]:
        """Returns the layouts of each member of a unit, a table with its collection's path; all lists are equally long.

        The n-th layouts of all members are chosen together: they have one sharding type and equally many ranges.
        """
        ranks = self.ranks(table for table, _ in members)
        by_key = [{_shape(layout): layout for layout in self._of(table, path, ranks)} for table, path in members]
        common = [key for key in by_key[0] if all(key in layouts for layouts in by_key)]
        if not common:
            listed = "; ".join(
                f"{table.name!r} can be {', '.join(dict.fromkeys(key[0] for key in member_layouts))}"
                for (table, _), member_layouts in zip(members, by_key, strict=True)
            )
            raise UserError(
                f"plan.together: the tables cannot be divided alike: {listed}. Allow one sharding type for all of them "
                "in plan.tables.NAME.sharding_types, or take one out of the group."
            )
        return [[layouts[key] for key in common] for layouts in by_key]

    def ranks(self, tables: Iterable[CompositionalEmbeddingConfig]) -> tuple[int, ...]:
        """Returns the sorted ranks to which all pinned ``tables`` of a unit agree; empty where no table is pinned."""
        pinned = {table.name: ranks for table in tables if (ranks := self.table_config(table).ranks) is not None}
        for name, table_ranks in pinned.items():
            if max(table_ranks) >= self._cluster.world_size:
                raise UserError(
                    f"plan.tables.{name}.ranks has rank {max(table_ranks)}, and there are {self._cluster.world_size} "
                    f"ranks; name ranks from 0 to {self._cluster.world_size - 1}."
                )
        common = set[int]().union(*pinned.values()).intersection(*pinned.values())
        if pinned and not common:
            listed = ", ".join(f"{name!r} to ranks {format_ranges(sorted(at))}" for name, at in pinned.items())
            raise UserError(
                f"plan.together: tables that lie together are pinned to different ranks: {listed}. Give them a rank in "
                "common in plan.tables.NAME.ranks, or take one out of the group."
            )
        return tuple(sorted(common))

    def together_with(self, table: CompositionalEmbeddingConfig) -> list[str]:
        """Returns the names of all tables of this table's unit; a table outside ``plan.together`` is its own unit."""
        return self._together.get(table.name, [table.name])

    def table_config(self, table: CompositionalEmbeddingConfig) -> TablePlanConfig:
        return self._config.tables.get(table.name, TablePlanConfig())

    def only_type_because(self, table: CompositionalEmbeddingConfig) -> str:
        """Returns the setting, or the lone rank, that limits a table's sharding types; empty where nothing does."""
        table_types = self.table_config(table).sharding_types
        for name, allowed in ((f"plan.tables.{table.name}", table_types), ("plan", self._config.sharding_types)):
            if allowed:
                return f"of {', '.join(allowed)}, as {name}.sharding_types has it"
        return "there is one rank" if self._cluster.world_size == 1 else ""

    def in_one_pass(self, table: CompositionalEmbeddingConfig, layouts: Sequence[Layout]) -> Sequence[Layout]:
        """Returns the layouts that the one-pass lookup can do, if the table requires it (``kernel="fused"``).

        Returns all layouts for other tables; raises a ``UserError`` with the first reason where none is left.
        """
        if table.kernel != "fused":
            return layouts
        kind, optimizer = self._cluster.device.kind, self._request.table_optimizers.for_table(table).sparse
        possible, reasons = [], []
        for layout in layouts:
            slices, _ = divided_table(table, layout)
            refusals = [reason_not_fused(table_slice, kind, optimizer) for table_slice in slices]
            reasons += [reason for reason in refusals if reason is not None]
            if not any(refusals):
                possible.append(layout)
        if not possible:
            raise fused_refusal(table, reasons[0])
        return possible

    def _of(self, table: CompositionalEmbeddingConfig, collection: str, ranks: Sequence[int]) -> list[Layout]:
        """Returns all layouts of a table that have places on the pinned ``ranks``; empty ``ranks`` are all ranks."""
        types, columns, setting = self._allowed_types(table, collection), width(table), f"plan.tables.{table.name}"
        layouts = [
            Layout(name, kernel, tuple((start, start + wide) for start in range(0, columns, wide)))
            for name in types
            for wide in self._widths_of_ranges(table, name, collection)
            for kernel in self._kernels(table, name)
        ]
        if not layouts:
            kernels = self.table_config(table).compute_kernels
            kernel_note = "" if kernels is None else f" by the kernels {', '.join(kernels)}"
            raise UserError(
                f"plan: table {table.name!r} may only be placed {', '.join(types)}{kernel_note}, but {columns} columns "
                f"cannot be divided so among {self._cluster.world_size} ranks. Allow table_wise in "
                f"{setting}.sharding_types"
                f"{'' if kernels is None else f', or fused and dense in {setting}.compute_kernels'}."
            )
        looked_up = self.in_one_pass(table, layouts)
        possible = [layout for layout in looked_up if self._has_places(layout, ranks)]
        if not possible:
            types_left = dict.fromkeys(layout.sharding_type for layout in looked_up)
            raise UserError(
                f"plan: table {table.name!r} is pinned to ranks {format_ranges(ranks)} of {self._cluster.world_size}, "
                f"and {', '.join(types_left)} needs more of them. Name more ranks in {setting}.ranks, or allow "
                f"table_wise in {setting}.sharding_types."
            )
        return possible

    def _has_places(self, layout: Layout, ranks: Sequence[int]) -> bool:
        """Returns whether the pinned ``ranks`` hold all shards of a layout, each on a rank or node of its own."""
        cluster, num_places = self._cluster, len(layout.columns)
        if not ranks or len(ranks) == cluster.world_size:
            return True
        if is_on_every_rank(layout.sharding_type):
            return False
        nodes = (range(at, at + cluster.ranks_per_node) for at in range(0, cluster.world_size, cluster.ranks_per_node))
        num_full_nodes = sum({*node} <= {*ranks} for node in nodes)
        if layout.sharding_type in WITHIN_NODES:
            return num_full_nodes >= num_places
        return num_full_nodes > 0 if layout.lies_on_one_node(cluster) else len(ranks) >= num_places

    def _chosen_types(self, table: CompositionalEmbeddingConfig) -> Sequence[str]:
        """Returns the sharding types that the config names for a table, else for all tables; else none."""
        return self.table_config(table).sharding_types or self._config.sharding_types or ()

    def _allowed_types(self, table: CompositionalEmbeddingConfig, collection: str) -> list[str]:
        """Returns the chosen or default types that composition, device and int8 vectors permit; else ``UserError``."""
        chosen = self._chosen_types(table)
        allowed = chosen or self._default_types(table)
        possible = [name for name in allowed if can_be_placed(table, name)]
        if not possible:
            remedy = " or ".join(name for name in ("table_wise", _DATA_PARALLEL) if can_be_placed(table, name))
            raise UserError(
                f"plan: table {table.name!r} may only be placed {', '.join(allowed)}, but it cannot be: "
                f"{_hindrance(table, allowed)}. Allow {remedy} in plan.tables.{table.name}.sharding_types."
            )
        is_torchs = chosen and possible == [_DATA_PARALLEL]
        if table.data_type == "BF16" and self._cluster.device.kind == "cpu" and not is_torchs:
            raise UserError(
                f"table {table.name!r} has data_type bf16, and FBGEMM has no kernel for bfloat16 on the CPU: set "
                f"embedding.default.data_type, or embedding.tables.{table.name}.data_type, to fp16 or fp32; or have "
                "torch look it up, with a copy on every rank, by plan.sharding_types=[data_parallel]."
            )
        if not self._request.exchanges[collection].has_int8 or self._cluster.world_size == 1:
            return possible
        # int8 numbers cannot be summed, and pooled tables whose rows are divided send partial sums
        sendable = [name for name in possible if name not in BY_ROWS or not is_pooled(table)]
        if not sendable or (width(table) % INT8_NUMBERS and sendable != [_DATA_PARALLEL]):
            lacking = "sums of several ranks are no int8" if not sendable else f"it has {width(table)} columns"
            raise UserError(
                f"train.quantized_comms sends vectors in int8, {INT8_NUMBERS} numbers at a time, which table "
                f"{table.name!r} does not allow: {lacking}. Take fp16 or bf16; or an embedding_dim that is a multiple "
                f"of {INT8_NUMBERS}, and table_wise or column_wise among plan.sharding_types."
            )
        return sendable

    def _default_types(self, table: CompositionalEmbeddingConfig) -> list[str]:
        """Returns the sharding types of a table for which the config names none."""
        if self._cluster.world_size == 1:
            # torch looks up a table for which FBGEMM has no kernel
            return ["table_wise"] if can_be_placed(table, "table_wise") else [_DATA_PARALLEL]
        types = ["table_wise", *(["column_wise"] if is_pooled(table) else []), "row_wise", _DATA_PARALLEL]
        return types + [*WITHIN_NODES] * (min(self._cluster.nodes, self._cluster.ranks_per_node) > 1)

    def _kernels(self, table: CompositionalEmbeddingConfig, sharding_type: str) -> list[str]:
        """Returns the compute kernels that the optimizer, the device and the config allow; may be empty."""
        table_kernels, is_cuda = self.table_config(table).compute_kernels, self._cluster.device.kind == "cuda"
        if sharding_type == _DATA_PARALLEL or not self._request.table_optimizers.for_table(table).is_fused:
            possible = [EmbeddingComputeKernel.DENSE.value]
        else:
            has_host = is_cuda and (self._config.host_memory or table_kernels is not None)
            possible = [EmbeddingComputeKernel.FUSED.value, *(IN_HOST_MEMORY if has_host else ())]
        return possible if table_kernels is None else [name for name in possible if name in table_kernels]

    def _widths_of_ranges(
        self, table: CompositionalEmbeddingConfig, sharding_type: str, collection: str
    ) -> Sequence[int]:
        """Returns the widths of column ranges for a sharding type, the widest first; the whole width if undivided.

        Empty where the type divides columns and no width gives enough ranges.
        """
        cluster, columns = self._cluster, width(table)
        most_ranges = {
            ShardingType.COLUMN_WISE.value: cluster.world_size,
            ShardingType.TABLE_COLUMN_WISE.value: cluster.ranks_per_node,
            ShardingType.GRID_SHARD.value: cluster.nodes,
        }
        most = most_ranges.get(sharding_type)
        if most is None:
            return [columns]
        if not is_pooled(table):
            wide = self._sequence_width[collection]
            return [wide] if columns // wide <= most else []
        chosen = self._chosen_types(table)
        is_only_by_columns = bool(chosen) and {*chosen} <= most_ranges.keys()
        in_line = _VECTOR if is_only_by_columns else _LINE_BYTES[cluster.device.kind] // table.bytes_per_number
        narrowest = max(_VECTOR, self.table_config(table).min_partition or self._config.min_partition or in_line)
        widths = [
            wide
            for wide in self._possible_widths(table, collection)
            if wide >= narrowest and 2 <= columns // wide <= most
        ]
        if sharding_type == ShardingType.TABLE_COLUMN_WISE.value and cluster.nodes > 1:
            # each rank of a node has exactly one range, and all ranges cut the partitions into equal shapes
            widths = [wide for wide in widths if wide * most == columns and len({*_range_shapes(table, wide)}) == 1]
        # without a width, a single range (as table_wise) if the config names this type
        return widths or ([columns] if sharding_type in chosen else [])

    def _possible_widths(self, table: CompositionalEmbeddingConfig, collection: str) -> list[int]:
        """Returns the widths that divide the columns evenly and suit FBGEMM's kernels and int8, the widest first."""
        columns, sent_together = width(table), INT8_NUMBERS if self._request.exchanges[collection].has_int8 else 1
        widths = [columns // number for number in range(1, columns // _VECTOR + 1) if columns % number == 0]
        return [
            wide
            for wide in widths
            if wide % sent_together == 0
            and all(num_columns % _VECTOR == 0 for shape in _range_shapes(table, wide) for _, num_columns in shape)
        ]

    def _common_width(self, tables: Sequence[CompositionalEmbeddingConfig], collection: str) -> int:
        """Returns one width of column ranges for all sequence tables of a collection, as TorchRec requires.

        Prefers the widest that divides some table into at most as many ranges as ranks; else the widest possible.
        """
        allowed = [table for table in tables if "column_wise" in self._allowed_types(table, collection)]
        if not allowed:
            return 1
        narrowest = max(
            self.table_config(table).min_partition or self._config.min_partition or _VECTOR for table in allowed
        )
        first_widths, *other_widths = [self._possible_widths(table, collection) for table in allowed]
        common = set(first_widths).intersection(*other_widths)
        widths = [wide for wide in first_widths if wide >= narrowest and wide in common]
        # by width, the number of ranges of the table with the most columns
        num_ranges = {wide: max(width(table) // wide for table in allowed) for wide in widths}
        divided = [wide for wide in widths if 1 < num_ranges[wide] <= self._cluster.world_size]
        return next(iter(divided or widths), gcd(*(width(table) for table in allowed)))


def _shape(layout: Layout) -> tuple[str, int, str]:
    """Returns the part of a layout in which tables of a unit agree: type, number of ranges, kernel in host memory."""
    in_host_memory = layout.compute_kernel if layout.compute_kernel in IN_HOST_MEMORY else ""
    return layout.sharding_type, len(layout.columns), in_host_memory


def _range_shapes(table: CompositionalEmbeddingConfig, wide: int) -> list[tuple[tuple[int, int], ...]]:
    """Returns, for each range of ``wide`` columns, the partitions within it as (number, columns of the partition)."""
    slices = [partition_slices(table, start, start + wide) for start in range(0, width(table), wide)]
    return [tuple((part_slice.partition, part_slice.num_columns) for part_slice in in_range) for in_range in slices]


def _hindrance(table: CompositionalEmbeddingConfig, allowed: Sequence[str]) -> str:
    """Returns the reason, for an error message, why a table can have none of the allowed types."""
    if any(part.dim % _VECTOR for part in table.lookup_tables()):
        return "FBGEMM has vectors of a multiple of 4 numbers only"
    if not can_be_placed(table, "column_wise"):
        return f"{table.combine.name} needs all columns on one rank"
    if not is_pooled(table):
        return "TorchRec does not shard sequences this way"
    if table.all_scored and set(allowed) <= set(WITHIN_NODES):
        return "all of its vectors are scored, which takes whole tables, or columns or rows over all ranks"
    return "a maximum needs all ids of a bag on one rank"
