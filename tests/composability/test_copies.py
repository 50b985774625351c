"""Copies, state dicts, dtypes, devices and parameters: of TorchRec's collections, and of ours."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from distembed.composition import COMPOSITIONS, Concat, PathMLP
from distembed.embedding import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig
from distembed.graph import Graph
from distembed.partitions import PARTITIONS, KeyedHash
from distembed.sse import SSE
from tests.composability.small_models import KINDS, NUM_IDS, SmallModel, draw, our_model, our_tables, stock_model

MODELS = [
    pytest.param(make, kind, id=f"{name}, {kind}")
    for name, make in (("stock", stock_model), ("ours", our_model))
    for kind in KINDS
]
each_model = pytest.mark.parametrize(("make", "kind"), MODELS)
Make = Callable[[str], SmallModel]


def saved(model: nn.Module) -> dict[str, Tensor]:
    """A state dict that was saved, and loaded without any code in it."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def other_weights(model: SmallModel) -> SmallModel:
    """The same model, each of whose numbers differs."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)
    return model


def on_meta(model: SmallModel) -> SmallModel:
    return copy.deepcopy(model).to("meta")


def loaded(model: SmallModel, make: Make, kind: str) -> SmallModel:
    other = other_weights(make(kind))
    other.load_state_dict(saved(model), strict=True)
    return other


def assigned(model: SmallModel, make: Make, kind: str) -> SmallModel:
    other = on_meta(model)
    other.load_state_dict(saved(model), strict=True, assign=True)
    return other


def emptied(model: SmallModel, make: Make, kind: str) -> SmallModel:
    other = on_meta(model).to_empty(device="cpu")
    other.load_state_dict(saved(model))
    return other


COPIES: dict[str, Callable[[SmallModel, Make, str], SmallModel]] = {
    "copy.deepcopy": lambda model, make, kind: copy.deepcopy(model),
    "pickle": lambda model, make, kind: pickle.loads(pickle.dumps(model)),
    "load_state_dict": loaded,
    "load_state_dict, assign": assigned,
    "to_empty": emptied,
}


@each_model
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_gives_the_same_and_has_weights_of_its_own(make: Make, kind: str, way: str) -> None:
    model = make(kind)
    inputs = draw(model, 5, 0)
    expected = model(*inputs)
    copied = COPIES[way](model, make, kind)
    assert torch.equal(copied(*inputs), expected)
    assert copied.state_dict().keys() == model.state_dict().keys()
    other_weights(copied)
    assert torch.equal(model(*inputs), expected) and not torch.equal(copied(*inputs), expected)


@each_model
def test_a_state_dict_that_does_not_fit_is_refused(make: Make, kind: str) -> None:
    model = make(kind)
    state = model.state_dict()
    name = next(iter(state))
    for wrong, message in (
        ({key: value for key, value in state.items() if key != name}, "Missing key"),
        ({**state, "embeddings.other": state[name]}, "Unexpected key"),
        ({**state, name: state[name][:-1]}, "size mismatch"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(wrong)


@each_model
def test_weights_that_are_made_again_are_the_first(make: Make, kind: str) -> None:
    """Ours, which follow from the seed; stock draws from torch's generator."""
    model = make(kind)
    before = copy.deepcopy(model.embeddings.state_dict())
    embeddings = copy.deepcopy(model.embeddings).to("meta").to_empty(device="cpu")
    embeddings.reset_parameters()
    after = embeddings.state_dict()
    assert after.keys() == before.keys() and all(value.isfinite().all() for value in after.values())
    # stock reads the device that it was made on, and so does nothing where that is meta
    same = all(torch.equal(after[key], before[key]) for key in before)
    assert same == (make is not stock_model)


@each_model
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_give_the_same_but_for_rounding(make: Make, kind: str, dtype: torch.dtype) -> None:
    """What comes out of half precision is float32; of float64, stock rounds it and ours does not.

    Stock's per-sample weights need the tables' dtype, and ours may have any.
    """
    model = make(kind)
    inputs = draw(model, 5, 0)
    expected = model(*inputs)
    model.embeddings.to(dtype)
    assert {parameter.dtype for parameter in model.embeddings.parameters()} == {dtype}
    features: Any = []
    model.embeddings.register_forward_hook(lambda _, __, output: features.append(output))
    if make is stock_model and kind == "weighted bags":
        with pytest.raises(RuntimeError, match="to have the same type"):
            model(*inputs)
        inputs = (*inputs[:3], inputs[3].to(dtype))
    if dtype == torch.float64 and make is not stock_model:
        model.to(dtype)
        inputs = tuple(value.double() if value.is_floating_point() else value for value in inputs)
    output = model(*inputs)
    vectors = features[0][model.keys[0]]
    found = vectors if isinstance(vectors, Tensor) else vectors.values()
    assert found.dtype == (torch.float64 if dtype == torch.float64 and make is not stock_model else torch.float32)
    torch.testing.assert_close(output.float(), expected, atol=0.02, rtol=0.02)
    output.sum().backward()
    assert all(parameter.grad.dtype == parameter.dtype for parameter in model.parameters())


