"""Builds a model from a config and a dataset's schema: ready to step, or to be planned for ranks that are not here."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan

from distembed.base.errors import UserError
from distembed.base.machine import is_intel_processor, multiplies_faster_in_bf16
from distembed.base.ranks import Collectives, Ranks
from distembed.checkpoints.checkpoint import load_grown
from distembed.data.dataset.schema import Schema
from distembed.embedding.collections import embedding_modules, table_configs
from distembed.embedding.initialization import name_key
from distembed.embedding.settings import VectorExchange
from distembed.models import Model, ModelInputs
from distembed.models.config import plan_values
from distembed.optim.averages import AveragedWeights
from distembed.optim.optimizers import (
    Optimizers,
    averaged_parameters,
    fuse_sparse_optimizer,
    table_parameters,
    weight_decays,
)
from distembed.planning import make_plan
from distembed.planning.apply_plan import apply_saved_plan
from distembed.planning.networks import estimate_network, require_networks_fit
from distembed.planning.request import Workload
from distembed.planning.saved_plan import PlanInputs, table_plan_inputs
from distembed.sharding import default_sharders, limit_gradients, round_at_random
from distembed.sse import SSE, graph_bytes
from distembed.sse.perturbation import Perturbation
from distembed.tasks import Task, batch_schema, build_task
from distembed.tasks.base import TaskContext, require_fields
from distembed.training.config import Config
from distembed.training.initial_run import InitialRun
from distembed.training.pipeline import StepPipeline, TaskModel
from distembed.training.start import PlanChoice


@dataclass(frozen=True)
class Blueprint:
    """A config, a dataset's schema and the ranks to train on, from which a model and its plan follow.

    Attributes:
        config: The whole config.
        schema: The columns of the dataset.
        world_size: Number of ranks.
        local_world_size: Number of ranks on a machine.
        device: The device of every rank; for ranks that are not here its type is enough.
        bf16: Whether the networks compute in bf16.
        sse: The rule by which ids are replaced in training, by feature.
    """

    config: Config
    schema: Schema
    world_size: int
    local_world_size: int
    device: torch.device
    bf16: bool
    sse: Mapping[str, SSE] = field(default_factory=dict)

    @classmethod
    def for_ranks(cls, config: Config, schema: Schema, ranks: Ranks, sse: Mapping[str, SSE]) -> "Blueprint":
        """Returns the blueprint for these ranks, with ``config.train.precision`` decided; all ranks call it."""
        bf16 = all_use_bf16(config.train.precision, ranks)
        return cls(config, schema, ranks.world_size, ranks.local_world_size, ranks.device, bf16, sse)

    @property
    def precision(self) -> str:
        """The arithmetic of the networks: ``bf16``, ``tf32`` or ``fp32``."""
        return _precision_name(self.config.train.precision, self.bf16)

    @cached_property
    def task(self) -> Task:
        """The task that the model learns."""
        return build_task(self.config.task, self.schema)

    @cached_property
    def model_inputs(self) -> ModelInputs:
        """The features and tables that the model is built from."""
        # the task itself replaces ids of these features, so that lookups must not replace them once more
        replaced = self.task.replaced_features
        sse = {feature: rule for feature, rule in self.sse.items() if feature not in replaced}
        return ModelInputs.from_config(
            self.batch_schema,
            self.config.embedding,
            self.config.train.seed,
            sse,
            dense_tables=self.task.dense_tables,
            scored_tables=self.task.scored_tables,
        )

    @cached_property
    def batch_schema(self) -> Schema:
        """The columns of the batches that the model is given."""
        return batch_schema(self.config.task, self.schema)

    def task_context(self, dataset: str, ranks: Ranks) -> TaskContext:
        """Returns the dataset in the given folder, and the ranks, as the task needs them."""
        sse = {name: rule for name, rule in self.sse.items() if name in self.task.replaced_features}
        return TaskContext(self.config.data, dataset, self.schema, ranks, self.config.train.seed, sse)

    @property
    def sharders(self) -> list[ModuleSharder[Any]]:
        """The sharders of every collection that a model may have, ours and TorchRec's."""
        return default_sharders(self.config.plan.host_memory, self.exchange)

    @property
    def exchange(self) -> VectorExchange:
        """How composed vectors are sent between ranks."""
        return VectorExchange(self.config.embedding.output_dtype, self.config.train.quantized_comms)

    def build_unsharded(self) -> Model:
        """Builds the model with its tables on the meta device, where they take no memory.

        Raises:
            UserError: The batches lack a field of the model or the task, or a table cannot be made as it is set.
        """
        model = self.config.model.build(self.model_inputs)
        require_fields(model, self.task, {each.name: each for each in self.batch_schema.fields})
        return model

    def build_plannable(self) -> TaskModel:
        """Builds the model with its loss for a plan: tables are on the meta device, marked with their optimizer.

        Raises:
            UserError: The model cannot be built, FBGEMM lacks the optimizer on the device, a group of weight decay has
                no parameters, or ``train.ema`` has nothing to average.
        """
        model, train = self.build_unsharded(), self.config.train
        vectors = table_parameters(model)
        fuse_sparse_optimizer(vectors, train.sparse_optimizer, self.device)
        task_model = TaskModel(model, self.task, self.world_size, self.device, self.bf16)
        in_tables = set(map(id, vectors))
        # refused here, before anything is placed
        weight_decays(
            [name for name, own in task_model.named_parameters() if id(own) not in in_tables], train.dense_optimizer
        )
        if train.ema is not None and not averaged_parameters(task_model):
            raise UserError(
                f"train.ema averages the weights of networks, but the model {self.config.model.name!r} has tables "
                "alone, which are not averaged; leave train.ema out."
            )
        return task_model

    def workload(self) -> Workload:
        """Returns the planner's inputs beside the tables: rows of a step, ids per row, networks and graphs."""
        train, schema = self.config.train, self.batch_schema
        features = schema.categorical
        network = estimate_network(
            self.config.model,
            self.model_inputs,
            self.task,
            math.ceil(train.batch_size / self.world_size),
            train.dense_optimizer.name,
            self.bf16,
            self.world_size,
            pads_lists=self.device.type == "cuda",
        )
        if train.ema is not None:  # an average of each weight of networks and path functions
            functions = [part for table in self.model_inputs.tables.values() for part in table.function_tables()]
            averages = network.gradients + sum(part.num_bytes for part in functions)
            network = dataclasses.replace(network, optimizer_state=network.optimizer_state + averages)
        return Workload(
            batch_size=train.batch_size,
            ids_per_row={
                feature.name: feature.mean_ids_per_row
                * (1 + self.task.added_rows.get(feature.name, 0) / train.batch_size)
                for feature in features
            },
            multi_hot={feature.name for feature in features if feature.multi_hot},
            # a list of numbers is sent as its length and its entries; the first of several labels is counted apart
            num_dense=len(schema.dense)
            + math.ceil(sum(1 + schema.mean_numbers_per_row(name) for name in schema.dense_sequences))
            + max(0, len(schema.labels) - 1),
            network=network,
            bf16=self.bf16,
            graph_bytes=graph_bytes(self.sse, self.device.type),
        )

    def plan_inputs(self, model: nn.Module) -> PlanInputs:
        """Returns the inputs of a plan for this model, which are saved with the plan."""
        tables = [table for module in embedding_modules(model).values() for table in table_configs(module)]
        return PlanInputs(
            world_size=self.world_size,
            local_world_size=self.local_world_size,
            device_kind=self.device.type,
            batch_size=self.config.train.batch_size,
            model=plan_values(self.config.model),
            sparse_optimizer=self.config.train.sparse_optimizer.name,
            dense_optimizer=self.config.train.dense_optimizer.name,
            tables=table_plan_inputs(tables),
            exchange=self.exchange.as_json(),
        )


