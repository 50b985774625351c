"""The sharded sequence collection on gloo ranks against the unsharded one: vectors, gradients, updated weights."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import Concat, PathMLP
from distembed.embedding import CompositionalEmbeddingCollection, CompositionalEmbeddingConfig
from distembed.partitions import (
    ChineseRemainder,
    Clustered,
    MixedRadix,
    MultiHash,
    QuotientRemainder,
    Remainder,
    Truncated,
)
from distembed.sharding import CompositionalEmbeddingCollectionSharder
from tests.layouts import scatter_columns
from tests.placing import plan_as
from tests.ranks import run_cases, run_on_ranks
from tests.sharding.test_sharded_equals_unsharded import check_weights

SIZES = {"a": 1000, "b": 77, "c": 500, "d": 500, "e": 30, "f": 300, "g": 600, "h": 900, "i": 1, "j": 800, "k": 700}
SIZES |= {"l": 600, "m": 600, "p": 900}
SIZES |= {"n": 20, "o": 480}
DIM = 16
CASES = list(itertools.product(["table_wise", "row_wise", "data_parallel"], ["sgd", "adagrad"]))
CASES += [("column_wise", "sgd"), ("scattered", "adagrad")]
SOME = [CASES[0], CASES[3], *CASES[5:]]


def tables() -> list[CompositionalEmbeddingConfig]:
    make = CompositionalEmbeddingConfig
    return [
        make("a", 1000, DIM, ["a"], QuotientRemainder(1000, collisions=4), id_policy="modulo"),
        make("b", 77, DIM, ["b"], QuotientRemainder(77, collisions=5), Concat([8, 8])),
        make("cd", 500, DIM, ["c", "d"], ChineseRemainder(500), "sum"),
        make("e", 30, DIM, ["e"]),
        make("f", 300, DIM, ["f"], Remainder(300, 4)),
        make("g", 600, DIM, ["g"], QuotientRemainder(600, collisions=7), PathMLP(hidden=[5])),
        make("i", 1, DIM, ["i"]),
        make("h", 900, DIM, ["h"], MixedRadix(900, num_partitions=3), "product"),
        make("j", 800, DIM, ["j"], MultiHash(800, moduli=[60, 50, 200]), "weighted_sum"),
        make("k", 700, DIM, ["k"], MultiHash(700, num_buckets=80), "sum"),
        make("l", 600, DIM, ["l"], MixedRadix(600, num_partitions=3), "tensor_train"),
        make("m", 600, DIM, ["m"], Clustered(600, num_buckets=40, num_partitions=5), "concat_sum"),
        make("p", 900, DIM, ["p"], Truncated(900, bounds=[300, 40]), Concat([8, 8])),
        make("no", 500, DIM, ["n", "o"], QuotientRemainder(500, collisions=4), first_ids={"o": 0, "n": 480}),
    ]


class Head(nn.Module):
    """A collection and one linear layer over the summed vectors of each row."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.embeddings = CompositionalEmbeddingCollection(tables(), device=device, need_indices=True)
        torch.manual_seed(0)
        self.linear = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, dict[str, Any]]:
        embedded = self.embeddings(features)
        ragged = {name: embedded[name] for name in SIZES}
        summed = sum(_sum_rows(jagged.values(), jagged.lengths()) for jagged in ragged.values())
        return self.linear(summed), ragged


def _sum_rows(vectors: Tensor, lengths: Tensor) -> Tensor:
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    return torch.zeros(len(lengths), vectors.shape[1]).index_add(0, rows, vectors)


def is_whole(table: CompositionalEmbeddingConfig) -> bool:
    """Whether the vectors of a table are not cut by columns, as those of paths and weighted sums."""
    return table.combine.columns(table.embedding_dim, len(table.scheme.num_rows)) is None


