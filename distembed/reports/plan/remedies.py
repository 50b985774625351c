"""What would make a model fit: each remedy is planned as it would be typed before it is named.

Each kind of change has sizes, from small to large, and the search looks for the least size with which the model fits.
The search is bounded, since a plan for many ranks or columns takes seconds. A size is not planned at all if the tables
take more bytes than all ranks would have for them with a batch of no rows.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from distembed.base.errors import UserError
from distembed.base.units import exact_bytes
from distembed.optim.kinds import OPTIMIZERS, row_wise_name
from distembed.planning.devices import DEVICES, Cluster
from distembed.reports.plan.assessment import Assessment, assess, is_fitting
from distembed.reports.plan.plannable import Plannable

MAX_RANKS = 4096  # up to which a search plans larger clusters
_MAX_SECONDS = 20.0
_MAX_NODES_FACTOR = 64
_MAX_GPUS = 8
_GIB = 2**30


@dataclass(frozen=True)
class Remedies:
    """Changes that make a model fit."""

    arguments: tuple[str, ...] = ()  # what to type behind the command, one remedy each
    is_complete: bool = True  # whether every kind of remedy was looked for to the end


def max_table_bytes(plannable: Plannable, assessment: Assessment, cluster: Cluster) -> int:
    """Returns the bytes that all ranks of a cluster would have for tables if a batch had no rows: more than they do.

    The assessment is of the same model for any cluster.
    """
    items = assessment.workload.bytes_beside_tables(world_size=2).items()  # with gradients, which one rank has as well
    beside = sum(num_bytes for item, num_bytes in items if item != "activations")
    beside += round(assessment.reserve * cluster.rank_bytes)
    host_bytes = cluster.host_bytes_per_rank if plannable.plan.allows_host_memory else 0
    return (max(0, cluster.rank_bytes - beside) + host_bytes) * cluster.world_size


def least_enough(too_few: int, enough: int, is_enough: Callable[[int], bool]) -> int:
    """Returns the least number that is enough, by bisection; where a number is enough, larger ones are taken to be."""
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if is_enough(middle) else (middle, enough)
    return enough


def _in_turn(too_few: int, most: int, fits: Callable[[int], bool]) -> int | None:
    return next(filter(fits, range(too_few + 1, most + 1)), None)


def _below_most(too_few: int, most: int, fits: Callable[[int], bool]) -> int | None:
    return least_enough(too_few, most, fits) if too_few < most and fits(most) else None


def _by_doubling(too_few: int, most: int, fits: Callable[[int], bool]) -> int | None:
    low, high = too_few, 2 * too_few
    while high <= most and not fits(high):
        low, high = high, 2 * high
    return least_enough(low, high, fits) if high <= most else None


@dataclass(frozen=True)
class _Kind:
    """A kind of change."""

    find: Callable[[int, int, Callable[[int], bool]], int | None]
    too_few: int  # size that changes nothing
    most: int  # largest size; at most `too_few` where no change of the kind helps
    change: Callable[[int], tuple[str, Plannable, Cluster]]  # text to type for a size; model and cluster to plan


def _kinds(model: Plannable, cluster: Cluster, assessment: Assessment, memory_is_given: bool) -> list[_Kind]:
    """Returns the kinds of changes in the order in which they are looked for."""
    device, is_cpu, plan = cluster.device, cluster.device.kind == "cpu", model.plan
    nodes, gpus, is_fixed = cluster.nodes, cluster.ranks_per_node, bool(cluster.memory_by_rank)

    def on(typed: str, **changes: Any) -> tuple[str, Plannable, Cluster]:
        return typed, model, replace(cluster, **changes)

    larger = [own for own in DEVICES.values() if own.kind == device.kind and own.memory_bytes > device.memory_bytes]
    larger = [] if is_fixed else sorted(larger, key=lambda own: own.memory_bytes)

    def on_device(number: int) -> tuple[str, Plannable, Cluster]:
        other = larger[number - 1]
        if not memory_is_given:
            return on(f"--gpu {other.name}", device=other)
        memory_bytes = other.memory_bytes  # --memory holds for any device
        return on(f"--memory {exact_bytes(memory_bytes)}", device=replace(device, memory_bytes=memory_bytes))

    # on a CPU further ranks would share its memory
    most_gpus = 0 if nodes > 1 or is_cpu or is_fixed else _MAX_GPUS
    most_nodes = 0 if is_fixed else nodes * _MAX_NODES_FACTOR
    halvings = (model.batch_size // cluster.world_size).bit_length() - 1  # that leave a row for each rank
    kinds = [
        _Kind(_in_turn, gpus, most_gpus, lambda number: on(f"--gpus {number}", ranks_per_node=number)),
        _Kind(_by_doubling, nodes, most_nodes, lambda number: on(f"--nodes {number}", nodes=number)),
        _Kind(_in_turn, 0, len(larger), on_device),
        _Kind(_below_most, 0, halvings, lambda number: (*model.with_batch_size(model.batch_size >> number), cluster)),
    ]
    if not assessment.bytes_left_for_tables:
        return kinds  # where networks alone are too large, smaller tables or other places for them do not help
    free: dict[str, Any] = {"sharding_types": None, "min_partition": None, "tables": {}, "together": []}
    freed = {name: value for name, value in free.items() if getattr(plan, name) != value}
    settings = " ".join(f"plan.{name}={'null' if value is None else value}" for name, value in freed.items())
    has_weight_states = model.sparse_optimizer is not None and OPTIMIZERS[model.sparse_optimizer].has_weight_states
    # all tables on any one rank, whose share of its node's this is
    most_host = gpus * (assessment.one_copy.total // _GIB + 1) if plan.allows_host_memory and not is_cpu else 0
    host, most_collisions = cluster.host_memory_bytes // _GIB, model.max_collisions()
    return [
        *kinds,
        _Kind(_in_turn, 0, bool(freed), lambda _: (settings, model.with_plan(replace(plan, **freed)), cluster)),
        _Kind(_in_turn, 0, has_weight_states, lambda _: (*model.with_sparse_optimizer(row_wise_name()), cluster)),
        _Kind(_below_most, host, most_host, lambda own: on(f"--host-memory {own}GiB", host_memory_bytes=own * _GIB)),
        _Kind(_by_doubling, model.collisions or 1, most_collisions, lambda n: (*model.with_collisions(n), cluster)),
    ]


def find_remedies(
    plannable: Plannable,
    cluster: Cluster,
    memory_is_given: bool = False,
    assessment: Assessment | None = None,
    max_seconds: float = _MAX_SECONDS,
) -> Remedies:
    """Finds one remedy of each kind for a model that does not fit: the smallest change, or the smallest found in time.

    ``memory_is_given`` says that ``--memory`` was typed. No plan is begun after ``max_seconds``. The assessment of the
    model on the cluster is made unless given.
    """
    found = assessment if assessment is not None else assess(plannable, cluster)
    arguments, is_complete, end = list[str](), True, time.monotonic() + max_seconds
    kinds = _kinds(plannable, cluster, found, memory_is_given)
    for i, kind in enumerate(kinds):
        # a share of what is left each, so that none takes all
        now = time.monotonic()
        deadline = now + (end - now) / (len(kinds) - i)

        def fits(size: int, kind: _Kind = kind, deadline: float = deadline) -> bool:
            """Plans a changed model or cluster while there is time; False if other settings refuse the change."""
            nonlocal is_complete
            try:
                _, model, on = kind.change(size)
                if model.table_bytes() > max_table_bytes(plannable, found, on):
                    return False
                if on.world_size > MAX_RANKS or time.monotonic() >= deadline:
                    is_complete = False
                    return False
                return is_fitting(model, on)
            except UserError:
                return False

        size = kind.find(kind.too_few, kind.most, fits)
        arguments += [] if size is None else [kind.change(size)[0]]
    return Remedies(tuple(arguments), is_complete)
