"""The search's problem in numbers alone: tables, their options, and each option's time and bytes.

A plan chooses one *option* for each table. An option has *blocks*. A block is one shard, which goes to any rank, or one
shard for each rank of a node, which go to the same node. Blocks of one table go to different *places*: a place is the
number of a rank, or of a node for a block that fills one. The block *everywhere* is the cost of an option to every
rank, wherever its blocks go. The milliseconds of a rank are then::

    base + sum of its blocks and of all blocks everywhere + starts of its groups + starts of all exchanges in use
        + for each phase: the longer of   sum of its own_ms   and   sum of all other_ms - sum of its other_ms

and at least the sum over its node's ranks divided by the number of ranks that the node's cores compute at once. The
phases are the communication phases of the exchanges; :mod:`distembed.planning.costs` estimates all these numbers.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NO_GROUP = -1


@dataclass(frozen=True)
class ShardBlock:
    """One shard, or one shard for each rank of a node; all numbers are the cost to one rank that has a shard."""

    lookup_ms: float
    num_bytes: float  # of weights, optimizer state and, as far as they add up, buffers
    stored_bytes: float  # of weights and optimizer state
    groups: tuple[int, ...]  # lookup groups of the shards; a block that sums several tables may have several
    own_ms: tuple[float, ...]  # communication of the shard's rank, by phase
    other_ms: tuple[float, ...]  # communication of each other rank for this shard, by phase
    fills_node: bool = False  # whether each rank of a node has a shard; else one rank has it
    host_bytes: float = 0.0  # in host memory besides a device's


@dataclass(frozen=True)
class Option:
    """One way to place a table."""

    blocks: tuple[ShardBlock, ...]  # go to different places, the slowest first; all or none of them fill nodes
    everywhere: ShardBlock  # cost to every rank besides the blocks
    exchanges: tuple[int, ...] = ()  # numbers of the exchanges that the table takes part in
    kind: Hashable = None  # sharding type and compute kernel
    num_ranges: int = 1  # ranges of columns into which the table is divided

    def stored_bytes(self, world_size: int, ranks_per_node: int) -> tuple[float, float]:
        """Returns the bytes of weights and optimizer state on all ranks together, and the least on the fullest rank.

        Blocks go to different places, so the fullest rank has at least the largest block.
        """
        shards = [(block.stored_bytes, ranks_per_node if block.fills_node else 1) for block in self.blocks]
        in_all = world_size * self.everywhere.stored_bytes + sum(num_bytes * count for num_bytes, count in shards)
        return in_all, self.everywhere.stored_bytes + max((num_bytes for num_bytes, _ in shards), default=0.0)

    @classmethod
    def together(cls, options: Sequence["Option"]) -> "Option":
        """Returns one option that stands for several tables whose n-th blocks share a place: the sum of their costs.

        All options have equally many blocks; the sum takes ``kind`` and ``num_ranges`` from the first option.
        """
        if len(options) == 1:
            return options[0]
        return replace(
            options[0],
            blocks=tuple(map(_sum_of_blocks, zip(*(option.blocks for option in options), strict=True))),
            everywhere=_sum_of_blocks([option.everywhere for option in options]),
            exchanges=tuple(sorted({exchange for option in options for exchange in option.exchanges})),
        )


def _sum_of_blocks(blocks: Sequence[ShardBlock]) -> ShardBlock:
    """Returns one block with the summed cost of ``blocks``, which share a place; the first tells if it fills a node."""
    return ShardBlock(
        lookup_ms=sum(block.lookup_ms for block in blocks),
        num_bytes=sum(block.num_bytes for block in blocks),
        stored_bytes=sum(block.stored_bytes for block in blocks),
        groups=tuple(sorted({group for block in blocks for group in block.groups})),
        own_ms=tuple(map(sum, zip(*(block.own_ms for block in blocks), strict=True))),
        other_ms=tuple(map(sum, zip(*(block.other_ms for block in blocks), strict=True))),
        fills_node=blocks[0].fills_node,
        host_bytes=sum(block.host_bytes for block in blocks),
    )


@dataclass(frozen=True)
class Problem:
    """Tables to be placed."""

    world_size: int
    ranks_per_node: int
    ranks_at_once: float  # ranks of a node that compute at once, each as fast as if it were alone
    base_ms: float  # milliseconds of every rank without tables
    group_start_ms: Sequence[float]  # milliseconds in which a rank starts the kernels of each group
    exchange_start_ms: Sequence[float]
    num_phases: int  # in which something is communicated
    classes: Sequence[Sequence[Option]]  # options of each class; tables of one class have equal options
    class_of: Sequence[int]  # class of each table
    ranks_of_class: Sequence[Sequence[int]] = ()  # ranks that each class's tables are pinned to; empty: any rank

    @property
    def num_tables(self) -> int:
        return len(self.class_of)

    def with_stored_bytes(self) -> "Problem":
        """Returns a copy whose ``num_bytes`` count weights and optimizer state, without gradients and buffers."""

        def stored(block: ShardBlock) -> ShardBlock:
            return replace(block, num_bytes=block.stored_bytes)

        def with_stored(option: Option) -> Option:
            return replace(option, blocks=tuple(map(stored, option.blocks)), everywhere=stored(option.everywhere))

        return replace(self, classes=[list(map(with_stored, options)) for options in self.classes])

    @cached_property
    def options(self) -> list[Option]:
        """Options of all classes, one class after the other; an option's position is its number everywhere below."""
        return [option for options in self.classes for option in options]

    @cached_property
    def first_option(self) -> Ints:
        """Offsets into :attr:`options`: class ``c`` is at ``first_option[c]:first_option[c + 1]``."""
        return np.concatenate([[0], np.cumsum([len(options) for options in self.classes], dtype=np.int64)])

    def options_of(self, table: int) -> range:
        number = self.class_of[table]
        return range(int(self.first_option[number]), int(self.first_option[number + 1]))

    @cached_property
    def is_pinned(self) -> bool:
        """Whether some class's tables may not lie on every rank."""
        return any(self.ranks_of_class)

    @cached_property
    def allowed(self) -> Mask:
        """Mask by option and rank: whether the option's shards may lie on the rank."""
        all_ranks = range(self.world_size)
        if not self.is_pinned:
            return np.broadcast_to(True, (len(self.options), len(all_ranks)))
        by_class = [np.isin(all_ranks, pinned or all_ranks) for pinned in self.ranks_of_class]
        return np.repeat(by_class, np.diff(self.first_option), axis=0)

    @cached_property
    def blocks(self) -> "BlockNumbers":
        """The distinct blocks of all options as arrays; options with equal blocks share a row."""
        distinct = dict.fromkeys(block for option in self.options for block in (*option.blocks, option.everywhere))
        return BlockNumbers(list(distinct), self.num_phases)

    @cached_property
    def option_blocks(self) -> list[Ints]:
        """Rows in :attr:`blocks` of each option's blocks, without its block everywhere."""
        number = self.blocks.number
        return [np.array([number[block] for block in option.blocks], np.int64) for option in self.options]

    @cached_property
    def placed_blocks(self) -> tuple[Ints, Ints]:
        """Option number and row in :attr:`blocks`: two arrays with an entry for each block of each option, in order."""
        option_of = np.repeat(np.arange(len(self.options)), [len(blocks) for blocks in self.option_blocks])
        return option_of, np.concatenate([np.empty(0, np.int64), *self.option_blocks])

    @cached_property
    def option_everywhere(self) -> Ints:
        """Row in :attr:`blocks` of each option's block everywhere."""
        return np.array([self.blocks.number[option.everywhere] for option in self.options], np.int64)

    @cached_property
    def num_shards(self) -> Ints:
        """Number of shards of each distinct block."""
        return np.where(self.blocks.fills_node, self.ranks_per_node, 1)

    @cached_property
    def block_sums(self) -> Floats:
        """Numbers that a shard of each distinct block adds to the sums of its rank: a row by block.

        Columns: lookup ms | bytes | host bytes | own_ms by phase | -other_ms by phase | 1 per group | no group

        other_ms is negative because :attr:`option_sums` adds it to all ranks, also to the rank that has the shard.
        """
        blocks = self.blocks
        # the padding NO_GROUP = -1 marks the last column
        in_group = np.zeros((len(blocks.groups), len(self.group_start_ms) + 1))
        np.put_along_axis(in_group, blocks.groups, 1, axis=1)
        columns = np.column_stack([blocks.lookup_ms, blocks.num_bytes, blocks.host_bytes])
        return np.concatenate([columns, blocks.own_ms, -blocks.other_ms, in_group], axis=1)

    @cached_property
    def option_sums(self) -> Floats:
        """Numbers that each option adds to the sums of every rank, as if all its shards were on other ranks.

        A rank that has a shard adds the block's row of :attr:`block_sums`, which has equal columns, on top.
        """
        sums, (option_of, blocks) = self.block_sums[self.option_everywhere], self.placed_blocks
        other_sums = sums[:, 3 + self.num_phases : 3 + 2 * self.num_phases]
        # block_sums has -other_ms of the block everywhere; every rank has +other_ms of it: -x + 2x = x
        other_sums += 2 * self.blocks.other_ms[self.option_everywhere]
        np.add.at(other_sums, option_of, self.blocks.other_ms[blocks] * self.num_shards[blocks, None])
        return sums

    @cached_property
    def option_columns(self) -> Floats:
        """:attr:`option_sums` of each option as a column, to be added to the columns of all ranks."""
        return self.option_sums[:, :, None]

    @cached_property
    def block_columns(self) -> Floats:
        """:attr:`block_sums` of each distinct block as a column, to be added to the columns of some ranks."""
        return self.block_sums[:, :, None]

    @cached_property
    def starts_everywhere(self) -> list[bool]:
        """Whether each option has groups that every rank starts."""
        has_groups: list[bool] = (self.blocks.groups[self.option_everywhere] != NO_GROUP).any(1).tolist()
        return has_groups

    @cached_property
    def mean_sums(self) -> Floats:
        """Mean over all ranks of the numbers that each option's blocks add (columns of :attr:`block_sums`)."""
        sums, (option_of, blocks) = self.block_sums[self.option_everywhere], self.placed_blocks
        np.add.at(sums, option_of, self.block_sums[blocks] * (self.num_shards[blocks] / self.world_size)[:, None])
        return sums

    @cached_property
    def mean_ms(self) -> Floats:
        """Mean over all ranks of each option's lookups and own_ms, without starts.

        A phase takes at least its own_ms, so the sum over all tables is a lower bound of the mean rank's milliseconds.
        """
        ms: Floats = self.mean_sums[:, 0] + self.mean_sums[:, 3 : 3 + self.num_phases].sum(1)
        return ms

    @cached_property
    def longest_ms(self) -> Floats:
        """Milliseconds of each option's longest shard: lookup and own_ms of all phases; 0 without blocks."""
        return self.largest(self.blocks.lookup_ms + self.blocks.own_ms.sum(1))

    def largest(self, by_block: Floats) -> Floats:
        """Returns the maximum of ``by_block`` (a number by row of :attr:`blocks`) over each option's blocks, or 0."""
        largest, (option_of, blocks) = np.zeros(len(self.options)), self.placed_blocks
        np.maximum.at(largest, option_of, by_block[blocks])
        return largest


