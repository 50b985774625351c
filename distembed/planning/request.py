"""A plan request: the model, its sharders, the cluster, the workload of a step, and the config."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from distembed.base.errors import UserError
from distembed.embedding.collections import table_configs
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.settings import VectorExchange
from distembed.embedding.tables import CompositionalTables
from distembed.optim.declared import TableOptimizers, declared_optimizers, largest_optimizer
from distembed.planning.config import PlanConfig
from distembed.planning.devices import Cluster
from distembed.planning.fastest.problem import Floats
from distembed.planning.networks import NetworkEstimate
from distembed.planning.storage import DEFAULT_CACHE_RATIO
from distembed.sharding.sharder import exchange_of


@dataclass(frozen=True)
class Workload:
    """Describes one training step to the planner: its rows, ids, networks and graphs."""

    batch_size: int  # rows on all ranks, B
    # mean number of ids of a row, by feature; 1 for features that are not named
    ids_per_row: Mapping[str, float] = field(default_factory=dict)
    # features with several ids in a row; a feature with more than one on average is among them
    multi_hot: Set[str] = frozenset()
    # number of 4-byte values of a row besides its ids and one label: dense features, further labels, and numbers in
    # lists with their lengths, on average
    num_dense: int = 0
    # memory and operations of the networks for a rank's share of B; None where they are unknown
    network: NetworkEstimate | None = None
    bf16: bool = False  # whether the networks compute in bf16
    weighted: Set[str] = frozenset()  # features whose ids have weights, which are sent with them
    # bytes of the knowledge graphs by which ids are replaced, on every rank, by table
    graph_bytes: Mapping[str, int] = field(default_factory=dict)
    # number of threads that a rank computes in on a CPU; as many as this process does unless given
    num_threads: int = field(default_factory=torch.get_num_threads)

    def has_bags(self, feature: str) -> bool:
        """Returns whether a row may have several ids of a feature."""
        return feature in self.multi_hot or self.ids_per_row.get(feature, 1.0) > 1

    def mean_ids(self, features: Iterable[str]) -> float:
        """Returns the mean number of ids that a row has of some features together."""
        return sum(self.ids_per_row.get(feature, 1.0) for feature in features)

    def weight_bytes(self, features: Iterable[str]) -> int:
        """Returns the bytes of each id's weight: 4 if one of the features has weights, else 0."""
        return 4 if not self.weighted.isdisjoint(features) else 0

    @property
    def resting_bytes(self) -> dict[str, int]:
        """Bytes that every rank holds between steps besides its tables, by item."""
        network = self.network or NetworkEstimate()
        return {
            "sse_graphs": sum(self.graph_bytes.values()),
            "network_weights": network.parameters + network.buffers,
            "network_optimizer_state": network.optimizer_state,
        }

    def bytes_beside_tables(self, world_size: int) -> dict[str, int]:
        """Returns the bytes of a rank at the networks' fullest moment, by item, without tables and exchanges.

        On one rank gradients are 0: the activations' peak has them as they arise.
        """
        network = self.network or NetworkEstimate()
        gradients = network.gradients if world_size > 1 else 0
        return {**self.resting_bytes, "gradients": gradients, "activations": network.peak}

    def on_machines_like_this(self, ranks_per_node: int) -> "Workload":
        """Returns the workload where the ranks of a node share this machine's threads evenly."""
        return replace(self, num_threads=max(1, torch.get_num_threads() // ranks_per_node))

    def rows_of_rank(self, world_size: int) -> int:
        """Returns b, the most rows of a step on one rank."""
        return math.ceil(self.batch_size / world_size)


def pipeline_depth(device_kind: str, world_size: int) -> int:
    """Returns the number of batches on a device: 3 in TorchRec's ``TrainPipelineSparseDist``, else 2."""
    return 3 if overlaps(device_kind, world_size) else 2


def overlaps(device_kind: str, world_size: int) -> bool:
    """Returns whether the next batch's ids are sent during a step: with several ranks, or on CUDA."""
    return world_size > 1 or device_kind == "cuda"


_UNKNOWN_NETWORKS = 0.1
"""Share of a device's memory that is kept for networks and activations of unknown size."""


@dataclass(frozen=True)
class PlanRequest:
    """A model to plan for a cluster; all its collections share one plan, TorchRec's own among them.

    Raises:
        UserError: Two tables of the model have one name, or no sharder takes a compositional collection.
    """

    model: nn.Module  # module that holds the collections, on the meta device
    sharders: Sequence[ModuleSharder[Any]]  # TorchRec's sharders of the collections to place
    cluster: Cluster  # ranks to plan for; they need not exist
    workload: Workload
    config: PlanConfig = field(default_factory=PlanConfig)
    # optimizers of the compositional tables; None for the declared ones
    optimizers: TableOptimizers | None = None
    cache_load_factor: float | None = None

    def __post_init__(self) -> None:
        path_of_table: dict[str, str] = {}
        for path, module, sharder in _sharded_modules(self.model, self.sharders):
            for name in sharder.shardable_parameters(module):
                if name in path_of_table:
                    raise UserError(
                        f"the model has two tables named {name!r}, in {path_of_table[name]!r} and in {path!r}; a plan "
                        "tells tables apart by name, whatever their collection: rename one of the two."
                    )
                path_of_table[name] = path
        sharded = {sharder.module_type for sharder in self.sharders}
        for path, collection in self.collections.items():
            if type(collection) not in sharded:
                raise UserError(
                    f"no sharder takes the {type(collection).__name__} {path!r}; add one of distembed.sharding's to "
                    "sharders."
                )

    @cached_property
    def collections(self) -> dict[str, CompositionalTables[Any]]:
        """Compositional collections, by their path within the model."""
        modules = self.model.named_modules()
        return {path: module for path, module in modules if isinstance(module, CompositionalTables)}

    @cached_property
    def tables(self) -> list[CompositionalEmbeddingConfig]:
        return [table for collection in self.collections.values() for table in collection.tables()]

    @cached_property
    def tables_by_collection(self) -> dict[str, Sequence[CompositionalEmbeddingConfig]]:
        """Tables by collection path; TorchRec's own tables are described as full tables."""
        return {
            path: table_configs(module)
            for path, module, _ in _sharded_modules(self.model, self.sharders)
            if isinstance(module, CompositionalTables | EmbeddingBagCollection | EmbeddingCollection)
        }

    @cached_property
    def exchanges(self) -> dict[str, VectorExchange]:
        """The precision in which each collection's sharder sends vectors, by collection path."""
        return {path: exchange_of(sharder) for path, _, sharder in _sharded_modules(self.model, self.sharders)}

    @cached_property
    def table_optimizers(self) -> TableOptimizers:
        """The given optimizers; else, for all tables, the declared optimizer with the largest states."""
        if self.optimizers is not None:
            return self.optimizers
        return TableOptimizers(largest_optimizer(declared_optimizers(self.model, self.sharders).values()))

    @property
    def reserved_share(self) -> float:
        """Share of each device's memory that a plan leaves free: ``plan.reserve``, and 10% if the step is unknown."""
        network = self.workload.network
        is_known = network is not None and network.is_step_known
        return min(self.config.reserve + (0.0 if is_known else _UNKNOWN_NETWORKS), 1.0)

    @cached_property
    def plannable_bytes(self) -> Floats:
        """Bytes of memory that a plan may fill, by rank, besides managed ids."""
        total_bytes = np.array(self.cluster.bytes_by_rank, np.float64)
        return total_bytes - np.rint(self.reserved_share * total_bytes) - self.managed_bytes

    @cached_property
    def host_bytes(self) -> Floats:
        """Bytes of host memory, besides CUDA devices, that a plan may fill, by rank; 0 where it is unknown."""
        total_bytes = np.array(self.cluster.host_bytes_by_rank, np.float64)
        return np.where(total_bytes > 0, total_bytes - self.managed_host_bytes, 0.0)

    @cached_property
    def managed_bytes(self) -> Floats:
        """Bytes of managed ids on the device, by rank, which no plan changes; on a GPU the copy of evaluations."""
        in_training, copied = self._managed_bytes
        return copied if self.cluster.device.kind == "cuda" else in_training + copied

    @cached_property
    def managed_names(self) -> list[str]:
        """Names of the tables with managed ids, the one with the most bytes first."""
        sizes = [table.managed.sizes for table in self.tables if table.managed is not None]
        return [own.name for own in sorted(sizes, key=lambda own: -own.memory_bytes)]

    @property
    def managed_host_bytes(self) -> Floats:
        """Bytes of managed ids in host memory besides CUDA devices, by rank; 0 on CPUs, which hold them."""
        return self._managed_bytes[0] * (self.cluster.device.kind == "cuda")

    @cached_property
    def _managed_bytes(self) -> Floats:
        """Bytes of managed ids by rank: of training, and of the copy of evaluations, ``[2, ranks]``."""
        world_size = self.cluster.world_size
        sizes = [table.managed.sizes for table in self.tables if table.managed is not None]
        by_rank = [[own.rank_bytes(rank, world_size) for own in sizes] for rank in range(world_size)]
        return np.array(by_rank, np.float64).reshape(world_size, -1, 2).sum(1).T

    @property
    def cache_ratio(self) -> float:
        """Cached rows per row of a table in host memory: given, else the first sharder's setting, else the default."""
        settings = (getattr(sharder, "fused_params", None) or {} for sharder in self.sharders)
        by_sharder = [fused_params.get("cache_load_factor") for fused_params in settings]
        ratios = [self.cache_load_factor, *by_sharder, DEFAULT_CACHE_RATIO]
        return next(ratio for ratio in ratios if ratio is not None)


def _sharded_modules(
    model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """Yields path, module and sharder of each module that a sharder takes, breadth first, each module once.

    Like TorchRec, does not look for further modules within a sharded module.
    """
    sharder_of_type = {sharder.module_type: sharder for sharder in sharders}
    waiting, visited = [("", model)], set[int]()
    while waiting:
        path, module = waiting.pop(0)
        if id(module) in visited:
            continue
        visited.add(id(module))
        if type(module) in sharder_of_type:
            yield path, module, sharder_of_type[type(module)]
        else:
            waiting += [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
