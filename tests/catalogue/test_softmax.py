"""The softmax over a catalogue: against all scores at once in float64, and against an untied model held by hand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding import CompositionalEmbeddingCollection
from distembed.embedding.share import ShareColumns, ShareIds, ShareWeight, TableShare
from distembed.models.queries import Catalogue
from distembed.tasks.catalogue.softmax import SoftmaxItems, catalogue_cross_entropy, cross_entropy
from tests.embedding.test_share import COMPOSED, make_table


class Tied(nn.Module):
    """Maps the item of each row to a query by a matrix, and scores it with all items."""

    def __init__(self, scheme: str, composition: str, bias: bool = True, num_reserved: int = 0) -> None:
        super().__init__()
        table = make_table(scheme, composition)
        self.embeddings = CompositionalEmbeddingCollection([table])
        self.catalogue = Catalogue(self, "embeddings", table, bias, num_reserved)
        self.hidden = nn.Linear(8, 8)

    def queries(self, ids: Tensor) -> Tensor:
        features = KeyedJaggedTensor(["item"], ids, lengths=torch.ones_like(ids))
        return torch.tanh(self.hidden(self.embeddings(features)["item"].values()))


def all_vectors(model: Tied) -> Tensor:
    features = KeyedJaggedTensor(["item"], torch.arange(60), lengths=torch.ones(60, dtype=torch.int64))
    return model.embeddings(features)["item"].values()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}


@pytest.mark.parametrize(("scheme", "composition"), COMPOSED)
def test_tied_equals_untied_with_the_same_numbers(scheme: str, composition: str) -> None:
    """An untied model, whose output table is held equal by hand, has the sum of both tables' gradients."""
    torch.manual_seed(0)
    model = Tied(scheme, composition)
    nn.init.normal_(model.catalogue.bias)
    inputs, targets, weights = torch.randint(60, (23,)), torch.randint(60, (23,)), torch.rand(23)
    losses = catalogue_cross_entropy(model.catalogue, model.queries(inputs), targets)
    (losses * weights).sum().backward()
    tied = gradients(model)
    model.zero_grad()
    untied = all_vectors(model).detach().double().requires_grad_()
    bias = model.catalogue.bias.detach().double().requires_grad_()
    scores = model.queries(inputs).double() @ untied.T + bias
    expected = nn.functional.cross_entropy(scores, targets, reduction="none")
    (expected * weights).sum().backward()
    torch.testing.assert_close(losses, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tied["catalogue.bias"], bias.grad.float(), rtol=1e-4, atol=1e-6)
    all_vectors(model).backward(untied.grad.float())  # to the input table's own
    for name, own in gradients(model).items():
        torch.testing.assert_close(tied[name], own, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sizes", [(1, 1), (7, 5), (60, 23), (100, 100)])
@pytest.mark.parametrize("num_queries", [0, 1, 23])
def test_any_tiles_give_the_same(sizes: tuple[int, int], num_queries: int) -> None:
    torch.manual_seed(1)
    model = Tied("quotient_remainder", "product", num_reserved=2)
    nn.init.normal_(model.catalogue.bias)
    vectors = torch.randn(num_queries, 8, requires_grad=True)
    targets = torch.randint(2, 60, (num_queries,))
    items = SoftmaxItems(model.embeddings.share("items"), 2)
    losses = cross_entropy(
        vectors, targets, model.catalogue.bias, replace(items, items_at_once=sizes[0], queries_at_once=sizes[1])
    )
    losses.sum().backward()
    table = all_vectors(model).detach().double()
    reference = vectors.detach().double().requires_grad_()
    scores = reference @ table.T + model.catalogue.bias.detach().double()
    expected = nn.functional.cross_entropy(scores[:, 2:], targets - 2, reduction="none")
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vectors.grad, reference.grad.float(), rtol=1e-4, atol=1e-6)
    assert not model.catalogue.bias.grad[:2].any()


def test_large_scores_are_exact() -> None:
    """Exponentials of such scores are infinite, or all 0."""
    model = Tied("naive", "product", bias=False)
    vectors = torch.randn(9, 8) * 1e5
    vectors.requires_grad_()
    targets = torch.randint(60, (9,))
    losses = catalogue_cross_entropy(model.catalogue, vectors, targets)
    losses.sum().backward()
    reference = vectors.detach().double().requires_grad_()
    expected = nn.functional.cross_entropy(
        reference @ all_vectors(model).detach().double().T, targets, reduction="none"
    )
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.float(), rtol=1e-4, atol=1e-1)
    assert torch.isfinite(vectors.grad).all()


def test_queries_in_bfloat16_have_gradients_in_it() -> None:
    model = Tied("naive", "product")
    vectors = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    losses = catalogue_cross_entropy(model.catalogue, vectors, torch.arange(5))
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert vectors.grad is not None and vectors.grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [("naive", torch.float32), ("quotient_remainder", torch.bfloat16), ("mixed_radix", torch.float32)],
)
def test_nothing_waits_for_a_device(scheme: str, dtype: torch.dtype) -> None:
    """Tensors of the meta device raise where a value is looked at, or where they meet others."""
    table, meta = make_table(scheme, "product"), torch.device("meta")
    with meta:
        parts = table.partition_tables()
        weights = [torch.empty(part.num_rows, part.dim, requires_grad=True) for part in parts]
        columns = ShareColumns(0, 8, [ShareWeight(j, weight) for j, weight in enumerate(weights)])
        items = SoftmaxItems(TableShare(table, ShareIds(0, 60), 60, [columns], meta), 2, 7, 4)
        vectors, bias = torch.empty(9, 8, dtype=dtype, requires_grad=True), torch.empty(60, requires_grad=True)
        cross_entropy(vectors, torch.empty(9, dtype=torch.int64), bias, items).sum().backward()
        assert all(own.grad is not None and own.grad.dtype == own.dtype for own in (vectors, bias, *weights))
