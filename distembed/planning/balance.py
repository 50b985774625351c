"""Ranks with loads alike: which tables to divide, and what goes where.

TorchRec's search places whole tables by the time that they take, and divides none of fewer than 256 columns. With many
ranks, or tables that fill them, that leaves a few ranks full and others empty. Here no range of columns is larger than
a limit, which is lowered until the bytes of all ranks are near their mean; then ranges are placed largest first, each
on the rank with least to do of those that it leaves within the mean.

Trade-off: each range of a table's columns takes the ids anew, and a row-wise table takes the vectors of all ranks'
batches on every rank. So tables are divided no more than balance needs, and by rows only where the narrowest range of
columns is more than a rank's share.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torchrec.distributed.planner.types import (
    PartitionByType,
    Partitioner,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingType

_SLACK = 1.02
"""Share of the mean up to which a rank is filled by time rather than by bytes."""
_BY_COLUMNS = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
_BY_ROWS = ShardingType.ROW_WISE.value
_VECTOR = 4
"""Numbers that FBGEMM's kernels read at once: the narrowest range of columns."""


@dataclass(frozen=True)
class Choice:
    """Sharding of a table.

    Attributes:
        sharding_type: The table's sharding type.
        columns: Number of columns of each range, where the table is divided by columns.
    """

    sharding_type: str
    columns: int | None = None


@dataclass(frozen=True)
class Divisible:
    """A table that may be divided.

    Attributes:
        columns: Number of columns of the table's output.
        column_bytes: Bytes of all columns, which are divided with them.
        row_bytes: Bytes that each range of columns has anew: numbers that an optimizer keeps of a row.
        sharding_types: Sharding types that the table may have.
        min_partition: Fewest columns of a range; None for as few as FBGEMM can have.
    """

    columns: int
    column_bytes: int
    row_bytes: int
    sharding_types: Sequence[str]
    min_partition: int | None = None

    def num_bytes(self, columns: int) -> float:
        """Returns the bytes of a range of columns."""
        return self.column_bytes * columns / self.columns + self.row_bytes


def choose(tables: Mapping[str, Divisible], world_size: int, divisor: float) -> dict[str, Choice]:
    """Chooses a sharding for each table, divided no more than it must be.

    Tables are divided by rows where even their narrowest range of columns is more than a rank's share, without what the
    rank has of other such tables.

    Args:
        tables: Tables by name.
        world_size: Number of ranks.
        divisor: A rank's share divided by this is the most bytes of a range of columns.
    """
    share = sum(table.num_bytes(table.columns) for table in tables.values()) / world_size
    room, left = math.inf, share
    while left < room:
        room = left
        choices = {name: _choose(table, world_size, min(share / divisor, room), room) for name, table in tables.items()}
        by_rows = [tables[name] for name, choice in choices.items() if choice.sharding_type == _BY_ROWS]
        left = share - sum(table.num_bytes(table.columns) for table in by_rows) / world_size
    return choices


def why_divided(tables: Mapping[str, Divisible], choices: Mapping[str, Choice], world_size: int) -> dict[str, str]:
    """Returns the reason for each table's sharding, empty where it had one type only; arguments as :func:`choose`."""
    share = sum(table.num_bytes(table.columns) for table in tables.values()) / world_size
    return {name: _why(tables[name], choice, share) for name, choice in choices.items()}


def _why(table: Divisible, choice: Choice, share: float) -> str:
    if len(table.sharding_types) == 1:
        return ""
    times = table.num_bytes(table.columns) / share
    shares = f"{times:.1f} times a rank's share" if times >= 0.1 else "less than a tenth of a rank's share"
    if choice.sharding_type == _BY_ROWS:
        return f"by rows: {shares}, and more than that in the narrowest range of columns"
    if choice.columns is None or choice.columns == table.columns:
        return f"whole: {shares}"
    return f"in ranges of {choice.columns} columns{', for balance' if times <= 1 else ''}: whole {shares}"


def _choose(table: Divisible, world_size: int, limit: float, room: float) -> Choice:
    by_columns = next((name for name in _BY_COLUMNS if name in table.sharding_types), None)
    whole = [table.columns] if ShardingType.TABLE_WISE.value in table.sharding_types else []
    widths = whole + (_ranges(table.columns, table.min_partition or _VECTOR, world_size) if by_columns else [])
    if _BY_ROWS in table.sharding_types and not (widths and table.num_bytes(widths[-1]) <= room):
        return Choice(_BY_ROWS)
    if not widths:  # one range, or on every rank
        return Choice(table.sharding_types[0], table.columns)
    columns = next((wide for wide in widths if table.num_bytes(wide) <= limit), widths[-1])
    if by_columns is None or columns == table.columns:
        return Choice(ShardingType.TABLE_WISE.value)
    return Choice(by_columns, columns)


