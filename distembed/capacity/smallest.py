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
from collections.abc import Sequence
from dataclasses import dataclass

from distembed.capacity.assessment import Assessment, assess
from distembed.capacity.plannable import Plannable
from distembed.capacity.remedies import MAX_RANKS, max_table_bytes
from distembed.capacity.texts import cluster_text, shortage_lines
from distembed.errors import InsufficientMemory, UserError
from distembed.planning.cluster import Cluster
from distembed.planning.plan import require_room
from distembed.units import enumerate_names

_ONE_BY_ONE = 8
"""Sizes that are planned before gaps double."""
_BELOW = 3
"""Sizes below the answer that are planned."""
_REMEDY = (
    "  take larger devices (--gpu), let tables be divided by rows (plan.sharding_types, plan.tables), compress them "
    "(embedding.default.collisions), or make networks or train.batch_size smaller"
)


@dataclass(frozen=True)
class Smallest:
    """Outcome of a search for the smallest cluster."""

    assessment: Assessment | None  # plan for the smallest cluster that fits; None where none was found
    # clusters that were planned, from small to large, and whether the model fits each
    tried: tuple[tuple[Cluster, bool], ...]
    num_untried: int  # number of smaller clusters that have memory for the tables and were not planned
    one_less: Cluster | None  # the next smaller cluster; None where there is none or nothing fits
    # why the next smaller cluster does not fit, or where none fits the largest, a sentence each
    shortage: tuple[str, ...]
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
    """Returns the smallest cluster that a model fits, by the search above.

    Args:
        plannable: Model to plan.
        cluster: Device of each rank, and the most ranks of a node; its number of nodes does not matter.

    Raises:
        UserError: The settings cannot be planned on any number of devices.
        InsufficientMemory: This machine cannot make the networks.
    """
    return _Search(plannable, cluster).find()


class _Search:
    """Plans sizes by their number, each at most once."""

    def __init__(self, plannable: Plannable, cluster: Cluster) -> None:
        self._plannable, self._cluster = plannable, cluster
        self._outcomes: dict[int, Assessment | UserError] = {}

    def find(self) -> Smallest:
        """Returns the smallest size that fits."""
        first, gpus = self._first_accepted(), self._cluster.ranks_per_node
        if self._fits(1):
            return self._found([1], 0)
        table_bytes, most = self._plannable.table_bytes(), gpus + max(0, MAX_RANKS // gpus - 1)
        # where not even the largest has the memory, its shortage is told
        sizes = [
            number
            for number in range(1, most + 1)
            if table_bytes <= max_table_bytes(self._plannable, first, self._size(number))
        ] or [most]
        if self._fits(sizes[0]):
            return self._found(sizes, 0)
        if lack := self._lack_of_room(sizes[-1]):
            return Smallest(None, self._tried, 0, None, (lack,), is_proven=True)
        place = self._place_after_first(sizes)
        if place is None:
            num_untried = sum(number not in self._outcomes for number in sizes)
            return Smallest(None, self._tried, num_untried, None, self._shortage(sizes[-1]), is_proven=not num_untried)
        return self._found(sizes, self._lowered(sizes, place))

    def _found(self, sizes: Sequence[int], place: int) -> Smallest:
        """Returns the answer that the size at a place of the list is the smallest."""
        number = sizes[place]
        shortage = self._shortage(number - 1) if number > 1 else ()
        num_untried = sum(smaller not in self._outcomes for smaller in sizes[:place])
        found, one_less = self._outcomes[number], self._size(number - 1) if number > 1 else None
        assert isinstance(found, Assessment)
        return Smallest(found, self._tried, num_untried, one_less, shortage, is_proven=not num_untried)

    def _place_after_first(self, sizes: Sequence[int]) -> int | None:
        """Returns the place of a size that fits, where the first does not: by doubling gaps, then bisecting one."""
        low, gap, last = 0, 1, len(sizes) - 1
        while True:
            high = min(low + gap, last)
            if high == low:
                return None
            if self._fits(sizes[high]):
                break
            low, gap = high, gap if high < _ONE_BY_ONE else 2 * gap
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(sizes[middle]) else (middle, high)
        return high

    def _lowered(self, sizes: Sequence[int], place: int) -> int:
        """Returns the place of the smallest size that fits so that the sizes right below it do not."""
        for lower in range(place - 1, max(-1, place - 1 - _BELOW), -1):
            if self._fits(sizes[lower]):
                return self._lowered(sizes, lower)
        return place

    def _size(self, number: int) -> Cluster:
        """Returns the cluster of a number in the drawing above."""
        gpus = self._cluster.ranks_per_node
        return dataclasses.replace(self._cluster, nodes=max(1, number - gpus + 1), ranks_per_node=min(number, gpus))

    def _first_accepted(self) -> Assessment:
        """Returns the plan for one device, or where the settings refuse it for one node or for two; else raises."""
        gpus = self._cluster.ranks_per_node
        for number in (1, gpus, gpus + 1):
            outcome = self._outcome(number)
            if isinstance(outcome, Assessment):
                return outcome
        assert isinstance(outcome, UserError)
        raise outcome

    def _outcome(self, number: int) -> Assessment | UserError:
        """Returns the plan for a size, or why the settings refuse it."""
        if number not in self._outcomes:
            try:
                self._outcomes[number] = assess(self._plannable, self._size(number))
            except UserError as error:
                self._outcomes[number] = error
        return self._outcomes[number]

    def _fits(self, number: int) -> bool:
        outcome = self._outcome(number)
        return isinstance(outcome, Assessment) and outcome.fits

    def _shortage(self, number: int) -> tuple[str, ...]:
        """Returns why a size does not fit, a sentence each."""
        outcome = self._outcome(number)
        return tuple(shortage_lines(outcome)) if isinstance(outcome, Assessment) else (str(outcome),)

    def _lack_of_room(self, number: int) -> str:
        """Returns which bytes that stay from step to step exceed a size's memory; empty where none do."""
        try:
            require_room(self._plannable.on_cluster(self._size(number)).request)
        except InsufficientMemory as error:
            return str(error).splitlines()[0]
        except UserError:
            pass
        return ""

    @property
    def _tried(self) -> tuple[tuple[Cluster, bool], ...]:
        """Clusters that were planned, from small to large, and whether the model fits each."""
        return tuple((self._size(number), self._fits(number)) for number in sorted(self._outcomes))
