"""What a prepared graph depends on besides its input: which ids its nodes are, and how rows become edges."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from distembed.errors import UserError
from distembed.names import one_of

COUNT, COSINE = "count", "cosine"


@dataclass(frozen=True)
class NodeIds:
    """Which ids a graph is over: those of a dataset's table, or all below a number.

    Attributes:
        data: Folder of a prepared dataset, through whose vocabulary or hash the values of ``table`` become ids.
        table: Name of the table there.
        num_embeddings: Number of ids, in place of both; values are then ids below it.

    Raises:
        UserError: Neither is given, or both, or one of ``data`` and ``table`` alone.
    """

    data: str | os.PathLike[str] | None = None
    table: str | None = None
    num_embeddings: int | None = None

    def __post_init__(self) -> None:
        if (self.data is None) != (self.table is None) or (self.data is None) == (self.num_embeddings is None):
            given = {"data": self.data, "table": self.table, "num_embeddings": self.num_embeddings}
            listed = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None) or "neither"
            raise UserError(f"give data and table, or num_embeddings: which ids there are. Received: {listed}")


@dataclass(frozen=True)
class GraphOptions:
    """How rows become edges; ``graph.json`` records it.

    Rows name both ends of an edge, or an id and an attribute: ids that share an attribute are neighbours. Or there are
    no rows but those that a dataset trains on: ids that occur together are neighbours.

    Attributes:
        source: Column of one end of each edge; with ``attribute``, of the id.
        target: Column of the other end.
        weight: Column of the weight, finite and above 0; weights of an edge given several times are added up.
        directed: Whether the target is a neighbour of the source, and not the other way round.
        attribute: Column of integers or texts, or of lists of them; ids that share a value are neighbours, and no
            target is read.
        max_shared: Values that more ids share are left out; 2 or more.
        count_shared: Whether an edge weighs the number of values that its ends share, or how often they occur together.
        min_shared: Edges between ids that share fewer values, or occur together less often, are left out; 1 or more.
        measure: What edges between ids that share something weigh, where that matters: the number of what they share
            (``count``), or that over the square root of the product of the two ids' own numbers (``cosine``), by which
            frequent ids are not near to everything.
        max_neighbors: Most neighbours of an id, those whose edges weigh most, the lower ids among equals; such a graph
            is directed. None keeps all.
        co_occurrence: Whether a dataset's training split is read: items of the same user, or users of the same item,
            are neighbours.
        within: With ``co_occurrence``, in place of all items of a user those that are at most so many steps apart in a
            sequence; 1 or more.
        unknown: ``error``, or ``drop`` to leave out rows with a value that the table has no id for.

    Raises:
        UserError: An option is out of its range, or two do not go with each other.
    """

    source: str = "source"
    target: str = "target"
    weight: str | None = None
    directed: bool = False
    attribute: str | None = None
    max_shared: int = 1000
    count_shared: bool = False
    min_shared: int = 1
    measure: str = COUNT
    max_neighbors: int | None = None
    co_occurrence: bool = False
    within: int | None = None
    unknown: str = "error"

    def __post_init__(self) -> None:
        one_of("unknown", self.unknown, ("error", "drop"))
        one_of("measure", self.measure, (COUNT, COSINE))
        if self.max_shared < 2:
            raise UserError(f"max_shared is {self.max_shared}: it must be 2 or more, since an edge has two ends")
        for name, value in (
            ("min_shared", self.min_shared),
            ("max_neighbors", self.max_neighbors),
            ("within", self.within),
        ):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: it must be 1 or more")
        if not self.is_shared and self.counts_shared:
            raise UserError(
                "count_shared, min_shared, max_neighbors and measure count what ids share: name the column of an "
                "attribute (attribute), or read a dataset (co_occurrence)"
            )
        if self.is_shared and (self.weight is not None or self.directed):
            raise UserError(
                "ids that share an attribute are neighbours of each other, without a weight: leave out weight and "
                "directed, or ask for the number of shared attributes as the weight (count_shared)"
            )
        if self.co_occurrence and self.attribute is not None:
            raise UserError("co_occurrence reads a dataset, which has no attribute column: leave out one of the two")
        if self.within is not None and not self.co_occurrence:
            raise UserError("within counts steps in the sequences of a dataset: give co_occurrence too")
        columns = list(self.columns)
        if len(set(columns)) < len(columns):
            raise UserError(f"the columns are {', '.join(map(repr, columns))}: each has one role, name different ones")

    @property
    def is_shared(self) -> bool:
        """Whether edges are between ids that share something, rather than named."""
        return self.attribute is not None or self.co_occurrence

    @property
    def counts_shared(self) -> bool:
        """Whether it matters how much the ends of an edge share."""
        return self.count_shared or self.min_shared > 1 or self.max_neighbors is not None or self.measure != COUNT

    @property
    def one_way(self) -> bool:
        """Whether an id need not be a neighbour of its neighbour."""
        return self.directed or self.max_neighbors is not None

    @property
    def weighted(self) -> bool:
        """Whether edges have weights."""
        return self.weight is not None or self.count_shared

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are read."""
        if self.attribute is not None:
            return (self.source, self.attribute)
        return (self.source, self.target) if self.weight is None else (self.source, self.target, self.weight)

    def to_json(self) -> dict[str, Any]:
        """Returns the options that matter for this kind of input."""
        named = {"source", "target", "weight", "directed", "unknown"}
        used = {"source", "attribute", "max_shared", "count_shared", "unknown"} if self.attribute is not None else named
        used = {"co_occurrence", "max_shared", "count_shared"} if self.co_occurrence else used
        limits = {"min_shared": self.min_shared > 1, "measure": self.measure != COUNT}
        limits |= {"max_neighbors": True, "within": True}
        values = asdict(self).items()
        return {name: value for name, value in values if name in used or (value is not None and limits.get(name))}
