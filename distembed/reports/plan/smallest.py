"""The smallest cluster that a model fits: ``distembed plan --smallest``.

With G devices a node, sizes are 1, 2, ..., G devices of one node, then 2, 3, ... whole nodes::

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
from collections.abc import Callable
from dataclasses import dataclass

from distembed.base.errors import InsufficientMemory, UserError
from distembed.base.units import enumerate_names
from distembed.planning.devices import Cluster
from distembed.planning.search import require_room
from distembed.reports.plan.assessment import Assessment, assess, is_fitting
from distembed.reports.plan.plannable import Plannable
from distembed.reports.plan.remedies import MAX_RANKS, least_enough, max_table_bytes
from distembed.reports.plan.texts import cluster_text, shortage_lines

_ONE_BY_ONE = 8  # sizes that are planned before gaps double
_BELOW = 3  # sizes below the answer that are planned
_REMEDY = (
    "  take larger devices (--gpu), let tables be divided by rows (plan.sharding_types, plan.tables), compress them "
    "(embedding.default.collisions), or make networks or train.batch_size smaller"
)


@dataclass(frozen=True)
class Smallest:
    """Outcome of a search for the smallest cluster."""

    assessment: Assessment | None  # plan for the smallest cluster that fits; None where none was found
    tried: tuple[tuple[Cluster, bool], ...]  # planned clusters, from small to large, and whether the model fits each
    num_untried: int  # number of smaller clusters that have memory for the tables and were not planned
    one_less: Cluster | None  # the next smaller cluster; None where there is none or nothing fits
    shortage: tuple[str, ...]  # why the next smaller cluster does not fit, or where none fits the largest
    is_proven: bool  # whether no smaller cluster fits for certain; where none was found, whether none fits for certain

    @property
    def lines(self) -> list[str]:
        """The answer, the clusters that were planned, and why a smaller cluster does not fit."""
        planned = enumerate_names([f"{own.nodes} x {own.ranks_per_node}" for own, _ in self.tried])
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
    """Returns the smallest cluster that a model fits; how many nodes the one given has does not matter."""
    gpus, outcomes = cluster.ranks_per_node, dict[int, bool]()

    def size(number: int) -> Cluster:
        """Returns the cluster of a number in the drawing above."""
        return dataclasses.replace(cluster, nodes=max(1, number - gpus + 1), ranks_per_node=min(number, gpus))

    def fits(number: int) -> bool:
        """Returns whether the model fits a size; False where the settings refuse it. Each size is searched once."""
        if number not in outcomes:
            try:
                outcomes[number] = is_fitting(plannable, size(number))
            except UserError:
                outcomes[number] = False
        return outcomes[number]

    def outcome(number: int) -> Assessment | UserError:
        """Returns the plan for a size, or why the settings refuse it."""
        found: Assessment | UserError
        try:
            found = assess(plannable, size(number))
        except UserError as error:
            found = error
        outcomes[number] = isinstance(found, Assessment) and found.fits
        return found

    def tried() -> tuple[tuple[Cluster, bool], ...]:
        return tuple((size(number), fits(number)) for number in sorted(outcomes))

    for number in (1, gpus, gpus + 1):  # where the settings refuse one device, one node or two
        first = outcome(number)
        if isinstance(first, Assessment):
            break
    if isinstance(first, UserError):
        raise first
    numbers, table_bytes = range(1, gpus + max(0, MAX_RANKS // gpus - 1) + 1), plannable.table_bytes()
    sizes = [number for number in numbers if table_bytes <= max_table_bytes(plannable, first, size(number))]
    # where not even the largest has the memory, its shortage is told
    sizes = [1] if fits(1) else sizes or [numbers[-1]]
    if not fits(sizes[0]) and (lack := _lack_of_room(plannable, size(sizes[-1]))):
        return Smallest(None, tried(), 0, None, (lack,), is_proven=True)
    place = _smallest_place(sizes, fits)
    below = sizes[-1] if place is None else sizes[place] - 1  # the size whose shortage is told
    shortage: list[str] = []
    if below:
        told = outcome(below)
        shortage = shortage_lines(told) if isinstance(told, Assessment) else [str(told)]
    num_untried = sum(smaller not in outcomes for smaller in sizes[:place])
    answer = None if place is None else outcome(sizes[place])
    assert not isinstance(answer, UserError)
    one_less = size(below) if answer is not None and below else None
    return Smallest(answer, tried(), num_untried, one_less, tuple(shortage), is_proven=not num_untried)


def _smallest_place(sizes: list[int], fits: Callable[[int], bool]) -> int | None:
    """Returns the place of the smallest size that fits, so that the sizes right below it do not; None for none."""
    low, high, gap = 0, 0, 1
    while not fits(sizes[high]):
        if high == len(sizes) - 1:
            return None
        gap = gap if high < _ONE_BY_ONE else 2 * gap
        low, high = high, min(high + gap, len(sizes) - 1)
    place = least_enough(low, high, lambda middle: fits(sizes[middle]))
    lower = place - 1
    while lower >= max(0, place - _BELOW):
        if fits(sizes[lower]):
            place = lower
        lower -= 1
    return place


def _lack_of_room(plannable: Plannable, cluster: Cluster) -> str:
    """Returns which bytes that stay from step to step exceed a cluster's memory; empty where none do."""
    try:
        require_room(plannable.on_cluster(cluster).request)
    except InsufficientMemory as error:
        return str(error).splitlines()[0]
    except UserError:
        pass
    return ""
