"""Many ids, each through the function of its bucket, without a loop over ids or buckets.

Ids are sorted by bucket, each bucket's run is cut into chunks of one size, and each chunk is one matrix of a batched
product with its bucket's function. Buckets may be thousands, empty, or hold nearly all ids (ids sorted by frequency)::

    ids by bucket     | 0 0 0 0 0 0 0 | 2 2 |          (bucket 1 is empty)
    chunks of size 4  | 0 0 0 0 | 0 0 0 . | 2 2 . . |   (. repeats an id of the chunk's own bucket)

Chunks are evaluated in blocks whose hidden values fit in the cache. A batch of one block keeps them for the backward;
that of a larger batch takes them anew, block by block: beside inputs and outputs only a few numbers an id are held,
however large the hidden layers. Reading a larger batch's hidden values back from memory was measured to take as long.

Trade-off: a chunk copies its function, so larger chunks copy less and smaller ones repeat fewer ids. Making each long
run one matrix, which copies and repeats nothing, was measured to be a few percent faster at best.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from distembed.composition.layers import PackedLayers

_CHUNK_SIZES = (8, 16, 32, 64, 128, 256)

_CHUNK_COST = 16
"""Copying a chunk's function and adding up its gradient take as long as so many inputs (one CPU core, 16-64-16)."""

BLOCK_BYTES = {"cpu": 2**21, "cuda": 2**27}
"""Size of a block's widest hidden values: a core's share of the cache, and enough work to fill a GPU."""


@dataclass(frozen=True)
class Groups:
    """Ids by bucket, in chunks of one size; the *places* are those of all chunks, one after another.

    Attributes:
        buckets: the bucket of each chunk.
        ids: which input of the batch is at each place.
        is_own: false where an id is repeated to fill its bucket's last chunk.
        places: where each id stands, not counting repetitions.
    """

    buckets: Int64[Tensor, " chunks"]
    ids: Int64[Tensor, "chunks size"]
    is_own: Bool[Tensor, "chunks size 1"]
    places: Int64[Tensor, " ids"]


def group(rows: Int64[Tensor, " ids"], num_buckets: int) -> Groups:
    """Groups ids by ``rows``, each in ``[0, num_buckets)``; on a GPU it waits once, for the number of chunks."""
    device, num_ids = rows.device, len(rows)
    order = _order(rows, num_buckets)
    counts = torch.bincount(rows, minlength=num_buckets)
    _, size, num_chunks = chunk_sizes(counts)[0]
    chunks = (counts + (size - 1)) // size
    ends = counts.cumsum(0)
    # how much further an id stands among the places than among the sorted ids
    shift = size * (chunks.cumsum(0) - chunks) - (ends - counts)
    by_run = torch.arange(num_ids, device=device) + shift.repeat_interleave(counts, output_size=num_ids)
    places = torch.empty_like(by_run).scatter_(0, order, by_run)

    buckets = torch.arange(num_buckets, device=device).repeat_interleave(chunks, output_size=num_chunks)
    position = torch.arange(num_chunks * size, device=device).view(num_chunks, size) - shift[buckets].unsqueeze(1)
    last = (ends[buckets] - 1).unsqueeze(1)
    ids = order.index_select(0, torch.minimum(position, last).flatten()).view(num_chunks, size)
    return Groups(buckets=buckets, ids=ids, is_own=(position <= last).unsqueeze(2), places=places)


def _order(rows: Int64[Tensor, " ids"], num_buckets: int) -> Int64[Tensor, " ids"]:
    """The ids by bucket."""
    # distinct ids come sorted, and then so do their quotients; a GPU sorts sooner than it answers
    if rows.device.type == "cpu" and bool((rows[1:] >= rows[:-1]).all()):
        return torch.arange(len(rows))
    # narrow keys sort faster
    return torch.sort(rows.to(torch.int16) if num_buckets <= 2**15 else rows, stable=True).indices


