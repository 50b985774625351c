"""Limits of composed vectors' gradients: on every placement as in float64, and as FBGEMM's on full tables."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import PathMLP
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.optim.config import SparseOptimizerConfig
from distembed.partitions import QuotientRemainder
from distembed.sharding import limit_gradients
from distembed.training.config import load_config
from tests.layouts import (
    DIM,
    EPS,
    PLAIN_OPTIMIZERS,
    RATE,
    ROWS,
    SIZES,
    WITHOUT_EPS,
    SeveralCollections,
    batch,
    gather_numbers,
    shard,
    tables,
)
from tests.ranks import run_cases, run_on_ranks
from tests.small_runs import call, distembed, losses

LIMIT, STEPS = 0.01, 3
LAYOUTS_OF_BOTH = ("table_wise", "column_wise", "row_wise", "data_parallel")
CASES = [
    *[(layout, name) for layout in LAYOUTS_OF_BOTH for name in ("sgd", "adagrad", "amsgrad")],
    *[(layout, "row_wise_adagrad") for layout in ("table_wise", "row_wise", "data_parallel")],
]
"""Row-wise Adagrad keeps a sum for each range of columns, so that it depends on the ranges."""


class Vectors(nn.Module):
    """Bags of several compositions, and sequences; b and s have gradients in all rows, which have the limit."""

    def __init__(self, device: str) -> None:
        super().__init__()
        bags = [dataclasses.replace(table, dense_gradient=table.name == "b") for table in tables() if table.name != "d"]
        self.bags = CompositionalEmbeddingBagCollection(bags, device=device)
        make = CompositionalEmbeddingConfig
        sequences = [
            make("s", 60, DIM, ["b"], QuotientRemainder(60, collisions=5), "sum", dense_gradient=True),
            make("d", 37, DIM, ["d"], QuotientRemainder(37, collisions=3), PathMLP(hidden=[5])),
        ]
        self.sequences = CompositionalEmbeddingCollection(sequences, device=device)
        torch.manual_seed(0)
        self.linear = nn.Linear((len(SIZES) + 1) * DIM, 1)
        self.shares: list[float] = []  # of numbers that are cut
        self.limit: float | None = None

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = [
            vectors if name == "b" else self.limited(vectors) for name, vectors in self.bags(features).to_dict().items()
        ]
        for name, sequence in self.sequences(features).items():
            vectors = sequence.values() if name == "b" else self.limited(sequence.values())
            rows = torch.repeat_interleave(torch.arange(features.stride()), sequence.lengths())
            pooled.append(vectors.new_zeros(features.stride(), DIM).index_add(0, rows, vectors))
        return self.linear(torch.cat(pooled, dim=1))

    def limited(self, vectors: Tensor) -> Tensor:
        limit = self.limit
        if limit is not None:

            def cut(gradient: Tensor) -> Tensor:
                numbers = gradient.numpy()
                self.shares.append(float((np.abs(numbers) > limit).mean()))
                return torch.from_numpy(np.clip(numbers, -limit, limit))

            vectors = vectors.clone()
            vectors.register_hook(cut)
        return vectors


def train_in_float64(optimizer: str) -> dict[str, Tensor]:
    """Trains the unsharded model, whose gradients NumPy cuts; returns its weights."""
    model = Vectors("cpu").double()
    model.limit = LIMIT
    settings = {"lr": RATE} if optimizer in WITHOUT_EPS else {"lr": RATE, "eps": EPS}
    named = dict(model.named_parameters())
    by_sparse = tuple(f".{name}__p" for name in "acde")
    in_tables = [own for name, own in named.items() if name.endswith(".weight") and any(it in name for it in by_sparse)]
    others = [own for own in named.values() if all(own is not other for other in in_tables)]
    rows_of_b = [own for name, own in named.items() if ".b__p" in name or ".s__p" in name]
    optimizers = [PLAIN_OPTIMIZERS[optimizer](in_tables, **settings), torch.optim.SGD(others, lr=RATE)]
    num_cut, num_kept = 0, 0
    for number in range(STEPS):
        model.zero_grad()
        ((model(batch(number, 0, ROWS)) - 1).square().sum() / ROWS).backward()
        for own in rows_of_b:
            numbers = own.grad.numpy()
            num_cut += int((np.abs(numbers) > LIMIT).sum())
            num_kept += int(((np.abs(numbers) < LIMIT) & (numbers != 0)).sum())
            np.clip(numbers, -LIMIT, LIMIT, out=numbers)
        for each in optimizers:
            each.step()
    assert len(rows_of_b) == 4 and min(num_cut, num_kept) > 100
    assert 0.1 < np.mean(model.shares) < 0.9  # some numbers are cut, and some are not
    return {name: value.detach() for name, value in model.state_dict().items()}


def check(rank: int, world_size: int, layout: str, optimizer: str) -> None:
    trained = shard(Vectors("meta"), layout, optimizer, "sgd", LIMIT)
    limit_gradients(trained.model, LIMIT)
    for number in range(STEPS):
        trained.step(number)
    found, expected = gather_numbers(trained).weights, train_in_float64(optimizer)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        difference = (torch.from_numpy(found[name]) - values).abs()
        assert (difference <= 2e-5 + 2e-4 * values.abs()).all(), (name, float(difference.max()))


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_placement_and_optimizer_has_the_limit_of_one_device(world_size: int) -> None:
    run_cases(world_size, check, CASES)


def check_refusal(rank: int, world_size: int) -> None:
    model = shard(SeveralCollections("meta"), "table_wise", "sgd").model
    with pytest.raises(UserError, match=r"max_gradient is 0.5, but stock is TorchRec's own Sharded"):
        limit_gradients(model, 0.5)


@pytest.mark.distributed
def test_collections_of_torchrec_are_refused() -> None:
    run_on_ranks(1, check_refusal)


def check_full_table(rank: int, world_size: int) -> None:
    trained = shard(OneTable("meta"), "table_wise", "adagrad")
    limit_gradients(trained.model, LIMIT)
    location, device = EmbeddingLocation.HOST, ComputeDevice.CPU
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(SIZES["a"], DIM, location, device)],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=RATE,
        eps=EPS,
        gradient_clipping=True,
        max_gradient=LIMIT,
    )
    weight = trained.model.state_dict()["bags.embedding_bags.a__p0.weight"].local_shards()[0].tensor
    tbe.split_embedding_weights()[0].copy_(weight)
    for number in range(STEPS):
        features = batch(number, 0, ROWS)["a"]
        gradient = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(number)) * LIMIT
        trained.before_step(number)
        trained.model(batch(number, 0, ROWS)).backward(gradient)
        tbe(features.values(), features.offsets().long()).backward(gradient)
    assert torch.equal(tbe.split_embedding_weights()[0], weight)


class OneTable(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        full = CompositionalEmbeddingBagCollection([_full("a")], device=device)
        self.bags = full

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.bags(features)["a"]


def _full(name: str) -> Any:
    (table,) = (table for table in tables() if table.name == "d")
    return type(table)(name, SIZES[name], DIM, [name], kernel="fbgemm")


@pytest.mark.distributed
def test_a_full_table_has_the_clipping_of_fbgemm() -> None:
    run_on_ranks(1, check_full_table)


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_run_with_a_limit_is_the_same_on_two_ranks(config: Path, tmp_path: Path) -> None:
    limit = "train.sparse_optimizer.max_gradient=0.0001"
    call("train", config, "train.max_steps=5", "--run-dir", tmp_path / "free")
    call("train", config, "train.max_steps=5", limit, "--run-dir", tmp_path / "one")
    distembed("train", config, "train.max_steps=5", limit, "--run-dir", tmp_path / "two", ranks=2)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert losses(tmp_path / "free") != pytest.approx(losses(tmp_path / "one"), rel=1e-4)


def test_the_limit_is_a_positive_number(config: Path) -> None:
    assert SparseOptimizerConfig().max_gradient is None
    for limit in ("0.0", "-1.0", ".inf"):
        with pytest.raises(UserError, match=r"train\.sparse_optimizer\.max_gradient"):
            load_config(config, [f"train.sparse_optimizer.max_gradient={limit}"])
