"""Someone's own TorchRec model as ``distembed plan --model`` plans it, without a config.

The function that makes it runs on the meta device, where tensors have shapes and no values: tables of any size take no
memory, and no other device has to be there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.base.units import enumerate_names
from distembed.embedding.collections import embedding_modules, table_configs
from distembed.optim.declared import TableOptimizers, declared_optimizers, largest_optimizer
from distembed.optim.kinds import OPTIMIZERS, sparse_names, stateless_name
from distembed.optim.table_storage import TableStorage, whole_table_storage
from distembed.planning import PlanConfig, PlanRequest, Workload
from distembed.planning.devices import Cluster
from distembed.planning.networks import ExampleBatch, OnDevice, estimate_own_networks
from distembed.planning.saved_plan import PlanInputs, table_plan_inputs
from distembed.reports.plan.own_options import NamedFunction, OwnStep
from distembed.reports.plan.plannable import ModelOnCluster, Plannable
from distembed.sharding import default_sharders
from distembed.sharding.sharder import common_exchange

_WITH_TABLES = (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    FeatureProcessedEmbeddingBagCollection,
    BaseManagedCollisionEmbeddingCollection,
)
"""Modules of TorchRec that hold or wrap tables; only some can be planned."""
_PLANNED = (
    "EmbeddingBagCollection, EmbeddingCollection, CompositionalEmbeddingBagCollection and "
    "CompositionalEmbeddingCollection"
)


@dataclass(frozen=True)
class MadeModel:
    """The model that a user's function returned."""

    name: str  # name of the function, `package.module:function`
    module: nn.Module  # the model, on the meta device
    sharders: Sequence[ModuleSharder[Any]] | None  # sharders of its collections; None for the default sharders


class OwnModel(Plannable):
    """Someone's own model, with its step and optimizers.

    Refuses ids per row of an unknown feature, and a sparse optimizer where each table declares its own (``UserError``).
    """

    def __init__(self, made: MadeModel, step: OwnStep, plan: PlanConfig) -> None:
        self.made, self.step = made, step
        self.sharders = default_sharders(plan.host_memory) if made.sharders is None else made.sharders
        # TorchRec's tables are described as the full tables that they are
        collections = embedding_modules(made.module).values()
        self.tables = [table for collection in collections for table in table_configs(collection)]
        self.features = list(dict.fromkeys(feature for table in self.tables for feature in table.feature_names))
        declared = declared_optimizers(made.module, self.sharders)
        undeclared = step.sparse_optimizer or stateless_name()
        super().__init__(plan, step.batch_size, undeclared if None in declared.values() else None)
        for feature in step.ids_per_row:
            one_of("--ids-per-row", feature, sorted(self.features))
        if step.sparse_optimizer is not None and self.sparse_optimizer is None:
            names = ", ".join(sorted({name for name in declared.values() if name is not None}))
            raise UserError(
                f"--sparse-optimizer is {step.sparse_optimizer!r}, and every table of the model declares its "
                f"optimizer ({names}); leave it out."
            )
        # all tables are counted with the largest declared optimizer: a plan that fits then fits with any of them
        sparse = largest_optimizer(declared.values(), step.sparse_optimizer)
        is_fused = OPTIMIZERS[sparse].fused_class is not None
        self.table_optimizers = TableOptimizers(sparse, step.dense_optimizer, is_fused)
        self.smaller_tables = [table for table, name in declared.items() if (name or undeclared) != sparse]

    def on_cluster(self, cluster: Cluster) -> ModelOnCluster:
        optimizers = self.table_optimizers
        if OPTIMIZERS[optimizers.sparse].fused_needs_cuda and cluster.device.kind != "cuda":
            on_cpu = ", ".join(name for name in sparse_names() if not OPTIMIZERS[name].fused_needs_cuda)
            raise UserError(
                f"FBGEMM has the optimizer {optimizers.sparse!r} of the tables on CUDA only, and --gpu is a "
                f"{cluster.device.kind}; use one of {on_cpu}."
            )
        workload, notes = self._workload(cluster)
        if self.smaller_tables:
            notes.append(
                f"all tables are counted with the states of {optimizers.sparse}, the largest that a table declares; "
                f"{enumerate_names(self.smaller_tables)} have smaller states"
            )
        request = PlanRequest(self.made.module, self.sharders, cluster, workload, self.plan, optimizers)
        plan_inputs = PlanInputs(
            world_size=cluster.world_size,
            local_world_size=cluster.ranks_per_node,
            device_kind=cluster.device.kind,
            batch_size=self.batch_size,
            model={"function": self.made.name},
            sparse_optimizer=optimizers.sparse,
            dense_optimizer=optimizers.dense,
            tables=table_plan_inputs(self.tables),
            exchange=common_exchange(self.sharders).as_json(),
        )
        return ModelOnCluster(request, plan_inputs, notes)

    def _workload(self, cluster: Cluster) -> tuple[Workload, list[str]]:
        """Returns the step on a cluster, and notes: why the networks' step is unknown, features with assumed ids."""
        step, num_rows = self.step, Workload(self.batch_size).rows_of_rank(cluster.world_size)
        batch = None
        if step.example is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # a function that draws torch's numbers makes the same batch each time
                batch = ExampleBatch(step.example.call(num_rows), num_rows)
        averages = cluster.world_size > 1
        network, unknown = estimate_own_networks(self.made.module, batch, step.dense_optimizer, step.bf16, averages)
        workload = Workload(self.batch_size, step.ids_per_row, network=network, bf16=step.bf16)
        if batch is not None:
            workload = replace(
                workload,
                ids_per_row={**batch.ids_per_row(), **step.ids_per_row},
                multi_hot=batch.multi_hot(),
                num_dense=max(0, batch.dense_numbers_per_row() - 1),  # labels are counted apart
            )
        notes = []
        if unknown:
            text = f"the memory of the networks' step and its time are not known: {unknown}; a share of each device "
            notes.append(f"{text}is kept free for it")
        unnamed = [feature for feature in self.features if feature not in workload.ids_per_row]
        if unnamed:
            notes.append(f"a row is taken to have one id of {enumerate_names(unnamed)}: --ids-per-row says otherwise")
        return workload.on_machines_like_this(cluster.ranks_per_node), notes

    def table_bytes(self) -> int:
        optimizers = self.table_optimizers
        return sum((whole_table_storage(table, optimizers) for table in self.tables), TableStorage()).total

    def with_plan(self, plan: PlanConfig) -> "OwnModel":
        return OwnModel(self.made, self.step, plan)

    def with_batch_size(self, num_rows: int) -> "tuple[str, OwnModel]":
        return f"--batch-size {num_rows}", OwnModel(self.made, replace(self.step, batch_size=num_rows), self.plan)

    def with_sparse_optimizer(self, name: str) -> "tuple[str, OwnModel]":
        step = replace(self.step, sparse_optimizer=name)
        return f"--sparse-optimizer {name}", OwnModel(self.made, step, self.plan)


