"""Tables sharded for real, whose steps can be timed and estimated: the embedding part of a model, and nothing else.

A step is forward, backward and update, with all exchanges: row-wise Adagrad of all tables within the backward pass.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Ranks
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.embedding.exchange import QuantizedCommsConfig
from distembed.planning.cluster import Cluster
from distembed.planning.costs import PlacementCosts
from distembed.planning.devices import Device
from distembed.planning.estimated_plan import plan_placements
from distembed.planning.networks import NetworkEstimate
from distembed.planning.planned_rank import StepTime
from distembed.planning.request import PlanRequest
from distembed.planning.times import step_times
from distembed.planning.workload import Workload
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.sharding.exchange import codecs_registry
from distembed.sharding.lookup import sharded_lookups
from distembed.sharding.table_slice import width

_LEARNING_RATE = 0.01
_NUM_BATCHES = 4
_GRADIENT = 1e-3
_MS = 1e3


class ShardedTables:
    """Tables on all ranks of the process group, which make it together, with the same places.

    A place is TorchRec's generator of it, such as ``table_wise(rank=0, compute_kernel="fused")``.
    """

    def __init__(
        self,
        placed: Iterable[tuple[CompositionalEmbeddingBagConfig, Any]],
        ranks: Ranks,
        comms: QuantizedCommsConfig | None = None,  # rounding of vectors and gradients while they are sent
        ids_per_bag: int = 1,
    ) -> None:
        places = list(placed)
        self.tables, self.ranks, self.ids_per_bag = [table for table, _ in places], ranks, ids_per_bag
        self._unsharded = _Embedding(self.tables)
        sharder = CompositionalEmbeddingBagCollectionSharder(
            qcomm_codecs_registry=codecs_registry(comms or QuantizedCommsConfig())
        )
        self._sharders: list[Any] = [sharder]
        by_name = {table.name: place for table, place in places}
        sizes = ranks.local_world_size, ranks.world_size, ranks.device.type
        module_plan: Any = construct_module_sharding_plan(self._unsharded.tables, by_name, sharder, *sizes)
        self._plan = ShardingPlan({"tables": module_plan})
        self.model = DistributedModelParallel(
            _Embedding(self.tables),  # tables of a copy would not be trained within the backward pass
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=ranks.device,
            plan=self._plan,
            sharders=self._sharders,
            init_data_parallel=ranks.world_size > 1,
        )

    def step(self, ids: Int64[Tensor, " ids"], gradient: Float[Tensor, "rows columns"]) -> None:
        """Takes a step, of ``ids_per_bag`` ids for each row and feature, feature after feature; all ranks call it."""
        names = [name for table in self.tables for name in table.feature_names]
        lengths = torch.full((len(ids) // self.ids_per_bag,), self.ids_per_bag, dtype=torch.int32, device=ids.device)
        # new features: those of an earlier step have their offsets already
        vectors = self.model(KeyedJaggedTensor(names, ids, lengths=lengths))
        vectors.backward(gradient)

    def estimate(self, num_rows: int, device: Device) -> list[StepTime]:
        """Returns the estimated times of every rank for a batch of so many rows each, as if on this device."""
        ranks = self.ranks
        cluster = Cluster(device, ranks.world_size // ranks.local_world_size, ranks.local_world_size)
        ids_per_row = {name: float(self.ids_per_bag) for table in self.tables for name in table.feature_names}
        workload = Workload(num_rows * ranks.world_size, ids_per_row, network=NetworkEstimate())
        request = PlanRequest(self._unsharded, self._sharders, cluster, workload)
        placements = plan_placements(self._unsharded, self._plan, cluster.world_size)
        return step_times(placements, PlacementCosts(request), cluster)


class TimedStep:
    """Steps of sharded tables on batches of ``num_rows`` on each rank."""

    def __init__(self, tables: ShardedTables, num_rows: int) -> None:
        self._tables, self._num_rows = tables, num_rows
        device = tables.ranks.device
        generator = torch.Generator().manual_seed(tables.ranks.rank)
        self._batches = cycle([self._draw_ids(generator).to(device) for _ in range(_NUM_BATCHES)])
        num_columns = sum(width(table) * len(table.feature_names) for table in tables.tables)
        self._gradient = _GRADIENT * torch.randn(num_rows, num_columns, device=device)

    def __call__(self) -> None:
        """Takes a step; all ranks call it together."""
        self._tables.step(next(self._batches), self._gradient)

    def estimated_seconds(self, device: Device) -> float:
        """Returns the estimated seconds of the slowest rank."""
        return max(time.total for time in self._tables.estimate(self._num_rows, device)) / _MS

    def _draw_ids(self, generator: torch.Generator) -> Int64[Tensor, " ids"]:
        """Draws ids that are skewed like those of clicks, log-uniform over each table, feature after feature."""
        sizes = [table.num_embeddings for table in self._tables.tables for _ in table.feature_names]
        drawn = torch.rand(
            len(sizes), self._num_rows * self._tables.ids_per_bag, generator=generator, dtype=torch.float64
        )
        exponents = drawn * torch.tensor(sizes, dtype=torch.float64).log().unsqueeze(1)
        last = torch.tensor(sizes).unsqueeze(1) - 1
        return (exponents.exp() - 1).long().clamp(min=0).minimum(last).flatten()


class LookupStep(TimedStep):
    """Steps of the lookups of a rank's own tables, with gradients and update and without exchanges.

    The tables are of one size and kind, placed whole, as many on every rank, which looks them up for all ranks' rows.
    """

    def __init__(self, tables: ShardedTables, num_rows: int) -> None:
        super().__init__(tables, num_rows)
        self._lookup, *_ = sharded_lookups(tables.model)
        self._names = [table.name for table in tables.tables[: len(tables.tables) // tables.ranks.world_size]]

    def __call__(self) -> None:
        """Takes a step of this rank alone."""
        ids = next(self._batches)  # of all tables, which are alike: they serve as those of all ranks
        vectors = self._lookup(KeyedJaggedTensor(self._names, ids, lengths=torch.ones_like(ids, dtype=torch.int32)))
        vectors.backward(self._gradient.view_as(vectors))

    def estimated_seconds(self, device: Device) -> float:
        """Returns the estimated seconds of the slowest rank's lookups."""
        slowest = max(time.lookup for time in self._tables.estimate(self._num_rows, device)) / _MS
        return slowest * max(1.0, self._tables.ranks.local_world_size / (device.ranks_at_once or math.inf))


class _Embedding(nn.Module):
    """A model of nothing but its tables, all trained within the backward pass."""

    def __init__(self, tables: Sequence[CompositionalEmbeddingBagConfig]) -> None:
        super().__init__()
        self.tables = CompositionalEmbeddingBagCollection(tables, device="meta")
        vectors = self.tables.embedding_bags.parameters()
        apply_optimizer_in_backward(RowWiseAdagrad, vectors, {"lr": _LEARNING_RATE})

    def forward(self, features: KeyedJaggedTensor) -> Float[Tensor, "rows columns"]:
        vectors: Tensor = self.tables(features).values()
        return vectors