class BlockNumbers:
    """Distinct blocks as arrays: one array for each field of :class:`ShardBlock`, with a row for each block.

    ``number`` maps a block to its row. Rows of ``groups`` are padded with ``NO_GROUP`` to equal lengths; ``groups_of``
    has the distinct numbers of each row.
    """

    def __init__(self, blocks: Sequence[ShardBlock], num_phases: int) -> None:
        self.number = {block: number for number, block in enumerate(blocks)}
        self.lookup_ms: Floats = np.array([block.lookup_ms for block in blocks], np.float64)
        self.num_bytes: Floats = np.array([block.num_bytes for block in blocks], np.float64)
        self.stored_bytes: Floats = np.array([block.stored_bytes for block in blocks], np.float64)
        self.host_bytes: Floats = np.array([block.host_bytes for block in blocks], np.float64)
        self.fills_node = np.array([block.fills_node for block in blocks], bool)
        self.groups: Ints = np.full((len(blocks), max([1, *(len(block.groups) for block in blocks)])), NO_GROUP)
        for groups, block in zip(self.groups, blocks, strict=True):
            groups[: len(block.groups)] = block.groups
        self.groups_of = [tuple(sorted(set(groups))) for groups in self.groups.tolist()]
        shape = len(blocks), num_phases
        self.own_ms: Floats = np.array([block.own_ms for block in blocks], np.float64).reshape(shape)
        self.other_ms: Floats = np.array([block.other_ms for block in blocks], np.float64).reshape(shape)
        # a column by block, to be added to the columns of all ranks
        self.own_columns, self.other_columns = self.own_ms[:, :, None], self.other_ms[:, :, None]


@dataclass
class Assignment:
    """The chosen option of every table, and the place of each of its blocks."""

    option: Ints  # by table, among all options of the problem; -1 where none is chosen yet
    places: list[Ints]  # by table, a place for each block of its option: a rank, or a node for a block that fills one

    @classmethod
    def empty(cls, num_tables: int) -> "Assignment":
        return cls(np.full(num_tables, -1), [np.empty(0, np.int64)] * num_tables)

    def copy(self) -> "Assignment":
        return Assignment(self.option.copy(), list(self.places))