def chunk_sizes(counts: Int64[Tensor, " buckets"]) -> list[tuple[int, int, int]]:
    """What each size of chunks costs, the size, and how many chunks there are then; the one that costs least first."""
    sizes = torch.tensor(_CHUNK_SIZES, device=counts.device)
    num_chunks: list[int] = ((counts.unsqueeze(1) + sizes - 1) // sizes).sum(0).tolist()
    costs = [
        (number * (size + _CHUNK_COST), size, number) for number, size in zip(num_chunks, _CHUNK_SIZES, strict=True)
    ]
    return sorted(costs)


def evaluate_grouped(
    inputs: Float[Tensor, "ids dim"],
    functions: Float[Tensor, "buckets F"],
    rows: Int64[Tensor, " ids"],
    layers: PackedLayers,
) -> Float[Tensor, "ids dim"]:
    """Applies to each input the function in its row of ``functions``; under autocast in its dtype.

    Gradients go to the inputs and, dense, to the functions; not to second order.
    """
    device_type = inputs.device.type
    in_dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else inputs.dtype
    values = _Grouped.apply(inputs, functions, rows, layers, in_dtype)  # type: ignore[no-untyped-call]
    return cast(Tensor, values)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, functions: Tensor, rows: Tensor, layers: PackedLayers, in_dtype: torch.dtype
    ) -> Tensor:
        groups = group(rows, len(functions))
        blocks = list(_blocks(groups, layers, inputs))
        hidden: list[Tensor] | None = [] if len(blocks) == 1 else None
        outputs = torch.empty(groups.ids.numel(), inputs.shape[1], dtype=in_dtype, device=inputs.device)
        with torch.autocast(inputs.device.type, enabled=False):
            for block in blocks:
                taken = _take(inputs, functions, block, in_dtype)
                outputs[block.places] = layers.forward(*taken, hidden).flatten(0, 1)
        kept = [] if hidden is None else [*taken, *hidden]
        ctx.save_for_backward(inputs, functions, *kept)
        ctx.groups, ctx.blocks, ctx.layers, ctx.in_dtype = groups, blocks, layers, in_dtype
        return outputs.index_select(0, groups.places).to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None, None]:
        (gradient,) = gradients
        inputs, functions, *kept = ctx.saved_tensors
        groups, layers, in_dtype = ctx.groups, ctx.layers, ctx.in_dtype
        of_inputs = torch.empty(groups.ids.numel(), inputs.shape[1], dtype=in_dtype, device=inputs.device)
        of_functions = torch.zeros_like(functions)
        with torch.autocast(inputs.device.type, enabled=False):
            for block in ctx.blocks:
                entering, packed, *hidden = kept or _take(inputs, functions, block, in_dtype)
                of_outputs = _gather(gradient, block.ids, in_dtype).mul_(block.is_own)
                values, of_packed = layers.backward(entering, packed, of_outputs, hidden)
                of_inputs[block.places] = values.flatten(0, 1)
                of_functions.index_add_(0, block.buckets, of_packed.to(functions.dtype))
        return of_inputs.index_select(0, groups.places).to(inputs.dtype), of_functions, None, None, None


def _take(
    inputs: Float[Tensor, "ids dim"], functions: Float[Tensor, "buckets F"], block: "_Block", dtype: torch.dtype
) -> tuple[Float[Tensor, "chunks size dim"], Float[Tensor, "chunks F"]]:
    """The inputs at a block's places, and the function of each of its chunks."""
    return _gather(inputs, block.ids, dtype), functions.index_select(0, block.buckets).to(dtype)


class _Block(NamedTuple):
    """Chunks that are evaluated together, and their places."""

    buckets: Int64[Tensor, " chunks"]
    ids: Int64[Tensor, "chunks size"]
    is_own: Bool[Tensor, "chunks size 1"]
    places: slice


def _blocks(groups: Groups, layers: PackedLayers, inputs: Float[Tensor, "ids dim"]) -> Iterator[_Block]:
    num_chunks, size = groups.ids.shape
    bytes_of_input = max(inputs.shape[1], *layers.hidden, 1) * inputs.element_size()
    limit = BLOCK_BYTES.get(inputs.device.type, BLOCK_BYTES["cpu"])
    step = max(1, limit // (size * bytes_of_input))
    for start in range(0, num_chunks, step):
        part = slice(start, min(start + step, num_chunks))
        places = slice(part.start * size, part.stop * size)
        yield _Block(groups.buckets[part], groups.ids[part], groups.is_own[part], places)


def _gather(
    values: Float[Tensor, "ids dim"], ids: Int64[Tensor, "chunks size"], dtype: torch.dtype
) -> Float[Tensor, "chunks size dim"]:
    return values.index_select(0, ids.flatten()).to(dtype).view(*ids.shape, -1)
