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
        tables=table_plan_inputs([table for own in tables.values() for table in own]),
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
    for module, own in tables.items():
        if module not in saved.modules:
            known = ", ".join(map(repr, saved.modules))
            differences.append(f"module {module!r} is in the model and not in the plan, which has {known}")
            continue
        planned, names = saved.modules[module], {table.name for table in own}
        differences += [f"table {name!r} is in the plan and not in the model" for name in planned if name not in names]
        for table in own:
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
            {table.name: _sharding(saved.modules[module][table.name], now) for table in own}
        )
        for module, own in tables.items()
    }
    return ShardingPlan(plan)


def _sharding(own: SavedTable, now: PlanInputs) -> ParameterSharding:
    shards = [
        ShardMetadata(shard.offset, shard.size, placement(now.device_kind, shard.rank, now.local_world_size))
        for shard in own.shards
    ]
    spec = EnumerableShardingSpec(shards) if shards else None
    return ParameterSharding(own.sharding_type, own.compute_kernel, list(own.ranks), spec)


def _table_differences(
    table: CompositionalEmbeddingConfig, own: SavedTable, now: PlanInputs, fused: bool
) -> Iterator[str]:
    """Yields a line for each reason why a table cannot be placed as planned: type, kernel, shards, ranks."""
    where, kind = f"table {table.name!r}", own.sharding_type
    possible = SHARDING_TYPES if isinstance(table, CompositionalEmbeddingBagConfig) else SEQUENCE_SHARDING_TYPES
    if kind not in possible:
        yield f"{where} is planned {reprlib.repr(kind)}, and can be placed {', '.join(possible)}"
        return
    is_dense = kind == ShardingType.DATA_PARALLEL.value or table.dense_gradient or not fused
    kernels = (_DENSE,) if is_dense else COMPUTE_KERNELS if now.device_kind == "cuda" else _ON_CPU
    if own.compute_kernel not in kernels:
        unfused = "" if fused else " with an optimizer that FBGEMM lacks"
        unfused = " with gradients in all rows" if table.dense_gradient else unfused
        yield (
            f"{where} is planned with compute kernel {reprlib.repr(own.compute_kernel)}, and the kernels of "
            f"{kind} tables on {now.device_kind}{unfused} are {', '.join(kernels)}"
        )
    shard_ranks, is_copied = [shard.rank for shard in own.shards], kind == ShardingType.DATA_PARALLEL.value
    found, needed = list(_wrong_shards(own, table, now)), list(range(now.world_size)) if is_copied else shard_ranks
    if (sorted(own.ranks) if is_copied else own.ranks) != needed:
        found.append(f"is planned {kind} on ranks {reprlib.repr(own.ranks)}, but must be on {reprlib.repr(needed)}")
    yield from (f"{where} {difference}" for difference in found)
    if not found and own.compute_kernel in COMPUTE_KERNELS:
        try:
            place_table(table, _sharding(own, now), now.world_size)
        except UserError as error:
            yield str(error)


def _wrong_shards(own: SavedTable, table: CompositionalEmbeddingConfig, now: PlanInputs) -> Iterator[str]:
    """Yields a line where the shards differ from TorchRec's division of the table."""
    kind, size, expected = own.sharding_type, unit_size(table), list[str]()
    if kind != ShardingType.DATA_PARALLEL.value:
        num_columns = own.shards[0].size[1] if own.shards else size[1]
        meta = torch.empty(size, device="meta")
        sizes, offsets = calculate_shard_sizes_and_offsets(
            meta, now.world_size, now.local_world_size, kind, num_columns or size[1]
        )
        expected = list(map(_block, offsets, sizes))
    found = [_block(shard.offset, shard.size) for shard in own.shards]
    if found != expected:
        yield (
            f"is planned {kind} in {len(found)} shard(s) [{enumerate_names(found, 4)}]; its {size[0]:,} x {size[1]:,} "
            f"numbers are divided into {len(expected)} [{enumerate_names(expected, 4)}]"
        )


def _block(offset: Sequence[int], size: Sequence[int]) -> str:
    """Returns the rows and columns of a shard, like ``0:26 x 0:4``."""
    return " x ".join(f"{start}:{start + length}" for start, length in zip(offset, size, strict=True))