def shard(model: Head, optimizer: Any, settings: dict[str, float], sharding_type: str) -> DistributedModelParallel:
    apply_optimizer_in_backward(optimizer, model.embeddings.embeddings.parameters(), dict(settings))
    sharders = [CompositionalEmbeddingCollectionSharder()]
    kind = "column_wise" if sharding_type == "scattered" else sharding_type
    kinds = {table.name: "table_wise" if kind == "column_wise" and is_whole(table) else kind for table in tables()}
    plan = plan_as(model, sharders, kinds)
    if sharding_type == "scattered":
        scatter_columns(plan)
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)


def draw(lengths: list[int], generator: torch.Generator) -> KeyedJaggedTensor:
    values, all_lengths = [], []
    for name, size in reversed(SIZES.items()):
        own = torch.tensor(lengths, dtype=torch.long)[torch.randperm(len(lengths), generator=generator)]
        # table a takes ids modulo its size
        values.append(torch.randint(0, size * (3 if name == "a" else 1), (int(own.sum()),), generator=generator))
        all_lengths.append(own)
    return KeyedJaggedTensor(
        list(reversed(SIZES)), torch.cat(values), lengths=torch.cat(all_lengths), stride=len(lengths)
    )


def check_equal(rank: int, world_size: int, sharding_type: str, name: str) -> None:
    optimizer, settings = {
        "sgd": (torch.optim.SGD, {"lr": 0.01}),
        "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2}),
    }[name]
    reference, model = Head("cpu"), shard(Head("meta"), optimizer, settings, sharding_type)
    sparse = optimizer(reference.embeddings.embeddings.parameters(), **settings)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    of_tables = {key: weight for key, weight in dense.items() if key.startswith("embeddings.embeddings.")}
    unfused = optimizer(list(of_tables.values()), **settings) if of_tables else None
    generators = [torch.Generator().manual_seed(r) for r in range(world_size)]
    for step in range(4):
        # every rank has its own rows, the last one at times none, or one without ids
        none = [[], [0], [3, 1], [1]][step]
        rows = [none if r and r == world_size - 1 else [0, 1, 4, 2][: r + 2] for r in range(world_size)]
        batches = [draw(lengths, generator) for lengths, generator in zip(rows, generators, strict=True)]
        outputs = [reference(batch) for batch in batches]
        output, ragged = model(batches[rank])
        torch.testing.assert_close(output, outputs[rank][0])
        for key, expected in outputs[rank][1].items():
            torch.testing.assert_close(ragged[key].values(), expected.values())
            assert torch.equal(ragged[key].lengths(), expected.lengths())
            assert torch.equal(ragged[key].weights(), expected.weights())
        (output.square().sum() * world_size).backward()
        sum(one.square().sum() for one, _ in outputs).backward()
        for key, weight in reference.named_parameters():
            if key in dense and key not in of_tables:
                torch.testing.assert_close(dense[key].grad, weight.grad)
                for copy in (weight, dense[key]):
                    copy.data.sub_(copy.grad, alpha=0.003)
        sparse.step()
        if unfused is not None:
            unfused.step()
        reference.zero_grad()
        model.zero_grad()
    check_weights(model, reference)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "cases"), [(2, SOME), *(pytest.param(n, CASES, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
def test_ranks_together_equal_one_module(world_size: int, cases: list[tuple[str, str]]) -> None:
    run_cases(world_size, check_equal, cases)
    run_on_ranks(1, check_refusals)


def check_refusals(rank: int, world_size: int) -> None:
    config = partial(CompositionalEmbeddingConfig, num_embeddings=50, embedding_dim=8)
    tables = [config("a", feature_names=["a"]), config("b", feature_names=["b"], partition="quotient_remainder")]
    tables[1] = config("b", feature_names=["b"], partition="quotient_remainder", composition="feature")
    model = nn.ModuleDict({"embeddings": CompositionalEmbeddingCollection(tables, device="meta")})
    sharders = [CompositionalEmbeddingCollectionSharder()]
    plan = plan_as(model, sharders, {})
    with pytest.raises(UserError, match=r"\{'a': 8, 'b': 16\} numbers"):
        DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