@dataclass
class TrainingState:
    """A sharded model, its optimizers and the pipeline that steps them, with its plan.

    Attributes:
        model: The task's model under ``DistributedModelParallel``.
        task: The task that the model learns.
        optimizers: The optimizers of all parameters of the model.
        averages: The averages of the networks' weights, none unless ``train.ema`` asks for them.
        pipeline: Steps the model through batches.
        plan: Where the shards of every table are.
        plan_inputs: The inputs of the plan.
        bf16: Whether the networks compute in bf16.
        decode_threads: Number of threads in which this rank decodes rows ahead.
    """

    model: DistributedModelParallel
    task: Task
    optimizers: Optimizers
    averages: AveragedWeights
    pipeline: StepPipeline
    plan: ShardingPlan
    plan_inputs: PlanInputs
    bf16: bool
    decode_threads: int


def build_training_state(
    blueprint: Blueprint, ranks: Ranks, num_steps: int, plans: PlanChoice | None = None
) -> TrainingState:
    """Builds, plans and shards a model; the weights depend on the seed alone. All ranks call it.

    Args:
        blueprint: The config, schema and ranks to build for.
        ranks: This rank among all.
        num_steps: Number of steps of the run, for the schedules of learning rates.
        plans: Saved plans to apply in place of a new one.

    Raises:
        UserError: The model cannot be built, the device lacks the precision, or the inputs of a required plan differ.
        InsufficientMemory: The tables or the networks do not fit into the memory of the ranks.
    """
    _require_precision(blueprint.config.train.precision, ranks.device)
    _set_matmul_precision(blueprint.precision, ranks.device)
    require_networks_fit(blueprint.config.model, blueprint.model_inputs, ranks.local_world_size)
    torch.manual_seed(blueprint.config.train.seed)
    task_model, sharders = blueprint.build_plannable(), blueprint.sharders
    collections = embedding_modules(task_model)
    _move_networks(task_model, set(collections), ranks.device)
    inputs = blueprint.plan_inputs(task_model)
    tables_trained_by = blueprint.config.train.table_optimizers
    saved = (plans or PlanChoice()).for_inputs(inputs)
    if saved is not None:
        tables = {path: table_configs(module) for path, module in collections.items()}
        plan = apply_saved_plan(saved, tables, inputs, tables_trained_by.is_fused)
    else:
        plan = make_plan(
            task_model,
            sharders,
            ranks,
            workload=blueprint.workload,
            config=blueprint.config.plan,
            optimizers=tables_trained_by,
        )
    model = DistributedModelParallel(
        task_model,
        env=ShardingEnv.from_process_group(torch.distributed.group.WORLD),
        device=ranks.device,
        plan=plan,
        sharders=sharders,
        # one rank has nothing to average: without DistributedDataParallel its small steps are faster
        init_data_parallel=ranks.world_size > 1,
    )
    for module in model.modules():
        if isinstance(module, Perturbation):
            module.in_place = True  # a batch's ids may be overwritten: only the model reads them, once
    train = blueprint.config.train
    if train.sparse_optimizer.max_gradient is not None:
        limit_gradients(model, train.sparse_optimizer.max_gradient)
    optimizers = Optimizers(model, train.dense_optimizer, train.sparse_optimizer, num_steps)
    if train.sparse_optimizer.stochastic_rounding == "everywhere" and ranks.device.type == "cpu":
        # of the run's seed and the step alone, so that a resumed run repeats its rounding
        round_at_random(model, lambda: name_key(f"{train.seed}/rounding/{optimizers.step}") | 1)
    averages = AveragedWeights(averaged_parameters(model), train.ema)
    pipeline = StepPipeline(model, optimizers.combined, ranks)
    threads = blueprint.config.data.threads_of_rank(ranks.local_world_size)
    return TrainingState(model, task_model.task, optimizers, averages, pipeline, plan, inputs, blueprint.bf16, threads)


