"""A plan that was kept as JSON, taken up again: what was reported is what runs.

A file holds ``plan`` and beside it ``made_for``, the :class:`PlanInputs`. It is refused for three reasons, each with
everything that is wrong at once. Its form is no plan's (:func:`read_saved_plan`); it was made for something else than
what is to run, be it ranks, batch, model, optimizers or tables; or it does not place the tables that it says it was
made for (:func:`apply_saved_plan`).
"""

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import Field, TypeAdapter, ValidationError
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig
from distembed.errors import UserError
from distembed.planning.plan_inputs import PlanInputs
from distembed.sharding.placement import COMPUTE_KERNELS, SHARDING_TYPES, place_table, unit_size
from distembed.sharding.shardings import SEQUENCE_SHARDING_TYPES

_DENSE = EmbeddingComputeKernel.DENSE.value
_ON_CPU = (EmbeddingComputeKernel.FUSED.value, _DENSE)
_AXES = ("rows", "columns")
_REMEDY = "give a file of `distembed plan --output` for a config that fits, or a run's plan.json"
_Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
_Pair = Annotated[list[_Count], Field(min_length=2, max_length=2)]


@pydantic.dataclasses.dataclass(frozen=True)
class SavedShard:
    """What a rank has of a table as one unit.

    Attributes:
        rank: that has it.
        offset: of the first row and column.
        size: rows and columns.
    """

    rank: _Count
    offset: _Pair
    size: _Pair

    def span(self, axis: int) -> tuple[int, int]:
        """First row (axis 0) or column (1), and the one behind the last."""
        return self.offset[axis], self.offset[axis] + self.size[axis]


@pydantic.dataclasses.dataclass(frozen=True)
class SavedTable:
    """Where a table goes.

    Attributes:
        sharding_type: as TorchRec names it.
        compute_kernel: likewise.
        ranks: of the shards, in their order; of all copies of a table that is replicated.
        shards: empty for a table that is replicated.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[_Count]
    shards: list[SavedShard]


@dataclass(frozen=True)
class SavedPlan:
    """A plan as it was read.

    Attributes:
        modules: where tables go, by module and table.
        plan_inputs: what it was made for.
    """

    modules: Mapping[str, Mapping[str, SavedTable]]
    plan_inputs: PlanInputs


@pydantic.dataclasses.dataclass(frozen=True)
class _SavedPlanFile:
    """What is read of a file; its keys are the names of the attributes."""

    made_for: PlanInputs
    plan: dict[str, dict[str, SavedTable]]


def read_saved_plan(path: Path) -> SavedPlan:
    """The plan in a file that ``distembed plan --output`` wrote, or in a run's ``plan.json``.

    Raises:
        UserError: where it cannot be read, or is no plan.
    """
    values = _read_json(path)
    if not isinstance(values, dict) or not values:
        raise UserError(f"{path} holds no plan, but {reprlib.repr(values)}; {_REMEDY}.")
    if "made_for" not in values:
        raise UserError(
            f"{path} does not say what its plan was made for: it has no 'made_for'; plan anew, and {_REMEDY}."
        )
    if values.get("plan", True) is None:
        raise UserError(f"{path} holds no plan, as `distembed plan` writes where tables do not fit; {_REMEDY}.")
    file = _checked(path, _SavedPlanFile, {key: values[key] for key in ("made_for", "plan") if key in values})
    return SavedPlan(file.plan, file.made_for)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the plan {path} cannot be read: {error}; {_REMEDY}.") from error


def _checked(path: Path, kind: Any, value: Any) -> Any:
    """The value if it is of this kind.

    Raises:
        UserError: with all parts of it that are not.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        wrong = "\n  ".join(_explained(part) for part in error.errors(include_url=False))
        raise UserError(f"{path} holds no plan that tables could be placed by; {_REMEDY}:\n  {wrong}") from error


