"""From a config to a model that is ready to step."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from distembed.config.train import TrainConfig
from distembed.data.dataset.schema import Schema
from distembed.embedding import CompositionalEmbeddingBagCollection, EmbeddingConfig, build_tables, vector_names
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.models.config import DCNConfig, DLRMConfig, build_model
from distembed.optim.declared import TableOptimizers
from distembed.optim.optimizers import Optimizers, fuse_sparse_optimizer, needs_dense_kernel
from distembed.planning import PlanConfig, make_plan
from distembed.planning.networks import estimate_network
from distembed.planning.plan_inputs import PlanInputs, table_plan_inputs
from distembed.planning.saved_plan import SavedPlan, apply_saved_plan
from distembed.planning.workload import Workload
from distembed.ranks import Ranks
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.sse import SSE, graph_bytes
from distembed.sse.perturbation import Perturbation
from distembed.tasks.click import ClickTask
from distembed.training.pipeline import StepPipeline


@dataclass
class TrainingState:
    """A sharded model, its optimizers and the pipeline that steps them; its plan, and what that was made for."""

    model: DistributedModelParallel
    optimizers: Optimizers
    pipeline: StepPipeline
    plan: ShardingPlan
    plan_inputs: PlanInputs
    bf16: bool


def build_unsharded(
    model: DLRMConfig | DCNConfig,
    embedding: EmbeddingConfig,
    schema: Schema,
    seed: int = 0,
    sse: Mapping[str, SSE] | None = None,
) -> nn.Module:
    """The model with its tables on the meta device, which takes no memory for them."""
    tables = build_tables(schema.categorical, embedding, seed, sse)
    collection = CompositionalEmbeddingBagCollection(tables, device="meta")
    names = vector_names(tables)
    return build_model(model, collection, names, embedding.default.embedding_dim, len(schema.dense))


def build_plannable(
    model: DLRMConfig | DCNConfig,
    embedding: EmbeddingConfig,
    train: TrainConfig,
    schema: Schema,
    world_size: int,
    device: torch.device,
    bf16: bool = False,
    sse: Mapping[str, SSE] | None = None,
) -> ClickTask:
    """The model with its loss as a plan is made for it: tables on the meta device, marked with their optimizer."""
    unsharded = build_unsharded(model, embedding, schema, train.seed, sse)
    # functions of path-based tables are trained with the networks
    vectors = unsharded.get_submodule("embeddings.embedding_bags").parameters()
    fuse_sparse_optimizer(vectors, train.sparse_optimizer, device)
    return ClickTask(unsharded, world_size, device, bf16)


def workload_of(
    task: ClickTask,
    model: DLRMConfig | DCNConfig,
    embedding: EmbeddingConfig,
    train: TrainConfig,
    schema: Schema,
    world_size: int,
    bf16: bool,
    device_kind: str,
    sse: Mapping[str, SSE] | None = None,
) -> Workload:
    """What a step of a plannable model brings along, as a plan reckons with it."""
    collection = task.model.get_submodule("embeddings")
    assert isinstance(collection, CompositionalEmbeddingBagCollection)
    network = estimate_network(
        model,
        vector_names(collection.tables()),
        embedding.default.embedding_dim,
        len(schema.dense),
        math.ceil(train.batch_size / world_size),
        train.dense_optimizer.name,
        bf16,
        averages=world_size > 1,
    )
    return Workload(
        batch_size=train.batch_size,
        ids_per_row={feature.name: feature.mean_ids_per_row for feature in schema.categorical},
        multi_hot={feature.name for feature in schema.categorical if feature.multi_hot},
        num_dense=len(schema.dense),
        network=network,
        bf16=bf16,
        logged_steps=train.log_every,
        graph_bytes=graph_bytes(sse or {}, device_kind),
    )


def table_optimizers(train: TrainConfig) -> TableOptimizers:
    """What trains the tables, as a plan reckons with it."""
    is_fused = not needs_dense_kernel(train.sparse_optimizer)
    return TableOptimizers(train.sparse_optimizer.name, train.dense_optimizer.name, is_fused)


def plan_inputs(
    model: DLRMConfig | DCNConfig,
    train: TrainConfig,
    tables: Sequence[CompositionalEmbeddingConfig],
    world_size: int,
    local_world_size: int,
    device_kind: str,
) -> PlanInputs:
    """What a plan of these tables is made for, as it is kept beside the plan."""
    return PlanInputs(
        world_size=world_size,
        local_world_size=local_world_size,
        device_kind=device_kind,
        batch_size=train.batch_size,
        model=dataclasses.asdict(model),
        sparse_optimizer=train.sparse_optimizer.name,
        dense_optimizer=train.dense_optimizer.name,
        tables=table_plan_inputs(tables),
    )


def build_training_state(
    model_config: DLRMConfig | DCNConfig,
    embedding_config: EmbeddingConfig,
    train: TrainConfig,
    plan_config: PlanConfig,
    schema: Schema,
    processes: Ranks,
    num_steps: int,
    sse: Mapping[str, SSE] | None = None,
    saved_plan: SavedPlan | None = None,
    previous_plan: SavedPlan | None = None,
) -> TrainingState:
    """Builds, plans and shards; the weights depend on the seed alone. All ranks call it.

    With ``sse`` ids of the named tables are replaced in training. With ``saved_plan`` nothing is planned anew,
    nor with ``previous_plan`` where that was made for what is built here.

    Raises:
        UserError: where ``saved_plan`` was made for something else.
    """
    torch.manual_seed(train.seed)
    bf16 = use_bf16(train.precision, processes.device)
    task = build_plannable(
        model_config, embedding_config, train, schema, processes.world_size, processes.device, bf16, sse
    )
    _move_dense(task.model, processes.device)
    sharders = [CompositionalEmbeddingBagCollectionSharder(host_memory=plan_config.host_memory)]
    path, collection = _collection_of(task)
    sizes = processes.world_size, processes.local_world_size
    now = plan_inputs(model_config, train, collection.tables(), *sizes, processes.device.type)
    if saved_plan is None and previous_plan is not None and not previous_plan.plan_inputs.differences(now):
        saved_plan = previous_plan
    if saved_plan is not None:
        plan = apply_saved_plan(saved_plan, path, collection.tables(), now, table_optimizers(train).is_fused)
    else:
        plan = make_plan(
            task,
            sharders,
            processes,
            workload=workload_of(
                task,
                model_config,
                embedding_config,
                train,
                schema,
                processes.world_size,
                bf16,
                processes.device.type,
                sse,
            ),
            config=plan_config,
            optimizers=table_optimizers(train),
        )
    model = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(torch.distributed.group.WORLD),
        device=processes.device,
        plan=plan,
        sharders=sharders,
        # one rank has nothing to average: without DistributedDataParallel its small steps are faster
        init_data_parallel=processes.world_size > 1,
    )
    for module in model.modules():
        if isinstance(module, Perturbation):
            module.in_place = True  # nobody looks at a batch of the reader's but the model, and once
    optimizers = Optimizers(model, train.dense_optimizer, train.sparse_optimizer, num_steps)
    return TrainingState(model, optimizers, StepPipeline(model, optimizers.combined, processes), plan, now, bf16)


def _collection_of(task: ClickTask) -> tuple[str, CompositionalEmbeddingBagCollection]:
    """The model's one collection, and its path."""
    (found,) = [
        (name, module)
        for name, module in task.named_modules()
        if isinstance(module, CompositionalEmbeddingBagCollection)
    ]
    return found


def use_bf16(precision: str, device: torch.device) -> bool:
    """Whether the networks compute in bf16; ``auto`` says yes where the processor does so natively."""
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def _move_dense(model: nn.Module, device: torch.device) -> None:
    for name, child in model.named_children():
        if name != "embeddings":
            child.to(device)
    for name, buffer in model.named_buffers(recurse=False):
        setattr(model, name, buffer.to(device))
