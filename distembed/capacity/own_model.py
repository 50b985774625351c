"""Someone's own TorchRec model as ``distembed plan --model`` plans it, without a config.

The function that makes it runs on the meta device, where tensors have shapes and no values: tables of any size take no
memory, and no other device has to be there.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from distembed.capacity.model_functions import NamedFunction
from distembed.capacity.own_step import OwnStep
from distembed.capacity.plannable import ModelOnCluster, Plannable
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.modules import embedding_modules, table_configs
from distembed.errors import UserError
from distembed.names import one_of
from distembed.optim.declared import TableOptimizers, declared_optimizers, largest_optimizer
from distembed.optim.kinds import OPTIMIZERS, sparse_names, stateless_name
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.cluster import Cluster
from distembed.planning.example_step import ExampleBatch, OnDevice, estimate_own_networks
from distembed.planning.plan_inputs import PlanInputs, table_plan_inputs
from distembed.planning.storage import TableStorage, whole_table_storage
from distembed.sharding import default_sharders
from distembed.sharding.exchange import common_exchange
from distembed.units import enumerate_names

_WITH_TABLES = (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    FeatureProcessedEmbeddingBagCollection,
    BaseManagedCollisionEmbeddingCollection,
)
"""Modules of TorchRec that hold or wrap tables, of which only some can be planned."""
_PLANNED = (
    "EmbeddingBagCollection, EmbeddingCollection, CompositionalEmbeddingBagCollection and "
    "CompositionalEmbeddingCollection"
)

_UNKNOWN_STEP = (
    "the memory of the networks' step and its time are not known: {}; a share of each device is kept free for it"
)


@dataclass(frozen=True)
class MadeModel:
    """The model that a user's function returned."""

    name: str  # name of the function, `package.module:function`
    module: nn.Module  # the model, on the meta device
    # sharders of its collections; None for the default sharders
    sharders: Sequence[ModuleSharder[Any]] | None

    @cached_property
    def tables(self) -> list[CompositionalEmbeddingConfig]:
        """Tables of all collections, those of TorchRec's described as the full tables that they are."""
        return [table for module in embedding_modules(self.module).values() for table in table_configs(module)]

    @cached_property
    def declared_optimizers(self) -> Mapping[str, str | None]:
        """Name of the optimizer that each table declares, by table; None for those that declare none."""
        return declared_optimizers(self.module, self.sharders_for(PlanConfig()))

    def sharders_for(self, plan: PlanConfig) -> Sequence[ModuleSharder[Any]]:
        """Returns the sharders of the model's collections."""
        return default_sharders(plan.host_memory) if self.sharders is None else self.sharders


def make_own_model(function: NamedFunction) -> MadeModel:
    """Calls the function that makes a model, or a model and its sharders; it may take a ``device``.

    Raises:
        UserError: The function raises an error or returns something else, or the model has no tables, has two of one
            name, or has some that cannot be planned.
    """
    with OnDevice("meta"):
        made = function.call(**({"device": torch.device("meta")} if "device" in function.parameters else {}))
    module, sharders = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    where = f"{function.option} {function.name}"
    if not isinstance(module, nn.Module):
        raise UserError(f"{where} returns {_kind(made)}; return a torch.nn.Module, or a pair of it and its sharders.")
    if sharders is not None:
        sharders = list(sharders) if isinstance(sharders, list | tuple) else [sharders]
        for sharder in sharders:
            if not isinstance(sharder, ModuleSharder):
                raise UserError(
                    f"{where} returns {_kind(sharder)} among the sharders; return TorchRec's ModuleSharders."
                )
    model = MadeModel(function.name, module, sharders)
    _require_plannable(where, model)
    return model