def _explained(error: Any) -> str:
    place_of_it = " / ".join(repr(part) if isinstance(part, str) else str(part) for part in error["loc"])
    if error["type"] == "missing":
        return f"{place_of_it} is missing"
    wanted = error["msg"].removeprefix("Input should be ").removeprefix("an instance of ")
    return f"{place_of_it or 'the file'} is {reprlib.repr(error['input'])} and should be {wanted}"


def apply_saved_plan(
    saved: SavedPlan,
    tables: Mapping[str, Sequence[CompositionalEmbeddingConfig]],
    now: PlanInputs,
    fused: bool = True,
) -> ShardingPlan:
    """Returns the plan for TorchRec, if it is for what runs now.

    Args:
        saved: The plan as it was read.
        tables: Of each collection of the model, by its path.
        now: What runs.
        fused: Whether FBGEMM has the tables' optimizer; else they need dense kernels.

    Raises:
        UserError: The plan is for something else, or places other tables than it says; with every difference.
    """
    changed = saved.plan_inputs.differences(now)
    if changed:
        nodes, listed = now.world_size // now.local_world_size, "\n  ".join(changed)
        raise UserError(
            "the plan was made for something else than what is to run; plan anew, with `distembed plan CONFIG --nodes "
            f"{nodes} --gpus {now.local_world_size} --gpu DEVICE --output FILE`, or leave --plan out:\n  {listed}"
        )
    ranks = _Ranks(now.world_size, now.local_world_size, now.device_kind, fused)
    differences = [
        difference
        for module, own in tables.items()
        for difference in _differences(saved, module, {table.name: table for table in own}, ranks)
    ]
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(
            "the plan does not place what it was made for, and must have been changed; plan anew, with `distembed plan "
            f"CONFIG --output FILE`:\n  {listed}"
        )
    plan: dict[str, ModuleShardingPlan] = {}
    for module, own in tables.items():
        plan[module] = sharded = EmbeddingModuleShardingPlan()
        for table in own:
            sharded[table.name] = ranks.sharding(saved.modules[module][table.name])
    return ShardingPlan(plan)


@dataclass(frozen=True)
class _Ranks:
    """The ranks that there are; attributes as in :class:`PlanInputs`, and ``fused`` of :func:`apply_saved_plan`."""

    world_size: int
    local_world_size: int
    device_kind: str
    fused: bool

    def sharding(self, own: SavedTable) -> ParameterSharding:
        """TorchRec's form of where a table goes."""
        shards = [
            ShardMetadata(
                list(shard.offset), list(shard.size), placement(self.device_kind, shard.rank, self.local_world_size)
            )
            for shard in own.shards
        ]
        spec = EnumerableShardingSpec(shards) if shards else None
        return ParameterSharding(own.sharding_type, own.compute_kernel, list(own.ranks), spec)

    def kernels(self, sharding_type: str) -> Sequence[str]:
        """Compute kernels that tables can have."""
        if sharding_type == ShardingType.DATA_PARALLEL.value or not self.fused:
            return (_DENSE,)
        return COMPUTE_KERNELS if self.device_kind == "cuda" else _ON_CPU


def _differences(
    saved: SavedPlan, module: str, tables: Mapping[str, CompositionalEmbeddingConfig], ranks: _Ranks
) -> Iterator[str]:
    if module not in saved.modules:
        yield f"module {module!r} is in the model and not in the plan, which has {', '.join(map(repr, saved.modules))}"
        return
    planned = saved.modules[module]
    yield from (f"table {name!r} is in the plan and not in the model" for name in planned if name not in tables)
    for name, table in tables.items():
        if name in planned:
            yield from _differences_of_table(table, planned[name], ranks)
        else:
            yield f"table {name!r} is in the model and not in the plan"


