"""Applies to each of many ids the function of its bucket, without a loop over ids or buckets.

Ids are sorted by bucket, each bucket's run is cut into chunks of one size, and each chunk is one matrix of a batched
product with its bucket's function. Buckets may be thousands, empty, or hold nearly all ids (ids sorted by frequency)::

    ids by bucket     | 0 0 0 0 0 0 0 | 2 2 |          (bucket 1 is empty)
    chunks of size 4  | 0 0 0 0 | 0 0 0 . | 2 2 . . |   (. repeats an id of the chunk's own bucket)

Chunks are evaluated in blocks whose hidden values fit in the cache. A batch of one block saves them for the backward
pass; a larger batch computes them again, block by block, which takes as long as reading them back from memory.

Trade-off: a chunk copies its function, so larger chunks copy less and smaller ones repeat fewer ids.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

from distembed.base.tracing import is_traced
from distembed.composition.layers import PackedLayers

_SIZE_IN_PROGRAM = 32
_CHUNK_SIZES = (8, 16, 32, 64, 128, 256)

_CHUNK_COST = 16
"""The number of inputs that take as long as copying a chunk's function and adding up its gradient (CPU, 16-64-16)."""

BLOCK_BYTES = {"cpu": 2**21, "cuda": 2**27}
"""The size of a block's widest hidden values: a core's share of the cache, and enough work to fill a GPU."""


@dataclass(frozen=True)
class Groups:
    """Ids grouped by bucket, in chunks of one size.

    The *slots* are the places of all chunks, one after another.
    """

    buckets: Int64[Tensor, " chunks"]  # the bucket of each chunk
    ids: Int64[Tensor, "chunks size"]  # the index of the input in each slot
    is_own: Bool[Tensor, "chunks size 1"]  # false where an id is repeated to fill its bucket's last chunk
    slot_of_id: Int64[Tensor, " ids"]  # the slot of each id, not counting repetitions


class ChunkSize(NamedTuple):
    """A size of chunks, their number, and the time of all chunks in units of the time of one input."""

    cost: int
    size: int
    num_chunks: int


def group(rows: Int64[Tensor, " ids"], num_buckets: int) -> Groups:
    """Groups ids by their ``rows``, each in ``[0, num_buckets)``, in chunks of the cheapest size.

    Reading the counts would wait for a GPU. There the number of chunks is the most that any counts need, and chunks
    beyond the needed ones repeat an id.
    """
    if rows.device.type == "cpu":
        counts = torch.bincount(rows, minlength=num_buckets)
        return group_in_chunks(rows, counts, chunk_sizes(counts)[0])
    counts = torch.zeros(num_buckets, dtype=torch.int64, device=rows.device).index_add_(0, rows, torch.ones_like(rows))
    return group_in_chunks(rows, counts, most_chunks(len(rows), num_buckets))


def group_in_chunks(rows: Int64[Tensor, " ids"], counts: Int64[Tensor, " buckets"], chunk_size: "ChunkSize") -> Groups:
    """Groups ids in chunks of a given size.

    Args:
        rows: The bucket of each id.
        counts: How many ids each bucket has.
        chunk_size: The size, and the number of chunks; at least as many as the counts need.
    """
    # bucket b has counts[b] ids: places ends[b-1] to ends[b]-1 among the sorted ids, and slots from
    # size * chunk_ends[b-1] on. The difference of the two beginnings is shift[b], equal for all ids of the bucket.
    device, num_ids, num_buckets = rows.device, len(rows), len(counts)
    _, size, num_chunks = chunk_size
    order = _sort(rows, num_buckets)
    chunks = (counts + (size - 1)) // size
    ends, chunk_ends = counts.cumsum(0), chunks.cumsum(0)
    shift = size * (chunk_ends - chunks) - (ends - counts)
    by_run = torch.arange(num_ids, device=device) + shift.repeat_interleave(counts, output_size=num_ids)
    slot_of_id = torch.empty_like(by_run).scatter_(0, order, by_run)

    numbers = torch.arange(num_chunks, device=device)
    buckets = torch.searchsorted(chunk_ends, numbers, right=True).clamp_(max=num_buckets - 1)
    position = torch.arange(num_chunks * size, device=device).view(num_chunks, size) - shift[buckets].unsqueeze(1)
    # slots beyond the bucket's last id repeat that id; is_own tells them apart
    last_position = (ends[buckets] - 1).unsqueeze(1)
    ids = order.index_select(0, torch.minimum(position, last_position).flatten()).view(num_chunks, size)
    return Groups(buckets=buckets, ids=ids, is_own=(position <= last_position).unsqueeze(2), slot_of_id=slot_of_id)


