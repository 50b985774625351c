"""The search's problem in numbers alone: tables, their options, what each takes of ranks in time and bytes.

A table has one of several *options*. An option has *blocks*: one shard, which goes to any rank, or as many shards as a
node has ranks, which go to a node together. Blocks of one table go to different places. What an option takes of every
rank, wherever its blocks go, is its block *everywhere*. Milliseconds of a rank are then::

    base + sum of its blocks and of those everywhere + starts of its groups + starts of all exchanges in use
         + for each phase: the longer of   sum of its own_ms   and   sum of all other_ms - sum of its other_ms

and no less than those of all ranks of its node over the number of ranks that the node's cores compute at once. This
is the estimate of :mod:`distembed.planning.costs`.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NO_GROUP = -1


@dataclass(frozen=True)
class Block:
    """Shards that go together; all numbers are those of one rank that has a shard.

    Attributes:
        lookup_ms: Milliseconds of lookups.
        num_bytes: Bytes of weights, optimizer state and, as far as they add up, buffers.
        stored_bytes: Bytes of weights and optimizer state.
        groups: Numbers of the groups that the shards are looked up in; tables that lie together may have several.
        own_ms: Milliseconds of the shard's rank in each phase.
        other_ms: Milliseconds of each other rank in each phase, for this shard.
        fills_node: Whether each rank of a node has a shard; else one rank has it.
        host_bytes: Bytes in the machine's memory beside a device.
    """

    lookup_ms: float
    num_bytes: float
    stored_bytes: float
    groups: tuple[int, ...]
    own_ms: tuple[float, ...]
    other_ms: tuple[float, ...]
    fills_node: bool = False
    host_bytes: float = 0.0


@dataclass(frozen=True)
class Option:
    """One way to place a table.

    Attributes:
        blocks: What goes to different places, the slowest first.
        everywhere: What every rank has beside them.
        exchanges: Numbers of the exchanges that the table takes part in.
        kind, num_ranges: How the table is divided, and in how many ranges of columns.
    """

    blocks: tuple[Block, ...]
    everywhere: Block
    exchanges: tuple[int, ...] = ()
    kind: Hashable = None
    num_ranges: int = 1

    def stored_bytes(self, world_size: int, ranks_per_node: int) -> tuple[float, float]:
        """Returns the bytes of weights and states of all ranks together, and those that some rank has at least."""
        shards = [(block.stored_bytes, ranks_per_node if block.fills_node else 1) for block in self.blocks]
        in_all = world_size * self.everywhere.stored_bytes + sum(num_bytes * count for num_bytes, count in shards)
        return in_all, self.everywhere.stored_bytes + max((num_bytes for num_bytes, _ in shards), default=0.0)

    @classmethod
    def together(cls, options: Sequence["Option"]) -> "Option":
        """Returns the option of tables that lie together: the first blocks on one place, then the second ones."""
        if len(options) == 1:
            return options[0]
        blocks = zip(*(option.blocks for option in options), strict=True)
        exchanges = sorted({exchange for option in options for exchange in option.exchanges})
        return cls(
            tuple(map(_sum_of_blocks, blocks)),
            _sum_of_blocks([option.everywhere for option in options]),
            tuple(exchanges),
            options[0].kind,
            options[0].num_ranges,
        )


@dataclass(frozen=True)
class Problem:
    """Tables to be placed.

    Attributes:
        world_size: Number of ranks.
        ranks_per_node: Number of ranks of a node.
        ranks_at_once: Number of ranks of a node that compute at once, each as fast as if it were alone.
        base_ms: Milliseconds of every rank beside tables.
        group_start_ms: Milliseconds in which a rank starts the kernels of each group.
        exchange_start_ms: Milliseconds in which each exchange is started.
        num_phases: Number of phases in which something is communicated.
        classes: Options of each class of tables that are alike.
        class_of: Class of each table.
        ranks_of_class: Ranks that tables of each class may lie on; all where it is empty.
    """

    world_size: int
    ranks_per_node: int
    ranks_at_once: float
    base_ms: float
    group_start_ms: Sequence[float]
    exchange_start_ms: Sequence[float]
    num_phases: int
    classes: Sequence[Sequence[Option]]
    class_of: Sequence[int]
    ranks_of_class: Sequence[Sequence[int]] = ()

    @property
    def num_tables(self) -> int:
        """Number of tables."""
        return len(self.class_of)

    def with_stored_bytes(self) -> "Problem":
        """Returns the problem whose bytes are those of weights and states alone."""

        def stored(block: Block) -> Block:
            return replace(block, num_bytes=block.stored_bytes)

        classes = [
            [replace(own, blocks=tuple(map(stored, own.blocks)), everywhere=stored(own.everywhere)) for own in options]
            for options in self.classes
        ]
        return replace(self, classes=classes)

    @cached_property
    def options(self) -> list[Option]:
        """Options of all classes, class after class."""
        return [option for options in self.classes for option in options]

    @cached_property
    def first_option(self) -> Ints:
        """Number of each class's first option, and behind them the number of all."""
        return np.concatenate([[0], np.cumsum([len(options) for options in self.classes], dtype=np.int64)])

    def options_of(self, table: int) -> range:
        """Returns the numbers of a table's options."""
        own = self.class_of[table]
        return range(int(self.first_option[own]), int(self.first_option[own + 1]))

    @cached_property
    def allowed(self) -> Mask | None:
        """Whether an option's shards may lie on a rank, by option and rank; None where all may lie anywhere."""
        if not any(self.ranks_of_class):
            return None
        by_class = np.array(
            [np.isin(np.arange(self.world_size), own or range(self.world_size)) for own in self.ranks_of_class]
        )
        return np.repeat(by_class, np.diff(self.first_option), axis=0)

    @cached_property
    def blocks(self) -> "BlockNumbers":
        """Numbers of all distinct blocks."""
        distinct = dict.fromkeys(block for option in self.options for block in (*option.blocks, option.everywhere))
        return BlockNumbers(list(distinct), self.num_phases)

    @cached_property
    def option_blocks(self) -> list[Ints]:
        """Numbers of each option's blocks."""
        number = self.blocks.number
        return [np.array([number[block] for block in option.blocks], np.int64) for option in self.options]

    @cached_property
    def option_everywhere(self) -> list[int]:
        """Number of the block that every rank has, of each option."""
        return [self.blocks.number[option.everywhere] for option in self.options]

    @cached_property
    def block_sums(self) -> Floats:
        """What a shard of each distinct block adds to the sums of its rank: milliseconds, bytes, host's bytes, ...

        Behind these stand what it has in each phase, what it spares its rank of the others' in each phase, and a 1 for
        its groups, by group; the last is that of no group.
        """
        return self.blocks.sums(len(self.group_start_ms))

    @cached_property
    def option_sums(self) -> Floats:
        """What each option adds to the sums of every rank, as if its shards were all on other ranks."""
        sums = self.block_sums[self.option_everywhere]
        everywhere = self.blocks.other_ms[self.option_everywhere]
        others = sums[:, 3 + self.num_phases : 3 + 2 * self.num_phases]
        others += 2 * everywhere  # every rank has what the others do for each other's
        for option, blocks in enumerate(self.option_blocks):
            if len(blocks):
                others[option] += (self.blocks.other_ms[blocks] * self.num_shards[blocks, None]).sum(0)
        return sums

    @cached_property
    def option_changes(self) -> list[tuple[Ints, Floats]]:
        """Numbers of the sums that each option adds something to on every rank, and what."""
        changed = [np.flatnonzero(sums) for sums in self.option_sums]
        return [(rows, sums[rows, None]) for rows, sums in zip(changed, self.option_sums, strict=True)]

    @cached_property
    def mean_sums(self) -> Floats:
        """Mean over all ranks of what each option adds to their sums (columns of :attr:`block_sums`)."""
        sums = self.block_sums[self.option_everywhere]
        option_of = np.repeat(np.arange(len(self.options)), [len(blocks) for blocks in self.option_blocks])
        blocks = np.concatenate([*self.option_blocks, np.empty(0, np.int64)]).astype(np.int64)
        np.add.at(sums, option_of, self.block_sums[blocks] * (self.num_shards[blocks] / self.world_size)[:, None])
        return sums

    @cached_property
    def mean_ms(self) -> Floats:
        """Milliseconds that each option takes of all ranks together, without starts, over their number."""
        ms: Floats = self.mean_sums[:, 0] + self.mean_sums[:, 3 : 3 + self.num_phases].sum(1)
        return ms

    @cached_property
    def longest_ms(self) -> Floats:
        """Milliseconds of each option's longest block."""
        ms = self.blocks.lookup_ms + self.blocks.own_ms.sum(1)
        return np.array([ms[blocks].max(initial=0) for blocks in self.option_blocks], np.float64)

    @cached_property
    def num_shards(self) -> Ints:
        """Number of shards of each distinct block."""
        return np.where(self.blocks.fills_node, self.ranks_per_node, 1)


