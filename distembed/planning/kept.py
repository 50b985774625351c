"""A plan that was kept as JSON, taken up again: what was reported is what runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.errors import UserError
from distembed.sharding.placement import SHARDING_TYPES, unit_size


@dataclass(frozen=True)
class KeptPlan:
    """A plan as it was read.

    Attributes:
        modules: ``{module: {table: {sharding_type, compute_kernel, ranks, shards}}}``, as ``plan_as_json`` gives it.
        world_size: number of ranks that it was made for; None where nothing says so.
    """

    modules: Mapping[str, Mapping[str, Any]]
    world_size: int | None


def read_plan(path: Path) -> KeptPlan:
    """The plan in a file that ``distembed plan --output`` wrote, or in a run's ``plan.json``.

    Raises:
        UserError: where it cannot be read, or is no plan.
    """
    values = _read_json(path)
    if isinstance(values, dict) and "plan" in values:  # of distembed plan
        world_size, values = values["nodes"] * values["gpus"], values["plan"]
    else:
        run = path.with_name("run.json")
        world_size = _read_json(run).get("world_size") if run.is_file() else None
    modules = values.values() if isinstance(values, dict) else [None]
    if not all(isinstance(of_module, dict) and all(map(_is_placed, of_module.values())) for of_module in modules):
        raise UserError(f"{path} holds no plan; give a file of `distembed plan --output`, or a run's plan.json.")
    return KeptPlan(values, world_size)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"the plan {path} cannot be read: {error}") from error


def take_up_plan(
    kept: KeptPlan,
    module: str,
    tables: Sequence[CompositionalEmbeddingConfig],
    world_size: int,
    local_world_size: int,
    device_kind: str,
) -> ShardingPlan:
    """The plan for TorchRec, if it was made for these tables and ranks.

    Args:
        kept: as it was read.
        module: path of the collection within the model.
        tables: of the collection.
        world_size: number of ranks.
        local_world_size: number of ranks on a machine.
        device_kind: ``cuda`` or ``cpu``.

    Raises:
        UserError: with every difference, where it was made for others.
    """
    planned = kept.modules.get(module, {})
    differences = _differences(planned, {table.name: table for table in tables})
    if kept.world_size is not None and kept.world_size != world_size:
        differences.insert(0, f"it was made for {kept.world_size} ranks, and there are {world_size}")
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(f"the plan was made for another model or another number of ranks; plan anew:\n  {listed}")

    def shard(value: Mapping[str, Any]) -> ShardMetadata:
        return ShardMetadata(value["offset"], value["size"], placement(device_kind, value["rank"], local_world_size))

    sharded = EmbeddingModuleShardingPlan()
    for table in tables:
        own = planned[table.name]
        is_replicated = own["sharding_type"] == ShardingType.DATA_PARALLEL.value
        spec = None if is_replicated else EnumerableShardingSpec([shard(value) for value in own["shards"]])
        sharded[table.name] = ParameterSharding(own["sharding_type"], own["compute_kernel"], list(own["ranks"]), spec)
    return ShardingPlan({module: sharded})


def _is_placed(value: Any) -> bool:
    keys = {"sharding_type", "compute_kernel", "ranks", "shards"}
    if not isinstance(value, dict) or not keys <= value.keys() or value["sharding_type"] not in SHARDING_TYPES:
        return False
    return all(isinstance(shard, dict) and {"rank", "offset", "size"} <= shard.keys() for shard in value["shards"])


def _differences(planned: Mapping[str, Any], tables: Mapping[str, CompositionalEmbeddingConfig]) -> list[str]:
    found = [f"table {name!r} is in the plan and not in the model" for name in planned if name not in tables]
    for name, table in tables.items():
        if name not in planned:
            found.append(f"table {name!r} is in the model and not in the plan")
            continue
        own = planned[name]
        rows, columns = unit_size(table)
        size = _size_of_shards(own)
        if own["shards"] and size != (rows, columns):
            planned_size, own_size = f"{size[0]:,} x {size[1]:,}", f"{rows:,} x {columns:,}"
            found.append(f"table {name!r} is planned as {planned_size} numbers, and is {own_size}")
    return found


def _size_of_shards(own: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that the shards reach together."""
    ends = [
        tuple(start + length for start, length in zip(shard["offset"], shard["size"], strict=True))
        for shard in own["shards"]
    ]
    return max((end[0] for end in ends), default=0), max((end[1] for end in ends), default=0)