def _sort(rows: Int64[Tensor, " ids"], num_buckets: int) -> Int64[Tensor, " ids"]:
    """Returns the indices of the ids sorted by bucket."""
    # deduplicated ids come sorted, and so do their quotients. On a GPU the check would wait longer than a sort takes.
    if rows.device.type == "cpu" and bool((rows[1:] >= rows[:-1]).all()):
        return torch.arange(len(rows))
    # narrow keys sort faster
    return torch.sort(rows.to(torch.int16) if num_buckets <= 2**15 else rows, stable=True).indices


def chunk_sizes(counts: Int64[Tensor, " buckets"]) -> list[ChunkSize]:
    """Returns every size of chunks for these numbers of ids in the buckets, the cheapest first."""
    # a chunk costs its slots, repeated ids included, plus the copy of its function
    sizes = torch.tensor(_CHUNK_SIZES, device=counts.device)
    num_chunks: list[int] = ((counts.unsqueeze(1) + sizes - 1) // sizes).sum(0).tolist()
    return sorted(
        ChunkSize(number * (size + _CHUNK_COST), size, number)
        for number, size in zip(num_chunks, _CHUNK_SIZES, strict=True)
    )


def most_chunks(num_ids: int, num_buckets: int) -> ChunkSize:
    """Returns the size of chunks that costs least if every bucket's last chunk is half full, for unknown counts.

    Its number of chunks suffices for any counts: all full chunks, and one partly filled chunk for each bucket.
    """
    return min(
        ChunkSize((num_ids // size + num_buckets // 2) * (size + _CHUNK_COST), size, most)
        for size in _CHUNK_SIZES
        for most in [num_ids // size + min(num_ids, num_buckets)]
    )


def evaluate_grouped(
    inputs: Float[Tensor, "ids dim"],
    functions: Float[Tensor, "buckets F"],
    rows: Int64[Tensor, " ids"],
    layers: PackedLayers,
) -> Float[Tensor, "ids dim"]:
    """Returns ``functions[rows[i]]`` applied to ``inputs[i]`` for each id i; functions are packed by ``layers``.

    Under autocast they are computed in its dtype and returned in the dtype of the inputs. Functions get dense
    gradients; there are no second derivatives. On the meta device, and in a program that is compiled or exported, it is
    :func:`evaluate_in_program`.
    """
    if is_traced() or inputs.is_meta:
        return evaluate_in_program(inputs, functions, rows, layers)
    device_type = inputs.device.type
    compute_dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else inputs.dtype
    values = _Grouped.apply(inputs, functions, rows, layers, compute_dtype)  # type: ignore[no-untyped-call]
    return cast(Tensor, values)


def evaluate_in_program(
    inputs: Float[Tensor, "ids dim"],
    functions: Float[Tensor, "buckets F"],
    rows: Int64[Tensor, " ids"],
    layers: PackedLayers,
) -> Float[Tensor, "ids dim"]:
    """Evaluates functions as :func:`evaluate_grouped` does, by operations whose shapes follow from argument shapes.

    The number of chunks, of one fixed size, suffices for any counts; slots without an id hold zeros. All hidden values
    are in memory at once; second derivatives exist. The steps follow :func:`group_in_chunks`.
    """
    num_ids, num_buckets, size = rows.shape[0], functions.shape[0], _SIZE_IN_PROGRAM
    num_chunks = num_ids // size + num_buckets
    order = torch.argsort(rows, stable=True)
    counts = torch.zeros_like(functions[:, 0], dtype=torch.int64).index_add(0, rows, torch.ones_like(rows))
    ends, chunk_ends = counts.cumsum(0), ((counts + (size - 1)) // size).cumsum(0)
    shift = size * chunk_ends.roll(1).index_fill(0, chunk_ends.new_zeros(1), 0) - (ends - counts)
    by_run = torch.arange(num_ids, device=rows.device) + shift.index_select(0, rows.index_select(0, order))
    slot_of_id = torch.zeros_like(by_run).scatter(0, order, by_run)

    chunk_numbers = torch.arange(num_chunks, device=rows.device)
    buckets = torch.searchsorted(chunk_ends, chunk_numbers, right=True).clamp(max=num_buckets - 1)
    in_slots = inputs.new_zeros(num_chunks * size, inputs.shape[1]).index_copy(0, slot_of_id, inputs)
    packed = functions.index_select(0, buckets).to(inputs.dtype)
    outputs = layers.forward(in_slots.view(num_chunks, size, -1), packed)
    return outputs.flatten(0, 1).index_select(0, slot_of_id).to(inputs.dtype)


class _Grouped(torch.autograd.Function):
    """The autograd function of :func:`evaluate_grouped`."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, functions: Tensor, rows: Tensor, layers: PackedLayers, compute_dtype: torch.dtype
    ) -> Tensor:
        groups = group(rows, len(functions))
        blocks = list(_blocks(groups, layers, inputs))
        hidden: list[Tensor] | None = [] if len(blocks) == 1 else None
        outputs = torch.empty(groups.ids.numel(), inputs.shape[1], dtype=compute_dtype, device=inputs.device)
        with torch.autocast(inputs.device.type, enabled=False):
            for block in blocks:
                selected = _select(inputs, functions, block, compute_dtype)
                outputs[block.slot_range] = layers.forward(*selected, hidden).flatten(0, 1)
        only_block = [] if hidden is None else [*selected, *hidden]
        ctx.save_for_backward(inputs, functions, *only_block)
        ctx.groups, ctx.blocks, ctx.layers, ctx.compute_dtype = groups, blocks, layers, compute_dtype
        return outputs.index_select(0, groups.slot_of_id).to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None, None, None]:
        (output_gradient,) = gradients
        inputs, functions, *only_block = ctx.saved_tensors
        groups, layers, compute_dtype = ctx.groups, ctx.layers, ctx.compute_dtype
        # slots that repeat an id to fill a chunk get gradients of 0, and are not read in the end
        slot_gradient = torch.empty(groups.ids.numel(), inputs.shape[1], dtype=compute_dtype, device=inputs.device)
        function_gradient = torch.zeros_like(functions)
        with torch.autocast(inputs.device.type, enabled=False):
            for block in ctx.blocks:
                # only a single block was saved; of several, the layers compute each one's hidden values again
                block_inputs, packed, *hidden = only_block or _select(inputs, functions, block, compute_dtype)
                gradient = _gather(output_gradient, block.ids, compute_dtype).mul_(block.is_own)  # [chunks, size, dim]
                block_gradient, packed_gradient = layers.backward(block_inputs, packed, gradient, hidden)
                slot_gradient[block.slot_range] = block_gradient.flatten(0, 1)
                function_gradient.index_add_(0, block.buckets, packed_gradient.to(functions.dtype))
        input_gradient = slot_gradient.index_select(0, groups.slot_of_id).to(inputs.dtype)
        return input_gradient, function_gradient, None, None, None


def _select(
    inputs: Float[Tensor, "ids dim"], functions: Float[Tensor, "buckets F"], block: "_Block", dtype: torch.dtype
) -> tuple[Float[Tensor, "chunks size dim"], Float[Tensor, "chunks F"]]:
    """Returns the inputs in a block's slots, and the function of each of its chunks."""
    return _gather(inputs, block.ids, dtype), functions.index_select(0, block.buckets).to(dtype)


class _Block(NamedTuple):
    """Chunks that are evaluated at once: the chunks of :class:`Groups`, and the range of their slots."""

    buckets: Int64[Tensor, " chunks"]
    ids: Int64[Tensor, "chunks size"]
    is_own: Bool[Tensor, "chunks size 1"]
    slot_range: slice


def _blocks(groups: Groups, layers: PackedLayers, inputs: Float[Tensor, "ids dim"]) -> Iterator[_Block]:
    """Yields the chunks in blocks whose widest values take at most :data:`BLOCK_BYTES`."""
    num_chunks, size = groups.ids.shape
    bytes_per_input = max(inputs.shape[1], *layers.hidden, 1) * inputs.element_size()
    limit = BLOCK_BYTES.get(inputs.device.type, BLOCK_BYTES["cpu"])
    step = max(1, limit // (size * bytes_per_input))
    for start in range(0, num_chunks, step):
        chunks = slice(start, min(start + step, num_chunks))
        slot_range = slice(chunks.start * size, chunks.stop * size)
        yield _Block(groups.buckets[chunks], groups.ids[chunks], groups.is_own[chunks], slot_range)


def _gather(
    values: Float[Tensor, "ids dim"], ids: Int64[Tensor, "chunks size"], dtype: torch.dtype
) -> Float[Tensor, "chunks size dim"]:
    """Returns the values of each chunk's ids, in a dtype."""
    return values.index_select(0, ids.flatten()).to(dtype).view(*ids.shape, -1)
