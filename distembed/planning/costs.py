"""What a placement of one table costs each rank in time, piece by piece; every estimate of time is a sum of these.

A search adds the pieces up for many plans, :func:`~distembed.planning.times.step_times` for one. Times are milliseconds
of a training step, forward and backward::

    rank = sum of its shards' lookups                      + what every rank does for each table
         + start of each group of lookups that it has      + start of each exchange that any table takes part in
         + for each phase of each exchange: the longer of sending and receiving
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from distembed.planning.lookups import ExchangeKey

Phase = tuple[ExchangeKey, str]
"""An exchange, and what is sent in it: ``ids``, or ``vectors`` with their gradients on the way back."""


@dataclass(frozen=True)
class Transfer:
    """What a shard has communicated in one phase.

    A rank's phase takes the longer of what it does for its own shards and what it does for those of others::

        max(sum of own shards' owner_ms, sum of all shards' other_ms - sum of own shards' other_ms)

    Attributes:
        owner_ms: Milliseconds of the rank that has the shard, to or from all others.
        other_ms: Milliseconds of each other rank, to or from the owner.
    """

    owner_ms: float
    other_ms: float


@dataclass(frozen=True)
class ShardCost:
    """What a shard costs the rank that has it.

    Attributes:
        lookup_ms: Milliseconds of lookups, composing, their gradients and their update, without starting kernels.
        group: What the shard is looked up together with; a rank starts the kernels of a group once.
        transfers: What is communicated for the shard, by phase.
    """

    lookup_ms: float
    group: Hashable
    transfers: Mapping[Phase, Transfer] = field(default_factory=dict)


@dataclass(frozen=True)
class PlacementCost:
    """What one placement of a table costs.

    Attributes:
        shards: Cost of each shard, in the order of the unit's shards; none of a table that is on every rank.
        everywhere: Cost to every rank of a table that is on all of them (``row_wise``, ``data_parallel``), and of what
            is replicated beside shards.
        all_reduce_ms: Milliseconds in which the gradients of replicated weights are averaged.
        exchange: The exchange that the table takes part in; None where nothing is exchanged.
    """

    shards: Sequence[ShardCost]
    everywhere: ShardCost | None = None
    all_reduce_ms: float = 0.0
    exchange: ExchangeKey | None = None