def used_precision(precision: str, ranks: Ranks) -> str:
    """Returns the arithmetic of the networks by ``train.precision``; all ranks call it. Refuses TF32 without a GPU."""
    _require_precision(precision, ranks.device)
    return _precision_name(precision, all_use_bf16(precision, ranks))


def _precision_name(precision: str, bf16: bool) -> str:
    return "bf16" if bf16 else "tf32" if precision == "tf32" else "fp32"


def _require_precision(precision: str, device: torch.device) -> None:
    if precision == "tf32" and device.type != "cuda":
        raise UserError(
            f"train.precision is 'tf32', which NVIDIA's GPUs compute in, but the device is {device.type!r}; set "
            "train.precision to fp32, bf16 or auto."
        )


def _set_matmul_precision(precision: str, device: torch.device) -> None:
    """Has a GPU multiply float32 matrices as ``train.precision`` says, in place of torch's default."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"  # of recurrent networks, where torch's default is yes


def all_use_bf16(precision: str, ranks: Ranks) -> bool:
    """Returns whether networks compute in bf16; all ranks call it.

    Ranks compute alike: where one of them multiplies no faster in bf16, ``auto`` is fp32 on all.
    """
    return not ranks.any(not use_bf16(precision, ranks.device))


def use_bf16(precision: str, device: torch.device) -> bool:
    """Returns whether networks would compute in bf16 on a device: by ``auto``, where it multiplies faster in it."""
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    flags = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    return multiplies_faster_in_bf16(flags, is_intel_processor())


def _move_networks(module: nn.Module, collections: set[str], device: torch.device, path: str = "") -> None:
    """Moves every parameter and buffer outside of the collections, given by path, to the device.

    Collections stay on the meta device, where ``DistributedModelParallel`` expects them. A subtree without a collection
    is moved at once; in other modules the recursion goes on into the children.
    """
    if not any(collection == path or collection.startswith(f"{path}." if path else "") for collection in collections):
        module.to(device)
        return
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if child_path not in collections:
            _move_networks(child, collections, device, child_path)
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, buffer.to(device))


def take_over(initial: InitialRun, blueprint: Blueprint, state: TrainingState) -> int:
    """Loads the checkpoint of an earlier run into a live model, and returns the optimizers' number of steps.

    Rows of the earlier run's tables get its weights and optimizer states; new rows keep their initial values. Adam
    corrects the bias of all rows by the earlier run's number of steps, as if a new row had not occurred until now. All
    ranks call it.

    Raises:
        UserError: The checkpoint is of another model or of other optimizers, or cannot be reached.
        DamagedCheckpoint: It is damaged.
    """
    earlier = dataclasses.replace(blueprint, config=initial.config, schema=initial.schema, sse={})
    before = TaskModel(earlier.build_unsharded(), earlier.task, blueprint.world_size, blueprint.device, blueprint.bf16)
    steps = load_grown(initial.checkpoint, before, state.model, state.optimizers.combined, Collectives())
    state.averages.update(0)  # begins with the weights that are loaded
    return steps
