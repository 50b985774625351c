"""Many ids, each through the function of its bucket, without a loop over ids or buckets.

Ids are sorted by bucket. A long run of ids of one bucket is one matrix; the other runs are cut into chunks of one size,
each a matrix of a batched product with its bucket's function. Buckets may be thousands, empty, or hold nearly all ids
(ids sorted by frequency)::

    ids by bucket      | 0 0 0 0 0 0 | 1 1 1 ... 1 1 | 3 3 |   (bucket 2 is empty, bucket 1 a long run)
    chunks of size 4   | 0 0 0 0 | 0 0 . . | 3 3 . . |         (. repeats an id of the chunk's own bucket)
    then the long runs | 1 1 1 ... 1 1 |

Both are evaluated in blocks whose hidden values fit in the cache, and the backward takes these values anew: beside
inputs and outputs only a few numbers an id are held, however large the hidden layers.

Trade-off: a chunk copies its function, so larger chunks copy less and smaller ones repeat fewer ids; a run of its own
copies and repeats nothing, but costs the calls of a block.
"""

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

_LONG_RUN = 2048
"""A run of so many ids pays for a block of its own."""

_BLOCK_BYTES = {"cpu": 2**21, "cuda": 2**27}
"""Size of a block's widest hidden values: a core's cache, and enough to keep every processor of a GPU busy."""


class Block(NamedTuple):
    """What is evaluated together: a function for each row of ``ids``.

    Attributes:
        buckets: the function of each row.
        ids: places of the inputs in the batch.
        is_own: 0 where an id is repeated to fill a chunk, else 1; None where no id is repeated.
        start: place of the first of ``ids`` among those of all blocks.
    """

    buckets: Int64[Tensor, " functions"]
    ids: Int64[Tensor, "functions inputs"]
    is_own: Bool[Tensor, "functions inputs 1"] | None
    start: int


@dataclass(frozen=True)
class Groups:
    """Ids by bucket.

    Attributes:
        blocks: every id once, and repeated ones.
        place: where each id stands among those of all blocks.
        num_places: ids of all blocks.
    """

    blocks: list[Block]
    place: Int64[Tensor, " ids"]
    num_places: int


