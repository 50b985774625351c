"""Four rows of 200,000 ids each: looked up, pooled and updated to the last bit, in memory that grows with the ids.

All weights and gradients are small multiples of powers of two, so that no float32 sum of them is rounded in any order.
"""

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Ranks
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder
from tests.gpu.models import SGD, Head, shard

ROWS, IDS, NUM_EMBEDDINGS, DIM, COLLISIONS = 4, 200_000, 50_000, 16, 4
SCALE = 2.0**-12
"""Of the gradient of every output."""
BYTES_OF_AN_ID = 16 * DIM * 4
"""What may be held of an id beside the tables: its rows' vectors, their product, gradients, and what sorts them."""


@pytest.mark.gpu
@pytest.mark.parametrize("composition", ["product", "sum", "concat"])
def test_long_bags_are_pooled_and_updated_exactly(composition: str, ranks: Ranks) -> None:
    generator = torch.Generator().manual_seed(0)
    partition = QuotientRemainder(NUM_EMBEDDINGS, collisions=COLLISIONS)
    table = CompositionalEmbeddingBagConfig("t", NUM_EMBEDDINGS, DIM, ["t"], partition, composition)
    sharded = shard(Head([table], "meta", ranks.device), ranks)
    shards = {
        name: value.local_shards()[0].tensor
        for name, value in sharded.model.state_dict().items()
        if "embedding_bags" in name
    }
    weights = []
    for weight in shards.values():
        drawn = torch.randint(-2, 3, weight.shape, generator=generator) / 4
        weight.copy_(drawn)
        weights.append(drawn.double().requires_grad_())
    linear = sharded.model.module.get_submodule("linear")
    torch.nn.init.constant_(linear.weight, 0.5)
    ids = torch.randint(NUM_EMBEDDINGS, (ROWS * IDS,), generator=generator)
    batch = KeyedJaggedTensor(["t"], ids, lengths=torch.full((ROWS,), IDS), stride=ROWS)

    on_gpu = ranks.device.type == "cuda"  # a processor does not say how much it has given out
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    _, embedded = sharded.step(0, batch, lambda output: output.sum() * SCALE)
    most = torch.cuda.max_memory_allocated() if on_gpu else 0
    assert most - before < ROWS * IDS * BYTES_OF_AN_ID

    pooled = composed(weights, partition.rows(ids), composition).view(ROWS, IDS, -1).sum(1)
    assert torch.equal(embedded.double(), pooled)
    gradients = torch.autograd.grad(pooled.sum() * SCALE / 2, weights)
    for updated, weight, gradient in zip(shards.values(), weights, gradients, strict=True):
        assert gradient.any()
        assert torch.equal(updated.cpu().double(), weight - SGD.learning_rate * gradient)


def composed(weights: list[Tensor], rows: Tensor, composition: str) -> Tensor:
    """The vector of each id, in double precision."""
    vectors = [weight[row] for weight, row in zip(weights, rows, strict=True)]
    if composition == "concat":
        return torch.cat(vectors, dim=1)
    return vectors[0] * vectors[1] if composition == "product" else vectors[0] + vectors[1]