def _ranges(columns: int, fewest: int, world_size: int) -> list[int]:
    """Returns the widths that equal ranges may have, no more ranges than ranks, from the widest."""
    least = max(fewest, -(-columns // world_size))
    return [wide for wide in range(columns // 2, least - 1, -1) if columns % wide == 0 and wide % _VECTOR == 0]


class BalancedPartitioner(Partitioner):
    """Places the shards of a proposal, largest first; ranges of one table on different ranks, where they are enough.

    Attributes:
        imbalance: Largest difference of a rank's bytes of tables from their mean over ranks, as a share of that mean,
            in the last proposal.

    Args:
        table_bytes: Returns the bytes of each shard of an option, without buffers.
    """

    imbalance = math.inf

    def __init__(self, table_bytes: Callable[[ShardingOption], list[int]]) -> None:
        self._table_bytes = table_bytes

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        """Sets the rank of every shard of a proposal; TorchRec calls it.

        Raises:
            PlannerError: A shard has room on no rank.
        """
        shards = {option.name: self._shard_loads(option) for option in proposal}
        ranks = _RankLoads(storage_constraint, [shard for option_shards in shards.values() for shard in option_shards])
        by_partitioning: dict[str, list[ShardingOption]] = {partition_by.value: [] for partition_by in PartitionByType}
        for option in proposal:
            by_partitioning[option.partition_by].append(option)
        for option in by_partitioning[PartitionByType.UNIFORM.value]:
            for rank, shard in enumerate(shards[option.name]):
                ranks.put(shard, rank)
        others = by_partitioning[PartitionByType.HOST.value] + by_partitioning[PartitionByType.DEVICE.value]
        for option in sorted(others, key=lambda option: -max(shard.table_bytes for shard in shards[option.name])):
            is_on_one_node = option.partition_by == PartitionByType.HOST.value
            allowed = ranks.emptiest_node() if is_on_one_node else ranks.all()
            for shard in shards[option.name]:
                rank = ranks.least_loaded(shard, allowed)
                ranks.put(shard, rank)
                if allowed.sum() > 1:
                    allowed[rank] = False
        self.imbalance = ranks.imbalance
        return proposal

    def _shard_loads(self, option: ShardingOption) -> list["_ShardLoad"]:
        pairs = zip(option.shards, self._table_bytes(option), strict=True)
        return [_ShardLoad(shard, num_bytes, _needed_bytes(shard)) for shard, num_bytes in pairs]


@dataclass(frozen=True)
class _ShardLoad:
    """A shard, the bytes of its table, and the bytes that it needs of the device's memory and the machine's."""

    shard: Shard
    table_bytes: int
    needed_bytes: npt.NDArray[np.float64]

    @property
    def load(self) -> npt.NDArray[np.float64]:
        """Bytes of the table, all bytes, and estimated time."""
        return np.array([self.table_bytes, self.needed_bytes.sum(), self.shard.perf.total])


class _RankLoads:
    """Load of each rank so far: tables' bytes, all bytes, and estimated time, as shares of the means in the end."""

    def __init__(self, topology: Topology, shards: Sequence[_ShardLoad]) -> None:
        self._free = np.array([[device.storage.hbm, device.storage.ddr] for device in topology.devices], np.float64)
        self._local_world_size = topology.local_world_size
        self._load = np.zeros((topology.world_size, 3))
        total = np.sum([shard.load for shard in shards], axis=0)
        self._mean = np.where(total > 0, total, 1) / topology.world_size

    @property
    def imbalance(self) -> float:
        """Largest difference of a rank's bytes of tables from their mean, as a share of that mean."""
        return float(np.abs(self._load[:, 0] - 1).max())

    def all(self) -> npt.NDArray[np.bool_]:
        """Returns the mask of all ranks."""
        return np.ones(len(self._load), bool)

    def emptiest_node(self) -> npt.NDArray[np.bool_]:
        """Returns the mask of the ranks of the node with fewest bytes of tables."""
        nodes = self._load[:, 0].reshape(-1, self._local_world_size).sum(1)
        return np.arange(len(self._load)) // self._local_world_size == nodes.argmin()

    def least_loaded(self, shard: _ShardLoad, allowed: npt.NDArray[np.bool_]) -> int:
        """Returns the rank with room that a shard leaves least loaded, among the allowed ones if any has room."""
        fits = (self._free >= shard.needed_bytes).all(1)
        candidates = fits & allowed if (fits & allowed).any() else fits
        if not fits.any():
            raise _no_room("no rank", shard)
        after = self._load + shard.load / self._mean
        within = candidates & (after[:, 0] <= _SLACK)
        if within.any():
            return int(np.where(within, after.max(1), np.inf).argmin())
        return int(np.where(candidates, after[:, 0], np.inf).argmin())

    def put(self, shard: _ShardLoad, rank: int) -> None:
        """Puts a shard on a rank."""
        if (self._free[rank] < shard.needed_bytes).any():
            raise _no_room(f"rank {rank} no longer", shard)
        shard.shard.rank = rank
        self._free[rank] -= shard.needed_bytes
        self._load[rank] += shard.load / self._mean


def _no_room(who: str, shard: _ShardLoad) -> PlannerError:
    size = f"{shard.shard.size[0]:,} rows of {shard.shard.size[1]} columns"
    return PlannerError(
        error_type=PlannerErrorType.PARTITION,
        message=f"{who} has room for {shard.needed_bytes.sum():,.0f} bytes of a shard of {size}",
    )


def _needed_bytes(shard: Shard) -> npt.NDArray[np.float64]:
    return np.array([shard.storage.hbm, shard.storage.ddr], np.float64)
