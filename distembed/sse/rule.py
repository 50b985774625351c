"""The rule by which the ids of one table are replaced: SSE-SE or SSE-Graph (Wu et al., NeurIPS 2019, section 3)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distembed.base.errors import UserError
from distembed.graph import Graph

MAX_RESERVED = 64
MAX_WALK_STEPS = 20


@dataclass(frozen=True)
class Walk:
    """A random walk with restart, which draws a neighbour instead of one step along an edge.

    The walk takes one step. Before each further one it ends with probability ``restart``; it also ends at a node
    without neighbours, and after ``max_steps``. The node where it ends is drawn; where the walk ends at its first node,
    the node before is drawn.

    Attributes:
        restart: Probability that the walk ends before a step, 0 to 1; at 1 every walk has one step.
        max_steps: Most steps of a walk, 1 to 20.

    Raises:
        UserError: A value is out of its range.
    """

    restart: float = 0.5
    max_steps: int = 8

    def __post_init__(self) -> None:
        _require_probability("walk.restart", self.restart)
        if type(self.max_steps) is not int or not 1 <= self.max_steps <= MAX_WALK_STEPS:
            raise UserError(f"walk.max_steps is {self.max_steps!r}; it must be an integer from 1 to {MAX_WALK_STEPS}.")


@dataclass(frozen=True)
class SSE:
    """Stochastic shared embeddings of one table: in training each id is replaced with probability ``p0``.

    Without a graph every other id is equally likely (SSE-SE): ``p(j, k) = p0 / (N - 1)`` for ``k != j``. With one,
    ``p(j, k) = rho * p(j, l)`` for neighbours k and non-neighbours l of j (SSE-Graph, equation 3), and
    ``p(j, j) = 1 - p0`` as before. Neighbours have an extra probability, beyond that of any other id: weights of edges,
    and a walk, change how it is divided among them, not how much it is. Ids without neighbours are replaced as without
    a graph.

    Attributes:
        p0: Probability that an id is replaced, 0 to 1.
        rho: How many times as likely a neighbour is as another id, 1 or more; 1 is SSE-SE.
        graph: Neighbours of each id; None for SSE-SE.
        walk: Random walk at whose end the neighbour is drawn; None for neighbours next to the id.
        schedule: Points ``(step, factor)``, in rising order of steps: p0 is multiplied by the factor, which is linear
            between the points and constant before the first and after the last. Factors lie in 0 to 1.
        reserved: Ids that are never drawn, like the ids of missing values and of padding; N counts the other ids.
        keep_reserved: Whether reserved ids are never replaced either.

    Raises:
        UserError: A value is out of its range, or a rho or a walk is given without a graph.
    """

    p0: float
    rho: float = 1.0
    graph: Graph | None = None
    walk: Walk | None = None
    schedule: Sequence[tuple[int, float]] = ()
    reserved: Sequence[int] = ()
    keep_reserved: bool = False

    def __post_init__(self) -> None:
        _require_probability("p0", self.p0)
        if not _is_number(self.rho) or not 1 <= self.rho < math.inf:
            raise UserError(
                f"rho is {self.rho!r}; it must be a finite number of 1 or more: how many times as likely a neighbour "
                "is as another id. 1 draws all ids alike."
            )
        for field, kind in (("graph", Graph), ("walk", Walk)):
            value = getattr(self, field)
            if value is not None and not isinstance(value, kind):
                raise UserError(f"{field} is {value!r}; give an instance of distembed.sse.{kind.__name__}, or None.")
        if self.graph is None and (self.rho != 1 or self.walk is not None):
            raise UserError(f"rho is {self.rho} and walk {self.walk}, which mean nothing without a graph; give one.")
        object.__setattr__(self, "schedule", checked_schedule(self.schedule))
        object.__setattr__(self, "reserved", _checked_reserved(self.reserved))

    def rate(self, step: int) -> float:
        """Returns the probability that an id is replaced at this step."""
        if not self.schedule:
            return self.p0
        steps, factors = zip(*self.schedule, strict=True)
        return self.p0 * float(np.interp(step, steps, factors))

    def require_valid_for(self, num_embeddings: int, where: str) -> None:
        """Raises an error unless the rule fits a table.

        Args:
            num_embeddings: Number of ids of the table.
            where: Name of the table in the error.

        Raises:
            UserError: A reserved id lies beyond the table, or the graph has another number of ids or edges to reserved
                ones.
        """
        for reserved in self.reserved:
            if reserved >= num_embeddings:
                raise UserError(
                    f"{where}: the reserved id {reserved} lies outside of the table; ids lie in [0, {num_embeddings})."
                )
        if self.graph is None:
            return
        if self.graph.num_nodes != num_embeddings:
            raise UserError(
                f"{where}: the graph has {self.graph.num_nodes} ids and the table {num_embeddings}; build the graph "
                "for this table."
            )
        for reserved in self.reserved:
            if np.isin(self.graph.neighbors, reserved).any():
                raise UserError(
                    f"{where}: the graph has edges to id {reserved}, which is reserved and thus never drawn; leave "
                    "these edges out, or do not reserve the id."
                )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_probability(field: str, value: object) -> None:
    if not _is_number(value) or not 0 <= value <= 1:  # type: ignore[operator]
        raise UserError(f"{field} is {value!r}; it is a probability, from 0 to 1.")


def checked_schedule(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Returns the points of a schedule, if they are ones."""
    remedy = "give a list of pairs (step, factor), such as [[0, 0.0], [1000, 1.0]]"
    try:
        pairs = tuple((step, factor) for step, factor in points)
    except (TypeError, ValueError):
        raise UserError(f"schedule is {points!r}; {remedy}.") from None
    for step, factor in pairs:
        if type(step) is not int or step < 0 or not _is_number(factor) or not 0 <= factor <= 1:
            raise UserError(f"schedule has the point ({step!r}, {factor!r}); {remedy}, with factors from 0 to 1.")
    steps = [step for step, _ in pairs]
    if steps != sorted(set(steps)):
        raise UserError(f"schedule has the steps {steps}; they must rise.")
    return pairs


