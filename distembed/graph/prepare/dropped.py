"""What was left out of a graph, in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from distembed.graph.prepare.options import GraphOptions


@dataclass
class DroppedCounts:
    """What was left out of a graph.

    Attributes:
        duplicates: Number of rows whose edge, or whose id with its attribute, was given before.
        self_loops: Number of rows from an id to itself.
        unknown: Number of rows with a value that the table has no id for.
        missing: Number of rows without an attribute.
        hubs: Number of attribute values that too many ids share.
        largest_hub: Number of ids that share the most common of these.
        rare: Number of edges stored between ids that share too little.
        beyond: Number of edges stored beyond the most neighbours of an id.
    """

    duplicates: int = 0
    self_loops: int = 0
    unknown: int = 0
    missing: int = 0
    hubs: int = 0
    largest_hub: int = 0
    rare: int = 0
    beyond: int = 0

    def to_json(self, options: GraphOptions) -> dict[str, int]:
        """Returns the counts of what can be left out of this kind of input."""
        unused = {"self_loops"} if options.is_shared else {"missing", "hubs", "largest_hub"}
        unused |= {"unknown", "missing"} if options.co_occurrence else set()
        unused |= set() if options.min_shared > 1 else {"rare"}
        unused |= set() if options.max_neighbors is not None else {"beyond"}
        return {name: count for name, count in asdict(self).items() if name not in unused}