def group(rows: Int64[Tensor, " ids"], num_buckets: int, block_size: int) -> Groups:
    """Groups ids by ``rows``, each in ``[0, num_buckets)``, in blocks of about ``block_size`` ids.

    On a GPU it waits for the lengths of the runs.
    """
    # narrow keys sort faster
    keys = rows.to(torch.int16) if num_buckets <= 2**15 else rows
    order = torch.sort(keys, stable=True).indices
    counts = torch.bincount(rows, minlength=num_buckets)
    is_long = counts >= _LONG_RUN
    size, num_chunks = _chunk_size(counts.masked_fill(is_long, 0))
    chunks = ((counts + (size - 1)) // size).masked_fill(is_long, 0)
    starts = counts.cumsum(0) - counts
    long_counts = counts.masked_fill(~is_long, 0)
    long_places = num_chunks * size + long_counts.cumsum(0) - long_counts
    first_place = torch.where(is_long, long_places, size * (chunks.cumsum(0) - chunks))
    runs = _Runs(order=order, counts=counts, starts=starts, shift=first_place - starts)
    blocks = _chunk_blocks(runs, chunks, size, num_chunks, block_size) + _long_blocks(runs, is_long, block_size)
    return Groups(blocks=blocks, place=_places(runs), num_places=sum(block.ids.numel() for block in blocks))


@dataclass(frozen=True)
class _Runs:
    """Each bucket's ids: ``order[start : start + count]``; they stand ``shift`` further on among the places."""

    order: Int64[Tensor, " ids"]
    counts: Int64[Tensor, " buckets"]
    starts: Int64[Tensor, " buckets"]
    shift: Int64[Tensor, " buckets"]


def _places(runs: _Runs) -> Int64[Tensor, " ids"]:
    num_ids = len(runs.order)
    by_run = torch.arange(num_ids, device=runs.order.device)
    by_run += runs.shift.repeat_interleave(runs.counts, output_size=num_ids)
    return torch.empty_like(by_run).scatter_(0, runs.order, by_run)


def _chunk_size(counts: Int64[Tensor, " buckets"]) -> tuple[int, int]:
    """The size of chunks that costs least, and how many chunks there are then."""
    sizes = torch.tensor(_CHUNK_SIZES, device=counts.device)
    num_chunks: list[int] = ((counts.unsqueeze(1) + sizes - 1) // sizes).sum(0).tolist()
    total, size = min(zip(num_chunks, _CHUNK_SIZES, strict=True), key=lambda it: it[0] * (it[1] + _CHUNK_COST))
    return size, total


def _chunk_blocks(
    runs: _Runs, chunks: Int64[Tensor, " buckets"], size: int, num_chunks: int, block_size: int
) -> list[Block]:
    """Blocks of the first places; ``chunks`` tells how many each bucket has."""
    device = chunks.device
    buckets = torch.arange(len(chunks), device=device).repeat_interleave(chunks, output_size=num_chunks)
    places = torch.arange(num_chunks * size, device=device).view(num_chunks, size)
    position = places - runs.shift[buckets].unsqueeze(1)
    last = (runs.starts + runs.counts - 1)[buckets].unsqueeze(1)
    ids = runs.order.index_select(0, torch.minimum(position, last).flatten()).view(num_chunks, size)
    is_own = (position <= last).unsqueeze(2)
    step = max(1, block_size // size)
    parts = [slice(start, start + step) for start in range(0, num_chunks, step)]
    return [Block(buckets[part], ids[part], is_own[part], start=part.start * size) for part in parts]


def _long_blocks(runs: _Runs, is_long: Bool[Tensor, " buckets"], block_size: int) -> list[Block]:
    """Blocks of one bucket each, in the order of their places."""
    buckets = is_long.nonzero()
    numbers = torch.stack([runs.starts, runs.counts, runs.shift], dim=1)[buckets.squeeze(1)].tolist()
    return [
        Block(bucket, ids.unsqueeze(0), None, start=start + shift + j * block_size)
        for bucket, (start, count, shift) in zip(buckets, numbers, strict=True)
        for j, ids in enumerate(runs.order[start : start + count].split(block_size))
    ]


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
    widest = max(inputs.shape[1], *layers.hidden, 1) * inputs.element_size()
    groups = group(rows, len(functions), max(1, _BLOCK_BYTES.get(device_type, _BLOCK_BYTES["cpu"]) // widest))
    values = _Grouped.apply(inputs, functions, groups, layers, in_dtype)  # type: ignore[no-untyped-call]
    return cast(Tensor, values)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, functions: Tensor, groups: Groups, layers: PackedLayers, in_dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(inputs, functions)
        ctx.groups, ctx.layers, ctx.in_dtype = groups, layers, in_dtype
        outputs = torch.empty(groups.num_places, inputs.shape[1], dtype=in_dtype, device=inputs.device)
        with torch.autocast(inputs.device.type, enabled=False):
            for block in groups.blocks:
                packed = functions.index_select(0, block.buckets).to(in_dtype)
                values = layers.forward(_gather(inputs, block.ids, in_dtype), packed).flatten(0, 1)
                outputs[block.start : block.start + len(values)] = values
        return outputs.index_select(0, groups.place).to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None, None]:
        (gradient,) = gradients
        inputs, functions = ctx.saved_tensors
        groups, layers, in_dtype = ctx.groups, ctx.layers, ctx.in_dtype
        of_inputs = torch.empty(groups.num_places, inputs.shape[1], dtype=in_dtype, device=inputs.device)
        of_functions = torch.zeros_like(functions)
        with torch.autocast(inputs.device.type, enabled=False):
            for block in groups.blocks:
                packed = functions.index_select(0, block.buckets).to(in_dtype)
                of_outputs = _gather(gradient, block.ids, in_dtype)
                if block.is_own is not None:
                    of_outputs.mul_(block.is_own)
                values, of_packed = layers.backward(_gather(inputs, block.ids, in_dtype), packed, of_outputs)
                of_inputs[block.start : block.start + block.ids.numel()] = values.flatten(0, 1)
                of_functions.index_add_(0, block.buckets, of_packed.to(functions.dtype))
        return of_inputs.index_select(0, groups.place).to(inputs.dtype), of_functions, None, None, None


def _gather(
    values: Float[Tensor, "ids dim"], ids: Int64[Tensor, "functions inputs"], dtype: torch.dtype
) -> Float[Tensor, "functions inputs dim"]:
    return values.index_select(0, ids.flatten()).to(dtype).view(*ids.shape, -1)
