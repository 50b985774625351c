"""What a request holds is kept alive for the stream that uses it, whatever kind of group made it.

In a prefetching pipeline a request is made on one stream and used on another; memory that is not recorded there may be
handed out again before it is used.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.sharding.bucket_pool import split_bags
from distembed.sharding.groups import LookupRequest
from tests.cuda.pretend import PretendStream
from tests.cuda.rehearsal import Cell, Rehearsed, rehearsed

CELLS = {
    "each bag": (Cell("quotient_remainder", "product", "table_wise"), "single"),
    "each id": (Cell("quotient_remainder", "product", "table_wise"), "ragged"),
    "weighted": (Cell("quotient_remainder", "product", "table_wise"), "weighted"),
    "pooled": (Cell("mixed_radix", "concat", "table_wise"), "weighted"),
    "path": (Cell("quotient_remainder", "path_mlp", "row_wise"), "ragged"),
    "sequence": (Cell("quotient_remainder", "product", "table_wise", None), "ragged"),
}


def held(value: Any) -> Iterator[Tensor]:
    """Yields every tensor that can be reached from a value by its attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, KeyedJaggedTensor):
        yield value.values()
        yield from (
            own
            for own in (value.lengths_or_none(), value.offsets_or_none(), value.weights_or_none())
            if own is not None
        )
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from held(each)
    elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        for each in vars(value).values():
            yield from held(each)


def memory(tensor: Tensor) -> int:
    """Returns what tells the memory of a tensor from that of others; views of a tensor share its."""
    return tensor.untyped_storage()._cdata


def requests_of(made: Rehearsed, bags: str) -> list[LookupRequest]:
    ctx = made.module.create_context()
    (received, *_) = made.module.input_dist(ctx, made.batch(bags)).wait().wait()
    (lookup, *_) = made.module._lookups
    return list(lookup._requests(received))


@pytest.mark.parametrize("name", CELLS)
def test_all_that_a_request_holds_is_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, bags = CELLS[name]
    with rehearsed(cell) as made:
        made.rehearse(bags)
        made.strict = False
        requests = requests_of(made, bags)
        assert requests
        for request in requests:
            recorded: set[int] = set()
            monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream, seen=recorded: seen.add(memory(tensor)))
            tensors = list(held(request))
            assert len(tensors) >= 4
            request.record_stream(PretendStream())
            assert {memory(tensor) for tensor in tensors} <= recorded


def test_buckets_are_recorded_with_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets = split_bags(torch.tensor([[0, 1, 2], [1, 0, 1]]), torch.tensor([[3]]), [4, 2])
    features = KeyedJaggedTensor(["a"], torch.tensor([1, 2, 5]), lengths=torch.tensor([3]))
    request = LookupRequest(buckets.rows, buckets.offsets, [None, None], features, buckets=buckets)
    recorded: set[int] = set()
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.add(memory(tensor)))
    request.record_stream(None)
    assert {memory(tensor) for tensor in held(request)} <= recorded
