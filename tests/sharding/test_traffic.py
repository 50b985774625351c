"""Bytes that one training step hands to collectives: those of a plain TorchRec table, to the byte."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.ranks import run_on_ranks

SIZES = {"t0": 1000, "t1": 777, "t2": 96}
FEATURES = {"t0": ["a", "b"], "t1": ["c"], "t2": ["d"]}
NUM_FEATURES, DIM, COLLISIONS, WORLD_SIZE = 4, 16, 4, 2
FLOAT, LENGTH = 4, 8
FUSED = EmbeddingComputeKernel.FUSED.value

Plan = Callable[[int], Any]
PLANS: dict[str, Plan] = {
    "table_wise": lambda i: table_wise(rank=i % WORLD_SIZE, compute_kernel=FUSED),
    "column_wise": lambda i: column_wise(ranks=[i % WORLD_SIZE, (i + 1) % WORLD_SIZE], compute_kernel=FUSED),
    "row_wise": lambda i: row_wise(compute_kernel=FUSED),
    "data_parallel": lambda i: data_parallel(),
}
"""How the i-th table is placed."""


class CountBytes(TorchDispatchMode):
    """Counts the bytes that this rank hands to each collective, by the rank that gets them: its own part with them.

    Everything is seen that reaches a process group, whoever calls it: also the all-reduces of DistributedDataParallel,
    of which there are the bytes that are averaged, at this rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_peer: Counter[tuple[str, int, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            given = dict(zip([argument.name for argument in func._schema.arguments], args, strict=False))
            (tensors,) = (
                given[name] for name in ("input", "input_tensor", "input_tensors", "tensors") if name in given
            )
            ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(given["process_group"]))
            for tensor in _flat(tensors):
                self._count(func._schema.name.removeprefix("c10d::"), tensor, ranks, given.get("input_split_sizes"))
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, tensor: Tensor, ranks: list[int], split: list[int] | None) -> None:
        if name == "allreduce_":
            ranks = [dist.get_rank()]
        rows = [len(tensor)] * len(ranks) if name in ("allreduce_", "_allgather_base_") else None
        for rank, part in zip(ranks, rows or split or [len(tensor) / len(ranks)] * len(ranks), strict=True):
            self.by_peer[name, rank, tensor.dtype] += round(part * tensor[:1].nbytes)

    @property
    def counts(self) -> Counter[str]:
        """Bytes by collective."""
        return sum((Counter({name: count}) for (name, *_), count in self.by_peer.items()), Counter())


def _flat(tensors: Any) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    else:
        for each in tensors:
            yield from _flat(each)


class Embedded(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.embeddings(features).values()


def plain(is_weighted: bool) -> nn.Module:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=DIM, feature_names=FEATURES[name])
        for name, size in SIZES.items()
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"), is_weighted=is_weighted)


def ours(composition: str, is_weighted: bool, id_dtype: torch.dtype) -> nn.Module:
    tables = [
        CompositionalEmbeddingBagConfig(
            name,
            size,
            DIM,
            FEATURES[name],
            QuotientRemainder(size, collisions=COLLISIONS),
            composition,
            id_policy="modulo",
            id_dtype=id_dtype,
        )
        for name, size in SIZES.items()
    ]
    return CompositionalEmbeddingBagCollection(tables, device="meta", is_weighted=is_weighted)


def shard(module: nn.Module, sharder: ModuleSharder[Any], kind: str) -> DistributedModelParallel:
    sharder.fused_params.update(learning_rate=0.1)
    placed = {name: PLANS[kind](i) for i, name in enumerate(SIZES)}
    plan = construct_module_sharding_plan(module, placed, sharder, WORLD_SIZE, WORLD_SIZE, "cpu")
    return DistributedModelParallel(
        Embedded(module),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"embeddings": plan}),
        sharders=[sharder],
    )


def rows_of_ranks(kind: str) -> tuple[int, int]:
    """Rows of a batch on either rank; gloo cannot carry TorchRec's row-wise gradients of unequal batches."""
    return (4, 4) if kind == "row_wise" else (5, 3)


def draw(rows: int, seed: int, bag: int, is_weighted: bool) -> KeyedJaggedTensor:
    """Bags of one id where ``bag`` is 1, else of 0 to twice as many."""
    generator = torch.Generator().manual_seed(seed)
    lengths, values = [], []
    for table, features in FEATURES.items():
        for _ in features:
            low, high = (1, 1) if bag == 1 else (0, 2 * bag)
            lengths.append(torch.randint(low, high + 1, (rows,), generator=generator))
            values.append(torch.randint(0, SIZES[table], (int(lengths[-1].sum()),), generator=generator))
    names = [name for features in FEATURES.values() for name in features]
    weights = torch.rand(sum(map(len, values)), generator=generator) if is_weighted else None
    return KeyedJaggedTensor(names, torch.cat(values), weights, lengths=torch.cat(lengths))