class BlockNumbers:
    """Columns of distinct blocks' numbers.

    Args:
        blocks: Distinct blocks.
        num_phases: Number of phases.

    Attributes:
        number: Number of each block.
        lookup_ms, num_bytes, host_bytes, stored_bytes, fills_node: As :class:`Block` has them, by block.
        groups: Groups by block, as many columns as a block has groups at most, filled up with -1.
        own_ms, other_ms: By block and phase.
        phases: Phases in which a shard of each block has something.
    """

    def __init__(self, blocks: Sequence[Block], num_phases: int) -> None:
        self.number = {block: number for number, block in enumerate(blocks)}
        self.lookup_ms: Floats = np.array([block.lookup_ms for block in blocks], np.float64)
        self.num_bytes: Floats = np.array([block.num_bytes for block in blocks], np.float64)
        self.host_bytes: Floats = np.array([block.host_bytes for block in blocks], np.float64)
        self.stored_bytes: Floats = np.array([block.stored_bytes for block in blocks], np.float64)
        most = max((len(block.groups) for block in blocks), default=0)
        self.groups: Ints = np.full((len(blocks), max(most, 1)), NO_GROUP)
        for groups, block in zip(self.groups, blocks, strict=True):
            groups[: len(block.groups)] = block.groups
        self.fills_node = np.array([block.fills_node for block in blocks], bool)
        self.own_ms: Floats = np.array([block.own_ms for block in blocks], np.float64).reshape(len(blocks), num_phases)
        self.other_ms: Floats = np.array([block.other_ms for block in blocks], np.float64).reshape(
            len(blocks), num_phases
        )
        self.phases = [_nonzero(own) for own in (self.own_ms != 0) | (self.other_ms != 0)]

    def sums(self, num_groups: int) -> Floats:
        """Returns what a shard adds to the sums of its rank, by block (:attr:`Problem.block_sums`)."""
        in_group = np.zeros((len(self.groups), num_groups + 1))
        np.put_along_axis(in_group, self.groups, 1, axis=1)
        columns = [self.lookup_ms[:, None], self.num_bytes[:, None], self.host_bytes[:, None]]
        return np.concatenate([*columns, self.own_ms, -self.other_ms, in_group], axis=1)


