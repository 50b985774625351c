"""Applies a saved plan: places tables as the file says, if the plan was made for this run.

:func:`apply_saved_plan` refuses a plan whose inputs differ from the run's (ranks, batch, model, optimizers, tables),
and a plan that does not place its own tables. The error lists every difference.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ModuleSharder,
    ModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.base.units import enumerate_names
from distembed.embedding.collections import embedding_modules, table_configs
from distembed.embedding.config import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig
from distembed.optim.declared import declared_optimizers, largest_optimizer
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning.saved_plan import PlanInputs, SavedPlan, SavedTable, read_saved_plan, table_plan_inputs
from distembed.sharding.placement import COMPUTE_KERNELS, SHARDING_TYPES, place_table
from distembed.sharding.sharder import common_exchange
from distembed.sharding.shardings import SEQUENCE_SHARDING_TYPES
from distembed.sharding.table_slice import unit_size

_DENSE = EmbeddingComputeKernel.DENSE.value
_ON_CPU = (EmbeddingComputeKernel.FUSED.value, _DENSE)


def load_plan(
    path: Path | str,
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    ranks: Ranks,
    batch_size: int,
    sparse_optimizer: str | None = None,
) -> ShardingPlan:
    """Reads a saved plan for a model without a config, in the form that ``DistributedModelParallel`` takes.

    Every rank reads the file. Ranks, rows of a step, tables and their optimizer have to equal the plan's inputs; the
    networks are not compared.

    Args:
        path: A file of ``distembed plan --output``.
        model: The model, not sharded, with the optimizers of its tables declared.
        sharders: Sharders of its collections.
        ranks: This rank and all ranks.
        batch_size: Rows of a step on all ranks.
        sparse_optimizer: Optimizer of tables that declare none, a key of ``OPTIMIZERS``; FBGEMM's default unless given.

    Raises:
        UserError: The file holds no plan, or its plan does not suit the model.
    """
    saved = read_saved_plan(Path(path))
    tables = {name: table_configs(module) for name, module in embedding_modules(model).items()}
    optimizer = largest_optimizer(declared_optimizers(model, sharders).values(), sparse_optimizer)
    now = replace(
        saved.plan_inputs,
        world_size=ranks.world_size,
        local_world_size=ranks.local_world_size,
        device_kind=ranks.device.type,
        batch_size=batch_size,
        sparse_optimizer=optimizer,
        tables=table_plan_inputs([table for configs in tables.values() for table in configs]),
        exchange=common_exchange(sharders).as_json(),
    )
    return apply_saved_plan(saved, tables, now, fused=OPTIMIZERS[optimizer].fused_class is not None)


def apply_saved_plan(
    saved: SavedPlan,
    tables: Mapping[str, Sequence[CompositionalEmbeddingConfig]],
    now: PlanInputs,
    fused: bool = True,
) -> ShardingPlan:
    """Returns a saved plan in TorchRec's form, after comparing it with the run.

    ``tables`` has each collection's tables by its path, ``now`` the run's inputs. ``fused`` is False where FBGEMM lacks
    the tables' optimizer, so that all kernels have to be dense.

    Raises:
        UserError: The plan's inputs differ, or it does not place the tables; the error lists every difference.
    """
    changed = saved.plan_inputs.differences(now)
    if changed:
        nodes, listed = now.world_size // now.local_world_size, "\n  ".join(changed)
        raise UserError(
            f"the plan was made for something else than this run; plan again, with `{now.command} --nodes {nodes} "
            f"--gpus {now.local_world_size} --gpu DEVICE --output FILE`, or run without it:\n  {listed}"
        )
    differences: list[str] = []
    for module, collection in tables.items():
        if module not in saved.modules:
            planned_modules = ", ".join(map(repr, saved.modules))
            differences.append(f"module {module!r} is in the model and not in the plan, which has {planned_modules}")
            continue
        planned, names = saved.modules[module], {table.name for table in collection}
        differences += [f"table {name!r} is in the plan and not in the model" for name in planned if name not in names]
        for table in collection:
            if table.name in planned:
                differences += _table_differences(table, planned[table.name], now, fused)
            else:
                differences.append(f"table {table.name!r} is in the model and not in the plan")
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(
            "the plan does not place its own tables, so it must have been changed; plan again, with "
            f"`{now.command} --output FILE`:\n  {listed}"
        )
    plan: dict[str, ModuleShardingPlan] = {
        module: EmbeddingModuleShardingPlan(
            {table.name: _sharding(saved.modules[module][table.name], now) for table in collection}
        )
        for module, collection in tables.items()
    }
    return ShardingPlan(plan)


def _sharding(saved: SavedTable, now: PlanInputs) -> ParameterSharding:
    shards = [
        ShardMetadata(shard.offset, shard.size, placement(now.device_kind, shard.rank, now.local_world_size))
        for shard in saved.shards
    ]
    spec = EnumerableShardingSpec(shards) if shards else None
    return ParameterSharding(saved.sharding_type, saved.compute_kernel, list(saved.ranks), spec)


def _table_differences(
    table: CompositionalEmbeddingConfig, saved: SavedTable, now: PlanInputs, fused: bool
) -> Iterator[str]:
    """Yields a line for each reason why a table cannot be placed as planned: type, kernel, shards, ranks."""
    where, sharding_type = f"table {table.name!r}", saved.sharding_type
    possible = SHARDING_TYPES if isinstance(table, CompositionalEmbeddingBagConfig) else SEQUENCE_SHARDING_TYPES
    if sharding_type not in possible:
        yield f"{where} is planned {reprlib.repr(sharding_type)}, and can be placed {', '.join(possible)}"
        return
    is_dense = sharding_type == ShardingType.DATA_PARALLEL.value or table.dense_gradient or not fused
    kernels = (_DENSE,) if is_dense else COMPUTE_KERNELS if now.device_kind == "cuda" else _ON_CPU
    if saved.compute_kernel not in kernels:
        unfused = "" if fused else " with an optimizer that FBGEMM lacks"
        unfused = " with gradients in all rows" if table.dense_gradient else unfused
        yield (
            f"{where} is planned with compute kernel {reprlib.repr(saved.compute_kernel)}, and the kernels of "
            f"{sharding_type} tables on {now.device_kind}{unfused} are {', '.join(kernels)}"
        )
    shard_ranks, is_copied = [shard.rank for shard in saved.shards], sharding_type == ShardingType.DATA_PARALLEL.value
    differences = list(_wrong_shards(saved, table, now))
    expected = list(range(now.world_size)) if is_copied else shard_ranks
    if (sorted(saved.ranks) if is_copied else saved.ranks) != expected:
        ranks, needed = reprlib.repr(saved.ranks), reprlib.repr(expected)
        differences.append(f"is planned {sharding_type} on ranks {ranks}, but must be on {needed}")
    yield from (f"{where} {difference}" for difference in differences)
    if not differences and saved.compute_kernel in COMPUTE_KERNELS:
        try:
            place_table(table, _sharding(saved, now), now.world_size)
        except UserError as error:
            yield str(error)


def _wrong_shards(saved: SavedTable, table: CompositionalEmbeddingConfig, now: PlanInputs) -> Iterator[str]:
    """Yields a line where the shards differ from TorchRec's division of the table."""
    sharding_type, unit_shape, divided_blocks = saved.sharding_type, unit_size(table), list[str]()
    if sharding_type != ShardingType.DATA_PARALLEL.value:
        num_columns = saved.shards[0].size[1] if saved.shards else unit_shape[1]
        meta = torch.empty(unit_shape, device="meta")
        sizes, offsets = calculate_shard_sizes_and_offsets(
            meta, now.world_size, now.local_world_size, sharding_type, num_columns or unit_shape[1]
        )
        divided_blocks = list(map(_block, offsets, sizes))
    saved_blocks = [_block(shard.offset, shard.size) for shard in saved.shards]
    if saved_blocks != divided_blocks:
        yield (
            f"is planned {sharding_type} in {len(saved_blocks)} shard(s) [{enumerate_names(saved_blocks, 4)}]; its "
            f"{unit_shape[0]:,} x {unit_shape[1]:,} numbers are divided into {len(divided_blocks)} "
            f"[{enumerate_names(divided_blocks, 4)}]"
        )


def _block(offset: Sequence[int], size: Sequence[int]) -> str:
    """Returns the rows and columns of a shard, like ``0:26 x 0:4``."""
    return " x ".join(f"{start}:{start + length}" for start, length in zip(offset, size, strict=True))
