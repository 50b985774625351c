"""A table's share, where one process has all of it: every id once, with the vector that is looked up for it."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.partitions import PARTITIONS
from tests.embedding.schemes import make_partition, small_composition

COMPOSED = [
    ("naive", "product"),
    *[(scheme, "product") for scheme in PARTITIONS if scheme != "naive"],
    *[("quotient_remainder", composition) for composition in COMPOSITIONS if composition not in ("product", "feature")],
]


def make_table(scheme: str, composition: str, num_ids: int = 60) -> CompositionalEmbeddingConfig:
    return CompositionalEmbeddingConfig(
        "items", num_ids, 8, ["item"], make_partition(scheme, num_ids), small_composition(composition)
    )


@pytest.mark.parametrize(("scheme", "composition"), COMPOSED)
def test_gradients_are_those_of_looking_up(scheme: str, composition: str) -> None:
    collection = CompositionalEmbeddingCollection([make_table(scheme, composition)])
    features = KeyedJaggedTensor(["item"], torch.arange(60), lengths=torch.tensor([60]))
    factors = torch.randn(60, 8)
    (collection(features)["item"].values() * factors).sum().backward()
    share = collection.share("items")
    totals = [torch.zeros_like(own.weight) for own in share.weights]
    for number in range(share.num_chunks(17)):
        chunk = share.read(number, 17, with_gradients=True)
        share.add_gradients(chunk, factors[chunk.chunk_ids.ids], totals)
    for total, weight in zip(totals, collection.weights("items"), strict=True):
        torch.testing.assert_close(total, weight.grad)


def test_half_precision_and_bags() -> None:
    table = CompositionalEmbeddingBagConfig("items", 9, 4, ["item"], data_type="FP16")
    (chunk,) = CompositionalEmbeddingBagCollection([table]).share("items").chunks(9)
    assert chunk.vectors.dtype == torch.float32


def test_errors_say_what_to_change() -> None:
    collection = CompositionalEmbeddingCollection([make_table("quotient_remainder", "feature")])
    with pytest.raises(UserError, match="'feature'.*use product, sum, concat or a path"):
        collection.share("items")
    with pytest.raises(UserError, match="Did you mean 'items'"):
        collection.share("item")
    share = CompositionalEmbeddingCollection([make_table("naive", "product")]).share("items")
    with pytest.raises(UserError, match="most_ids of a chunk is 0"):
        list(share.chunks(0))
