"""``torch.compile`` of whole unsharded models: with TorchRec's collections, and with ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.pt2.utils import kjt_for_pt2_tracing
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.embedding import CompositionalEmbeddingBag
from distembed.sse import SSE
from tests.composability.small_models import (
    ALL_PAIRS,
    BATCHES,
    EACH_ONCE,
    KINDS,
    NUM_IDS,
    ONE,
    SmallModel,
    TakesFeatures,
    draw,
    our_model,
    stock_model,
)

BOTH = [
    pytest.param(lambda kind: stock_model(kind), id="stock", marks=pytest.mark.slow),
    pytest.param(lambda kind: our_model(kind, ONE), id="ours"),
]
# what any backend is given, without a C++ compiler
EAGER = "aot_eager"


def compiled(module: nn.Module, fullgraph: bool, backend: str = EAGER, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(module, backend=backend, fullgraph=fullgraph, **options)


def num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def steps(function: Callable[..., Tensor], model: nn.Module, *inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and gradients of all parameters."""
    model.zero_grad()
    output = function(*inputs)
    output.square().sum().backward()
    return output.detach(), [parameter.grad for parameter in model.parameters()]


def require_same(model: SmallModel, fullgraph: bool, backend: str = EAGER, batches: Any = BATCHES) -> int:
    """Compares a compiled model with the model itself; returns how many programs were compiled."""
    function = compiled(model, fullgraph, backend)
    for num_rows, seed, most_ids in batches:
        inputs = draw(model, num_rows, seed, most_ids)
        torch.testing.assert_close(steps(function, model, *inputs), steps(model, model, *inputs))
    return num_graphs()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "fullgraph"),
    [
        ("bags", False),
        pytest.param("bags", True, marks=pytest.mark.slow),
        pytest.param("weighted bags", False, marks=pytest.mark.slow),
        pytest.param("weighted bags", True, marks=pytest.mark.slow),
        pytest.param("sequences", False, marks=pytest.mark.slow),
        pytest.param("sequences", True, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_takes_the_steps_of_an_uncompiled_one(kind: str, fullgraph: bool) -> None:
    """Ours is compiled to no more programs than stock, however many sizes batches have."""
    num_stock = require_same(stock_model(kind), fullgraph)
    assert require_same(our_model(kind, ONE), fullgraph) <= num_stock


@pytest.mark.thorough
def test_each_scheme_and_each_composition_compiles() -> None:
    assert require_same(our_model("bags"), fullgraph=True, batches=BATCHES[:1]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_scheme_with_every_composition_compiles(kind: str) -> None:
    require_same(our_model(kind, ALL_PAIRS), fullgraph=True, batches=BATCHES[:1])
    require_same(our_model(kind), fullgraph=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_inductor_compiles_all_of_it(kind: str) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(f"inductor needs a C++ compiler: {error}")
    for model in (stock_model(kind), our_model(kind, EACH_ONCE)):
        require_same(model, fullgraph=True, backend="inductor")


@pytest.mark.thorough
@pytest.mark.parametrize("make", BOTH)
def test_a_compiled_model_takes_keyed_jagged_tensors(make: Callable[[str], SmallModel]) -> None:
    """Fresh ones, ones that were used before, and ones of unknown size, as TorchRec prepares them."""
    model = make("weighted bags")
    module = TakesFeatures(model)
    function = compiled(module, fullgraph=True)
    for num_rows, seed, most_ids in BATCHES[:1]:
        dense, values, lengths, weights = draw(model, num_rows, seed, most_ids)
        expected = model(dense, values, lengths, weights)
        used = KeyedJaggedTensor(model.features, values, lengths=lengths, weights=weights)
        used.to_dict()
        for features in (
            KeyedJaggedTensor(model.features, values, lengths=lengths, weights=weights),
            used,
            kjt_for_pt2_tracing(KeyedJaggedTensor(model.features, values, lengths=lengths, weights=weights)),
        ):
            torch.testing.assert_close(function(dense, features), expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", BOTH)
def test_batch_sizes_for_each_feature_compile(make: Callable[[str], SmallModel]) -> None:
    model = make("bags")
    function = compiled(TakesFeatures(model), fullgraph=True)
    for seed, sizes in enumerate(([2, 4], [5, 3])):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (sum(sizes),), generator=generator)
        values = torch.randint(NUM_IDS, (int(lengths.sum()),), generator=generator)
        rows = torch.stack([torch.randint(size, (6,), generator=generator) for size in sizes])
        dense = torch.rand(6, 3, generator=generator)

        def features(lengths: Tensor = lengths, values: Tensor = values, sizes: Any = sizes, rows: Any = rows) -> Any:
            return KeyedJaggedTensor(
                model.features,
                values,
                lengths=lengths,
                stride_per_key_per_rank=[[size] for size in sizes],
                inverse_indices=(model.features, rows),
            )

        torch.testing.assert_close(function(dense, features()), model.score(dense, features()))


NAMED = r"table 't0', feature 'f0': an id lies outside of 0 to 59 .* run the batch uncompiled to see which"
# torch's own words, or ours
SUMS = r"Eq\(u0 \+ u1|[Ss]plit.sizes|do not divide the ids into bags"
BROKEN: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], str]] = {
    "an id too large": (lambda values, lengths: (values.index_fill(0, torch.tensor([0]), NUM_IDS), lengths), NAMED),
    "an id below 0": (lambda values, lengths: (values.index_fill(0, torch.tensor([0]), -1), lengths), NAMED),
    "too few ids": (lambda values, lengths: (values[:-1], lengths), SUMS),
    "too many ids": (lambda values, lengths: (torch.cat([values, values[:1]]), lengths), SUMS),
    "a length below 0": (
        lambda values, lengths: (values, lengths + torch.tensor([-9, 9] + [0] * (len(lengths) - 2))),
        "do not divide the ids into bags",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("fullgraph", [pytest.param(False, marks=pytest.mark.slow), True], ids=["default", "fullgraph"])
def test_a_compiled_model_refuses_what_an_uncompiled_one_does(fullgraph: bool) -> None:
    """By a RuntimeError, which names table and feature of an id that is outside; never by another row's vector."""
    model = our_model("bags", [("remainder", "sum")])
    function = compiled(model, fullgraph)
    dense, values, lengths = draw(model, 4, 0)
    function(dense, values, lengths)
    for name, (spoil, message) in BROKEN.items():
        broken = spoil(values, lengths)
        with pytest.raises(UserError):
            model(dense, *broken)
        with pytest.raises((RuntimeError, UserError), match=message):
            pytest.fail(f"{name}: {function(dense, *broken)}")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings", [pytest.param({"id_policy": "modulo"}, marks=pytest.mark.slow), {"id_policy": "clip_to_oov"}], ids=str
)
def test_a_compiled_model_maps_ids_as_an_uncompiled_one(settings: dict[str, Any]) -> None:
    model = our_model("bags", ONE, **settings)
    function = compiled(model, fullgraph=True)
    dense, values, lengths = draw(model, 4, 0)
    values = values - 7 + 40 * (values % 3)
    assert values.min() < 0 and values.max() >= NUM_IDS
    torch.testing.assert_close(function(dense, values, lengths), model(dense, values, lengths))


@pytest.mark.slow
def test_replaced_ids_are_those_of_an_uncompiled_model() -> None:
    """Random ids (SSE) are drawn between programs; a single program, which cannot, says so."""
    model, reference = (our_model("bags", ONE, sse=SSE(p0=0.5)) for _ in range(2))
    function = compiled(model, fullgraph=False)
    for seed in range(2):
        inputs = draw(model, 20, seed, most_ids=1)
        torch.testing.assert_close(steps(function, model, *inputs), steps(reference, reference, *inputs))
    assert model.embeddings.sse.take_counts() == reference.embeddings.sse.take_counts()
    whole = compiled(model, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ids are replaced in training"):
        whole(*inputs)
    model.eval()
    torch.testing.assert_close(whole(*inputs), reference.eval()(*inputs))


@pytest.mark.parametrize(
    ("mode", "composition"),
    [
        ("mean", "product"),
        *[pytest.param(*pair, marks=pytest.mark.slow) for pair in (("sum", "path_mlp"), ("max", "sum"))],
    ],
)
def test_the_bag_for_any_model_compiles(mode: Any, composition: str) -> None:
    module = CompositionalEmbeddingBag(NUM_IDS, 8, composition=composition, mode=mode, seed=0)
    function = compiled(module, fullgraph=True, dynamic=True)
    for num_rows in (3, 5):
        ids, offsets = torch.arange(3 * num_rows) % NUM_IDS, torch.arange(num_rows) * 2
        torch.testing.assert_close(steps(function, module, ids, offsets), steps(module, module, ids, offsets))
    with pytest.raises(RuntimeError, match="an id lies outside of 0 to 59"):
        function(torch.full((6,), NUM_IDS), torch.tensor([0, 3, 4]))