def _checked_reserved(ids: Sequence[int]) -> tuple[int, ...]:
    """Returns reserved ids distinct and ascending, as replacement needs them; refuses anything else than ids."""
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str)
    if not is_list or not all(type(reserved) is int and reserved >= 0 for reserved in ids):
        raise UserError(f"reserved is {ids!r}; give a list of ids of 0 or more.")
    distinct = tuple(sorted(set(ids)))
    if len(distinct) > MAX_RESERVED:
        raise UserError(
            f"reserved has {len(distinct)} ids; at most {MAX_RESERVED} can be reserved: the ids of missing, unknown "
            "and padding values."
        )
    return distinct


@dataclass(frozen=True)
class IdStream:
    """The ids of one feature, with the rule that replaces them; each stream has its own random numbers.

    Raises:
        UserError: The rule does not fit the table.
    """

    table: str  # name of the table that the feature is looked up in
    feature: str  # name of the feature
    num_embeddings: int  # number of ids, which lie in ``[0, num_embeddings)``
    sse: SSE  # rule by which the ids are replaced
    seed: int  # seed of the random numbers, which also depend on both names
    first: int = 0  # the ids in a batch are these ids plus ``first``, in a table with other features' ids

    def __post_init__(self) -> None:
        self.sse.require_valid_for(self.num_embeddings, f"table {self.table!r}: sse")

    @property
    def num_drawable(self) -> int:
        """Number of ids that may be drawn: all but the reserved ones."""
        return self.num_embeddings - len(self.sse.reserved)

    @property
    def num_first_reserved(self) -> int:
        """Length of the run 0, 1, 2, ... that the (ascending) reserved ids begin with: 2 for ``(0, 1, 5)``."""
        return sum(reserved == expected for expected, reserved in enumerate(self.sse.reserved))

    def rate(self, step: int) -> float:
        """Returns the probability that an id is replaced at this step: 0 where there is no other id to draw."""
        return self.sse.rate(step) if self.num_drawable > 1 else 0.0
