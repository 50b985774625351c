"""The options of a prepared graph: which ids its nodes are, and how rows become edges."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from distembed.base.errors import UserError
from distembed.base.names import one_of

COUNT, COSINE = "count", "cosine"


@dataclass(frozen=True)
class NodeIds:
    """Which ids a graph is over: the ids of a dataset's table, or all ids below a number.

    Raises:
        UserError: Neither is given, or both, or one of ``data`` and ``table`` alone.
    """

    data: str | os.PathLike[str] | None = None  # dataset, through whose vocabulary or hash values become ids
    table: str | None = None  # name of the table there
    num_embeddings: int | None = None  # number of ids in place of both; values are then ids below it

    def __post_init__(self) -> None:
        if (self.data is None) != (self.table is None) or (self.data is None) == (self.num_embeddings is None):
            settings = {"data": self.data, "table": self.table, "num_embeddings": self.num_embeddings}
            listed = ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None) or "neither"
            raise UserError(f"give data and table, or num_embeddings: which ids there are. Received: {listed}")


@dataclass(frozen=True)
class GraphOptions:
    """How rows become edges; ``graph.json`` records it.

    Rows name both ends of an edge, or an id and an attribute: ids that share an attribute are neighbours. Without rows,
    ids that occur together in a dataset's training split are neighbours.

    Raises:
        UserError: An option is out of its range, or two do not go with each other.
    """

    source: str = "source"  # column of one end of each edge; with an attribute, of the id
    target: str = "target"  # column of the other end
    weight: str | None = None  # column of weights above 0; an edge given several times weighs the sum
    directed: bool = False  # whether the target is a neighbour of the source, and not the other way round
    # column of integers or texts, or of lists of them: ids that share a value are neighbours, and no target is read
    attribute: str | None = None
    max_shared: int = 1000  # values that more ids share are left out; 2 or more
    count_shared: bool = False  # whether an edge weighs the number of values that its ends share
    min_shared: int = 1  # edges between ids that share fewer values are left out
    # Weight of an edge between ids that share values: their number (``count``), or this number over the square root of
    # the product of the ids' own numbers of values (``cosine``), so that frequent ids are not near to everything.
    measure: str = COUNT
    # Most neighbours of an id: the heaviest, the lower ids among equals. Such a graph is directed. None keeps all.
    max_neighbors: int | None = None
    co_occurrence: bool = False  # whether items of a user, or users of an item, are neighbours in a training split
    within: int | None = None  # most steps between such items in a sequence; None for all items of a user
    unknown: str = "error"  # or ``drop``, to leave out rows with a value that the table has no id for

    def __post_init__(self) -> None:
        one_of("unknown", self.unknown, ("error", "drop"))
        one_of("measure", self.measure, (COUNT, COSINE))
        if self.max_shared < 2:
            raise UserError(f"max_shared is {self.max_shared}: it must be 2 or more, since an edge has two ends")
        for name in ("min_shared", "max_neighbors", "within"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name} is {value}: it must be 1 or more")
        counts_shared = self.count_shared or self.min_shared > 1 or self.max_neighbors or self.measure != COUNT
        if not self.is_shared and counts_shared:
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
        ends = (self.source, self.target, self.weight) if self.attribute is None else (self.source, self.attribute)
        columns = [column for column in ends if column is not None]
        if len(set(columns)) < len(columns):
            raise UserError(f"the columns are {', '.join(map(repr, columns))}: each has one role, name different ones")

    @property
    def is_shared(self) -> bool:
        """Whether edges are between ids that share something, rather than named."""
        return self.attribute is not None or self.co_occurrence

    @property
    def one_way(self) -> bool:
        """Whether an id need not be a neighbour of its neighbour."""
        return self.directed or self.max_neighbors is not None

    @property
    def weighted(self) -> bool:
        """Whether edges have weights."""
        return self.weight is not None or self.count_shared

    @property
    def droppable(self) -> list[str]:
        """Names of the counts of rows, values and edges that this kind of input can have left out."""
        kinds = {
            "duplicates": True,  # rows whose edge, or whose id with its attribute, was given before
            "self_loops": not self.is_shared,  # rows from an id to itself
            "unknown": not self.co_occurrence,  # rows with a value that the table has no id for
            "missing": self.attribute is not None,  # rows without an attribute
            "hubs": self.is_shared,  # attribute values that too many ids share
            "largest_hub": self.is_shared,  # ids that share the most common of these
            "rare": self.min_shared > 1,  # edges between ids that share too little
            "beyond": self.max_neighbors is not None,  # edges beyond the most neighbours of an id
        }
        return [name for name, is_possible in kinds.items() if is_possible]

    def to_json(self) -> dict[str, Any]:
        """Returns the options that matter for this kind of input."""
        used = {"source", "target", "weight", "directed", "unknown"}
        if self.is_shared:
            used = {"source", "attribute", "unknown"} if self.attribute is not None else {"co_occurrence"}
            used |= {"max_shared", "count_shared"}
        limits = {"min_shared": self.min_shared > 1, "measure": self.measure != COUNT}
        limits |= {"max_neighbors": True, "within": True}
        values = asdict(self).items()
        return {name: value for name, value in values if name in used or (value is not None and limits.get(name))}
