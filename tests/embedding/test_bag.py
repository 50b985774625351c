"""The module for one feature, in the place of ``nn.EmbeddingBag``."""

import pytest
import torch
from torch import nn

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS
from distembed.embedding import CompositionalEmbeddingBag
from distembed.embedding.bag import pool
from distembed.partitions import QuotientRemainder

IDS = torch.tensor([3, 47, 0, 49, 1, 1, 2])
OFFSETS = torch.tensor([0, 2, 2, 3, 7])  # bags of 2, 0, 1, 4 and 0 ids
MODES = ["sum", "mean", "max"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_a_full_table_equals_embedding_bag(mode: str, kind: torch.dtype, include_last_offset: bool) -> None:
    ours = CompositionalEmbeddingBag(50, 6, "naive", mode=mode, include_last_offset=include_last_offset)  # type: ignore[arg-type]
    theirs = nn.EmbeddingBag(50, 6, mode=mode, include_last_offset=include_last_offset)
    theirs.weight.data.copy_(ours.weights[0])
    ids, offsets = IDS.to(kind), OFFSETS.to(kind)
    calls: list[tuple[torch.Tensor, ...]] = [(ids, offsets), (ids[:6].view(3, 2),), (ids[:6].view(2, 3),)]
    calls += [(ids[:0], offsets[:1]), (ids[:0].view(0, 3),)]
    if mode == "sum":
        calls += [(ids, offsets, torch.randn(7)), (ids[:6].view(3, 2), None, torch.randn(3, 2))]  # type: ignore[list-item]
    for arguments in calls:
        ours.zero_grad(), theirs.zero_grad()
        found, expected = ours(*arguments), theirs(*arguments)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward(), expected.square().sum().backward()
        torch.testing.assert_close(ours.weights[0].grad, theirs.weight.grad)


def test_the_default_is_the_mean_as_in_embedding_bag() -> None:
    ours = CompositionalEmbeddingBag(50, 6, "naive")
    expected = nn.functional.embedding_bag(IDS, ours.weights[0], OFFSETS)
    torch.testing.assert_close(ours(IDS, OFFSETS), expected)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_sparse_gradients_equal_dense_ones(composition: str) -> None:
    dense, sparse = (
        CompositionalEmbeddingBag(50, 6, composition=composition, sparse=sparse, seed=0) for sparse in (False, True)
    )
    for module in (dense, sparse):
        module(IDS, OFFSETS).square().sum().backward()
    num_sparse = len(sparse.table.lookup_tables())
    assert [weight.grad.is_sparse for weight in sparse.weights] == [j < num_sparse for j in range(2)]
    for ours, expected in zip(sparse.weights, dense.weights, strict=True):
        torch.testing.assert_close(ours.grad.to_dense() if ours.grad.is_sparse else ours.grad, expected.grad)


def test_initial_weights_follow_the_seed_or_torchs_generator() -> None:
    def first(**settings: object) -> torch.Tensor:
        return CompositionalEmbeddingBag(50, 6, **settings).weights[0].detach()  # type: ignore[arg-type]

    assert torch.equal(first(seed=1), first(seed=1)) and not torch.equal(first(seed=1), first(seed=2))
    torch.manual_seed(3)
    one, another = first(), first()
    assert not torch.equal(one, another)
    torch.manual_seed(3)
    assert torch.equal(one, first())


def test_weights_made_on_the_meta_device_are_drawn_later() -> None:
    expected = CompositionalEmbeddingBag(50, 6, composition="path_mlp", seed=0)
    module = CompositionalEmbeddingBag(50, 6, composition="path_mlp", seed=0, device="meta").to_empty(device="cpu")
    module.reset_parameters()
    for weight, same in zip(module.weights, expected.weights, strict=True):
        assert torch.equal(weight, same)


def test_it_says_what_it_is() -> None:
    module = CompositionalEmbeddingBag(50, 6, QuotientRemainder(50, num_buckets=10), "path_linear", mode="max")
    assert "50, 6" in repr(module) and "path_linear" in repr(module) and "'max'" in repr(module)
    assert "(10, 5)" in repr(module)


def test_it_is_asked_as_embedding_bag_is() -> None:
    ours, theirs = CompositionalEmbeddingBag(50, 6, mode="max"), nn.EmbeddingBag(50, 6, mode="max")
    for name in ("num_embeddings", "embedding_dim", "mode"):
        assert getattr(ours, name) == getattr(theirs, name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((IDS,), "offsets None"),
        ((IDS.view(7, 1), OFFSETS), "leave offsets out"),
        ((IDS.view(7, 1, 1),), r"\(7, 1, 1\)"),
        ((IDS, OFFSETS.view(5, 1)), r"offsets \(5, 1\)"),
        ((IDS, OFFSETS[1:]), "offsets begin with 2"),
        ((IDS, torch.tensor([0, 5, 3])), "never fall"),
        ((IDS, torch.tensor([0, 8])), "never fall"),
        ((IDS, OFFSETS[:0]), "give each a bag"),
        ((IDS, OFFSETS.double()), "offsets are of torch.float64, .* integers"),
        ((IDS, OFFSETS, torch.ones(6)), r"per_sample_weights has the shape \(6,\)"),
    ],
)
def test_wrong_inputs_are_named(arguments: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CompositionalEmbeddingBag(50, 6)(*arguments)


def test_a_last_offset_that_is_no_end_is_named() -> None:
    with pytest.raises(UserError, match="bags end at 3, for 7 ids"):
        CompositionalEmbeddingBag(50, 6, include_last_offset=True)(IDS, OFFSETS[:-1])


def test_weights_of_a_maximum_are_refused() -> None:
    with pytest.raises(UserError, match="pooling max"):
        CompositionalEmbeddingBag(50, 6, mode="max")(IDS, OFFSETS, torch.ones(7))


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_pooled_gradients(pooling: str) -> None:
    vectors = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([0, 3, 1, 0, 2])
    inputs = (vectors,) if pooling == "max" else (vectors, weights)
    assert torch.autograd.gradcheck(lambda v, w=None: pool(v, lengths, pooling, w), inputs)  # type: ignore[arg-type]


def test_a_maximum_of_negative_numbers_is_negative() -> None:
    found = pool(torch.tensor([[-3.0], [-2.0]]), torch.tensor([2, 0]), "max")
    assert found.tolist() == [[-2.0], [0.0]]
