"""Models that ``distembed plan`` can plan, with their step and settings: the interface, and a config's model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from distembed.embedding import build_tables
from distembed.optim.table_storage import TableStorage, whole_table_storage
from distembed.planning import PlanConfig, PlanRequest
from distembed.planning.devices import Cluster
from distembed.planning.networks import require_networks_fit
from distembed.planning.saved_plan import PlanInputs
from distembed.sse.config import build_sse
from distembed.tasks import batch_schema
from distembed.training.build import Blueprint, use_bf16
from distembed.training.config import Config
from distembed.training.describe import tied_outputs


@dataclass(frozen=True)
class ModelOnCluster:
    """A model with its training step on a cluster."""

    request: PlanRequest
    plan_inputs: PlanInputs  # compared when the saved plan is applied
    notes: Sequence[str] = ()  # remarks on the workload for the reader, a sentence each


class Plannable(ABC):
    """A model with its step and settings, to be planned for any cluster.

    ``with_`` methods leave this model unchanged. They return the text to type for the change, and the changed model;
    :meth:`with_plan` returns the model alone.

    Args:
        plan: Ways in which tables may be placed.
        batch_size: Rows of a step on all ranks.
        sparse_optimizer: Name of the optimizer of the tables; None where it cannot be changed.
        collisions: Ids that share a row of a table, 1 where none do; None where that cannot be changed.
    """

    def __init__(
        self, plan: PlanConfig, batch_size: int, sparse_optimizer: str | None, collisions: int | None = None
    ) -> None:
        self.plan, self.batch_size = plan, batch_size
        self.sparse_optimizer, self.collisions = sparse_optimizer, collisions

    @abstractmethod
    def on_cluster(self, cluster: Cluster) -> ModelOnCluster:
        """Returns the plan request for a cluster; raises a ``UserError`` for settings that no plan can have."""

    @abstractmethod
    def table_bytes(self) -> int:
        """Returns the bytes of all tables with their optimizer's state, each of them once."""

    @abstractmethod
    def with_plan(self, plan: PlanConfig) -> Self:
        """Returns the model with other settings of the plan."""

    @abstractmethod
    def with_batch_size(self, num_rows: int) -> tuple[str, Self]:
        """Changes the rows of a step on all ranks."""

    @abstractmethod
    def with_sparse_optimizer(self, name: str) -> tuple[str, Self]:
        """Changes the optimizer of the tables."""

    def max_collisions(self) -> int:
        """Returns the largest number of collisions to try; 0 where they cannot be changed."""
        return 0

    def with_collisions(self, collisions: int) -> tuple[str, Self]:
        """Compresses the tables; called only where ``collisions`` is a number."""
        raise NotImplementedError


_HASHED = ("quotient_remainder", "remainder")  # schemes that a number of collisions, or of buckets, compresses
_MAX_COLLISIONS = 2**20
_UNKNOWN_STEP = (
    "the memory of the networks' step and its time could not be estimated: it looks at values, or has an operator "
    "without a form for fake tensors; a share of each device is kept free for it"
)


class ConfiguredModel(Plannable):
    """The model of a config; its changes are typed as overrides, like ``train.batch_size=512``."""

    def __init__(self, config: Config) -> None:
        default, train = config.embedding.default, config.train
        # tables of other schemes cannot be compressed further
        by_scheme = {"naive": 1, **dict.fromkeys(_HASHED, default.collisions or 1)}
        collisions = by_scheme.get(default.partition)
        super().__init__(config.plan, train.batch_size, train.sparse_optimizer.name, collisions)
        self.config = config

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
        optimizers = config.train.table_optimizers
        request = PlanRequest(model, blueprint.sharders, cluster, workload, config.plan, optimizers)
        is_step_known = workload.network is not None and workload.network.is_step_known
        notes = [*(output.text for output in tied_outputs(model)), *(() if is_step_known else (_UNKNOWN_STEP,))]
        return ModelOnCluster(request, blueprint.plan_inputs(model), tuple(notes))

    def table_bytes(self) -> int:
        optimizers = self.config.train.table_optimizers
        schema = batch_schema(self.config.task, self.config.data.load_schema())
        tables = build_tables(schema.categorical, self.config.embedding)
        return sum((whole_table_storage(table, optimizers) for table in tables), TableStorage()).total

    def with_plan(self, plan: PlanConfig) -> "ConfiguredModel":
        return ConfiguredModel(replace(self.config, plan=plan))

    def with_batch_size(self, num_rows: int) -> "tuple[str, ConfiguredModel]":
        return f"train.batch_size={num_rows}", self._with_train(batch_size=num_rows)

    def with_sparse_optimizer(self, name: str) -> "tuple[str, ConfiguredModel]":
        optimizer = replace(self.config.train.sparse_optimizer, name=name)
        return f"train.sparse_optimizer.name={name}", self._with_train(sparse_optimizer=optimizer)

    def _with_train(self, **changes: Any) -> "ConfiguredModel":
        return ConfiguredModel(replace(self.config, train=replace(self.config.train, **changes)))

    def max_collisions(self) -> int:
        features = batch_schema(self.config.task, self.config.data.load_schema()).categorical
        largest = max((feature.num_embeddings for feature in features), default=0)
        return 0 if self.collisions is None else min(2 * largest, _MAX_COLLISIONS)  # one doubling beyond the largest

    def with_collisions(self, collisions: int) -> "tuple[str, ConfiguredModel]":
        """Compresses the tables of ``embedding.default``; the typed text repeats settings that other tables inherit."""
        embedding = self.config.embedding
        default = embedding.default
        scheme = "quotient_remainder" if default.partition == "naive" else default.partition
        changed = replace(default, partition=scheme, collisions=collisions, num_buckets=None)
        settings = [] if scheme == default.partition else [f"embedding.default.partition={scheme}"]
        settings += [] if default.num_buckets is None else ["embedding.default.num_buckets=null"]
        settings.append(f"embedding.default.collisions={collisions}")
        # tables with entries of their own inherit unset fields from the default, which changes: state them explicitly
        for name, table in embedding.tables.items():
            key = f"embedding.tables.{name}"
            if table.partition == default.partition != scheme:
                settings.append(f"{key}.partition={table.partition}")
            is_same = (table.collisions, table.num_buckets) == (default.collisions, default.num_buckets)
            if table.partition in _HASHED and is_same:
                is_given = table.num_buckets is not None
                unchanged = f"num_buckets={table.num_buckets}" if is_given else f"collisions={table.collisions or 4}"
                settings.append(f"{key}.{unchanged}")
        return " ".join(settings), ConfiguredModel(replace(self.config, embedding=replace(embedding, default=changed)))