@dataclass(frozen=True)
class OwnModel(Plannable):
    """Someone's own model, with its step."""

    model: MadeModel
    step: OwnStep  # its step and optimizers
    plan_config: PlanConfig

    def __post_init__(self) -> None:
        features = {feature for table in self.model.tables for feature in table.feature_names}
        for feature in self.step.ids_per_row:
            one_of("--ids-per-row", feature, sorted(features))
        if self.step.sparse_optimizer is not None and self.sparse_optimizer is None:
            declared = ", ".join(sorted({name for name in self.model.declared_optimizers.values() if name is not None}))
            raise UserError(
                f"--sparse-optimizer is {self.step.sparse_optimizer!r}, and every table of the model declares its "
                f"optimizer ({declared}); leave it out."
            )

    @property
    def plan(self) -> PlanConfig:
        return self.plan_config

    @property
    def batch_size(self) -> int:
        return self.step.batch_size

    @property
    def sparse_optimizer(self) -> str | None:
        """Name of the optimizer of the tables that declare none; None where all do."""
        declared = self.model.declared_optimizers.values()
        return largest_optimizer([None], self.step.sparse_optimizer) if None in declared else None

    @property
    def table_optimizers(self) -> TableOptimizers:
        """Optimizers of the tables, of which the one that keeps most stands for all."""
        sparse = largest_optimizer(self.model.declared_optimizers.values(), self.step.sparse_optimizer)
        is_fused = OPTIMIZERS[sparse].fused_class is not None
        return TableOptimizers(sparse, self.step.dense_optimizer, is_fused)

    def on_cluster(self, cluster: Cluster) -> ModelOnCluster:
        optimizers = self.table_optimizers
        if OPTIMIZERS[optimizers.sparse].fused_needs_cuda and cluster.device.kind != "cuda":
            known = ", ".join(name for name in sparse_names() if not OPTIMIZERS[name].fused_needs_cuda)
            raise UserError(
                f"FBGEMM has the optimizer {optimizers.sparse!r} of the tables on CUDA only, and --gpu is a "
                f"{cluster.device.kind}; use one of {known}."
            )
        workload, notes = self._workload(cluster)
        sharders = self.model.sharders_for(self.plan)
        request = PlanRequest(self.model.module, sharders, cluster, workload, self.plan, optimizers)
        plan_inputs = PlanInputs(
            world_size=cluster.world_size,
            local_world_size=cluster.ranks_per_node,
            device_kind=cluster.device.kind,
            batch_size=self.batch_size,
            model={"function": self.model.name},
            sparse_optimizer=optimizers.sparse,
            dense_optimizer=optimizers.dense,
            tables=table_plan_inputs(self.model.tables),
            exchange=common_exchange(sharders).as_json(),
        )
        return ModelOnCluster(request, plan_inputs, [*notes, *self._optimizer_notes()])

    def table_bytes(self) -> int:
        optimizers = self.table_optimizers
        return sum((whole_table_storage(table, optimizers) for table in self.model.tables), TableStorage()).total

    def with_plan(self, plan: PlanConfig) -> "OwnModel":
        return dataclasses.replace(self, plan_config=plan)

    def with_batch_size(self, num_rows: int) -> "tuple[OwnModel, str]":
        step = dataclasses.replace(self.step, batch_size=num_rows)
        return dataclasses.replace(self, step=step), f"--batch-size {num_rows}"

    def with_sparse_optimizer(self, name: str) -> "tuple[OwnModel, str]":
        step = dataclasses.replace(self.step, sparse_optimizer=name)
        return dataclasses.replace(self, step=step), f"--sparse-optimizer {name}"

    def _optimizer_notes(self) -> list[str]:
        """Returns that some tables are counted with more states than they have, where tables differ in optimizers."""
        counted = self.table_optimizers.sparse
        undeclared = self.step.sparse_optimizer or stateless_name()
        declared = self.model.declared_optimizers.items()
        others = [name for name, own in declared if (own or undeclared) != counted]
        if not others:
            return []
        return [
            f"the states of all tables are counted as those of {counted}, the largest that a table declares; those of "
            f"{enumerate_names(others)} are smaller"
        ]

    def _workload(self, cluster: Cluster) -> tuple[Workload, list[str]]:
        """Returns the step on a cluster, and what is not known of it, a sentence each."""
        num_rows = Workload(self.batch_size).rows_of_rank(cluster.world_size)
        batch = None if self.step.example is None else _example_batch(self.step.example, num_rows)
        network, unknown = estimate_own_networks(
            self.model.module,
            batch,
            self.step.dense_optimizer,
            self.step.bf16,
            averages=cluster.world_size > 1,
        )
        seen = {} if batch is None else batch.ids_per_row()
        workload = Workload(
            batch_size=self.batch_size,
            ids_per_row={**seen, **self.step.ids_per_row},
            multi_hot=frozenset() if batch is None else batch.multi_hot(),
            num_dense=0 if batch is None else max(0, batch.dense_numbers_per_row() - 1),  # labels are counted apart
            network=network,
            bf16=self.step.bf16,
        ).on_machines_like_this(cluster.ranks_per_node)
        notes = [] if not unknown else [_UNKNOWN_STEP.format(unknown)]
        features = [feature for table in self.model.tables for feature in table.feature_names]
        unnamed = [feature for feature in dict.fromkeys(features) if feature not in workload.ids_per_row]
        if unnamed:
            notes.append(f"a row is taken to have one id of {enumerate_names(unnamed)}: --ids-per-row says otherwise")
        return workload, notes


def _require_plannable(where: str, model: MadeModel) -> None:
    """Refuses a model without tables, with two tables of one name, or with some that no plan can place."""
    known = {sharder.module_type for sharder in default_sharders()}
    sharded = {sharder.module_type for sharder in model.sharders_for(PlanConfig())}
    for path, module in model.module.named_modules():
        if not isinstance(module, _WITH_TABLES):
            continue
        kind = f"{where} makes {path or 'a model'!r}, a {type(module).__name__}"
        if not any(isinstance(module, each) for each in known):
            raise UserError(f"{kind}, which cannot be planned; collections that can are {_PLANNED}.")
        if type(module) not in sharded:
            raise UserError(f"{kind}, and no sharder takes it; return the model with one, as (model, [sharder, ...]).")
    if not model.tables:
        raise UserError(
            f"{where} makes a model without embedding tables to place; tables are those of {_PLANNED}, and layers such "
            "as torch.nn.Embedding are on every rank whole."
        )


def _example_batch(example: NamedFunction, num_rows: int) -> ExampleBatch:
    """Returns the batch of a function; one that draws numbers of torch's draws the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ExampleBatch(example.call(num_rows), num_rows)


def _kind(value: Any) -> str:
    """Returns what a value is, with its article."""
    return "None" if value is None else f"a {type(value).__name__}"