@dataclass
class Assignment:
    """Where every table goes.

    Attributes:
        option: Number of each table's option, among all options of the problem; -1 where none is chosen yet.
        places: Places of the option's blocks, by table: ranks, or nodes of blocks that fill one.
    """

    option: Ints
    places: list[Ints]

    @classmethod
    def empty(cls, num_tables: int) -> "Assignment":
        """Returns the assignment of no table."""
        return cls(np.full(num_tables, -1), [np.empty(0, np.int64)] * num_tables)

    def copy(self) -> "Assignment":
        """Returns a copy that may be changed."""
        return Assignment(self.option.copy(), list(self.places))


def _sum_of_blocks(blocks: Iterable[Block]) -> Block:
    """Returns the block of shards of several tables on one place."""
    own = list(blocks)
    return Block(
        lookup_ms=sum(block.lookup_ms for block in own),
        num_bytes=sum(block.num_bytes for block in own),
        stored_bytes=sum(block.stored_bytes for block in own),
        groups=tuple(sorted({group for block in own for group in block.groups})),
        own_ms=tuple(map(sum, zip(*(block.own_ms for block in own), strict=True))),
        other_ms=tuple(map(sum, zip(*(block.other_ms for block in own), strict=True))),
        fills_node=own[0].fills_node,
        host_bytes=sum(block.host_bytes for block in own),
    )


def _nonzero(has_some: npt.NDArray[np.bool_]) -> slice:
    """Returns the range from the first to the last that has some; an empty one where none has."""
    numbers = np.flatnonzero(has_some)
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else slice(0, 0)
