"""The inputs of a plan, which are saved beside it: the ranks, a step's rows, the model, optimizers and tables.

With other inputs a saved plan might still place every table, but the memory and the times that were reported of it
would not be those of the run. So it is applied only where its inputs are the same.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any

import pydantic.dataclasses
from pydantic import Field

from distembed.embedding.exchange import VectorExchange

if TYPE_CHECKING:
    from distembed.embedding.config import CompositionalEmbeddingConfig

_AtLeastOne = Annotated[int, Field(strict=True, ge=1)]


@pydantic.dataclasses.dataclass(frozen=True)
class TablePlanInputs:
    """An embedding table among the inputs of a plan."""

    scheme: str  # name of the partition
    rows: list[_AtLeastOne]  # number of rows of each partition
    dims: list[_AtLeastOne]  # how many numbers make a row of each partition
    composition: str
    embedding_dim: _AtLeastOne
    data_type: str  # type of the vectors, by TorchRec's name
    pooling: str | None  # how the vectors of a bag are pooled; None for a table of sequences
    feature_names: list[str]


@pydantic.dataclasses.dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan."""

    world_size: _AtLeastOne
    local_world_size: _AtLeastOne  # number of ranks on a machine
    device_kind: str  # type of the ranks' devices, `cuda` or `cpu`
    batch_size: _AtLeastOne  # rows of a step on all ranks
    # the config's section `model` in plain values; of a model of one's own, the `function` that makes it
    model: dict[str, Any]
    sparse_optimizer: str  # name of the optimizer of the tables
    dense_optimizer: str  # name of the optimizer of the networks
    tables: dict[str, TablePlanInputs]  # by name
    # precisions in which vectors and gradients are sent, as VectorExchange.as_json() has them
    exchange: dict[str, str] = field(default_factory=lambda: VectorExchange().as_json())

    @property
    def command(self) -> str:
        """The command that plans for such inputs, without what it says of ranks and files."""
        if "function" not in self.model:
            return "distembed plan CONFIG"
        return f"distembed plan --model {self.model['function']} --batch-size {self.batch_size}"

    def as_json(self) -> dict[str, Any]:
        """Returns the inputs in plain values."""
        return dataclasses.asdict(self)

    def differences(self, now: "PlanInputs") -> list[str]:
        """Returns a line for each value that differs now, with both values; tables that differ alike share a line."""
        own, others = self.as_json(), now.as_json()
        tables, tables_now = own.pop("tables"), others.pop("tables")
        lines = [f"{path}: {values}" for path, values in _changed(own, others)]
        lines += [f"table {name!r} is in the plan and not in the model" for name in tables if name not in tables_now]
        lines += [f"table {name!r} is in the model and not in the plan" for name in tables_now if name not in tables]
        alike: dict[tuple[str, str], list[str]] = {}
        for name in tables:
            for change in _changed(tables[name], tables_now.get(name, tables[name])):
                alike.setdefault(change, []).append(name)
        return lines + [
            f"{path} of table{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}: {values}"
            for (path, values), names in alike.items()
        ]


def table_plan_inputs(tables: "Sequence[CompositionalEmbeddingConfig]") -> dict[str, TablePlanInputs]:
    """Returns the inputs of tables, by their names."""
    return {
        table.name: TablePlanInputs(
            scheme=table.scheme.name,
            rows=[part.num_rows for part in table.partition_tables()],
            dims=[part.dim for part in table.partition_tables()],
            composition=table.combine.name,
            embedding_dim=table.embedding_dim,
            data_type=table.data_type,
            pooling=getattr(table, "pooling", None),
            feature_names=list(table.feature_names),
        )
        for table in tables
    }


def _changed(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each value that differs, and a text with both values."""
    for key in before | now:
        own, other = before.get(key), now.get(key)
        if isinstance(own, dict) and isinstance(other, dict):
            yield from _changed(own, other, f"{prefix}{key}.")
        elif own != other or (key in before) != (key in now):
            texts = [repr(values[key]) if key in values else "nothing" for values in (before, now)]
            yield f"{prefix}{key}", f"{texts[0]} in the plan, {texts[1]} now"
