"""Small models under every layout, trained alike, and all numbers that their ranks hold."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.utils import placement
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardMetadata
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import PathMLP
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.config import DataType
from distembed.embedding.tables import CompositionalTables
from distembed.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from distembed.optim.optimizers import Optimizers, fuse_sparse_optimizer, table_parameters
from distembed.optim.replicated import ReplicatedOptimizer
from distembed.partitions import ChineseRemainder, QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder

LAYOUTS = ("plain", "table_wise", "column_wise", "table_column_wise", "row_wise", "data_parallel")
OPTIMIZER_NAMES = ("sgd", "adagrad", "row_wise_adagrad", "amsgrad")
"""Of the tables; each of them can be had on a CPU."""
DIM = 16
ROWS = 8
SIZES = {"a": 101, "b": 60, "c": 90, "d": 37, "e": 50}
RATE, EPS = 0.1, 1e-3
PLAIN_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
    "amsgrad": lambda params, **chosen: torch.optim.Adam(params, amsgrad=True, **chosen),
}
"""What trains models that are not sharded."""
WITHOUT_EPS = {"sgd"}


def tables(dim: int = DIM, data_type: DataType = "FP32") -> list[CompositionalEmbeddingBagConfig]:
    make = partial(CompositionalEmbeddingBagConfig, data_type=data_type)
    return [
        make("a", 101, dim, ["a"], QuotientRemainder(101, collisions=4)),
        make("b", 60, dim, ["b"], QuotientRemainder(60, collisions=5), "concat"),
        make("c", 90, dim, ["c"], QuotientRemainder(90, collisions=7), PathMLP(hidden=[5])),
        make("d", 37, dim, ["d"]),
        make("e", 50, dim, ["e"], ChineseRemainder(50), "sum", pooling="mean"),
    ]


class Head(nn.Module):
    """A collection and one linear layer."""

    def __init__(self, device: str, dim: int = DIM, data_type: DataType = "FP32") -> None:
        super().__init__()
        self.embeddings = CompositionalEmbeddingBagCollection(tables(dim, data_type), device=device)
        torch.manual_seed(0)
        self.linear = nn.Linear(len(SIZES) * dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        embedded = self.embeddings(features).to_dict()
        return self.linear(torch.cat([embedded[name] for name in SIZES], dim=1))


class SeveralCollections(nn.Module):
    """Compositional bags, compositional sequences and TorchRec's own bags, and one linear layer.

    Table b is one whose rows all have gradients.
    """

    def __init__(self, device: str, dim: int = DIM) -> None:
        super().__init__()
        by_name = {table.name: table for table in tables(dim)}
        self.bags = CompositionalEmbeddingBagCollection([by_name["a"], by_name["c"]], device=device)
        make = CompositionalEmbeddingConfig
        sequences = [
            make("b", 60, dim, ["b"], QuotientRemainder(60, collisions=5), "sum", dense_gradient=True),
            make("d", 37, dim, ["d"], QuotientRemainder(37, collisions=3), PathMLP(hidden=[5])),
        ]
        self.sequences = CompositionalEmbeddingCollection(sequences, device=device)
        stock = EmbeddingBagConfig(name="e", embedding_dim=dim, num_embeddings=50, feature_names=["e"])
        self.stock = EmbeddingBagCollection([stock], device=torch.device(device))
        torch.manual_seed(0)
        self.linear = nn.Linear(len(SIZES) * dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = {**self.bags(features).to_dict(), **self.stock(features).to_dict()}
        for name, sequence in self.sequences(features).items():
            rows = torch.repeat_interleave(torch.arange(features.stride()), sequence.lengths())
            empty = sequence.values().new_zeros(features.stride(), sequence.values().shape[1])
            pooled[name] = empty.index_add(0, rows, sequence.values())
        return self.linear(torch.cat([pooled[name] for name in SIZES], dim=1))


@dataclass
class Trained:
    """A model under one layout with its optimizers."""

    model: nn.Module
    optimizer: KeyedOptimizer
    sharded: bool
    before_step: Callable[[int], object]

    def step(self, number: int) -> None:
        """One step on the rows of a batch that depends on its number alone; all ranks call it."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if self.sharded else (0, 1)
        start, stop = rank * ROWS // world, (rank + 1) * ROWS // world
        self.before_step(number)
        self.optimizer.zero_grad()
        output = self.model(batch(number, start, stop))
        ((output - 1).square().sum() * world / ROWS).backward()
        self.optimizer.step()


