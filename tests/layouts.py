"""One small model under every layout, trained alike, and what it holds put together again."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import PathMLP
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from distembed.optim.optimizers import Optimizers, fuse_sparse_optimizer, needs_dense_kernel
from distembed.partitions import ChineseRemainder, QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder

LAYOUTS = ("plain", "table_wise", "column_wise", "table_column_wise", "row_wise", "data_parallel")
OPTIMIZERS = ("sgd", "adagrad", "row_wise_adagrad", "amsgrad")
DIM = 16
ROWS = 8
SIZES = {"a": 101, "b": 60, "c": 90, "d": 37, "e": 50}
RATE, EPS = 0.1, 1e-3


def tables(dim: int = DIM) -> list[CompositionalEmbeddingBagConfig]:
    make = CompositionalEmbeddingBagConfig
    return [
        make("a", 101, dim, ["a"], QuotientRemainder(101, collisions=4)),
        make("b", 60, dim, ["b"], QuotientRemainder(60, collisions=5), "concat"),
        make("c", 90, dim, ["c"], QuotientRemainder(90, collisions=7), PathMLP(hidden=[5])),
        make("d", 37, dim, ["d"]),
        make("e", 50, dim, ["e"], ChineseRemainder(50), "sum", pooling="mean"),
    ]


class Head(nn.Module):
    """A collection and one linear layer."""

    def __init__(self, device: str, dim: int = DIM) -> None:
        super().__init__()
        self.embeddings = CompositionalEmbeddingBagCollection(tables(dim), device=device)
        torch.manual_seed(0)
        self.linear = nn.Linear(len(SIZES) * dim, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        embedded = self.embeddings(features).to_dict()
        return self.linear(torch.cat([embedded[name] for name in SIZES], dim=1))


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


def build(layout: str, optimizer: str, dense: str = "adam", dim: int = DIM) -> Trained:
    """The model with its first weights; all ranks call it."""
    return _build_plain(optimizer, dim) if layout == "plain" else shard(Head("meta", dim), layout, optimizer, dense)


def _build_plain(optimizer: str, dim: int) -> Trained:
    model = Head("cpu", dim)
    settings: dict[str, Any] = {"lr": RATE} if optimizer == "sgd" else {"lr": RATE, "eps": EPS}
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "row_wise_adagrad": RowWiseAdagrad,
        "amsgrad": lambda params, **chosen: torch.optim.Adam(params, amsgrad=True, **chosen),
    }
    named = dict(model.named_parameters())
    in_tables = {name: p for name, p in named.items() if ".embedding_bags." in name}
    others = {name: p for name, p in named.items() if name not in in_tables}
    wrappers = [
        KeyedOptimizerWrapper(in_tables, lambda params: makers[optimizer](params, **settings)),
        KeyedOptimizerWrapper(others, lambda params: torch.optim.Adam(params, lr=RATE)),
    ]
    return Trained(model, CombinedOptimizer(wrappers), False, lambda step: None)


def shard(model: nn.Module, layout: str, optimizer: str, dense: str = "adam") -> Trained:
    """Places all tables of ``model.embeddings`` alike; all ranks call it."""
    cpu, world = torch.device("cpu"), dist.get_world_size()
    sparse = SparseOptimizerConfig(name=optimizer, learning_rate=RATE, eps=EPS)  # type: ignore[arg-type]
    fuse_sparse_optimizer(model.get_submodule("embeddings.embedding_bags").parameters(), sparse, cpu)
    sharders: list[Any] = [CompositionalEmbeddingBagCollectionSharder()]
    constraints = {}
    for table in model.get_submodule("embeddings").tables():
        # a function needs whole vectors
        own_layout = "table_wise" if table.function_tables() and "column" in layout else layout
        constraints[table.name] = ParameterConstraints(sharding_types=[own_layout], min_partition=4)
    topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    if needs_dense_kernel(sparse):
        for placed in plan.plan["embeddings"].values():  # type: ignore[attr-defined]
            placed.compute_kernel = "dense"
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=cpu, plan=plan, sharders=sharders)
    config = DenseOptimizerConfig(name=dense, learning_rate=RATE)  # type: ignore[arg-type]
    optimizers = Optimizers(sharded, config, sparse, num_steps=10)
    return Trained(sharded, optimizers.combined, True, optimizers.set_learning_rates)


Arrays = dict[str, npt.NDArray[np.float32]]


@dataclass(frozen=True)
class Whole:
    """All numbers of a model and its optimizers.

    Attributes:
        weights: by name.
        states: by parameter and state, of the parameter's shape; where a row has one number a slice of columns, that
            number in each of them.
        slices: ``[start, stop]`` of the slices of such states.
    """

    weights: Arrays
    states: Arrays
    slices: Mapping[str, list[tuple[int, int]]]


def put_together(trained: Trained) -> Whole:
    """Gathers everything; all ranks call it."""
    local = list(_local(trained))
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, local)
    weights: Arrays = {}
    states: Arrays = {}
    slices: dict[str, set[tuple[int, int]]] = {}
    for kind, name, size, offsets, values, columns in (item for of_rank in of_ranks for item in of_rank):
        whole = (weights if kind == "weight" else states).setdefault(name, np.full(size, np.nan, np.float32))
        box = tuple(slice(start, start + length) for start, length in zip(offsets, values.shape, strict=True))
        seen = whole[box]
        assert np.isnan(seen).all() or np.array_equal(seen, values), name  # equal where replicated
        whole[box] = values
        if columns is not None:
            slices.setdefault(name, set()).add(columns)
    for name, values in {**weights, **states}.items():
        assert not np.isnan(values).any(), name
    return Whole(weights, states, {name: sorted(found) for name, found in slices.items()})


def _local(trained: Trained) -> Iterator[tuple[Any, ...]]:
    """(weight or state, name, size of the whole, offsets, values, columns of a row's number) of this rank."""
    state_dict = trained.model.state_dict()
    shards_of: dict[str, list[tuple[tuple[int, ...], Tensor]]] = {}
    for name, value in state_dict.items():
        if isinstance(value, ShardedTensor):
            shards = [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()]
        else:
            shards = [((0,) * value.dim(), value)]
        shards_of[name] = shards
        for offsets, values in shards:
            yield "weight", name, tuple(value.size()), offsets, values.detach().numpy().copy(), None
    for name, state in trained.optimizer.state_dict()["state"].items():
        shards, size = shards_of[name], tuple(state_dict[name].size())
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
                local = list(value.flatten().split(counts))
            for (offsets, weight), values in zip(shards, local, strict=True):
                row_wise = weight.dim() == 2 and values.numel() == len(weight)
                expanded = values.view(-1, 1).expand_as(weight) if row_wise else values.view(weight.shape)
                columns = (offsets[1], offsets[1] + weight.shape[1]) if row_wise else None
                yield "state", f"{name}.{key}", size, offsets, expanded.detach().numpy().copy(), columns
