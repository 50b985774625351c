"""Which optimizer trains what, and learning rates over the steps."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from distembed.base.errors import UserError
from distembed.embedding import CompositionalEmbeddingCollection, CompositionalEmbeddingConfig
from distembed.optim.config import DenseOptimizerConfig, ScheduleConfig, SparseOptimizerConfig
from distembed.optim.kinds import OPTIMIZERS, dense_names, row_wise_name, sparse_names, stateless_name
from distembed.optim.live_state import local_shards, optimizer_names, parameter_states, set_step_count
from distembed.optim.optimizers import (
    Optimizers,
    fuse_sparse_optimizer,
    learning_rate_factor,
    table_parameters,
)
from distembed.optim.replicated import ReplicatedOptimizer
from tests.layouts import Head, build, replicated_leaves
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


def test_other_decays() -> None:
    found = factors(decay="exponential", final_factor=0.01)
    assert found[50] == pytest.approx(0.1)
    assert [later / earlier for earlier, later in zip(found, found[1:], strict=False)] == pytest.approx(
        [0.01**0.01] * 99
    )
    found = factors(decay="inverse_sqrt", warmup=0.16)
    assert found[15:17] == pytest.approx([1.0, math.sqrt(16 / 17)])
    assert found[63] == pytest.approx(0.5)
    assert ScheduleConfig(decay="inverse_sqrt").depends_on_length is False
    with pytest.raises(ValueError, match="decay is 'exponential', which never falls to final_factor=0"):
        ScheduleConfig(decay="exponential")


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_short_runs_have_positive_rates(num_steps: int) -> None:
    assert all(factor > 0 for factor in factors(num_steps, warmup=0.9, decay="linear"))


def test_which_optimizers_train_what() -> None:
    assert set(dense_names()) == {"adagrad", "adam", "adamw", "amsgrad", "sgd"}
    only_fused = {"partial_row_wise_adam", "lamb", "partial_row_wise_lamb"}
    assert set(sparse_names()) == {"row_wise_adagrad", "adagrad", "sgd", "amsgrad", "adam", *only_fused}
    assert (stateless_name(), row_wise_name()) == ("sgd", "row_wise_adagrad")


@pytest.mark.parametrize(
    ("section", "name", "message"),
    [
        (DenseOptimizerConfig, "adagrda", "name is 'adagrda', which is not known. Did you mean 'adagrad'?"),
        (SparseOptimizerConfig, "row_wise_adagard", "Did you mean 'row_wise_adagrad'? Known: sgd, adagrad, "),
        (DenseOptimizerConfig, "row_wise_adagrad", "which trains tables only; use one of sgd, adagrad, adam, "),
        (DenseOptimizerConfig, "lamb", "name is 'lamb', which trains tables only"),
        (SparseOptimizerConfig, "adamw", "name is 'adamw', which trains networks only; use one of sgd, adagrad, row"),
        (SparseOptimizerConfig, 3, "valid string"),
    ],
)
def test_other_optimizers_are_refused_by_name(section: type[Any], name: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        section(name=name)


class NamedLikeATable(nn.Module):
    """A network that is no table, whatever its names."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({"C1__p0": nn.Linear(2, 2)})
        self.embedding_bags = nn.ModuleDict({"C1__p0": nn.Linear(2, 2)})