def batch(number: int, start: int, stop: int) -> KeyedJaggedTensor:
    rng = np.random.default_rng(number)
    bags = {name: [rng.integers(0, size, rng.integers(0, 4)) for _ in range(ROWS)] for name, size in SIZES.items()}
    mine = [bag for name in SIZES for bag in bags[name][start:stop]]
    values = np.concatenate([np.zeros(0, np.int64), *mine])
    return KeyedJaggedTensor(
        list(SIZES), torch.from_numpy(values), lengths=torch.tensor([len(bag) for bag in mine]), stride=stop - start
    )


def build(
    layout: str,
    optimizer: str,
    dense: str | DenseOptimizerConfig = "adam",
    dim: int = DIM,
    data_type: DataType = "FP32",
) -> Trained:
    """The model of one collection with its first weights; all ranks call it."""
    if layout == "plain":
        assert isinstance(dense, str)
        return _build_plain(optimizer, dense, dim)
    return shard(Head("meta", dim, data_type), layout, optimizer, dense)


def _build_plain(optimizer: str, dense: str, dim: int) -> Trained:
    model = Head("cpu", dim)
    settings = {"lr": RATE} if optimizer in WITHOUT_EPS else {"lr": RATE, "eps": EPS}
    named = dict(model.named_parameters())
    in_tables = {name: p for name, p in named.items() if ".embedding_bags." in name}
    others = {name: p for name, p in named.items() if name not in in_tables}
    wrappers = [
        KeyedOptimizerWrapper(in_tables, lambda params: PLAIN_OPTIMIZERS[optimizer](params, **settings)),
        KeyedOptimizerWrapper(others, lambda params: PLAIN_OPTIMIZERS[dense](params, lr=RATE)),
    ]
    return Trained(model, CombinedOptimizer(wrappers), False, lambda step: None)


SCATTERED_RANKS = ([-1, -1, -2, -1], [-1, -2, -2, -1], [-2, -1, -1, -1], [-1, -2, -1, -2])
"""Ranks, counted from the last, of the column ranges of one table after the other: some are unequal once merged."""


def scatter_columns(plan: ShardingPlan) -> None:
    """Gives the column ranges of a plan's tables to ranks out of order."""
    world, ranks_of_tables = dist.get_world_size(), cycle(SCATTERED_RANKS)
    for planned in (planned for module_plan in plan.plan.values() for planned in module_plan.values()):
        if planned.sharding_type == "column_wise":
            shards = planned.sharding_spec.shards
            planned.ranks = [rank % world for _, rank in zip(shards, cycle(next(ranks_of_tables)), strict=False)]
            planned.sharding_spec = EnumerableShardingSpec(
                [
                    ShardMetadata(shard.shard_offsets, shard.shard_sizes, placement("cpu", rank, world))
                    for shard, rank in zip(shards, planned.ranks, strict=True)
                ]
            )


def shard(
    model: nn.Module,
    layout: str,
    optimizer: str,
    dense: str | DenseOptimizerConfig = "adam",
    max_gradient: float | None = None,
) -> Trained:
    """Places all tables of a model alike; all ranks call it.

    Args:
        layout: One of :data:`LAYOUTS`, or ``scattered``: column-wise, in ranges out of order.
        max_gradient: The limit of tables with ``dense_gradient``; :func:`limit_gradients` sets that of other tables.
    """
    cpu, world = torch.device("cpu"), dist.get_world_size()
    sparse = SparseOptimizerConfig(name=optimizer, learning_rate=RATE, eps=EPS, max_gradient=max_gradient)
    fuse_sparse_optimizer(table_parameters(model), sparse, cpu)
    sharders: list[Any] = [
        CompositionalEmbeddingBagCollectionSharder(),
        CompositionalEmbeddingCollectionSharder(),
        EmbeddingBagCollectionSharder(),
    ]
    is_scattered, layout = layout == "scattered", "column_wise" if layout == "scattered" else layout
    constraints = dict.fromkeys(SIZES, ParameterConstraints(sharding_types=[layout], min_partition=4))
    for module in model.modules():
        for table in module.tables() if isinstance(module, CompositionalTables) else ():
            # a function needs whole vectors
            if table.function_tables() and ("column" in layout or layout == "grid_shard"):
                constraints[table.name] = ParameterConstraints(sharding_types=["table_wise"])
        if isinstance(module, EmbeddingBagCollection) and layout == "row_wise":  # TorchRec has that on CUDA only
            constraints |= {
                table.name: ParameterConstraints(sharding_types=["table_wise"])
                for table in module.embedding_bag_configs()
            }
    topology = Topology(world_size=world, local_world_size=get_local_size(world), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    if is_scattered:
        scatter_columns(plan)
    if not sparse.is_fused:
        for placed in (placed for module_plan in plan.plan.values() for placed in module_plan.values()):
            placed.compute_kernel = "dense"
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=cpu, plan=plan, sharders=sharders)
    config = DenseOptimizerConfig(name=dense, learning_rate=RATE) if isinstance(dense, str) else dense
    optimizers = Optimizers(sharded, config, sparse, num_steps=10)
    return Trained(sharded, optimizers.combined, True, optimizers.set_learning_rates)


