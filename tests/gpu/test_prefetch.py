"""Requests that are made on one stream and used on another, late, while what they do not hold is handed out again."""

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from distembed.base.ranks import Ranks
from tests.gpu.models import Head, Reference, check_weights, draw, moved, shard, tables
from tests.gpu.streams import SideStream

ROWS, BATCHES = 64, 6
CACHED = {"cache_load_factor": 0.2, "prefetch_pipeline": True}
SIZES_OF_BLOCKS = [2**n for n in range(9, 19)]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bags", ["single", "ragged", "weighted"])
@pytest.mark.parametrize("composition", ["product", "concat", "path_mlp"])
def test_garbage_does_not_reach_a_request_that_waits(composition: str, bags: str, ranks: Ranks) -> None:
    weighted = bags == "weighted"
    head = Head(tables(composition), "meta", ranks.device, weighted)
    sharded = shard(head, ranks, kernel="fused_uvm_caching", fused_params=CACHED)
    reference = Reference(tables(composition), weighted)
    (lookup,) = sharded.collection._lookups
    if ranks.device.type == "cpu":
        give_prefetch(lookup)
    side, generator = SideStream(ranks.device), torch.Generator().manual_seed(1)
    for number in range(BATCHES):
        batch = draw(ROWS, bags, generator)
        sharded.optimizers.set_learning_rates(number)
        sharded.optimizers.combined.zero_grad()
        found = late_lookup(sharded.collection, lookup, moved(batch, ranks.device), side)
        found.values().square().mean().backward()
        sharded.optimizers.combined.step()
        side.litter(SIZES_OF_BLOCKS)  # and what going back has given back
        expected = reference.model.embeddings(batch)
        reference.update(expected.values().square().mean())
        for name in expected.keys():
            torch.testing.assert_close(found[name].detach().cpu(), expected[name].detach())
    check_weights(sharded.model, reference.model)


def late_lookup(collection: Any, lookup: Any, batch: KeyedJaggedTensor, side: SideStream) -> KeyedTensor:
    """Looks a batch up whose request was made ahead, while the side stream's memory is filled with garbage."""
    with side.ahead():
        context = collection.create_context()
        received = collection.input_dist(context, batch).wait().wait()
        (features,) = received
        lookup.prefetch(features, forward_stream=side.main)
    assert lookup._prefetched
    side.litter(SIZES_OF_BLOCKS)  # what making the request has given back
    side.meet()
    side.delay()
    if side.main is not None:  # as TorchRec's pipeline does with what it holds itself
        features.record_stream(side.main)
        context.record_stream(side.main)
    outputs = collection.compute_and_output_dist(context, received)
    del received, features, batch
    gc.collect()
    assert not lookup._prefetched
    assert side.litter(SIZES_OF_BLOCKS) > 0  # what looking it up has given back, while the lookup waits
    return outputs.wait()


def give_prefetch(lookup: nn.Module) -> None:
    """Stands in for FBGEMM's prefetching, which processors do not have."""
    for kernel in lookup._emb_modules:
        kernel.emb_module.prefetch = lambda indices, offsets, forward_stream: None
