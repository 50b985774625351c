"""A config as ``distembed plan`` plans it: its model and step are those of ``distembed train``."""

import dataclasses
from dataclasses import dataclass

import torch

from distembed.capacity.plannable import ModelOnCluster, Plannable
from distembed.config import Config, TrainConfig
from distembed.describe import tied_outputs
from distembed.embedding import TableConfig, build_tables
from distembed.planning import PlanConfig, PlanRequest
from distembed.planning.cluster import Cluster
from distembed.planning.networks import require_networks_fit
from distembed.planning.storage import TableStorage, whole_table_storage
from distembed.sse.config import build_sse
from distembed.tasks import batch_schema
from distembed.training.build import Blueprint, table_optimizers, use_bf16

_HASHED = ("quotient_remainder", "remainder")
"""Partition schemes that a number of collisions, or of buckets, compresses."""
_UNKNOWN_STEP = (
    "the memory of the networks' step and its time could not be estimated: it looks at values, or has an operator "
    "without a form for fake tensors; a share of each device is kept free for it"
)


@dataclass(frozen=True)
class ConfiguredModel(Plannable):
    """The model of a config."""

    config: Config

    @property
    def plan(self) -> PlanConfig:
        return self.config.plan

    @property
    def batch_size(self) -> int:
        return self.config.train.batch_size

    @property
    def sparse_optimizer(self) -> str:
        return self.config.train.sparse_optimizer.name

    @property
    def collisions(self) -> int | None:
        """Ids that share a row of the default's tables, 1 where none do; None where another scheme compresses them."""
        default = self.config.embedding.default
        if default.partition == "naive":
            return 1
        return (default.collisions or 1) if default.partition in _HASHED else None

    def on_cluster(self, cluster: Cluster) -> ModelOnCluster:
        config, is_cuda = self.config, cluster.device.kind == "cuda"
        schema, device = config.data.load_schema(), torch.device(cluster.device.kind)
        # all CUDA devices of the catalogue have bf16
        bf16 = config.train.precision in ("auto", "bf16") if is_cuda else use_bf16(config.train.precision, device)
        features = batch_schema(config.task, schema).categorical
        sse = build_sse(config.sse, {feature.name: feature.num_embeddings for feature in features}, {})
        blueprint = Blueprint(config, schema, cluster.world_size, cluster.ranks_per_node, device, bf16, sse)
        require_networks_fit(config.model, blueprint.model_inputs, num_copies=1)
        model = blueprint.build_plannable()
        workload = blueprint.workload().on_machines_like_this(cluster.ranks_per_node)
        optimizers = table_optimizers(config.train)
        request = PlanRequest(model, blueprint.sharders, cluster, workload, config.plan, optimizers)
        is_step_known = workload.network is not None and workload.network.is_step_known
        notes = [*(output.text for output in tied_outputs(model)), *(() if is_step_known else (_UNKNOWN_STEP,))]
        return ModelOnCluster(request, blueprint.plan_inputs(model), tuple(notes))

    def table_bytes(self) -> int:
        optimizers = table_optimizers(self.config.train)
        schema = batch_schema(self.config.task, self.config.data.load_schema())
        tables = build_tables(schema.categorical, self.config.embedding)
        return sum((whole_table_storage(table, optimizers) for table in tables), TableStorage()).total

    def with_plan(self, plan: PlanConfig) -> "ConfiguredModel":
        return ConfiguredModel(dataclasses.replace(self.config, plan=plan))

    def with_batch_size(self, num_rows: int) -> "tuple[ConfiguredModel, str]":
        train = dataclasses.replace(self.config.train, batch_size=num_rows)
        return self._with_train(train), f"train.batch_size={num_rows}"

    def with_sparse_optimizer(self, name: str) -> "tuple[ConfiguredModel, str]":
        optimizer = dataclasses.replace(self.config.train.sparse_optimizer, name=name)
        train = dataclasses.replace(self.config.train, sparse_optimizer=optimizer)
        return self._with_train(train), f"train.sparse_optimizer.name={name}"

    def with_collisions(self, collisions: int) -> "tuple[ConfiguredModel, str]":
        """Compresses the default's tables; those of tables with settings of their own stay as they are."""
        embedding = self.config.embedding
        default = embedding.default
        scheme = "quotient_remainder" if default.partition == "naive" else default.partition
        table = dataclasses.replace(default, partition=scheme, collisions=collisions, num_buckets=None)
        config = dataclasses.replace(self.config, embedding=dataclasses.replace(embedding, default=table))
        settings = [] if scheme == default.partition else [f"embedding.default.partition={scheme}"]
        settings += [] if default.num_buckets is None else ["embedding.default.num_buckets=null"]
        settings.append(f"embedding.default.collisions={collisions}")
        for name, own_table in embedding.tables.items():
            settings += [f"embedding.tables.{name}.{own}" for own in _settings_to_repeat(own_table, default, scheme)]
        return ConfiguredModel(config), " ".join(settings)

    def _with_train(self, train: TrainConfig) -> "ConfiguredModel":
        """Returns the same with another section ``train``."""
        return ConfiguredModel(dataclasses.replace(self.config, train=train))


def _settings_to_repeat(table: TableConfig, default: TableConfig, scheme: str) -> list[str]:
    """Returns what to type of a table that keeps its settings, where it has them from the default that changes."""
    settings = []
    if table.partition == default.partition and scheme != default.partition:
        settings.append(f"partition={table.partition}")
    is_hashed = table.partition in _HASHED
    if is_hashed and (table.collisions, table.num_buckets) == (default.collisions, default.num_buckets):
        is_given = table.num_buckets is not None
        settings.append(f"num_buckets={table.num_buckets}" if is_given else f"collisions={table.collisions or 4}")
    return settings