@each_model
def test_functional_calls_and_their_gradients(make: Make, kind: str) -> None:
    model = make(kind)
    inputs = draw(model, 5, 0)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    doubled = {name: 2 * value for name, value in parameters.items()}
    model(*inputs).square().sum().backward()

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, given, inputs).square().sum()

    gradients = torch.func.grad(loss)(parameters)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    other = copy.deepcopy(model)
    other.load_state_dict({**other.state_dict(), **doubled})
    assert torch.equal(loss(doubled), other(*inputs).square().sum())


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@each_model
def test_weights_are_parametrised(make: Make, kind: str) -> None:
    model = make(kind)
    inputs = draw(model, 5, 0)
    holders = [m for m in model.embeddings.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    expected_model = copy.deepcopy(model)
    with torch.no_grad():
        for other in expected_model.embeddings.modules():
            if isinstance(other, (nn.Embedding, nn.EmbeddingBag)):
                other.weight.mul_(2)
    for holder in holders:
        nn.utils.parametrize.register_parametrization(holder, "weight", Doubled())
    assert torch.equal(model(*inputs), expected_model(*inputs))
    model(*inputs).square().sum().backward()
    assert all(holder.parametrizations.weight.original.grad is not None for holder in holders)


@each_model
def test_parameters_are_those_of_any_module(make: Make, kind: str) -> None:
    """Named by table, in order, with gradients that are set, cleared and left out as usual."""
    model = make(kind)
    inputs = draw(model, 5, 0)
    names = [name for name, _ in model.named_parameters()]
    weights = [name for name in model.state_dict() if not name.endswith(("__assignment", "__keys"))]
    assert names == weights and len(set(map(id, model.parameters()))) == len(names)
    at = "embeddings.embeddings" if kind == "sequences" else "embeddings.embedding_bags"
    lookups = [name for name in names if name.startswith(at)]
    if make is stock_model:
        assert lookups == [f"{at}.t0.weight"]
    else:
        tables = model.embeddings.tables()
        assert lookups == [f"{at}.{part.name}.weight" for table in tables for part in table.lookup_tables()]
        functions = [f"embeddings.functions.{part.name}" for table in tables for part in table.function_tables()]
        assert set(names) == {*lookups, *functions, *[name for name in names if not name.startswith("embeddings.")]}
    model(*inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.embeddings.requires_grad_(False)
    model(*inputs).sum().backward()
    with_gradients = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradients == {name for name in names if not name.startswith("embeddings.")}
    assert torch.equal(model.eval()(*inputs), model.train()(*inputs))
    assert not any(module.training for module in model.eval().modules())


def equal_configs() -> list[Callable[[], Any]]:
    """Each makes a config, the same in each call, and different from those of the others."""
    bags = CompositionalEmbeddingBagConfig
    of_each = [
        lambda scheme=scheme, composition=composition: our_tables(bags, [(scheme, composition)])[0]
        for scheme, composition in itertools.product(PARTITIONS, COMPOSITIONS)
    ]

    def sse(target: int) -> SSE:
        return SSE(p0=0.1, rho=2.0, graph=Graph.from_edges(NUM_IDS, [0, 1], [5, target]))

    return [
        *of_each,
        lambda: bags("t", NUM_IDS, 8, ["f"]),
        lambda: CompositionalEmbeddingConfig("t", NUM_IDS, 8, ["f"]),
        lambda: bags("t", NUM_IDS, 8, ["g"]),
        lambda: bags("t", NUM_IDS, 16, ["f"]),
        lambda: bags("t", NUM_IDS, 8, ["f"], pooling="mean"),
        lambda: bags("t", NUM_IDS, 8, ["f"], pre_hash=KeyedHash(3)),
        lambda: bags("t", NUM_IDS, 8, ["f"], sse=sse(6)),
        lambda: bags("t", NUM_IDS, 8, ["f"], sse=sse(7)),
        lambda: bags("t", NUM_IDS, 8, ["f"], sse={"f": SSE(p0=0.5)}),
        lambda: bags("t", NUM_IDS, 8, ["f"], "quotient_remainder", Concat([4, 4])),
        lambda: bags("t", NUM_IDS, 8, ["f"], "quotient_remainder", Concat([2, 6])),
        lambda: bags("t", NUM_IDS, 8, ["f"], PARTITIONS["quotient_remainder"](NUM_IDS, collisions=2)),
        lambda: bags("t", NUM_IDS, 8, ["f"], PARTITIONS["explicit"](NUM_IDS, [range(NUM_IDS)])),
        lambda: bags("t", NUM_IDS, 8, ["f"], PARTITIONS["explicit"](NUM_IDS, [range(NUM_IDS)[::-1]])),
        lambda: bags("t", NUM_IDS, 8, ["f"], "quotient_remainder", PathMLP([5], "tanh")),
        lambda: bags("t", NUM_IDS, 8, ["f"], "quotient_remainder", PathMLP([7], "tanh")),
    ]


def test_equal_configs_are_equal() -> None:
    """TorchRec's are where they are given one ``init_fn``; ours may be members of sets too, unless they hold a dict."""

    def stock(**settings: Any) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=NUM_IDS, feature_names=["f"], **settings)

    assert EmbeddingBagConfig.__hash__ is None and stock() != stock()
    assert stock(init_fn=nn.init.zeros_) == stock(init_fn=nn.init.zeros_)
    made = [make() for make in equal_configs()]
    for i, make in enumerate(equal_configs()):
        for same in (make(), copy.deepcopy(made[i]), pickle.loads(pickle.dumps(made[i]))):
            assert same == made[i]
            if not isinstance(same.sse, dict):
                assert hash(same) == hash(made[i])
        assert [j for j, other in enumerate(made) if other == made[i]] == [i]


def test_equal_partitions_are_equal_once_they_were_used() -> None:
    for scheme in PARTITIONS:
        first, second = (our_tables(CompositionalEmbeddingBagConfig, [(scheme, "sum")])[0].scheme for _ in range(2))
        assert first.is_complementary() == second.is_complementary()
        first.rows(torch.arange(NUM_IDS))
        assert first == second and first != object()
