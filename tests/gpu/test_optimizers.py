"""All of FBGEMM's fused optimizers, sharded on the device, against dense optimizers on the CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Ranks
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.optim.config import SparseOptimizerConfig
from distembed.optim.kinds import OPTIMIZERS, NumberPer
from distembed.optim.live_state import local_shards, parameter_states
from distembed.partitions import QuotientRemainder
from tests.gpu.formulas import FORMULAS, FormulaOptimizer, kernels_on_a_processor
from tests.gpu.models import DENSE, Head, mean_square, shard

N, DIM, STEPS, RATE, EPS = 60, 8, 4, 0.05, 1e-3
FUSED = [name for name, kind in OPTIMIZERS.items() if kind.fused_class is not None]
DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params, lr, eps: torch.optim.SGD(params, lr=lr),
    "adagrad": torch.optim.Adagrad,
    "row_wise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
} | {name: partial(FormulaOptimizer, formula=formula) for name, formula in FORMULAS.items() if name != "adam"}


def tables() -> list[CompositionalEmbeddingBagConfig]:
    make = CompositionalEmbeddingBagConfig
    return [
        make("a", N, DIM, ["a"], QuotientRemainder(N, collisions=4), "product"),
        make("b", N, DIM, ["b"], QuotientRemainder(N, collisions=5), "concat"),
        make("c", N, DIM, ["c"]),
    ]


def batch_of_all_ids(generator: torch.Generator) -> KeyedJaggedTensor:
    """Every id of each table at least once, so that a dense optimizer steps no row that the batch lacks."""
    rows = N + 20
    ids = [torch.cat([torch.randperm(N, generator=generator), torch.randint(N, (20,), generator=generator)])] * 3
    return KeyedJaggedTensor(["a", "b", "c"], torch.cat(ids), lengths=torch.ones(3 * rows).int(), stride=rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUSED)
def test_fused_updates_are_those_of_a_dense_optimizer(name: str, ranks: Ranks) -> None:
    on_cpu = ranks.device.type == "cpu"
    sparse = SparseOptimizerConfig(name=name, learning_rate=RATE, eps=EPS)
    with kernels_on_a_processor() if on_cpu and OPTIMIZERS[name].fused_needs_cuda else nullcontext():
        has_it = torch.device("cuda") if on_cpu else ranks.device
        sharded = shard(Head(tables(), "meta", ranks.device), ranks, sparse=sparse, optimizer_on=has_it)
        reference = Head(tables(), "cpu", torch.device("cpu"))
        vectors = dict(reference.embeddings.embedding_bags.named_parameters())
        optimizers: list[Any] = [
            DENSE_OPTIMIZERS[name](vectors.values(), lr=RATE, eps=EPS),
            torch.optim.SGD(reference.linear.parameters(), lr=DENSE.learning_rate),
        ]
        generator = torch.Generator().manual_seed(0)
        for number in range(STEPS):
            batch = batch_of_all_ids(generator)
            sharded.step(number, batch, mean_square)
            train(reference, optimizers, batch)
        close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
        weights = {key: local_shards(value) for key, value in sharded.model.state_dict().items()}
        for key, weight in vectors.items():
            (held,) = weights[f"embeddings.embedding_bags.{key}"]
            close(held.tensor.cpu(), weight.detach(), msg=lambda text, key=key: f"{key}: {text}")
        found = {own.parameter: own for own in parameter_states(sharded.optimizers.combined, weights)}
        for key, weight in vectors.items():
            own = found[f"embeddings.embedding_bags.{key}"]
            assert own.optimizer == name and list(own.values) == list(OPTIMIZERS[name].states)
            for state, (value,) in own.values.items():
                expected = optimizers[0].state[weight][state]
                if OPTIMIZERS[name].states[state] is NumberPer.ROW:
                    expected = expected.view(-1)
                close(value.cpu(), expected, msg=lambda text, key=key, state=state: f"{key}, {state}: {text}")


def train(model: nn.Module, optimizers: list[Any], batch: KeyedJaggedTensor) -> None:
    model.zero_grad()
    output: Tensor
    output, _ = model(batch)
    mean_square(output).backward()
    for optimizer in optimizers:
        optimizer.step()
