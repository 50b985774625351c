"""The steps that calibration measures: sharded tables, networks, copies from host memory, and ranks sharing cores.

A step of tables is forward, backward and update with all exchanges: row-wise Adagrad within the backward pass. All
steps are measured in turn, in rounds, and the shortest round counts: disturbances make steps longer, never shorter.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Ranks
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.embedding.settings import QuantizedCommsConfig
from distembed.partitions import QuotientRemainder
from distembed.planning.costs import PlacementCosts, step_times
from distembed.planning.devices import Cluster, Device
from distembed.planning.networks import NetworkEstimate
from distembed.planning.request import PlanRequest, Workload
from distembed.planning.search import plan_placements
from distembed.planning.storage import StepTime
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.sharding.lookup import sharded_lookups
from distembed.sharding.sharder import codecs_registry
from distembed.sharding.table_slice import width

_LEARNING_RATE = 0.01
_NUM_BATCHES = 4
_GRADIENT = 1e-3
_MS = 1e3


class ShardedTables:
    """Tables sharded over all ranks of the process group; all ranks construct it with equal arguments.

    ``placed`` pairs each table with TorchRec's generator of its sharding, like ``table_wise(rank=0)``.
    """

    def __init__(
        self,
        placed: Iterable[tuple[CompositionalEmbeddingBagConfig, Any]],
        ranks: Ranks,
        comms: QuantizedCommsConfig | None = None,  # rounding of vectors and gradients while they are sent
        ids_per_bag: int = 1,
    ) -> None:
        placements = list(placed)
        self.tables, self.ranks, self.ids_per_bag = [table for table, _ in placements], ranks, ids_per_bag
        self._unsharded = _Embedding(self.tables)
        sharder = CompositionalEmbeddingBagCollectionSharder(
            qcomm_codecs_registry=codecs_registry(comms or QuantizedCommsConfig())
        )
        self._sharders: list[Any] = [sharder]
        by_name = {table.name: placement for table, placement in placements}
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
        """Runs forward, backward and update; all ranks call it. Ids: all rows of the first feature, then the next."""
        names = [name for table in self.tables for name in table.feature_names]
        lengths = torch.full((len(ids) // self.ids_per_bag,), self.ids_per_bag, dtype=torch.int32, device=ids.device)
        # a new jagged tensor: the one of the step before keeps offsets that it has computed
        vectors = self.model(KeyedJaggedTensor(names, ids, lengths=lengths))
        vectors.backward(gradient)

    def estimate(self, num_rows: int, device: Device) -> list[StepTime]:
        """Returns every rank's estimated times of a step on ``device``, with ``num_rows`` rows a rank."""
        ranks = self.ranks
        cluster = Cluster(device, ranks.world_size // ranks.local_world_size, ranks.local_world_size)
        ids_per_row = {name: float(self.ids_per_bag) for table in self.tables for name in table.feature_names}
        workload = Workload(num_rows * ranks.world_size, ids_per_row, network=NetworkEstimate())
        request = PlanRequest(self._unsharded, self._sharders, cluster, workload)
        placements = plan_placements(self._unsharded, self._plan, cluster.world_size)
        return step_times(placements, PlacementCosts(request), cluster)


class TimedStep:
    """Takes steps of sharded tables, cycling through a few drawn batches of ``num_rows`` rows on each rank."""

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
        """Draws ids log-uniformly over each table, feature by feature: as skewed as clicks."""
        sizes = [table.ids_of(name).num_ids for table in self._tables.tables for name in table.feature_names]
        drawn = torch.rand(
            len(sizes), self._num_rows * self._tables.ids_per_bag, generator=generator, dtype=torch.float64
        )
        exponents = drawn * torch.tensor(sizes, dtype=torch.float64).log().unsqueeze(1)
        last_ids = torch.tensor(sizes).unsqueeze(1) - 1
        return (exponents.exp() - 1).long().clamp(min=0).minimum(last_ids).flatten()


class LookupStep(TimedStep):
    """Takes steps of a rank's own lookups, with gradients and update and without exchanges.

    All tables have equal shapes; each lies whole on one rank, equally many on every rank, sorted by rank.
    """

    def __init__(self, tables: ShardedTables, num_rows: int) -> None:
        super().__init__(tables, num_rows)
        self._lookup, *_ = sharded_lookups(tables.model)
        self._names = [table.name for table in tables.tables[: len(tables.tables) // tables.ranks.world_size]]

    def __call__(self) -> None:
        # ids of all tables for one rank's rows stand for ids of the rank's tables for all ranks' rows: equally many
        ids = next(self._batches)
        vectors = self._lookup(KeyedJaggedTensor(self._names, ids, lengths=torch.ones_like(ids, dtype=torch.int32)))
        vectors.backward(self._gradient.view_as(vectors))

    def estimated_seconds(self, device: Device) -> float:
        slowest = max(time.lookup for time in self._tables.estimate(self._num_rows, device)) / _MS
        return slowest * max(1.0, self._tables.ranks.local_world_size / (device.ranks_at_once or math.inf))


class _Embedding(nn.Module):
    def __init__(self, tables: Sequence[CompositionalEmbeddingBagConfig]) -> None:
        super().__init__()
        self.tables = CompositionalEmbeddingBagCollection(tables, device="meta")
        vectors = self.tables.embedding_bags.parameters()
        apply_optimizer_in_backward(RowWiseAdagrad, vectors, {"lr": _LEARNING_RATE})

    def forward(self, features: KeyedJaggedTensor) -> Float[Tensor, "rows columns"]:
        vectors: Tensor = self.tables(features).values()
        return vectors


Step = Callable[[], object]
_COLLISIONS = 4
_WIDTHS, _NUM_ROWS, _NUM_TABLES = (16, 64), (128, 1024, 4096), (2, 8)
_LOOKED_UP = 4
"""Number of a rank's tables in a probe of lookups alone."""
_SMALL, _LARGE = 1_000, 200_000
_NETWORK = (512, 512, 256, 1)
_NETWORK_ROWS = 1024
_PRODUCTS = [width * next_width for width, next_width in pairwise(_NETWORK)]
NETWORK_OPERATIONS = 2 * _NETWORK_ROWS * (3 * sum(_PRODUCTS) - _PRODUCTS[0])
"""Floating-point operations of a step of the network, whose inputs need no gradient."""
COPIED_BYTES = 2**26
_REPLICATED = 24
"""Number of small replicated tables in a probe whose steps mostly start operations."""


def probes(ranks: Ranks) -> list[TimedStep]:
    """Returns steps of tables of different sharding types, widths, numbers and batches; all ranks call it."""
    world_size = ranks.world_size
    placers: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda i: table_wise(rank=i % world_size, compute_kernel="fused"),
        "data_parallel": lambda i: data_parallel(),
    }
    if world_size > 1:
        placers["row_wise"] = lambda i: row_wise(compute_kernel="fused")
        placers["column_wise"] = lambda i: column_wise(ranks=list(range(world_size)), compute_kernel="fused")
    placed = [
        [(table, placer(i)) for i, table in enumerate(_tables(count, world_size if name == "table_wise" else 1, dim))]
        for (name, placer), dim, count in product(placers.items(), _WIDTHS, _NUM_TABLES)
    ]
    small = [_table(i, _SMALL, _WIDTHS[0], is_product=i % 2 == 0) for i in range(_REPLICATED)]
    steps = []
    for tables in [*placed, [(table, data_parallel()) for table in small]]:
        sharded = ShardedTables(tables, ranks)
        steps += [TimedStep(sharded, num_rows) for num_rows in _NUM_ROWS]
    return steps


def lookup_probes(ranks: Ranks) -> list[LookupStep]:
    """Returns steps of lookups without exchanges, the largest tables first; all ranks call it."""
    steps = []
    for num_ids, dim, is_product in product((_LARGE, _SMALL), _WIDTHS, (True, False)):
        tables = [_table(i, num_ids, dim, is_product) for i in range(_LOOKED_UP * ranks.world_size)]
        placements = [table_wise(rank=i // _LOOKED_UP, compute_kernel="fused") for i in range(len(tables))]
        sharded = ShardedTables(zip(tables, placements, strict=True), ranks)
        steps += [LookupStep(sharded, num_rows) for num_rows in _NUM_ROWS[:0:-1]]
    return steps


def _tables(count: int, repeats: int, dim: int) -> list[CompositionalEmbeddingBagConfig]:
    """Returns ``count`` tables, full or products, small or large by turns; each one ``repeats`` times."""
    kinds = [i // repeats for i in range(count * repeats)]
    return [_table(i, _LARGE if kind % 4 in (0, 3) else _SMALL, dim, kind % 2 == 0) for i, kind in enumerate(kinds)]


def _table(i: int, num_ids: int, dim: int, is_product: bool) -> CompositionalEmbeddingBagConfig:
    scheme: Any = QuotientRemainder(num_ids, collisions=_COLLISIONS) if is_product else "naive"
    return CompositionalEmbeddingBagConfig(f"t{i}", num_ids, dim, [f"f{i}"], scheme)


def shortest_seconds(steps: Sequence[Step], rounds: int, num_steps: int, device: torch.device) -> list[float]:
    """Returns each step's seconds: the mean of ``num_steps`` runs in a row, in the shortest of ``rounds``.

    All steps take turns within a round, after one unmeasured run each. All ranks call it with equally many steps.
    """
    shortest = [math.inf] * len(steps)
    for _ in range(rounds):
        for i, step in enumerate(steps):
            step()
            _wait_for_all(device)
            started = time.perf_counter()
            for _ in range(num_steps):
                step()
            _wait_for_all(device)
            shortest[i] = min(shortest[i], (time.perf_counter() - started) / num_steps)
    return shortest


def _wait_for_all(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def network_step(device: torch.device, bf16: bool) -> Step:
    """Returns a step that runs forward and backward of a network of a click model's size, without an update."""
    layers = [nn.Linear(width, next_width) for width, next_width in pairwise(_NETWORK)]
    network = nn.Sequential(*[module for layer in layers for module in (layer, nn.ReLU())]).to(device)
    inputs = torch.randn(_NETWORK_ROWS, _NETWORK[0], device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)

    def step() -> None:
        network.zero_grad()
        with autocast:
            loss = network(inputs).sum()
        loss.backward()

    return step


def host_copy(device: torch.device) -> Step:
    """Returns a step that copies :data:`COPIED_BYTES` from the machine's memory to the device."""
    host = torch.zeros(COPIED_BYTES // 4, pin_memory=device.type == "cuda")
    copy = torch.empty_like(host, device=device)
    return lambda: copy.copy_(host, non_blocking=True)
