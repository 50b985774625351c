"""Plans saved as JSON and applied by a later run, so that the reported plan is the plan that runs.

A file holds the plan under ``plan`` and its :class:`PlanInputs` under ``made_for``. :func:`read_saved_plan` refuses
files of another form without torch; :mod:`distembed.planning.apply_plan` applies the plan.
"""

import dataclasses
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic.dataclasses
from pydantic import Field, TypeAdapter

from distembed.base.errors import UserError
from distembed.base.files import read_json
from distembed.base.units import format_ranges
from distembed.base.validation import validated
from distembed.embedding.settings import VectorExchange

if TYPE_CHECKING:
    from torchrec.distributed.types import ShardingPlan

    from distembed.embedding.config import CompositionalEmbeddingConfig

_REMEDY = "give a file of `distembed plan --output` for a config that fits, or a run's plan.json"
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_Pair = Annotated[list[_Count], Field(min_length=2, max_length=2)]
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
        """The command that makes a plan for these inputs, without its options for ranks and files."""
        if "function" not in self.model:
            return "distembed plan CONFIG"
        return f"distembed plan --model {self.model['function']} --batch-size {self.batch_size}"

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def differences(self, now: "PlanInputs") -> list[str]:
        """Returns a line for each changed value, with both values; tables with equal changes share a line."""
        planned, current = self.as_json(), now.as_json()
        tables, tables_now = planned.pop("tables"), current.pop("tables")
        lines = [f"{path}: {values}" for path, values in _changed(planned, current)]
        lines += [f"table {name!r} is in the plan and not in the model" for name in tables if name not in tables_now]
        lines += [f"table {name!r} is in the model and not in the plan" for name in tables_now if name not in tables]
        changed_tables: dict[tuple[str, str], list[str]] = {}
        for name in tables:
            for change in _changed(tables[name], tables_now.get(name, tables[name])):
                changed_tables.setdefault(change, []).append(name)
        return lines + [
            f"{path} of table{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}: {values}"
            for (path, values), names in changed_tables.items()
        ]


def table_plan_inputs(tables: "Sequence[CompositionalEmbeddingConfig]") -> dict[str, TablePlanInputs]:
    """Returns the properties of tables that a saved plan is compared by, by table name."""
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


@pydantic.dataclasses.dataclass(frozen=True)
class SavedShard:
    """A block of a table's rows and columns that one rank holds."""

    rank: _Count
    offset: _Pair  # first row and first column
    size: _Pair  # number of rows and of columns


@pydantic.dataclasses.dataclass(frozen=True)
class SavedTable:
    """A table's sharding."""

    sharding_type: str
    compute_kernel: str
    ranks: list[_Count]  # of each shard, in the order of the shards; of each copy of a replicated table
    shards: list[SavedShard]  # none of a replicated table


@pydantic.dataclasses.dataclass(frozen=True)
class SavedPlan:
    """A plan that was read from a file."""

    plan_inputs: PlanInputs = Field(alias="made_for")
    modules: dict[str, dict[str, SavedTable]] = Field(alias="plan")  # by the path of their module and their name


def saved_plan_as_json(plan_inputs: PlanInputs, plan: "ShardingPlan | None") -> dict[str, Any]:
    """Returns the content of a plan's file; ``plan`` is null where no plan was found."""
    return {"plan": None if plan is None else plan_as_json(plan), "made_for": plan_inputs.as_json()}


def plan_as_json(plan: "ShardingPlan") -> dict[str, dict[str, Any]]:
    """Returns ``{module: {table: {sharding_type, compute_kernel, ranks, shards}}}``.

    A shard is ``{rank, offset, size}``; offset and size are rows and columns of the table's unit of placement.
    """
    return {
        path: {
            table: {
                "sharding_type": sharding.sharding_type,
                "compute_kernel": sharding.compute_kernel,
                "ranks": list(sharding.ranks or []),
                "shards": [
                    {"rank": shard.placement.rank(), "offset": shard.shard_offsets, "size": shard.shard_sizes}
                    for shard in (sharding.sharding_spec.shards if sharding.sharding_spec is not None else [])
                ],
            }
            for table, sharding in module_plan.items()
        }
        for path, module_plan in plan.plan.items()
    }


def describe_plan(plan: "ShardingPlan") -> str:
    """Returns one line: the number of tables by sharding type, and the number of shards by rank."""
    shardings = [sharding for module_plan in plan.plan.values() for sharding in module_plan.values()]
    counts = Counter(sharding.sharding_type for sharding in shardings)
    num_shards = Counter(rank for sharding in shardings for rank in sharding.ranks or [])
    ranks: dict[int, list[int]] = {}
    for rank in sorted(num_shards):
        ranks.setdefault(num_shards[rank], []).append(rank)
    tables = ", ".join(f"{count} {sharding_type}" for sharding_type, count in counts.items())
    shards = "; ".join(f"{format_ranges(numbers)}: {count}" for count, numbers in ranks.items())
    return f"{tables}; shards by rank: {shards}"


def read_saved_plan(path: Path) -> SavedPlan:
    """Returns the plan of a file that ``distembed plan --output`` wrote, or of a run's ``plan.json``.

    Raises:
        UserError: The file cannot be read, or holds no plan.
    """
    values = read_json(path, _REMEDY)
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path} holds no plan, but {reprlib.repr(values)}; {_REMEDY}.")
    if values.get("plan", True) is None:
        raise UserError(f"{path} holds no plan, as `distembed plan` writes where tables do not fit; {_REMEDY}.")
    saved = {key: values[key] for key in ("made_for", "plan") if key in values}
    return validated(TypeAdapter(SavedPlan), SavedPlan, saved, f"the plan of {path}; {_REMEDY}")


def _changed(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields the dotted path of each value that differs, and a text with both values."""
    for key in before | now:
        planned, current = before.get(key), now.get(key)
        if isinstance(planned, dict) and isinstance(current, dict):
            yield from _changed(planned, current, f"{prefix}{key}.")
        elif planned != current or (key in before) != (key in now):
            texts = [repr(values[key]) if key in values else "nothing" for values in (before, now)]
            yield f"{prefix}{key}", f"{texts[0]} in the plan, {texts[1]} now"
