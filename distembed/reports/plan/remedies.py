"""Searches for remedies for a model that does not fit, and the smallest cluster that a model fits.

**Remedies.** Each kind of change has sizes, from small to large, and the search looks for the least size with which the
model fits. A remedy is named only if some plan fits with it, as it would be typed. The search is bounded, since an
answer of no takes seconds for many ranks. A size is skipped if the tables take more bytes than all ranks would have for
them with a batch of no rows.

**The smallest cluster**, ``distembed plan --smallest``. With G devices a node, sizes are 1, 2, ..., G devices of one
node, then 2, 3, ... whole nodes::

    number   1       2            G       G + 1   G + 2
    size     1 x 1   1 x 2  ...   1 x G   2 x G   3 x G  ...   up to 4,096 ranks

A size with less memory than the tables' weights and optimizer states cannot fit, and is not planned. The first eight
other sizes are planned one by one, further ones after gaps that double; once a size fits, the last gap is bisected. A
plan may fit a size and miss a larger one, since shards are whole ranges of columns or whole tables, and the search for
a plan is not exhaustive. So three sizes below the answer are planned, and the answer says how many smaller sizes with
enough memory were not.

The bytes that a rank keeps from step to step do not grow with the number of ranks. Where the largest size has no room
for them, no smaller size has.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from distembed.base.errors import InsufficientMemory, UserError
from distembed.base.units import enumerate_names, exact_bytes
from distembed.optim.kinds import OPTIMIZERS, row_wise_name
from distembed.planning.devices import DEVICES, Cluster
from distembed.planning.search import require_room
from distembed.reports.plan.assessment import Assessment, assess, is_fitting
from distembed.reports.plan.plannable import Plannable
from distembed.reports.plan.tables import cluster_text, shortage_lines

MAX_RANKS = 4096  # up to which a search plans larger clusters
_MAX_SECONDS = 20.0
_MAX_NODES_FACTOR = 64
_MAX_GPUS = 8
_GIB = 2**30


@dataclass(frozen=True)
class Remedies:
    """Changes that make a model fit."""

    arguments: tuple[str, ...] = ()  # texts to type after the command; each alone makes the model fit
    is_complete: bool = True  # False if the time or the number of ranks cut the search short


def max_table_bytes(plannable: Plannable, assessment: Assessment, cluster: Cluster) -> int:
    """Returns an upper bound of the bytes for tables on all ranks together: the room with a batch of no rows.

    ``assessment`` may be of this model on another cluster: the bytes used are equal on all clusters of several ranks.
    """
    items = assessment.workload.bytes_beside_tables(world_size=2).items()  # with gradients, which one rank has as well
    beside = sum(num_bytes for item, num_bytes in items if item != "activations")
    beside += round(assessment.reserve * cluster.rank_bytes)
    host_bytes = cluster.host_bytes_per_rank if plannable.plan.allows_host_memory else 0
    return (max(0, cluster.rank_bytes - beside) + host_bytes) * cluster.world_size


def least_enough(too_few: int, least: int, is_enough: Callable[[int], bool]) -> int:
    """Returns the least number above ``too_few`` that is enough, by bisection; larger ones must be enough too."""
    while least - too_few > 1:
        middle = (too_few + least) // 2
        too_few, least = (too_few, middle) if is_enough(middle) else (middle, least)
    return least


# ways to find the least size above too_few, up to most, that fits, or None: one by one, by bisection after checking
# the largest size, and by doubling until a size fits and bisecting the last step
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
    """A kind of change, like more nodes, with sizes from small to large."""

    find: Callable[[int, int, Callable[[int], bool]], int | None]  # finds the least size that fits
    too_few: int  # the size that the model or cluster has now
    most: int  # largest size; at most `too_few` where no change of the kind helps
    change: Callable[[int], tuple[str, Plannable, Cluster]]  # text to type for a size; model and cluster to plan


def _kinds(model: Plannable, cluster: Cluster, assessment: Assessment, memory_is_given: bool) -> list[_Kind]:
    """Returns the kinds of changes in the order of the search, the cluster's first and compression last."""
    device, is_cpu, plan = cluster.device, cluster.device.kind == "cpu", model.plan
    nodes, gpus, is_fixed = cluster.nodes, cluster.ranks_per_node, bool(cluster.memory_by_rank)

    def on(typed: str, **changes: Any) -> tuple[str, Plannable, Cluster]:
        return typed, model, replace(cluster, **changes)

    by_memory = sorted(DEVICES.values(), key=lambda known: known.memory_bytes)
    larger = [known for known in by_memory if known.kind == device.kind and known.memory_bytes > device.memory_bytes]
    larger = [] if is_fixed else larger

    def on_device(number: int) -> tuple[str, Plannable, Cluster]:
        larger_device = larger[number - 1]
        if not memory_is_given:
            return on(f"--gpu {larger_device.name}", device=larger_device)
        memory_bytes = larger_device.memory_bytes  # --memory holds for any device
        return on(f"--memory {exact_bytes(memory_bytes)}", device=replace(device, memory_bytes=memory_bytes))

    # on a CPU further ranks would share its memory
    most_gpus = 0 if nodes > 1 or is_cpu or is_fixed else _MAX_GPUS
    most_nodes = 0 if is_fixed else nodes * _MAX_NODES_FACTOR
    halvings = (model.batch_size // cluster.world_size).bit_length() - 1  # most halvings that leave each rank a row
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
    # host memory of a node (GiB) with which each rank's share has room for all tables
    most_host = gpus * (assessment.one_copy.total // _GIB + 1) if plan.allows_host_memory and not is_cpu else 0
    host, most_collisions = cluster.host_memory_bytes // _GIB, model.max_collisions()
    return [
        *kinds,
        _Kind(_in_turn, 0, bool(freed), lambda _: (settings, model.with_plan(replace(plan, **freed)), cluster)),
        _Kind(_in_turn, 0, has_weight_states, lambda _: (*model.with_sparse_optimizer(row_wise_name()), cluster)),
        _Kind(_below_most, host, most_host, lambda gib: on(f"--host-memory {gib}GiB", host_memory_bytes=gib * _GIB)),
        _Kind(_by_doubling, model.collisions or 1, most_collisions, lambda c: (*model.with_collisions(c), cluster)),
    ]


def find_remedies(
    plannable: Plannable,
    cluster: Cluster,
    memory_is_given: bool = False,
    assessment: Assessment | None = None,
    max_seconds: float = _MAX_SECONDS,
) -> Remedies:
    """Finds one remedy of each kind for a model that does not fit: the smallest change, or the smallest found in time.

    ``memory_is_given`` says that ``--memory`` was typed, so that a larger device is suggested by its memory. No size is
    planned after ``max_seconds``. ``assessment`` is the model's on this cluster; it is made unless given.
    """
    present = assessment if assessment is not None else assess(plannable, cluster)
    arguments, is_complete, end = list[str](), True, time.monotonic() + max_seconds
    kinds = _kinds(plannable, cluster, present, memory_is_given)
    for i, kind in enumerate(kinds):
        # each kind may use an equal share of the time left, so that one kind does not take all
        now = time.monotonic()
        deadline = now + (end - now) / (len(kinds) - i)

        def fits(size: int, kind: _Kind = kind, deadline: float = deadline) -> bool:
            """Returns whether the change of a size fits; False if settings refuse it, or if time is up."""
            nonlocal is_complete
            try:
                _, model, changed_cluster = kind.change(size)
                if model.table_bytes() > max_table_bytes(plannable, present, changed_cluster):
                    return False
                if changed_cluster.world_size > MAX_RANKS or time.monotonic() >= deadline:
                    is_complete = False
                    return False
                return is_fitting(model, changed_cluster)
            except UserError:
                return False

        size = kind.find(kind.too_few, kind.most, fits)
        arguments += [] if size is None else [kind.change(size)[0]]
    return Remedies(tuple(arguments), is_complete)


_ONE_BY_ONE = 8  # sizes that are planned before gaps double
_BELOW = 3  # sizes right below the answer that have to be planned and not fit
_REMEDY = (
    "  take larger devices (--gpu), let tables be divided by rows (plan.sharding_types, plan.tables), compress them "
    "(embedding.default.collisions), or make networks or train.batch_size smaller"
)


@dataclass(frozen=True)
class Smallest:
    """The result of a search for the smallest cluster."""

    assessment: Assessment | None  # plan for the smallest cluster that fits; None where none was found
    tried: tuple[tuple[Cluster, bool], ...]  # planned clusters, from small to large, and whether the model fits each
    num_untried: int  # number of smaller clusters that have memory for the tables and were not planned
    one_less: Cluster | None  # the next smaller cluster; None where there is none or nothing fits
    shortage: tuple[str, ...]  # why the next smaller cluster does not fit, or where none fits the largest
    is_proven: bool  # whether no smaller cluster fits for certain; where none was found, whether none fits for certain

    @property
    def lines(self) -> list[str]:
        """The answer, the clusters that were planned, and why a smaller cluster does not fit."""
        planned = enumerate_names([f"{tried.nodes} x {tried.ranks_per_node}" for tried, _ in self.tried])
        details = [f"  {line}" for line in self.shortage]
        if self.assessment is None:
            answer = f"no number of devices up to {MAX_RANKS:,} " + ("helps" if self.is_proven else "was found to fit")
            return [f"smallest: {answer} (planned: {planned}):", *details, *([_REMEDY] * self.is_proven)]
        untried = f"; {self.num_untried:,} smaller ones were not" if self.num_untried else ""
        answer = f"smallest: {cluster_text(self.assessment.cluster)} (planned: {planned}{untried})"
        if self.one_less is None:
            return [f"{answer}; none is smaller"]
        return [answer, f"one less, {cluster_text(self.one_less)}, does not fit:", *details]


def find_smallest(plannable: Plannable, cluster: Cluster) -> Smallest:
    """Finds the smallest cluster of the given devices that a model fits; the number of given nodes is not read.

    Raises the ``UserError`` of the settings where they refuse one device, one node and two nodes alike.
    """
    gpus, fits_by_size = cluster.ranks_per_node, dict[int, bool]()

    # a size is a number in the module's drawing: 1 to `gpus` are devices of one node, `gpus` + 1 on are 2, 3, ... nodes
    def cluster_of(size: int) -> Cluster:
        return dataclasses.replace(cluster, nodes=max(1, size - gpus + 1), ranks_per_node=min(size, gpus))

    def fits(size: int) -> bool:
        """Returns whether the model fits a size, False where settings refuse it; remembers the answer."""
        if size not in fits_by_size:
            try:
                fits_by_size[size] = is_fitting(plannable, cluster_of(size))
            except UserError:
                fits_by_size[size] = False
        return fits_by_size[size]

    def planned(size: int) -> Assessment | UserError:
        """Returns the full plan for a size, or the error of settings that refuse it; remembers whether it fits."""
        plan: Assessment | UserError
        try:
            plan = assess(plannable, cluster_of(size))
        except UserError as error:
            plan = error
        fits_by_size[size] = isinstance(plan, Assessment) and plan.fits
        return plan

    def tried() -> tuple[tuple[Cluster, bool], ...]:
        return tuple((cluster_of(size), fits(size)) for size in sorted(fits_by_size))

    # 1. a first plan, whose networks and inputs tell how many bytes of tables a size can hold
    for size in (1, gpus, gpus + 1):  # where the settings refuse one device, one node or two
        first_plan = planned(size)
        if isinstance(first_plan, Assessment):
            break
    if isinstance(first_plan, UserError):
        raise first_plan
    # 2. search the sizes with enough memory for the tables; if there is none, the largest, to report its shortage
    all_sizes, table_bytes = range(1, gpus + max(0, MAX_RANKS // gpus - 1) + 1), plannable.table_bytes()
    sizes = [size for size in all_sizes if table_bytes <= max_table_bytes(plannable, first_plan, cluster_of(size))]
    sizes = [1] if fits(1) else sizes or [all_sizes[-1]]
    if not fits(sizes[0]) and (lack := _lack_of_room(plannable, cluster_of(sizes[-1]))):
        return Smallest(None, tried(), 0, None, (lack,), is_proven=True)
    # 3. the search, and the shortage of the next smaller size, or of the largest where none fits
    index = _smallest_index(sizes, fits)
    short_size = sizes[-1] if index is None else sizes[index] - 1
    shortage: list[str] = []
    if short_size:
        short_plan = planned(short_size)
        shortage = shortage_lines(short_plan) if isinstance(short_plan, Assessment) else [str(short_plan)]
    num_untried = sum(smaller not in fits_by_size for smaller in sizes[:index])
    answer = None if index is None else planned(sizes[index])
    assert not isinstance(answer, UserError)
    one_less = cluster_of(short_size) if answer is not None and short_size else None
    return Smallest(answer, tried(), num_untried, one_less, tuple(shortage), is_proven=not num_untried)


def _smallest_index(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """Returns the index in ``sizes`` of the smallest that was found to fit; None if the largest does not fit either.

    The three sizes right below the answer are planned too, and do not fit.
    """
    low, high, gap = 0, 0, 1
    while not fits(sizes[high]):
        if high == len(sizes) - 1:
            return None
        gap = gap if high < _ONE_BY_ONE else 2 * gap
        low, high = high, min(high + gap, len(sizes) - 1)
    index = least_enough(low, high, lambda middle: fits(sizes[middle]))
    lower = index - 1
    while lower >= max(0, index - _BELOW):
        if fits(sizes[lower]):
            index = lower
        lower -= 1
    return index


def _lack_of_room(plannable: Plannable, cluster: Cluster) -> str:
    """Returns the error that weights and optimizer states alone exceed a cluster's memory; empty if they do not."""
    try:
        require_room(plannable.on_cluster(cluster).request)
    except InsufficientMemory as error:
        return str(error).splitlines()[0]
    except UserError:
        pass
    return ""
