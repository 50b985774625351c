"""What would make a model fit: each remedy is planned as it would be typed before it is named.

The search is bounded, since a plan for many ranks or columns takes seconds. What cannot help is not planned at all:
tables that take more bytes than all ranks would have for them if a batch had no rows.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distembed.capacity.assessment import Assessment, assess, reserve_bytes
from distembed.capacity.plannable import Plannable
from distembed.errors import UserError
from distembed.optim.kinds import OPTIMIZERS, row_wise_name
from distembed.planning.cluster import Cluster
from distembed.planning.devices import DEVICES
from distembed.planning.networks import NetworkEstimate
from distembed.units import exact_bytes

MAX_SECONDS = 20.0
"""Seconds after which the search begins no other plan."""

MAX_RANKS = 4096
"""Ranks up to which a search plans larger clusters."""
_MAX_NODES_FACTOR = 64
_MAX_GPUS = 8
_MAX_COLLISIONS = 2**20
_GIB = 2**30


@dataclass(frozen=True)
class Remedies:
    """Changes that make a model fit."""

    arguments: tuple[str, ...] = ()  # what to type behind the command, one remedy each
    is_complete: bool = True  # whether every kind of remedy was looked for to the end


def max_table_bytes(plannable: Plannable, assessment: Assessment, cluster: Cluster) -> int:
    """Returns the bytes that all ranks would have for tables if a batch had no rows, which is more than they do.

    Args:
        plannable: Model to plan.
        assessment: Plan of the model for any cluster.
        cluster: The ranks.
    """
    workload = assessment.workload
    network = workload.network or NetworkEstimate()
    beside = network.parameters + network.buffers + network.optimizer_state + network.gradients
    beside += sum(workload.graph_bytes.values()) + reserve_bytes(assessment.reserve, cluster)
    host_bytes = cluster.host_bytes_per_rank if plannable.plan.host_memory else 0
    return (max(0, cluster.rank_bytes - beside) + host_bytes) * cluster.world_size


class _OutOfTimeError(Exception):
    """Says that the search may begin no other plan."""


def find_remedies(
    plannable: Plannable,
    cluster: Cluster,
    memory_is_given: bool = False,
    assessment: Assessment | None = None,
    max_seconds: float = MAX_SECONDS,
) -> Remedies:
    """Finds one remedy of each kind: the smallest change of its kind, or the smallest found in time.

    Args:
        plannable: Model that does not fit.
        cluster: Cluster that it does not fit.
        memory_is_given: Whether ``--memory`` was typed, which holds for any device.
        assessment: Result of planning the model for the cluster; it is planned once more unless given.
        max_seconds: Seconds after which no other plan is begun.
    """
    assessment = assessment if assessment is not None else assess(plannable, cluster)
    search = _Search(plannable, cluster, assessment, memory_is_given)
    kinds: list[Callable[[], str | None]] = [search.gpus, search.nodes, search.device, search.batch_size]
    # where networks alone are too large, smaller tables or other places for them are none
    if search.assessment.bytes_left_for_tables:
        kinds += [search.sharding, search.optimizer, search.host_memory, search.collisions]
    arguments, end = list[str](), time.monotonic() + max_seconds
    for i, kind in enumerate(kinds):
        # a share of what is left each, so that none takes all
        now = time.monotonic()
        search.deadline = now + (end - now) / (len(kinds) - i)
        try:
            argument = kind()
        except _OutOfTimeError:
            argument = None
        arguments += [] if argument is None else [argument]
    return Remedies(tuple(arguments), is_complete=not search.was_cut_short)


class _Search:
    """Looks for remedies: a method a kind, which returns what to type, or None where no change of the kind helps."""

    def __init__(self, plannable: Plannable, cluster: Cluster, assessment: Assessment, memory_is_given: bool) -> None:
        self._plannable, self._cluster, self.assessment = plannable, cluster, assessment
        self._memory_is_given = memory_is_given
        # time of the monotonic clock after which no other plan is begun; whether there was such a plan
        self.deadline, self.was_cut_short = 0.0, False

    def gpus(self) -> str | None:
        """Adds GPUs to the only node; on a CPU further ranks would share its memory."""
        cluster = self._cluster
        if cluster.nodes > 1 or cluster.device.kind == "cpu" or cluster.memory_by_rank:
            return None
        numbers = range(cluster.ranks_per_node + 1, _MAX_GPUS + 1)
        sufficient = (n for n in numbers if self._fits(cluster=dataclasses.replace(cluster, ranks_per_node=n)))
        number = next(sufficient, None)
        return None if number is None else f"--gpus {number}"

    def nodes(self) -> str | None:
        """Adds nodes to the cluster, at most ``_MAX_NODES_FACTOR`` times as many."""
        cluster = self._cluster
        if cluster.memory_by_rank:
            return None
        number = self._least(
            lambda n: self._fits(cluster=dataclasses.replace(cluster, nodes=n)),
            cluster.nodes,
            cluster.nodes * _MAX_NODES_FACTOR,
        )
        return None if number is None else f"--nodes {number}"

    def device(self) -> str | None:
        """Takes another device of the catalogue, or its memory in place of the size that was typed."""
        own = self._cluster.device
        if self._cluster.memory_by_rank:
            return None
        for other in sorted(DEVICES.values(), key=lambda device: device.memory_bytes):
            if other.kind != own.kind or other.memory_bytes <= own.memory_bytes:
                continue
            device = dataclasses.replace(own, memory_bytes=other.memory_bytes) if self._memory_is_given else other
            if self._fits(cluster=dataclasses.replace(self._cluster, device=device)):
                return f"--memory {exact_bytes(other.memory_bytes)}" if self._memory_is_given else f"--gpu {other.name}"
        return None

    def batch_size(self) -> str | None:
        """Halves the batch, as seldom as it takes and not below a row for each rank."""
        rows = self._plannable.batch_size

        def halved(halvings: int) -> tuple[Plannable, str]:
            return self._plannable.with_batch_size(rows >> halvings)

        def fits(halvings: int) -> bool:
            return self._fits(halved(halvings)[0])

        most = (rows // self._cluster.world_size).bit_length() - 1
        if most < 1 or not fits(most):
            return None
        return halved(self._bisect(fits, 0, most))[1]

    def sharding(self) -> str | None:
        """Drops what the settings say of how tables may be placed."""
        plan = self._plannable.plan
        free: dict[str, Any] = {"sharding_types": None, "min_partition": None, "tables": {}, "together": []}
        changed = {name: value for name, value in free.items() if getattr(plan, name) != value}
        if not changed:
            return None
        settings = " ".join(f"plan.{name}={'null' if value is None else value}" for name, value in changed.items())
        return settings if self._fits(self._plannable.with_plan(dataclasses.replace(plan, **changed))) else None

    def optimizer(self) -> str | None:
        """Takes an optimizer that keeps a number for each row, where there is one that keeps some for each weight."""
        name = self._plannable.sparse_optimizer
        if name is None or not OPTIMIZERS[name].has_weight_states:
            return None
        changed, argument = self._plannable.with_sparse_optimizer(row_wise_name())
        return argument if self._fits(changed) else None

    def host_memory(self) -> str | None:
        """Adds host memory to each node, in whole gibibytes, where tables may lie in it."""
        cluster = self._cluster
        if not self._plannable.plan.host_memory or cluster.device.kind == "cpu":
            return None

        def fits(gibibytes: int) -> bool:
            return self._fits(cluster=dataclasses.replace(cluster, host_memory_bytes=gibibytes * _GIB))

        # all tables on any one rank, whose share of its node's this is
        enough = cluster.ranks_per_node * (self.assessment.one_copy.total // _GIB + 1)
        too_few = cluster.host_memory_bytes // _GIB
        if too_few >= enough or not fits(enough):
            return None
        return f"--host-memory {self._bisect(fits, too_few, enough)}GiB"

    def collisions(self) -> str | None:
        """Compresses tables further, or at all."""
        before, with_collisions = self._plannable.collisions, self._plannable.with_collisions
        if before is None:
            return None
        number = self._least(lambda collisions: self._fits(with_collisions(collisions)[0]), before, _MAX_COLLISIONS)
        return None if number is None else with_collisions(number)[1]

    def _fits(self, plannable: Plannable | None = None, cluster: Cluster | None = None) -> bool:
        """Plans a changed model or cluster while there is time; False if other settings refuse the change."""
        plannable, cluster = plannable or self._plannable, cluster or self._cluster
        try:
            if plannable.table_bytes() > max_table_bytes(self._plannable, self.assessment, cluster):
                return False
            if cluster.world_size > MAX_RANKS or time.monotonic() >= self.deadline:
                self.was_cut_short = True
                raise _OutOfTimeError
            return assess(plannable, cluster).fits
        except UserError:
            return False

    def _least(self, fits: Callable[[int], bool], too_few: int, most: int) -> int | None:
        """Returns the least number above ``too_few`` and up to ``most`` that fits, by doubling and then bisecting."""
        low, high = too_few, 2 * too_few
        while high <= most and not fits(high):
            low, high = high, 2 * high
        return self._bisect(fits, low, high) if high <= most else None

    def _bisect(self, fits: Callable[[int], bool], too_few: int, enough: int) -> int:
        """Returns the least number that fits, or the least found in time."""
        try:
            while enough - too_few > 1:
                middle = (too_few + enough) // 2
                too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
        except _OutOfTimeError:
            pass
        return enough
