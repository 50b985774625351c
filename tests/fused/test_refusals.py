"""Tables that cannot be looked up in one pass: refused by name where that is asked for, else looked up by FBGEMM."""

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import PathMLP, Sum
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.kernels import loading
from distembed.partitions import Explicit, Naive, QuotientRemainder, Remainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.sharding.groups.fused import FusedGroup, is_faster_alone
from distembed.sharding.lookup import sharded_lookups
from tests.placing import shard_as
from tests.ranks import free_port, run_on_ranks, start

NUM_IDS = 64
PLAIN: dict[str, Any] = {"partition": QuotientRemainder(NUM_IDS, collisions=4)}
EXPLICIT = Explicit(NUM_IDS, [torch.arange(NUM_IDS) // 8, torch.arange(NUM_IDS) % 8])
RATE = {"lr": 0.1, "eps": 1e-2}
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, str]
"""Settings of the table, of the optimizer and of FBGEMM's tables; the sharding type; the reason that is given."""


class Doubled(Sum):
    """A composition of one's own, which the formula of its base is not."""

    name = "doubled"

    def compose(self, vectors: Sequence[Tensor]) -> Tensor:
        return 2 * super().compose(vectors)


CASES: list[Case] = [
    (PLAIN | {"composition": Doubled()}, RATE, {}, "table_wise", "the kernels have no formula of doubled"),
    (PLAIN | {"pooling": "max"}, RATE, {}, "table_wise", "pooling is max"),
    (
        PLAIN | {"composition": PathMLP(hidden=[5])},
        RATE,
        {},
        "table_wise",
        "path_mlp does not compose column by column",
    ),
    ({"partition": EXPLICIT}, RATE, {}, "table_wise", "rows of explicit are not digits of ids"),
    (PLAIN | {"data_type": "BF16"}, RATE, {}, "data_parallel", "data_type is BF16"),
    (PLAIN | {"embedding_dim": 6}, RATE, {}, "data_parallel", "a number of columns is no multiple of 4"),
    (PLAIN, RATE | {"weight_decay": 0.1}, {}, "table_wise", "weight_decay is 0.1"),
    (PLAIN, RATE, {"gradient_clipping": True, "max_gradient": 0.01}, "table_wise", "gradient_clipping is True"),
    (PLAIN, RATE, {"output_dtype": None}, "table_wise", ""),
]


def build(case: Case, kernel: str) -> DistributedModelParallel:
    settings, rate, fused_params, sharding_type, _ = case
    table = CompositionalEmbeddingBagConfig("clicks", NUM_IDS, settings.get("embedding_dim", 8), ["f"])
    table = dataclasses.replace(table, **settings, kernel=kernel)
    model = nn.Module()
    model.embeddings = CompositionalEmbeddingBagCollection([table], device="meta")
    apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.embedding_bags.parameters(), dict(rate))
    given = {name: value for name, value in fused_params.items() if value is not None}
    sharders = [CompositionalEmbeddingBagCollectionSharder(fused_params=given or None)]
    return shard_as(model, sharders, {"clicks": sharding_type}, min_partition=None)


def is_fused(model: DistributedModelParallel) -> bool:
    return any(isinstance(group, FusedGroup) for lookup in sharded_lookups(model) for group in lookup._groups)


def numbers(model: DistributedModelParallel) -> list[Tensor]:
    """Outputs of three steps, and the weights behind them."""
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        lengths = torch.randint(0, 4, (6,), generator=generator)
        ids = torch.randint(0, NUM_IDS, (int(lengths.sum()),), generator=generator)
        output = model.module.embeddings(KeyedJaggedTensor(["f"], ids, lengths=lengths)).values()
        found.append(output.detach())
        output.square().sum().backward()
    state = model.state_dict().values()
    return found + [one.local_tensor() if hasattr(one, "local_tensor") else one for one in state]


def check_cases(rank: int, world_size: int) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    for case in CASES:
        auto, unfused = build(case, "auto"), build(case, "fbgemm")
        assert is_fused(auto) == (not case[-1]) and not is_fused(unfused), case
        for own, expected in zip(numbers(auto), numbers(unfused), strict=True):
            if case[-1]:
                assert torch.equal(own, expected), case
            else:
                torch.testing.assert_close(own, expected)
        if not case[-1]:
            assert is_fused(build(case, "fused"))
            continue
        check_refused(lambda case=case: build(case, "fused"), case[-1])
    for partition in (Naive(NUM_IDS), Remainder(NUM_IDS, collisions=4)):
        case = ({"partition": partition}, RATE, {}, "table_wise", "")
        auto, unfused = build(case, "auto"), build(case, "fbgemm")
        assert is_fused(auto) == is_faster_alone("row_wise_adagrad") and not is_fused(unfused)
        for own, expected in zip(numbers(auto), numbers(unfused), strict=True):
            torch.testing.assert_close(own, expected)


def check_refused(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    text = str(caught.value)
    assert text.startswith("table 'clicks' has kernel='fused', but cannot be looked up in one pass, because "), text
    assert reason in text and text.endswith("give it kernel='auto', which takes FBGEMM's lookups then."), text


@pytest.mark.distributed
def test_what_it_does_not_have_is_refused_by_name_and_left_to_fbgemm_by_auto() -> None:
    run_on_ranks(1, check_cases)


def check_without_numba(rank: int, world_size: int) -> None:
    assert not any(name.startswith("numba") for name in sys.modules)
    sys.modules["numba"] = None  # type: ignore[assignment]
    check_left_to_fbgemm("pip install numba")


def check_left_to_fbgemm(reason: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    case: Case = (PLAIN, RATE, {}, "table_wise", "")
    auto, unfused = build(case, "auto"), build(case, "fbgemm")
    assert not is_fused(auto)
    assert all(torch.equal(own, other) for own, other in zip(numbers(auto), numbers(unfused), strict=True))
    check_refused(lambda: build(case, "fused"), reason)


@pytest.mark.thorough
@pytest.mark.distributed
def test_without_numba_fbgemm_looks_up() -> None:
    spawn(start, (1, free_port(), check_without_numba, ()))  # not forked from one that has loaded it


def check_without_compiler(rank: int, world_size: int) -> None:
    tried = []

    def fail(kernel: Any, signature: str) -> None:
        tried.append(kernel)
        raise RuntimeError("no such target")

    loading.load_kernels.cache_clear()
    loading.reason_not_compiled.cache_clear()
    loading._compile = fail
    check_left_to_fbgemm("its kernels cannot be compiled (RuntimeError: no such target)")
    assert len(tried) == 1  # which takes seconds, so it is not tried for every table


@pytest.mark.distributed
def test_where_nothing_can_be_compiled_fbgemm_looks_up() -> None:
    run_on_ranks(1, check_without_compiler)
