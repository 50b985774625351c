"""What a prepared graph depends on besides its input: which ids its nodes are, and how rows become edges."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from distembed.errors import UserError
from distembed.names import one_of


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

    Rows either name both ends of an edge, or an id and an attribute: ids that share an attribute are neighbours.

    Attributes:
        source: Column of one end of each edge; with ``attribute``, of the id.
        target: Column of the other end.
        weight: Column of the weight, finite and above 0; weights of an edge given several times are added up.
        directed: Whether the target is a neighbour of the source, and not the other way round.
        attribute: Column of integers or texts; ids that share a value are neighbours, and no target is read.
        max_shared: Values that more ids share are left out; 2 or more.
        count_shared: Whether an edge weighs the number of values that its ends share.
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
    unknown: str = "error"

    def __post_init__(self) -> None:
        one_of("unknown", self.unknown, ("error", "drop"))
        if self.max_shared < 2:
            raise UserError(f"max_shared is {self.max_shared}: it must be 2 or more, since an edge has two ends")
        if self.attribute is None and self.count_shared:
            raise UserError("count_shared counts the attributes that ids share: name the column of them (attribute)")
        if self.attribute is not None and (self.weight is not None or self.directed):
            raise UserError(
                "ids that share an attribute are neighbours of each other, without a weight: leave out weight and "
                "directed, or ask for the number of shared attributes as the weight (count_shared)"
            )
        columns = list(self.columns)
        if len(set(columns)) < len(columns):
            raise UserError(f"the columns are {', '.join(map(repr, columns))}: each has one role, name different ones")

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
        unused = (
            ("attribute", "max_shared", "count_shared") if self.attribute is None else ("target", "weight", "directed")
        )
        return {name: value for name, value in asdict(self).items() if name not in unused}
