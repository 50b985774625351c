"""The ``sse`` section of a config, and the rules that follow from it for a dataset's tables."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import Field, NonNegativeInt, Strict, field_validator, model_validator

from distembed.base.names import STRICT, complete_tables, one_of
from distembed.graph import Graph
from distembed.sse.rule import MAX_RESERVED, MAX_WALK_STEPS, SSE, Walk, checked_schedule

_Share = Annotated[float, Field(ge=0, le=1)]
_Point = Annotated[tuple[NonNegativeInt, _Share], Strict(False)]  # YAML has no tuples


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class WalkConfig:
    """A random walk with restart in the graph; see :class:`distembed.sse.Walk`."""

    restart: _Share = 0.5  # probability that the walk ends, before each step after the first
    max_steps: Annotated[int, Field(ge=1, le=MAX_WALK_STEPS)] = 8  # most steps that the walk may take


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TableSSEConfig:
    """How the ids of a table are replaced in training; see :class:`distembed.sse.SSE`."""

    p0: _Share = 0.0  # probability that an id is replaced; 0 for never
    # how many times as likely a neighbour in the graph is as another id
    rho: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    # folder that ``distembed prepare graph`` made; relative to the working directory
    graph: Annotated[str, Field(min_length=1)] | None = None
    walk: WalkConfig | None = None  # random walk that draws neighbours; null to draw the id's neighbours in the graph
    # points ``[step, factor]`` between which p0 is multiplied by a linear factor
    schedule: list[_Point] = field(default_factory=list)
    # ids that are never drawn; null for the ids of missing and of out-of-vocabulary values
    reserved: Annotated[list[NonNegativeInt], Field(max_length=MAX_RESERVED)] | None = None
    keep_reserved: bool = False  # whether reserved ids are never replaced either

    @field_validator("schedule")
    @classmethod
    def _rising(cls, value: list[tuple[int, float]]) -> list[tuple[int, float]]:
        checked_schedule(value)
        return value

    @model_validator(mode="after")
    def _require_graph(self) -> "TableSSEConfig":
        """Refuses settings that mean nothing without a graph."""
        if self.graph is None and (self.rho != 1 or self.walk is not None):
            setting = f"rho is {self.rho}" if self.rho != 1 else "walk is given"
            raise ValueError(f"{setting}, which means nothing without graph; give the folder of one")
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class SSEConfig:
    """The ``sse`` section of a config."""

    default: TableSSEConfig = field(default_factory=TableSSEConfig)  # settings for every table
    # exceptions by the feature's name; in a file an exception gives only what differs from ``default``
    tables: dict[str, TableSSEConfig] = field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _complete_exceptions(cls, values: Any) -> Any:
        return complete_tables(values)

    def for_table(self, name: str) -> TableSSEConfig:
        """Returns the settings of one table."""
        return self.tables.get(name, self.default)


def build_sse(
    config: SSEConfig, num_embeddings: Mapping[str, int], reserved: Mapping[str, Sequence[int]]
) -> dict[str, SSE]:
    """Returns the rule of every table with a p0 above 0, by table; opens the graphs, each once.

    Args:
        config: The ``sse`` section; a table that ``num_embeddings`` lacks is refused.
        num_embeddings: Number of ids of each table, by table.
        reserved: Reserved ids of tables whose settings give none, by table; ids beyond the table are ignored.
    """
    for name in config.tables:
        one_of("sse.tables", name, num_embeddings)
    settings = {name: config.for_table(name) for name in num_embeddings}
    graphs = {path: Graph.open(path) for path in graph_paths(config)}
    rules = {}
    for name, table in settings.items():
        if table.p0 > 0:
            rules[name] = SSE(
                p0=table.p0,
                rho=table.rho,
                graph=None if table.graph is None else graphs[table.graph],
                walk=None if table.walk is None else Walk(table.walk.restart, table.walk.max_steps),
                schedule=table.schedule,
                reserved=[id for id in reserved.get(name, ()) if id < num_embeddings[name]]
                if table.reserved is None
                else table.reserved,
                keep_reserved=table.keep_reserved,
            )
    return rules


def graph_paths(config: SSEConfig) -> list[str]:
    """Returns the distinct folders of graphs in settings whose p0 is above 0, sorted."""
    settings = [config.default, *config.tables.values()]
    return sorted({table.graph for table in settings if table.graph is not None and table.p0 > 0})


def graph_fingerprints(rules: Mapping[str, SSE]) -> dict[str, str]:
    """Returns the checksum of every graph's contents, by table."""
    return {table: rule.graph.fingerprint for table, rule in rules.items() if rule.graph is not None}