def _differences_of_table(table: CompositionalEmbeddingConfig, own: SavedTable, ranks: _Ranks) -> Iterator[str]:
    where, kind = f"table {table.name!r}", own.sharding_type
    possible = SHARDING_TYPES if isinstance(table, CompositionalEmbeddingBagConfig) else SEQUENCE_SHARDING_TYPES
    if kind not in possible:
        yield f"{where} is planned {reprlib.repr(kind)}, and can be placed {', '.join(possible)}"
        return
    if own.compute_kernel not in ranks.kernels(kind):
        unfused = "" if ranks.fused else " with an optimizer that FBGEMM lacks"
        yield (
            f"{where} is planned with compute kernel {reprlib.repr(own.compute_kernel)}, and those of {kind} tables on "
            f"{ranks.device_kind}{unfused} are {', '.join(ranks.kernels(kind))}"
        )
    found = [*_wrong_ranks(own, ranks.world_size), *_wrong_shards(own, unit_size(table))]
    yield from (f"{where} {difference}" for difference in found)
    if not found and own.compute_kernel in COMPUTE_KERNELS:
        try:
            place_table(table, ranks.sharding(own), ranks.world_size)
        except UserError as error:
            yield str(error)


def _wrong_ranks(own: SavedTable, world_size: int) -> Iterator[str]:
    kind, of_shards = own.sharding_type, [shard.rank for shard in own.shards]
    beyond = sorted({rank for rank in (*own.ranks, *of_shards) if rank >= world_size})
    there_are = f"and there are {world_size} ranks" if world_size > 1 else "and there is 1 rank"
    if kind == ShardingType.ROW_WISE.value and len(own.shards) != world_size:
        yield f"is planned row_wise in {len(own.shards)} shards, {there_are}"
    elif beyond:
        yield f"is planned on rank {', '.join(map(str, beyond))}, {there_are}, the last {world_size - 1}"
    elif kind == ShardingType.DATA_PARALLEL.value and sorted(own.ranks) != list(range(world_size)):
        yield f"is planned data_parallel on ranks {reprlib.repr(own.ranks)}, {there_are}: each has a copy"
    if kind != ShardingType.DATA_PARALLEL.value and own.ranks != of_shards:
        yield f"is planned on ranks {reprlib.repr(own.ranks)}, and its shards on {reprlib.repr(of_shards)}"


def _wrong_shards(own: SavedTable, size: tuple[int, int]) -> Iterator[str]:
    """What keeps the shards from being the table, each number of it once."""
    kind, shards = own.sharding_type, own.shards
    if kind == ShardingType.DATA_PARALLEL.value:
        if shards:
            yield f"is planned data_parallel in {len(shards)} shards, and a table that is replicated has none"
        return
    if not shards:
        yield f"is planned {kind} without a shard"
        return
    reach = [max(shard.span(axis)[1] for shard in shards) for axis in (0, 1)]
    if tuple(reach) != size:
        yield f"is planned as {reach[0]:,} x {reach[1]:,} numbers, and is {size[0]:,} x {size[1]:,}"
    divided = 0 if kind == ShardingType.ROW_WISE.value else 1
    if kind == ShardingType.TABLE_WISE.value and len(shards) > 1:
        yield f"is planned table_wise in {len(shards)} shards, and has one"
    yield from _untiled(shards, divided)
    whole = 1 - divided
    for shard in shards:
        if shard.span(whole) != (0, reach[whole]):
            start, stop = shard.span(whole)
            yield (
                f"is planned {kind} with {_AXES[whole]} [{start:,}, {stop:,}) on rank {shard.rank}, and each of its "
                f"shards has all {reach[whole]:,}"
            )


def _untiled(shards: Sequence[SavedShard], axis: int) -> Iterator[str]:
    """Rows or columns that no shard has, or several."""
    end = 0
    for start, stop in sorted(shard.span(axis) for shard in shards):
        if start == stop:
            # row-wise, where rows are fewer than ranks, the last ranks have none
            if axis == 1 or start != end:
                yield f"is planned with a shard of no {_AXES[axis]} at {start:,}"
            continue
        if start > end:
            yield f"is planned with {_AXES[axis]} [{end:,}, {start:,}) on no rank"
        if start < end:
            yield f"is planned with {_AXES[axis]} [{start:,}, {min(end, stop):,}) in two shards"
        end = max(end, stop)