def count_step(model: nn.Module, features: KeyedJaggedTensor) -> dict[str, Counter[str]]:
    """Returns bytes by collective, of the fourth step: only earlier ones do what is done once."""
    for _ in range(4):
        fresh = KeyedJaggedTensor(
            features.keys(), features.values(), features.weights_or_none(), lengths=features.lengths()
        )
        with CountBytes() as forward:
            output = model(fresh)
        with CountBytes() as backward:
            output.square().mean().backward()
    return {"forward": forward.counts, "backward": backward.counts}


def with_dtype(features: KeyedJaggedTensor, dtype: torch.dtype) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        features.keys(), features.values().to(dtype), features.weights_or_none(), lengths=features.lengths()
    )


def dists_by_hand(
    kind: str, rank: int, features: KeyedJaggedTensor, id_dtype: torch.dtype
) -> dict[str, dict[str, int]]:
    """What a plain table's dists carry, from the shapes alone."""
    rows, all_rows = features.stride(), sum(rows_of_ranks(kind))
    is_weighted = features.weights_or_none() is not None
    per_id = id_dtype.itemsize + FLOAT * is_weighted
    # to each rank the sizes of what comes: lengths, ids, weights, and the number of rows
    sizes = WORLD_SIZE * LENGTH * (3 + is_weighted)
    lengths, ids = rows * NUM_FEATURES * LENGTH, features.values().numel() * per_id
    pooled = all_rows * NUM_FEATURES * DIM * FLOAT
    gradients = rows * NUM_FEATURES * DIM * FLOAT
    if kind == "table_wise":
        own_features = (3, 1)[rank]  # t0 and t2 have three, t1 has one
        forward = sizes + lengths + ids + pooled * own_features // NUM_FEATURES
        return {"forward": {"alltoall_base_": forward}, "backward": {"alltoall_base_": gradients}}
    if kind == "column_wise":
        # each rank has half of the columns of every table, so every id goes to both
        forward = sizes + 2 * (lengths + ids) + pooled // 2
        return {"forward": {"alltoall_base_": forward}, "backward": {"alltoall_base_": gradients}}
    if kind == "row_wise":
        # each id goes to the rank that has its row; either rank sends its sums of all rows' bags
        forward = sizes + 2 * lengths + ids
        return {
            "forward": {"alltoall_base_": forward, "_reduce_scatter_base_": pooled},
            "backward": {"_allgather_base_": WORLD_SIZE * gradients},
        }
    return {"forward": {}, "backward": {}}


def replicated_bytes(model: nn.Module) -> dict[str, int]:
    """Gradients that are averaged over the ranks, by the names of their parameters: of what no rank has a shard of."""
    return {
        name.removeprefix("embeddings.embedding_bags.").removesuffix(".weight"): FLOAT * weight.numel()
        for name, weight in model.state_dict().items()
        if not isinstance(weight, ShardedTensor)
    }


def replicated_by_hand(kind: str, composition: str) -> dict[str, int]:
    """None but a data-parallel table's two partitions, and the one of 4 rows of a row-wise table."""
    if kind not in ("row_wise", "data_parallel"):
        return {}
    dim = DIM // 2 if composition == "concat" else DIM
    rows = {f"{name}__p1": COLLISIONS for name in SIZES}
    if kind == "data_parallel":
        rows |= {f"{name}__p0": math.ceil(size / COLLISIONS) for name, size in SIZES.items()}
    return {name: num_rows * dim * FLOAT for name, num_rows in rows.items()}


def check_traffic(rank: int, world_size: int, kind: str, is_weighted: bool, id_dtype: torch.dtype) -> None:
    """Ids travel in the tables' dtype, whatever a batch has and though one rank has an id outside of its table."""
    stock = shard(plain(is_weighted), EmbeddingBagCollectionSharder({}), kind)
    compositions = ("product", "sum", "concat")
    models = [
        shard(ours(composition, is_weighted, id_dtype), CompositionalEmbeddingBagCollectionSharder({}), kind)
        for composition in compositions
    ]
    for bag, dtypes in ((1, [torch.int32]), (10, [torch.int64, torch.int32])):
        features = draw(rows_of_ranks(kind)[rank], rank, bag, is_weighted)
        stock_counts = count_step(stock, with_dtype(features, id_dtype))
        stock_counts["backward"].pop("allreduce_", 0)
        if rank == 1:
            features.values()[0] += SIZES["t0"]
        for (composition, model), given in itertools.product(zip(compositions, models, strict=True), dtypes):
            assert replicated_bytes(model) == replicated_by_hand(kind, composition)
            counts = count_step(model, with_dtype(features, given))
            assert counts["backward"].pop("allreduce_", 0) == sum(replicated_bytes(model).values())
            by_hand = dists_by_hand(kind, rank, features, id_dtype)
            assert counts == stock_counts == by_hand, (kind, composition, bag, given)


def check_all_traffic(rank: int, world_size: int) -> None:
    for kind in PLANS:
        check_traffic(rank, world_size, kind, False, torch.int64)
    for kind in ("column_wise", "row_wise"):
        check_traffic(rank, world_size, kind, True, torch.int32)


@pytest.mark.thorough
@pytest.mark.distributed
def test_dists_carry_what_those_of_a_plain_table_carry() -> None:
    run_on_ranks(WORLD_SIZE, check_all_traffic)
