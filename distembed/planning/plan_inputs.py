"""What a plan was made for, kept beside it: its ranks, a step's rows, the model, the optimizers and every table.

A plan that is taken up for something else would place the same numbers and still be wrong: what was reported of its
memory and its times would not be what runs.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import Field

from distembed.embedding.config import CompositionalEmbeddingConfig

_AtLeastOne = Annotated[int, Field(strict=True, ge=1)]


@pydantic.dataclasses.dataclass(frozen=True)
class TablePlanInputs:
    """A table that a plan was made for.

    Attributes:
        scheme: name of the partition.
        rows: of each partition.
        dims: numbers of a row of each partition.
        composition: its name.
        embedding_dim: of a composed vector.
        data_type: of the vectors, as TorchRec names it.
        pooling: None for a table of sequences.
        feature_names: that are looked up in it.
    """

    scheme: str
    rows: list[_AtLeastOne]
    dims: list[_AtLeastOne]
    composition: str
    embedding_dim: _AtLeastOne
    data_type: str
    pooling: str | None
    feature_names: list[str]

    @classmethod
    def of(cls, table: CompositionalEmbeddingConfig) -> "TablePlanInputs":
        """That of a table which is there."""
        parts = table.partition_tables()
        return cls(
            scheme=table.scheme.name,
            rows=[part.num_rows for part in parts],
            dims=[part.dim for part in parts],
            composition=table.combine.name,
            embedding_dim=table.embedding_dim,
            data_type=table.data_type.value,
            pooling=getattr(table, "pooling", None),
            feature_names=list(table.feature_names),
        )


@pydantic.dataclasses.dataclass(frozen=True)
class PlanInputs:
    """What a plan was made for.

    Attributes:
        world_size: number of ranks.
        local_world_size: number of ranks on a machine.
        device_kind: ``cuda`` or ``cpu``.
        batch_size: rows of a step on all ranks.
        model: the config's section in plain values.
        sparse_optimizer: name of the tables' optimizer.
        dense_optimizer: name of the networks'.
        tables: by name.
    """

    world_size: _AtLeastOne
    local_world_size: _AtLeastOne
    device_kind: str
    batch_size: _AtLeastOne
    model: dict[str, Any]
    sparse_optimizer: str
    dense_optimizer: str
    tables: dict[str, TablePlanInputs]

    def as_json(self) -> dict[str, Any]:
        """In plain values."""
        return dataclasses.asdict(self)

    def differences(self, now: "PlanInputs") -> list[str]:
        """A line for each value that is another one now, with both; tables that differ alike share one."""
        own, others = self.as_json(), now.as_json()
        tables, tables_now = own.pop("tables"), others.pop("tables")
        lines = [f"{path}: {values}" for path, values in _changed(own, others)]
        lines += [f"table {name!r} is in the plan and not in the model" for name in tables if name not in tables_now]
        lines += [f"table {name!r} is in the model and not in the plan" for name in tables_now if name not in tables]
        alike: dict[tuple[str, str], list[str]] = {}
        for name in tables:
            for change in _changed(tables[name], tables_now.get(name, tables[name])):
                alike.setdefault(change, []).append(name)
        return lines + [f"{path} of {_listed(names)}: {values}" for (path, values), names in alike.items()]


def table_plan_inputs(tables: Sequence[CompositionalEmbeddingConfig]) -> dict[str, TablePlanInputs]:
    """By name."""
    return {table.name: TablePlanInputs.of(table) for table in tables}


def _listed(names: Sequence[str]) -> str:
    return f"table{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


def _changed(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path, and both values as they are said."""
    for key in before | now:
        own, other = before.get(key), now.get(key)
        if isinstance(own, dict) and isinstance(other, dict):
            yield from _changed(own, other, f"{prefix}{key}.")
        elif own != other or (key in before) != (key in now):
            yield f"{prefix}{key}", f"{_said(before, key)} in the plan, {_said(now, key)} now"


def _said(values: dict[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "nothing"