def test_tables_are_what_collections_own() -> None:
    bags = [EmbeddingBagConfig(name="s", embedding_dim=4, num_embeddings=3, feature_names=["s"])]
    sequences = [EmbeddingConfig(name="q", embedding_dim=4, num_embeddings=3, feature_names=["q"])]
    model = nn.ModuleDict(
        {
            "ours": Head("meta"),
            "sequences": CompositionalEmbeddingCollection([CompositionalEmbeddingConfig("e", 9, 4, ["e"])]),
            "stock": EmbeddingBagCollection(bags),
            "stock_sequences": EmbeddingCollection(tables=sequences),
            "network": NamedLikeATable(),
        }
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [names[id(parameter)] for parameter in table_parameters(model)]
    partitions = [f"{table}__p{j}" for table, count in zip("abcde", (2, 2, 1, 1, 2), strict=True) for j in range(count)]
    assert found == [
        *[f"ours.embeddings.embedding_bags.{name}.weight" for name in partitions],
        "sequences.embeddings.e__p0.weight",
        "stock.embedding_bags.s.weight",
        "stock_sequences.embeddings.q.weight",
    ]


def test_what_only_cuda_has_is_refused_by_name_elsewhere() -> None:
    for name in sparse_names():
        weight = nn.Parameter(torch.zeros(2, 4))
        config = SparseOptimizerConfig(name=name)
        if OPTIMIZERS[name].fused_needs_cuda:
            with pytest.raises(UserError, match=f"is '{name}', which FBGEMM has on CUDA only.*use one of .*amsgrad"):
                fuse_sparse_optimizer([weight], config, torch.device("cpu"))
        fuse_sparse_optimizer([weight], config, torch.device("cuda"))
        assert config.is_fused != (name == "amsgrad")
        assert hasattr(weight, "_optimizer_classes") == (name != "amsgrad")


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
            vectors = {name for name in trained.model.state_dict() if ".embedding_bags." in name}
            assert bool(tables) == (name == "amsgrad")
            # what every rank has: by the same optimizer, within the backward pass
            on_all = list(replicated_leaves(trained.optimizer))
            assert bool(on_all) == (layout != "table_wise" and name != "amsgrad")
            for found in (*tables, *on_all):
                inner = found._inner if isinstance(found, ReplicatedOptimizer) else found._optimizer
                assert type(inner) is kind
                keys = {key if key in vectors else f"embeddings.{key}" for key in found.params}
                assert keys <= vectors
                assert all(parameter.numel() for parameter in found.params.values())
            kinds = optimizer_names(trained.optimizer)
            assert {kind for parameter, kind in kinds.items() if parameter in vectors} <= {name}
            for_ranks: list[dict[str, str]] = [{} for _ in range(world_size)]
            dist.all_gather_object(for_ranks, kinds)
            everything = {parameter for of_rank in for_ranks for parameter in of_rank}
            assert everything == trained.model.state_dict().keys()
    lamb = SparseOptimizerConfig(name="lamb")
    with pytest.raises(UserError, match="'lamb', which only FBGEMM has, but torch trains what every rank has.*__p0"):
        Optimizers(build("data_parallel", "amsgrad").model, DenseOptimizerConfig(), lamb, num_steps=1)


@pytest.mark.thorough
@pytest.mark.distributed
def test_tables_that_are_not_fused_are_trained_by_the_sparse_optimizer_in_torchs_form() -> None:
    run_on_ranks(2, check_who_trains_what)


def check_clipping(rank: int, world_size: int) -> None:
    model = build("table_wise", "sgd", dense="sgd").model
    dense = DenseOptimizerConfig(name="sgd", learning_rate=1.0, clip_norm=0.5)
    optimizers = Optimizers(model, dense, SparseOptimizerConfig(name="sgd"), num_steps=1)
    trained = {name: own for name, own in model.named_parameters() if "embedding_bags" not in name and own.numel()}
    before = {name: own.detach().clone() for name, own in trained.items()}
    for own in trained.values():
        own.grad = torch.full_like(own, 2.0)
    optimizers.combined.step()
    moves = {name: before[name] - own.detach() for name, own in trained.items()}
    networks = torch.cat([own.flatten() for name, own in moves.items() if "functions" not in name])
    # all gradients are equal, and together they have the norm 0.5
    torch.testing.assert_close(networks, torch.full_like(networks, 0.5 / len(networks) ** 0.5))
    functions = [own for name, own in moves.items() if "functions" in name]
    for own in functions:
        torch.testing.assert_close(own, torch.full_like(own, 2.0))
    assert functions


@pytest.mark.distributed
def test_gradients_of_networks_are_scaled_alike_on_all_ranks() -> None:
    run_on_ranks(2, check_clipping)


def test_an_optimizer_without_names_for_its_state_is_refused() -> None:
    for make in (torch.optim.RMSprop, lambda params: torch.optim.SGD(params, momentum=0.9)):
        optimizer = KeyedOptimizerWrapper(dict(nn.Linear(2, 2).named_parameters()), make)
        with pytest.raises(UserError, match=r"is an optimizer whose state a checkpoint has no names for; known: sgd"):
            optimizer_names(CombinedOptimizer([("model", optimizer)]))


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_state_that_torch_has_not_made_yet_is_what_torch_makes(name: str, fused: bool) -> None:
    check_first_state(name, partial(MAKERS[name], fused=fused))


def test_all_optimizers_of_networks_are_among_those() -> None:
    assert MAKERS.keys() == set(dense_names())


def check_first_state(name: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    """That reading the states before the first step changes nothing of what follows."""
    layers = [nn.Linear(3, 2), nn.Linear(3, 2)]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [KeyedOptimizerWrapper(dict(layer.named_parameters()), make) for layer in layers]
    weights = {key: local_shards(value) for key, value in layers[0].state_dict().items()}
    for parameter in parameter_states(OptimizerWrapper(optimizers[0]), weights):
        assert parameter.optimizer == name and list(parameter.values) == list(OPTIMIZERS[name].states)
    for _ in range(2):
        for layer, optimizer in zip(layers, optimizers, strict=True):
            optimizer.zero_grad()
            layer(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()
    for (key, first), second in zip(layers[0].named_parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(first, second)
        made, usual = optimizers[0].state[first], optimizers[1].state[second]
        kept = {state for state, value in usual.items() if value is not None}  # plain SGD has an empty momentum
        assert made.keys() == usual.keys() and len(kept) == len(OPTIMIZERS[name].states) + ("step" in usual), key
        assert all(torch.equal(made[it], usual[it]) and made[it].dtype == usual[it].dtype for it in kept)
        assert ("step" in usual) == OPTIMIZERS[name].counts_steps
    set_step_count(optimizers[0], 5)
    assert all(state["step"] == 5 for state in optimizers[0].state.values() if "step" in state)
