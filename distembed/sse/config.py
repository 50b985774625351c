"""The ``sse`` section of a YAML file, and the rules that it makes for a dataset's tables."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import ConfigDict, Field, NonNegativeInt, Strict, field_validator, model_validator

from distembed.graph import Graph
from distembed.names import complete_tables, one_of
from distembed.sse.rule import MAX_RESERVED, MAX_WALK_STEPS, SSE, Walk, checked_schedule

_STRICT = ConfigDict(extra="forbid", strict=True)
_Share = Annotated[float, Field(ge=0, le=1)]
_Point = Annotated[tuple[NonNegativeInt, _Share], Strict(False)]  # YAML has no tuples


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class WalkConfig:
    """A random walk with restart in the graph; see :class:`distembed.sse.Walk`.

    Attributes:
        restart: probability that the walk ends, before each step after the first.
        max_steps: that it may take.
    """

    restart: _Share = 0.5
    max_steps: Annotated[int, Field(ge=1, le=MAX_WALK_STEPS)] = 8


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class TableSSEConfig:
    """How the ids of a table are replaced in training; see :class:`distembed.sse.SSE`.

    Attributes:
        p0: probability that an id is replaced; 0 for never.
        rho: how many times as likely a neighbour in the graph is as another id.
        graph: folder that ``distembed prepare graph`` made; relative to the working directory.
        walk: how neighbours are drawn: by a random walk, or next to the id where null.
        schedule: points ``[step, factor]`` between which p0 is multiplied by a linear factor.
        reserved: ids that are never drawn; null for those that ``distembed prepare`` gave to missing and
            out-of-vocabulary values.
        keep_reserved: whether these are never replaced either.
    """

    p0: _Share = 0.0
    rho: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    graph: Annotated[str, Field(min_length=1)] | None = None
    walk: WalkConfig | None = None
    schedule: list[_Point] = field(default_factory=list)
    reserved: Annotated[list[NonNegativeInt], Field(max_length=MAX_RESERVED)] | None = None
    keep_reserved: bool = False

    @field_validator("schedule")
    @classmethod
    def _rising(cls, value: list[tuple[int, float]]) -> list[tuple[int, float]]:
        checked_schedule(value)
        return value

    @model_validator(mode="after")
    def _of_a_graph(self) -> "TableSSEConfig":
        if self.graph is None and (self.rho != 1 or self.walk is not None):
            given = f"rho is {self.rho}" if self.rho != 1 else "walk is given"
            raise ValueError(f"{given}, which means nothing without graph; give the folder of one")
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=_STRICT)
class SSEConfig:
    """The ``sse`` section: ``default`` for every table, ``tables`` for exceptions by the feature's name.

    In a file an exception gives only what differs from ``default``.
    """

    default: TableSSEConfig = field(default_factory=TableSSEConfig)
    tables: dict[str, TableSSEConfig] = field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _complete_exceptions(cls, values: Any) -> Any:
        return complete_tables(values)

    def for_table(self, name: str) -> TableSSEConfig:
        """Returns the settings of one table."""
        return self.tables.get(name, self.default)


def build_sse(config: SSEConfig, num_embeddings: Mapping[str, int], reserved: Sequence[int]) -> dict[str, SSE]:
    """The rule of every table whose ids are replaced.

    Args:
        config: the section.
        num_embeddings: of each table, by its name.
        reserved: ids that are reserved in every table unless its settings say otherwise.

    Raises:
        UserError: for a table that is not there, or a graph that cannot be read or is not for its table.
    """
    for name in config.tables:
        one_of("sse.tables", name, num_embeddings)
    settings = {name: config.for_table(name) for name in num_embeddings}
    graphs = {path: Graph.open(path) for path in graph_paths(config)}
    rules = {}
    for name, own in settings.items():
        if own.p0 > 0:
            rules[name] = SSE(
                p0=own.p0,
                rho=own.rho,
                graph=None if own.graph is None else graphs[own.graph],
                walk=None if own.walk is None else Walk(own.walk.restart, own.walk.max_steps),
                schedule=own.schedule,
                reserved=_of_table(reserved, num_embeddings[name]) if own.reserved is None else own.reserved,
                keep_reserved=own.keep_reserved,
            )
    return rules


def graph_paths(config: SSEConfig) -> list[str]:
    """Folders of all graphs that the section names and some p0 makes use of."""
    settings = [config.default, *config.tables.values()]
    return sorted({own.graph for own in settings if own.graph is not None and own.p0 > 0})


def graph_fingerprints(rules: Mapping[str, SSE]) -> dict[str, str]:
    """Checksum of the contents of every graph, by table."""
    return {table: rule.graph.fingerprint for table, rule in rules.items() if rule.graph is not None}


def _of_table(reserved: Sequence[int], num_embeddings: int) -> list[int]:
    return [id for id in reserved if id < num_embeddings]
