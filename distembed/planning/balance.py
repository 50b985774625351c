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
"""Numbers of the vectors that FBGEMM's kernels read: the narrowest range of columns."""


@dataclass(frozen=True)
class Choice:
    """How a table is placed.

    Attributes:
        sharding_type: of the table.
        columns: of each range, where it is divided by columns.
    """

    sharding_type: str
    columns: int | None = None


@dataclass(frozen=True)
class Divisible:
    """A table that may be divided.

    Attributes:
        columns: of its output.
        bytes_of_columns: that are divided with the columns.
        bytes_of_rows: that each range of columns has anew: numbers that an optimizer keeps of a row.
        possible: sharding types.
        min_partition: fewest columns of a range; None for as few as FBGEMM can have.
    """

    columns: int
    bytes_of_columns: int
    bytes_of_rows: int
    possible: Sequence[str]
    min_partition: int | None = None

    def num_bytes(self, columns: int) -> float:
        """Of a range of columns."""
        return self.bytes_of_columns * columns / self.columns + self.bytes_of_rows


def choose(tables: Mapping[str, Divisible], world_size: int, divisor: float) -> dict[str, Choice]:
    """How each table is placed: divided no more than it must be.

    By rows go tables of which even the narrowest range of columns is more than a rank's share, without what it has of
    other such tables.

    Args:
        tables: by name.
        world_size: number of ranks.
        divisor: of a rank's share, to the most bytes of a range of columns.
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
    """Why each table is placed so; arguments as those of :func:`choose`."""
    share = sum(table.num_bytes(table.columns) for table in tables.values()) / world_size
    return {name: _why(tables[name], choice, share) for name, choice in choices.items()}


def _why(table: Divisible, choice: Choice, share: float) -> str:
    if len(table.possible) == 1:
        return ""
    times = table.num_bytes(table.columns) / share
    shares = f"{times:.1f} times a rank's share" if times >= 0.1 else "less than a tenth of a rank's share"
    if choice.sharding_type == _BY_ROWS:
        return f"by rows: {shares}, and more than that in the narrowest range of columns"
    if choice.columns is None or choice.columns == table.columns:
        return f"whole: {shares}"
    return f"in ranges of {choice.columns} columns{', for balance' if times <= 1 else ''}: whole {shares}"


def _choose(table: Divisible, world_size: int, limit: float, room: float) -> Choice:
    by_columns = next((kind for kind in _BY_COLUMNS if kind in table.possible), None)
    whole = [table.columns] if ShardingType.TABLE_WISE.value in table.possible else []
    widths = whole + (_ranges(table.columns, table.min_partition or _VECTOR, world_size) if by_columns else [])
    if _BY_ROWS in table.possible and not (widths and table.num_bytes(widths[-1]) <= room):
        return Choice(_BY_ROWS)
    if not widths:  # one range, or on every rank
        return Choice(table.possible[0], table.columns)
    columns = next((wide for wide in widths if table.num_bytes(wide) <= limit), widths[-1])
    if by_columns is None or columns == table.columns:
        return Choice(ShardingType.TABLE_WISE.value)
    return Choice(by_columns, columns)


def _ranges(columns: int, fewest: int, world_size: int) -> list[int]:
    """Widths of equal ranges, from the widest, no more of them than ranks."""
    least = max(fewest, -(-columns // world_size))
    return [wide for wide in range(columns // 2, least - 1, -1) if columns % wide == 0 and wide % _VECTOR == 0]


class BalancedPartitioner(Partitioner):
    """Places the shards of a proposal, largest first; ranges of one table on different ranks, where they are enough.

    Attributes:
        imbalance: of the last proposal: by what share of their mean some rank's tables' bytes differ from it, at most.

    Args:
        table_bytes: of each shard of an option, without buffers.
    """

    imbalance = math.inf

    def __init__(self, table_bytes: Callable[[ShardingOption], list[int]]) -> None:
        self._table_bytes = table_bytes

    def partition(self, proposal: list[ShardingOption], storage_constraint: Topology) -> list[ShardingOption]:
        pieces = {option.name: self._pieces(option) for option in proposal}
        ranks = _Ranks(storage_constraint, [piece for of_table in pieces.values() for piece in of_table])
        by_kind: dict[str, list[ShardingOption]] = {kind.value: [] for kind in PartitionByType}
        for option in proposal:
            by_kind[option.partition_by].append(option)
        for option in by_kind[PartitionByType.UNIFORM.value]:
            for rank, piece in enumerate(pieces[option.name]):
                ranks.put(piece, rank)
        others = by_kind[PartitionByType.HOST.value] + by_kind[PartitionByType.DEVICE.value]
        for option in sorted(others, key=lambda option: -max(piece.table_bytes for piece in pieces[option.name])):
            is_on_one_node = option.partition_by == PartitionByType.HOST.value
            allowed = ranks.of_emptiest_node() if is_on_one_node else ranks.all()
            for piece in pieces[option.name]:
                rank = ranks.with_least_to_do(piece, allowed)
                ranks.put(piece, rank)
                if allowed.sum() > 1:
                    allowed[rank] = False
        self.imbalance = ranks.imbalance
        return proposal

    def _pieces(self, option: ShardingOption) -> list["_Piece"]:
        pairs = zip(option.shards, self._table_bytes(option), strict=True)
        return [_Piece(shard, num_bytes, _needed(shard)) for shard, num_bytes in pairs]


@dataclass(frozen=True)
class _Piece:
    shard: Shard
    table_bytes: int
    needed: npt.NDArray[np.float64]  # of the device's memory and the machine's

    @property
    def load(self) -> npt.NDArray[np.float64]:
        return np.array([self.table_bytes, self.needed.sum(), self.shard.perf.total])


class _Ranks:
    """What each rank holds so far: tables' bytes, all bytes, and estimated time, as shares of the means in the end."""

    def __init__(self, topology: Topology, pieces: Sequence[_Piece]) -> None:
        self._free = np.array([[device.storage.hbm, device.storage.ddr] for device in topology.devices], np.float64)
        self._local_world_size = topology.local_world_size
        self._load = np.zeros((topology.world_size, 3))
        total = np.sum([piece.load for piece in pieces], axis=0)
        self._mean = np.where(total > 0, total, 1) / topology.world_size

    @property
    def imbalance(self) -> float:
        """By what share of their mean some rank's tables' bytes differ from it, at most."""
        return float(np.abs(self._load[:, 0] - 1).max())

    def all(self) -> npt.NDArray[np.bool_]:
        return np.ones(len(self._load), bool)

    def of_emptiest_node(self) -> npt.NDArray[np.bool_]:
        nodes = self._load[:, 0].reshape(-1, self._local_world_size).sum(1)
        return np.arange(len(self._load)) // self._local_world_size == nodes.argmin()

    def with_least_to_do(self, piece: _Piece, allowed: npt.NDArray[np.bool_]) -> int:
        fits = (self._free >= piece.needed).all(1)
        candidates = fits & allowed if (fits & allowed).any() else fits
        if not fits.any():
            raise _no_room("no rank", piece)
        after = self._load + piece.load / self._mean
        within = candidates & (after[:, 0] <= _SLACK)
        if within.any():
            return int(np.where(within, after.max(1), np.inf).argmin())
        return int(np.where(candidates, after[:, 0], np.inf).argmin())

    def put(self, piece: _Piece, rank: int) -> None:
        if (self._free[rank] < piece.needed).any():
            raise _no_room(f"rank {rank} no longer", piece)
        piece.shard.rank = rank
        self._free[rank] -= piece.needed
        self._load[rank] += piece.load / self._mean


def _no_room(who: str, piece: _Piece) -> PlannerError:
    size = f"{piece.shard.size[0]:,} rows of {piece.shard.size[1]} columns"
    return PlannerError(
        error_type=PlannerErrorType.PARTITION,
        message=f"{who} has room for {piece.needed.sum():,.0f} bytes of a shard of {size}",
    )


def _needed(shard: Shard) -> npt.NDArray[np.float64]:
    return np.array([shard.storage.hbm, shard.storage.ddr], np.float64)
