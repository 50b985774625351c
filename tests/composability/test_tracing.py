"""``torch.export``, ``torch.fx`` and ``torch.jit``: with TorchRec's collections, and with ours."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec.fx
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.embedding import CompositionalEmbeddingBag
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

OTHER_BATCHES = (*BATCHES, (2, 5, 3), (9, 6, 1))
# TorchRec's own collection does as much, which the slow tests show
each_model = pytest.mark.parametrize("is_ours", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["", "stock"])


def exported(model: nn.Module, inputs: tuple[Tensor, ...], strict: bool) -> Callable[..., Tensor]:
    """What is left of a model after ``torch.export``, saved and loaded again; first dims of inputs may differ."""
    torch._dynamo.reset()
    sizes = {0: torch.export.Dim.AUTO}
    shapes: Any = tuple(dict(sizes) for _ in inputs)
    weights = (shapes[3],) if len(inputs) > 3 else ()
    program = torch.export.export(model, inputs, dynamic_shapes=(*shapes[:3], *weights), strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def require_same_scores(found: Callable[..., Tensor], model: SmallModel) -> None:
    for num_rows, seed, most_ids in OTHER_BATCHES:
        inputs = draw(model, num_rows, seed, most_ids)
        torch.testing.assert_close(found(*inputs), model(*inputs))


@pytest.mark.thorough
@each_model
@pytest.mark.parametrize(
    ("kind", "strict"),
    [
        *[(kind, False) for kind in KINDS],
        ("bags", True),
        pytest.param("weighted bags", True, marks=pytest.mark.slow),
        pytest.param("sequences", True, marks=pytest.mark.slow),
    ],
)
def test_an_exported_model_gives_the_same(kind: str, strict: bool, is_ours: bool) -> None:
    """Each scheme and each composition once, in bags that are not exported strictly."""
    pairs = EACH_ONCE if (kind, strict) == ("bags", False) else ONE
    model = our_model(kind, pairs) if is_ours else stock_model(kind)
    require_same_scores(exported(model, draw(model, 5, 0), strict), model)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_scheme_with_every_composition_is_exported(kind: str, strict: bool) -> None:
    model = our_model(kind, ALL_PAIRS)
    require_same_scores(exported(model, draw(model, 5, 0), strict), model)


def test_an_exported_model_refuses_ids_outside_of_tables() -> None:
    model = our_model("bags", ONE)
    dense, values, lengths = draw(model, 5, 0)
    program = exported(model, (dense, values, lengths), strict=False)
    for wrong in (NUM_IDS, -1):
        with pytest.raises(RuntimeError, match=r"table 't0', feature 'f0': an id lies outside of 0 to 59"):
            program(dense, values.index_fill(0, torch.tensor([0]), wrong), lengths)


@each_model
def test_an_export_that_takes_a_keyed_jagged_tensor_has_its_sizes(is_ours: bool) -> None:
    """The sizes of its tensors cannot be named, and are those of the example."""
    model = our_model("bags", ONE) if is_ours else stock_model("bags")

    def features(dense: Tensor, values: Tensor, lengths: Tensor) -> Any:
        return dense, KeyedJaggedTensor(model.features, values, lengths=lengths)

    inputs = draw(model, 5, 0, most_ids=1)
    program = torch.export.export(TakesFeatures(model), features(*inputs), strict=False).module()
    torch.testing.assert_close(program(*features(*inputs)), model(*inputs))
    with pytest.raises(AssertionError, match="Guard failed"):
        program(*features(*draw(model, 6, 1, most_ids=1)))


TRACERS: dict[str, Callable[[nn.Module], torch.fx.GraphModule]] = {
    "torch.fx": torch.fx.symbolic_trace,
    "torchrec.fx": torchrec.fx.symbolic_trace,
    "torchrec.fx, collections as leaves": lambda model: torchrec.fx.symbolic_trace(
        model, leaf_modules=[type(model.get_submodule("model.embeddings")).__name__]
    ),
}


@each_model
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_traced_model_gives_the_same(tracer: str, kind: str, is_ours: bool) -> None:
    """Names in the state dict stay, copies and pickles work; ours is one node of the graph, and checks ids there."""
    model = our_model(kind) if is_ours else stock_model(kind)
    module = TakesFeatures(model)
    traced = TRACERS[tracer](module)
    assert traced.state_dict().keys() == module.state_dict().keys()
    called = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert called[-2:] == ["model.bottom", "model.top"]
    for copied in (traced, pickle.loads(pickle.dumps(traced))):
        for num_rows, seed, most_ids in OTHER_BATCHES:
            dense, values, lengths, *weights = draw(model, num_rows, seed, most_ids)
            features = KeyedJaggedTensor(model.features, values, lengths=lengths, weights=(*weights, None)[0])
            torch.testing.assert_close(copied(dense, features), model(dense, values, lengths, *weights))
    if not is_ours:
        return
    assert "model.embeddings" in [node.target for node in traced.graph.nodes]
    with pytest.raises(UserError, match="id at position 0 is 60"):
        copied(
            dense, KeyedJaggedTensor(model.features, values.fill_(NUM_IDS), lengths=lengths, weights=features._weights)
        )


@each_model
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_makes_its_batch_is_traced(kind: str, is_ours: bool) -> None:
    """From plain tensors, as a server may have them."""
    model = our_model(kind, ONE) if is_ours else stock_model(kind)
    given = {} if kind == "weighted bags" else {"weights": None}
    require_same_scores(torch.fx.symbolic_trace(model, concrete_args=given), model)


def test_the_bag_for_any_model_is_traced_as_a_leaf() -> None:
    module = nn.Sequential(CompositionalEmbeddingBag(NUM_IDS, 8, seed=0), nn.Linear(8, 1))
    traced = torch.fx.symbolic_trace(module)
    for size in ((2, 3), (4, 5)):
        ids = torch.randint(NUM_IDS, size)
        torch.testing.assert_close(traced(ids), module(ids))


def test_scripts_are_refused_with_the_way_that_works() -> None:
    modules = [
        our_model("bags", ONE),
        our_model("sequences", ONE),
        nn.Sequential(CompositionalEmbeddingBag(NUM_IDS, 8)),
    ]
    for module in modules:
        with pytest.raises(UserError, match=r"torch.jit.script does not compile a Compositional\w+; use torch.export"):
            torch.jit.script(module)


@each_model
@pytest.mark.parametrize("kind", KINDS)
def test_a_jit_trace_takes_the_sizes_of_its_example(kind: str, is_ours: bool) -> None:
    """Other ids are looked up, and ids outside of tables refused."""
    model = our_model(kind) if is_ours else stock_model(kind)
    said = "feature 'f0': an id lies outside of 0 to 59" if is_ours else "valid range|out of range"
    dense, values, lengths, *weights = draw(model, 5, 0)
    traced = torch.jit.trace(model, (dense, values, lengths, *weights))
    others = (7 * values + 3) % NUM_IDS
    torch.testing.assert_close(traced(dense, others, lengths, *weights), model(dense, others, lengths, *weights))
    for wrong in (NUM_IDS, -1):
        with pytest.raises((RuntimeError, torch.jit.Error), match=said):
            traced(dense, values.index_fill(0, torch.tensor([0]), wrong), lengths, *weights)
    with pytest.raises(RuntimeError, match="split_sizes"):
        traced(*draw(model, 7, 1))
