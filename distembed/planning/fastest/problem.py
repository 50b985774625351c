"""The search's problem in numbers alone: tables, their options, and each option's time and bytes.

A table has one of several *options*. An option has *blocks*: one shard, which goes to any rank, or a shard for each
rank of a node, which go to a node together. Blocks of one table go to different places. The block *everywhere* is the
cost of an option to every rank, wherever its blocks go. Milliseconds of a rank are then::

    base + sum of its blocks and of all blocks everywhere + starts of its groups + starts of all exchanges in use
        + for each phase: the longer of   sum of its own_ms   and   sum of all other_ms - sum of its other_ms

and at least the sum over its node's ranks divided by the number of ranks that the node's cores compute at once. This is
the estimate of :mod:`distembed.planning.costs`.
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
    """Shards that go together; all numbers are of one rank that has a shard."""

    lookup_ms: float
    num_bytes: float  # of weights, optimizer state and, as far as they add up, buffers
    stored_bytes: float  # of weights and optimizer state
    groups: tuple[int, ...]  # that the shards are looked up in; tables that lie together may have several
    own_ms: tuple[float, ...]  # of the shard's rank, by phase
    other_ms: tuple[float, ...]  # of each other rank for this shard, by phase
    fills_node: bool = False  # whether each rank of a node has a shard; else one rank has it
    host_bytes: float = 0.0  # in host memory besides a device's


@dataclass(frozen=True)
class Option:
    """One way to place a table."""

    blocks: tuple[ShardBlock, ...]  # go to different places, the slowest first; all or none of them fill nodes
    everywhere: ShardBlock  # cost to every rank besides the blocks
    exchanges: tuple[int, ...] = ()  # that the table takes part in
    kind: Hashable = None  # how the table is divided
    num_ranges: int = 1  # of columns

    def stored_bytes(self, world_size: int, ranks_per_node: int) -> tuple[float, float]:
        """Returns the bytes of weights and states of all ranks together, and the least of the fullest rank."""
        shards = [(block.stored_bytes, ranks_per_node if block.fills_node else 1) for block in self.blocks]
        in_all = world_size * self.everywhere.stored_bytes + sum(num_bytes * count for num_bytes, count in shards)
        return in_all, self.everywhere.stored_bytes + max((num_bytes for num_bytes, _ in shards), default=0.0)

    @classmethod
    def together(cls, options: Sequence["Option"]) -> "Option":
        """Returns the option of tables that lie together: their first blocks on one place, then their second ones."""
        if len(options) == 1:
            return options[0]
        return replace(
            options[0],
            blocks=tuple(map(_sum_of_blocks, zip(*(option.blocks for option in options), strict=True))),
            everywhere=_sum_of_blocks([option.everywhere for option in options]),
            exchanges=tuple(sorted({exchange for option in options for exchange in option.exchanges})),
        )


def _sum_of_blocks(blocks: Sequence[ShardBlock]) -> ShardBlock:
    """Returns the block of shards of several tables on one place."""
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
    classes: Sequence[Sequence[Option]]  # options of each class of tables that are alike
    class_of: Sequence[int]  # by table
    ranks_of_class: Sequence[Sequence[int]] = ()  # ranks that tables of each class may lie on; all where it is empty

    @property
    def num_tables(self) -> int:
        return len(self.class_of)

    def with_stored_bytes(self) -> "Problem":
        """Returns the problem whose bytes are only weights and states."""

        def stored(block: ShardBlock) -> ShardBlock:
            return replace(block, num_bytes=block.stored_bytes)

        classes = [
            [replace(own, blocks=tuple(map(stored, own.blocks)), everywhere=stored(own.everywhere)) for own in options]
            for options in self.classes
        ]
        return replace(self, classes=classes)

    @cached_property
    def options(self) -> list[Option]:
        return [option for options in self.classes for option in options]

    @cached_property
    def first_option(self) -> Ints:
        """Number of each class's first option; last, the number of all options."""
        return np.concatenate([[0], np.cumsum([len(options) for options in self.classes], dtype=np.int64)])

    def options_of(self, table: int) -> range:
        own = self.class_of[table]
        return range(int(self.first_option[own]), int(self.first_option[own + 1]))

    @cached_property
    def allowed(self) -> Mask:
        """Whether an option's shards may lie on a rank, by option and rank."""
        every = range(self.world_size)
        if not any(self.ranks_of_class):
            return np.broadcast_to(True, (len(self.options), len(every)))
        by_class = [np.isin(every, own or every) for own in self.ranks_of_class]
        return np.repeat(by_class, np.diff(self.first_option), axis=0)

    @cached_property
    def blocks(self) -> "BlockNumbers":
        distinct = dict.fromkeys(block for option in self.options for block in (*option.blocks, option.everywhere))
        return BlockNumbers(list(distinct), self.num_phases)

    @cached_property
    def option_blocks(self) -> list[Ints]:
        number = self.blocks.number
        return [np.array([number[block] for block in option.blocks], np.int64) for option in self.options]

    @cached_property
    def placed_blocks(self) -> tuple[Ints, Ints]:
        """The number of the option and of the block, for all blocks of all options in order."""
        option_of = np.repeat(np.arange(len(self.options)), [len(blocks) for blocks in self.option_blocks])
        return option_of, np.concatenate([np.empty(0, np.int64), *self.option_blocks])

    @cached_property
    def option_everywhere(self) -> Ints:
        """Number of each option's block on every rank."""
        return np.array([self.blocks.number[option.everywhere] for option in self.options], np.int64)

    @cached_property
    def num_shards(self) -> Ints:
        """Number of shards of each distinct block."""
        return np.where(self.blocks.fills_node, self.ranks_per_node, 1)

    @cached_property
    def block_sums(self) -> Floats:
        """Numbers that a shard of each distinct block adds to the sums of its rank.

        Columns: lookup ms | bytes | host bytes | own_ms by phase | -other_ms by phase | 1 per group | no group
        """
        blocks = self.blocks
        in_group = np.zeros((len(blocks.groups), len(self.group_start_ms) + 1))
        np.put_along_axis(in_group, blocks.groups, 1, axis=1)
        columns = np.column_stack([blocks.lookup_ms, blocks.num_bytes, blocks.host_bytes])
        return np.concatenate([columns, blocks.own_ms, -blocks.other_ms, in_group], axis=1)

    @cached_property
    def option_sums(self) -> Floats:
        """Numbers that each option adds to the sums of every rank, as if its shards were on other ranks."""
        sums, (option_of, blocks) = self.block_sums[self.option_everywhere], self.placed_blocks
        others = sums[:, 3 + self.num_phases : 3 + 2 * self.num_phases]
        others += 2 * self.blocks.other_ms[self.option_everywhere]  # each rank's part of all other ranks' work
        np.add.at(others, option_of, self.blocks.other_ms[blocks] * self.num_shards[blocks, None])
        return sums

    @cached_property
    def mean_sums(self) -> Floats:
        """Mean over all ranks of each option's part in their sums (columns of :attr:`block_sums`)."""
        sums, (option_of, blocks) = self.block_sums[self.option_everywhere], self.placed_blocks
        np.add.at(sums, option_of, self.block_sums[blocks] * (self.num_shards[blocks] / self.world_size)[:, None])
        return sums

    @cached_property
    def mean_ms(self) -> Floats:
        """Milliseconds of each option, without starts, over all ranks together, divided by their number."""
        ms: Floats = self.mean_sums[:, 0] + self.mean_sums[:, 3 : 3 + self.num_phases].sum(1)
        return ms

    @cached_property
    def longest_ms(self) -> Floats:
        """Milliseconds of each option's longest block."""
        return self.largest(self.blocks.lookup_ms + self.blocks.own_ms.sum(1))

    def largest(self, by_block: Floats) -> Floats:
        """Returns the largest number of each option's blocks; 0 where it has none."""
        largest, (option_of, blocks) = np.zeros(len(self.options)), self.placed_blocks
        np.maximum.at(largest, option_of, by_block[blocks])
        return largest


class BlockNumbers:
    """Columns of distinct blocks' numbers, named as in :class:`ShardBlock`; ``number`` has the number of each block.

    Groups are padded with -1 to the most groups of any block.
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
        shape = len(blocks), num_phases
        self.own_ms: Floats = np.array([block.own_ms for block in blocks], np.float64).reshape(shape)
        self.other_ms: Floats = np.array([block.other_ms for block in blocks], np.float64).reshape(shape)


@dataclass
class Assignment:
    """Where every table goes."""

    option: Ints  # by table, among all options of the problem; -1 where none is chosen yet
    places: list[Ints]  # of the option's blocks, by table: ranks, or nodes of blocks that fill one

    @classmethod
    def empty(cls, num_tables: int) -> "Assignment":
        return cls(np.full(num_tables, -1), [np.empty(0, np.int64)] * num_tables)

    def copy(self) -> "Assignment":
        return Assignment(self.option.copy(), list(self.places))
