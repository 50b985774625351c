"""Batches that are not whole: refused by every module for what is wrong with them, as TorchRec's own check refuses."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

from distembed.base.errors import UserError
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.batches import require_whole_batch

F = ["f", "g"]
THREE = torch.tensor([1, 2, 3])
ONES = torch.tensor([1, 1])

BAD_BATCHES: dict[str, tuple[Callable[[], KeyedJaggedTensor], str]] = {
    "a feature twice": (
        lambda: KeyedJaggedTensor(["f", "g", "f"], THREE, lengths=torch.ones(3).int()),
        r"the feature 'f' 2 times \(f, g, f\)",
    ),
    "too many ids": (lambda: KeyedJaggedTensor(F, THREE, lengths=ONES), r"3 ids, .* add up to 2 \(f 1, g 1\)"),
    "too few ids": (lambda: KeyedJaggedTensor(F, THREE[:1], lengths=ONES), r"1 ids, .* add up to 2 \(f 1, g 1\)"),
    "no ids at all": (lambda: KeyedJaggedTensor(F, THREE[:0], lengths=ONES), r"0 ids, .* add up to 2"),
    "ids of no bag": (lambda: KeyedJaggedTensor(F, THREE, lengths=0 * ONES), r"3 ids, .* add up to 0"),
    "ids without rows": (lambda: KeyedJaggedTensor(F, THREE, lengths=ONES[:0]), r"3 ids, .* add up to 0"),
    "counts that are not the lengths'": (
        lambda: KeyedJaggedTensor(F, THREE, lengths=torch.tensor([2, 1]), length_per_key=[1, 2]),
        r"add up to 3 \(f 2, g 1\), and its length_per_key is \[1, 2\]",
    ),
    "a length below 0": (
        lambda: KeyedJaggedTensor(F, THREE, lengths=torch.tensor([2, 2, 0, -1])),
        r"feature 'g': the bag of row 1 has -1 ids",
    ),
    "offsets that begin elsewhere": (
        lambda: KeyedJaggedTensor(F, THREE, offsets=torch.tensor([1, 2, 3])),
        "offsets of the batch begin with 1",
    ),
    "offsets that fall": (
        lambda: KeyedJaggedTensor(F, THREE, offsets=torch.tensor([0, 3, 2, 3, 3])),
        "feature 'f': the bag of row 1 has -1 ids",
    ),
    "offsets past the ids": (
        lambda: KeyedJaggedTensor(F, THREE, offsets=torch.tensor([0, 1, 5])),
        r"3 ids, .* add up to 5 \(f 1, g 4\)",
    ),
    "offsets that stop early": (
        lambda: KeyedJaggedTensor(F, THREE, offsets=torch.tensor([0, 1, 2])),
        r"3 ids, .* add up to 2",
    ),
    "offsets of other lengths": (
        lambda: KeyedJaggedTensor(
            F, THREE, lengths=torch.tensor([1, 1, 0, 1]), offsets=torch.tensor([0, 1, 1, 2, 3]), stride=2
        ),
        "feature 'f': the bag of row 1 has 1 ids by lengths, but lies between the offsets 1 and 1",
    ),
    "one offset too few": (
        lambda: KeyedJaggedTensor(F, THREE[:2], lengths=ONES, offsets=torch.tensor([0, 2]), stride=1),
        r"offsets of the shape \(2,\), .* give 3 numbers",
    ),
    "lengths that are no multiple of the features": (
        lambda: KeyedJaggedTensor(F, THREE, lengths=torch.tensor([1, 1, 1])),
        r"lengths of the shape \(3,\), but 2 features \(f, g\) of 1 rows have 2 bags",
    ),
    "lengths of another number of rows": (
        lambda: KeyedJaggedTensor(F, THREE[:2], lengths=ONES, stride=2),
        r"lengths of the shape \(2,\), .* give 4 numbers",
    ),
    "neither lengths nor offsets": (lambda: KeyedJaggedTensor(F, THREE), "neither lengths nor offsets"),
    "weights of another number": (
        lambda: KeyedJaggedTensor(F, THREE[:2], weights=torch.ones(3), lengths=ONES),
        r"2 ids, and weights of the shape \(3,\)",
    ),
    "ids of two dimensions": (
        lambda: KeyedJaggedTensor(F, torch.tensor([[1], [2]]), lengths=ONES),
        r"shape \(2, 1\); give one dimension",
    ),
    "numbers of bags for one feature alone": (
        lambda: KeyedJaggedTensor(F, THREE, lengths=torch.ones(3).int(), stride_per_key_per_rank=[[3]]),
        r"stride_per_key_per_rank=\[\[3\]\] for 2 features \(f, g\)",
    ),
    "numbers of bags of two ranks": (
        lambda: KeyedJaggedTensor(F, THREE, lengths=torch.ones(3).int(), stride_per_key_per_rank=[[1, 0], [1, 1]]),
        "give a list with one number, 0 or more, for each feature",
    ),
    "lengths of other numbers of bags": (
        lambda: KeyedJaggedTensor(
            F,
            THREE,
            lengths=torch.ones(3).int(),
            stride_per_key_per_rank=[[1], [1]],
            inverse_indices=(F, torch.zeros(2, 3, dtype=torch.long)),
        ),
        r"lengths of the shape \(3,\), but 2 features \(f, g\) of 1, 1 bags have 2 bags",
    ),
    "a row with a bag that there is not": (
        lambda: KeyedJaggedTensor(
            F,
            THREE,
            lengths=torch.ones(3).int(),
            stride_per_key_per_rank=[[1], [2]],
            inverse_indices=(F, torch.tensor([[0, 0], [0, 2]])),
        ),
        "feature 'g': inverse_indices say that row 1 has bag 2, but there are 2 bags",
    ),
    "rows of one feature alone": (
        lambda: KeyedJaggedTensor(F, THREE[:2], lengths=ONES, inverse_indices=(["f"], torch.zeros(1, 3).long())),
        r"inverse_indices of the shape \(1, 3\) for f, and the features f, g",
    ),
    "rows in fractions": (
        lambda: KeyedJaggedTensor(F, THREE[:2], lengths=ONES, inverse_indices=(F, torch.zeros(2, 3))),
        "inverse_indices of the batch are of torch.float32",
    ),
}
"""A batch of two features that is not whole, and what its error says."""


def bag_collection(features: KeyedJaggedTensor) -> Tensor:
    tables = [CompositionalEmbeddingBagConfig(name, 10, 4, [name], pooling="mean") for name in F]
    return CompositionalEmbeddingBagCollection(tables)(features).values()


def weighted_bag_collection(features: KeyedJaggedTensor) -> Tensor:
    tables = [CompositionalEmbeddingBagConfig(name, 10, 4, [name], id_policy="modulo") for name in F]
    if features.weights_or_none() is None:
        features._weights = torch.ones(features.values().shape)
    return CompositionalEmbeddingBagCollection(tables, is_weighted=True)(features).values()


def collection(features: KeyedJaggedTensor) -> Tensor:
    tables = [CompositionalEmbeddingConfig(name, 10, 4, [name], "quotient_remainder") for name in F]
    return torch.cat([own.values() for own in CompositionalEmbeddingCollection(tables)(features).values()])


@pytest.mark.parametrize("module", [bag_collection, weighted_bag_collection, collection])
@pytest.mark.parametrize("name", BAD_BATCHES)
def test_a_batch_that_is_not_whole_is_refused(name: str, module: Callable[[KeyedJaggedTensor], Tensor]) -> None:
    make, message = BAD_BATCHES[name]
    with pytest.raises(UserError, match=message):
        module(make())


_NUMBERS = st.lists(st.integers(-1, 3), min_size=0, max_size=6)


@given(
    keys=st.lists(st.sampled_from(["f", "g", "h"]), max_size=3),
    num_ids=st.integers(0, 6),
    lengths=st.none() | _NUMBERS,
    offsets=st.none() | _NUMBERS | _NUMBERS.map(lambda own: [0, *(sum(own[: i + 1]) for i in range(len(own)))]),
    num_weights=st.none() | st.integers(0, 6),
)
def test_what_torchrec_refuses_is_refused(
    keys: list[str], num_ids: int, lengths: list[int] | None, offsets: list[int] | None, num_weights: int | None
) -> None:
    """And what it lets pass is refused only for a bag of less than no ids."""
    batch = KeyedJaggedTensor(
        keys,
        torch.zeros(num_ids, dtype=torch.long),
        weights=None if num_weights is None else torch.ones(num_weights),
        lengths=None if lengths is None else torch.tensor(lengths, dtype=torch.int32),
        offsets=None if offsets is None else torch.tensor(offsets, dtype=torch.int32),
    )
    try:
        validate_keyed_jagged_tensor(batch)
        is_whole = int(batch.lengths().min() if batch.lengths().numel() else 0) >= 0
    except ValueError:
        is_whole = False
    if is_whole:
        require_whole_batch(batch)
    else:
        with pytest.raises(UserError):
            require_whole_batch(batch)


@pytest.mark.gpu
def test_a_gpu_looks_at_lengths_without_waiting() -> None:
    batch = KeyedJaggedTensor(F, THREE, lengths=torch.tensor([2, 1]), offsets=torch.tensor([0, 2, 3])).to(
        torch.device("cuda")
    )
    batch.length_per_key(), batch.stride()  # known to a batch that the reader made
    torch.cuda.set_sync_debug_mode("error")
    try:
        require_whole_batch(batch)
        with pytest.raises(RuntimeError):
            batch.lengths().sum().item()  # which waits, as this mode notices
    finally:
        torch.cuda.set_sync_debug_mode("default")