def make_own_model(function: NamedFunction) -> MadeModel:
    """Calls, on the meta device, a function that returns a model, or a pair of a model and its sharders.

    The function may take a ``device``. A ``UserError`` refuses other return values, modules with tables that cannot be
    planned or have no sharder, and a model without tables.
    """
    with OnDevice("meta"):
        returned = function.call(**({"device": torch.device("meta")} if function.takes("device") else {}))
    module, own_sharders = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
    where = f"{function.option} {function.name}"
    if not isinstance(module, nn.Module):
        kind = _kind(returned)
        raise UserError(f"{where} returns {kind}; return a torch.nn.Module, or a pair of it and its sharders.")
    if own_sharders is None:
        sharders = default_sharders()
    else:
        sharders = list(own_sharders) if isinstance(own_sharders, list | tuple) else [own_sharders]
    for sharder in sharders:
        if not isinstance(sharder, ModuleSharder):
            raise UserError(f"{where} returns {_kind(sharder)} among the sharders; return TorchRec's ModuleSharders.")
    plannable = {sharder.module_type for sharder in default_sharders()}
    sharded = {sharder.module_type for sharder in sharders}
    for path, submodule in module.named_modules():
        if not isinstance(submodule, _WITH_TABLES):
            continue
        kind = f"{where} makes {path or 'a model'!r}, a {type(submodule).__name__}"
        if not any(isinstance(submodule, module_type) for module_type in plannable):
            raise UserError(f"{kind}, which cannot be planned; collections that can are {_PLANNED}.")
        if type(submodule) not in sharded:
            raise UserError(f"{kind}, and no sharder takes it; return the model with one, as (model, [sharder, ...]).")
    if not any(table_configs(collection) for collection in embedding_modules(module).values()):
        raise UserError(
            f"{where} makes a model without embedding tables to place; tables are those of {_PLANNED}, and layers such "
            "as torch.nn.Embedding are on every rank whole."
        )
    return MadeModel(function.name, module, None if own_sharders is None else sharders)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
