"""Which optimizer trains what, and learning rates over the steps."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.checkpoints.optimizer_state import IS_ROW_WISE, optimizer_kinds, optimizer_states, set_step
from distembed.checkpoints.shards import TensorShards
from distembed.errors import UserError
from distembed.optim.config import DenseOptimizerConfig, ScheduleConfig, SparseOptimizerConfig
from distembed.optim.optimizers import (
    SPARSE_OPTIMIZERS,
    Optimizers,
    fuse_sparse_optimizer,
    is_table,
    learning_rate_factor,
    needs_dense_kernel,
)
from tests.layouts import build
from tests.ranks import run_on_ranks


def factors(num_steps: int = 100, **settings: object) -> list[float]:
    schedule = ScheduleConfig(**settings)  # type: ignore[arg-type]
    return [learning_rate_factor(schedule, step, num_steps) for step in range(num_steps)]


def test_no_schedule_is_constant() -> None:
    assert set(factors()) == {1.0}


def test_warm_up_grows_to_one_in_its_share_of_the_steps() -> None:
    found = factors(warmup=0.1)
    assert found[:11] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])


@pytest.mark.parametrize(("decay", "half"), [("linear", 0.5), ("cosine", 0.5 * (1 + math.cos(math.pi / 2)))])
def test_decay_falls_to_its_final_factor(decay: str, half: float) -> None:
    found = factors(decay=decay)
    assert found[0] == 1.0
    assert found[50] == pytest.approx(half)
    assert found == sorted(found, reverse=True)
    assert learning_rate_factor(ScheduleConfig(decay=decay, final_factor=0.2), 100, 100) == pytest.approx(0.2)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_short_runs_have_positive_rates(num_steps: int) -> None:
    assert all(factor > 0 for factor in factors(num_steps, warmup=0.9, decay="linear"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.embeddings.embedding_bags.C1__p0.weight", True),
        ("embeddings.C1__p12.weight", True),
        ("model.embeddings.functions.C1__p1", False),
        ("model.top.0.weight", False),
        ("model.my_embeddings.C1__p0.weight", False),
    ],
)
def test_tables_are_known_by_their_names(name: str, expected: bool) -> None:
    assert is_table(name) == expected


def test_what_only_cuda_has_is_refused_by_name_elsewhere() -> None:
    for name, optimizer in SPARSE_OPTIMIZERS.items():
        weight = nn.Parameter(torch.zeros(2, 4))
        config = SparseOptimizerConfig(name=name)  # type: ignore[arg-type]
        if optimizer.needs_cuda:
            with pytest.raises(UserError, match=f"is '{name}', which FBGEMM has on CUDA only.*use one of .*amsgrad"):
                fuse_sparse_optimizer([weight], config, torch.device("cpu"))
        fuse_sparse_optimizer([weight], config, torch.device("cuda"))
        assert needs_dense_kernel(config) == (name == "amsgrad")
        assert hasattr(weight, "_optimizer_classes") == (name != "amsgrad")
        assert name in IS_ROW_WISE


def check_who_trains_what(rank: int, world_size: int) -> None:
    classes = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "row_wise_adagrad": RowWiseAdagrad}
    for layout in ("table_wise", "row_wise", "data_parallel"):
        for name, kind in {**classes, "amsgrad": torch.optim.Adam}.items():
            trained = build(layout, name, dense="adamw")
            assert isinstance(trained.optimizer, CombinedOptimizer)
            by_torch = [found for _, found in trained.optimizer.optimizers if isinstance(found, KeyedOptimizerWrapper)]
            (networks,) = (found for found in by_torch if isinstance(found._optimizer, torch.optim.AdamW))
            assert set(networks.params) == {"linear.weight", "linear.bias", "embeddings.functions.c__p1"}
            tables = [found for found in by_torch if found is not networks]
            assert bool(tables) == (layout != "table_wise" or name == "amsgrad")
            for found in tables:
                assert type(found._optimizer) is kind and all(map(is_table, found.params))
                assert all(parameter.numel() for parameter in found.params.values())
            kinds = optimizer_kinds(trained.optimizer)
            assert {kind for parameter, kind in kinds.items() if is_table(parameter)} <= {name}
            of_ranks: list[dict[str, str]] = [{} for _ in range(world_size)]
            dist.all_gather_object(of_ranks, kinds)
            everything = {parameter for of_rank in of_ranks for parameter in of_rank}
            assert everything == trained.model.state_dict().keys()
    lamb = SparseOptimizerConfig(name="lamb")
    with pytest.raises(UserError, match="'lamb', which only FBGEMM has, but torch trains what every rank has.*__p0"):
        Optimizers(build("data_parallel", "sgd").model, DenseOptimizerConfig(), lamb, num_steps=1)


@pytest.mark.distributed
def test_tables_that_are_not_fused_are_trained_by_the_sparse_optimizer_in_torchs_form() -> None:
    run_on_ranks(2, check_who_trains_what)


def test_an_optimizer_without_names_for_its_state_is_refused() -> None:
    for make in (torch.optim.RMSprop, lambda params: torch.optim.SGD(params, momentum=0.9)):
        optimizer = KeyedOptimizerWrapper(dict(nn.Linear(2, 2).named_parameters()), make)
        with pytest.raises(UserError, match=r"is an optimizer whose state a checkpoint has no names for; known: sgd"):
            optimizer_kinds(CombinedOptimizer([("model", optimizer)]))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_that_torch_has_not_made_yet_is_what_torch_makes(fused: bool, amsgrad: bool) -> None:
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [
        KeyedOptimizerWrapper(
            dict(layer.named_parameters()), lambda params: torch.optim.AdamW(params, fused=fused, amsgrad=False)
        )
        if not amsgrad
        else KeyedOptimizerWrapper(
            dict(layer.named_parameters()), lambda params: torch.optim.Adam(params, fused=fused, amsgrad=True)
        )
        for layer in layers
    ]
    weights = {name: TensorShards.of(value) for name, value in layers[0].state_dict().items()}
    kind = "amsgrad" if amsgrad else "adamw"
    for parameter in optimizer_states(OptimizerWrapper(optimizers[0]), weights):
        assert parameter.kind == kind and list(parameter.states) == list(IS_ROW_WISE[kind])
    for _ in range(2):
        for layer, optimizer in zip(layers, optimizers, strict=True):
            optimizer.zero_grad()
            layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
    for (name, first), second in zip(layers[0].named_parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(first, second)
        made, usual = optimizers[0].state[first], optimizers[1].state[second]
        assert made.keys() == usual.keys(), name
        assert all(torch.equal(made[key], usual[key]) and made[key].dtype == usual[key].dtype for key in usual)
    set_step(optimizers[0], 5)
    assert all(state["step"] == 5 for state in optimizers[0].state.values())