def replicated_leaves(optimizer: KeyedOptimizer) -> Iterator[ReplicatedOptimizer]:
    """The optimizers of what every rank has, which update it within the backward pass."""
    for _, inner in optimizer.optimizers if isinstance(optimizer, CombinedOptimizer) else ():
        yield from replicated_leaves(inner)
    if isinstance(optimizer, ReplicatedOptimizer):
        yield optimizer


Arrays = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Whole:
    """All numbers of a model and its optimizers.

    Attributes:
        weights: by name.
        states: by parameter and state, of the parameter's shape; where a row has one number a slice of columns, or the
            parameter has one, that number in each of them.
        slices: ``[start, stop]`` of the slices of such states.
    """

    weights: Arrays
    states: Arrays
    slices: Mapping[str, list[tuple[int, int]]]


def gather_numbers(trained: Trained) -> Whole:
    """What all ranks hold; all ranks call it."""
    local = list(_local(trained))
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, local)
    weights: Arrays = {}
    states: Arrays = {}
    slices: dict[str, set[tuple[int, int]]] = {}
    for kind, name, size, offsets, values, columns in (item for items in by_rank for item in items):
        # a long double holds integers of 64 bits, as the keys of hashes are
        dtype = np.float32 if np.issubdtype(values.dtype, np.floating) else np.longdouble
        whole = (weights if kind == "weight" else states).setdefault(name, np.full(size, np.nan, dtype))
        place = tuple(slice(start, start + length) for start, length in zip(offsets, values.shape, strict=True))
        seen = whole[place]
        assert np.isnan(seen).all() or np.array_equal(seen, values), name  # equal where replicated
        whole[place] = values
        if columns is not None:
            slices.setdefault(name, set()).add(columns)
    for name, values in {**weights, **states}.items():
        assert not np.isnan(values).any(), name
    return Whole(weights, states, {name: sorted(found) for name, found in slices.items()})


def _local(trained: Trained) -> Iterator[tuple[Any, ...]]:
    """(weight or state, name, size of the whole, offsets, values, columns of a row's number) of this rank."""
    state_dict = trained.model.state_dict()
    local_weights: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for name, value in state_dict.items():
        if isinstance(value, ShardedTensor):
            shards = [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()]
        else:
            shards = [((0,) * value.dim(), value)]
        local_weights[name] = shards
        for offsets, values in shards:
            yield "weight", name, tuple(value.size()), offsets, values.detach().numpy().copy(), None
    for name, state in trained.optimizer.state_dict()["state"].items():
        shards, size = local_weights[name], tuple(state_dict[name].size())
        for key, value in state.items():
            if key == "step":
                continue
            # FBGEMM's word; of these optimizers, the fused ones keep sums
            key = {"momentum1": "sum"}.get(key.rpartition(".")[2], key)
            if isinstance(value, ShardedTensor):
                local = [shard.tensor for shard in value.local_shards()]
            else:  # one behind the other
                row_wise = value.numel() < sum(weight.numel() for _, weight in shards)
                counts = [len(weight) if row_wise else weight.numel() for _, weight in shards]
                # a number of the parameter is that of each of its shards
                local = list(value.flatten().split(counts)) if value.dim() else [value] * len(shards)
            for (offsets, weight), values in zip(shards, local, strict=True):
                row_wise = values.dim() > 0 and weight.dim() == 2 and values.numel() == len(weight)
                if values.dim() == 0:
                    expanded = values.expand_as(weight)
                else:
                    expanded = values.view(-1, 1).expand_as(weight) if row_wise else values.view(weight.shape)
                columns = (offsets[1], offsets[1] + weight.shape[1]) if row_wise else None
                yield "state", f"{name}.{key}", size, offsets, expanded.detach().numpy().copy(), columns
