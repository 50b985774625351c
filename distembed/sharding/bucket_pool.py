"""Pooled products without composing every id: bags are split by their rows in the small partitions.

The product does not commute with summing, but a factor that ids of a bag share may be taken out of the sum. With the
largest partition's rows ``r`` and a small one's rows ``q``::

    sum_i W1[q_i] * W2[r_i]  =  sum_q W1[q] * (sum_{i: q_i = q} W2[r_i])

So the largest partition's vectors are summed by its table-batched embedding, in a *bucket* for each bag and ``q``, and
only these sums are multiplied. Several small partitions count as one whose rows are the tuples of theirs, the *codes*::

    a bag's rows in the largest partition   | r1  r2  r3  r4 |      of codes 1 0 1 1
    its buckets                             | r2 | r1 r3 r4 |       summed, then multiplied by the vectors of codes 0, 1

Trade-off: no vector of a single id is stored, and as many rows are looked up as in a plain table; but every bag has a
bucket for every code, filled or not, so codes must be few (:func:`buckets_are_faster`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd.function import once_differentiable

_BUCKETS_PER_ID = 2.5
"""Largest number of buckets per id for buckets to be used. On a CPU both ways took equal time at 2.7 (ids as skewed as
Criteo's) to 6 (uniform ids)."""


def buckets_are_faster(num_ids: int, num_bags: int, buckets_per_bag: int) -> bool:
    """Returns whether pooling by buckets takes less time than composing each distinct id and pooling these.

    A bucket costs a sum that is written, read and multiplied, forward and backward, whether it has ids or not.
    """
    return num_bags * buckets_per_bag <= _BUCKETS_PER_ID * num_ids


def count_buckets_per_bag(num_rows: Sequence[int]) -> int:
    """Returns the number of codes: the product of all partitions' numbers of rows, without the largest partition."""
    return prod(num_rows) // max(num_rows)


@dataclass(frozen=True)
class Buckets:
    """The lookups, in each of k partitions, whose sums :meth:`pool` multiplies into pooled products."""

    # Rows to look up in each partition, feature after feature. Largest partition: every id's row, sorted by bucket.
    # Small partitions: one row for each code that occurs in the feature.
    rows: list[Int64[Tensor, " rows_j"]]
    # Bag offsets for these lookups. Largest partition: one bag per bucket, by (feature, code, bag of the batch). Small
    # partitions: one bag per (feature, code), with one row where the code occurs, else empty.
    offsets: list[Int64[Tensor, " bags_j_plus_1"]]
    # index of the batch's id at each place of the largest partition's rows; per-sample weights need this order too
    order: Int64[Tensor, " ids"]
    largest: int  # number of the partition with most rows
    buckets_per_bag: int  # number of buckets of a bag

    def record_stream(self, stream: Any) -> None:
        for tensor in (*self.rows, *self.offsets, self.order):
            tensor.record_stream(stream)

    def pool(self, vectors: Sequence[Float[Tensor, "bags_j features dim"]]) -> Float[Tensor, "batch features dim"]:
        """Returns the sums of products over the batch's bags, zeros for an empty bag.

        ``vectors`` are each partition's sums over the bags of :attr:`offsets`. Per-sample weights are already part of
        the largest partition's sums.
        """
        small = reduce(torch.mul, [vectors[j] for j in range(len(vectors)) if j != self.largest])
        # bucket number = code * batch size + bag of the batch: the first dimension splits into [codes, batch]
        num_buckets, num_features, dim = vectors[self.largest].shape
        summed = vectors[self.largest].reshape(
            self.buckets_per_bag, num_buckets // self.buckets_per_bag, num_features * dim
        )
        pooled: Tensor = _MultiplyAndSum.apply(summed, small.flatten(1))  # type: ignore[no-untyped-call]
        return pooled.unflatten(1, (num_features, dim))


def split_bags(
    rows: Int64[Tensor, "k ids"],
    lengths: Int64[Tensor, "features batch"],
    num_rows: Sequence[int],
    first_rows: Int64[Tensor, "k features"] | None = None,
) -> Buckets:
    """Splits each bag into buckets of ids that have equal rows in every partition except the largest.

    A bag has a bucket for each code: for each tuple of rows in the small partitions. A row is looked up only if an id
    has it: an optimizer may change a row even for a gradient of zero.

    Args:
        rows: Row of every id in each partition, feature after feature and bag after bag.
        lengths: Number of ids of each bag.
        num_rows: Number of rows of each partition, the maximum over the features' tables.
        first_rows: Number that ``rows`` of a feature are shifted by in each partition, where tables are stacked.
    """
    num_features, batch_size = lengths.shape
    largest, buckets_per_bag = max(range(len(num_rows)), key=num_rows.__getitem__), count_buckets_per_bag(num_rows)
    small = [j for j in range(len(num_rows)) if j != largest]
    codes = _codes(rows[small], [num_rows[j] for j in small]) if len(small) > 1 else rows[small[0]]
    # key    = feature * buckets_per_bag + code     the pair (feature, code)
    # bucket = key * batch_size + bag               the triple (feature, code, bag)
    first_keys = torch.arange(num_features, device=rows.device) * buckets_per_bag
    first_buckets = torch.arange(batch_size, device=rows.device) + (first_keys * batch_size).unsqueeze(1)
    if first_rows is not None:  # a code is linear in the rows, so the code of the shift is taken off
        first_codes = _codes(first_rows[small], [num_rows[j] for j in small])
        first_keys = first_keys - first_codes
        first_buckets = first_buckets - (first_codes * batch_size).unsqueeze(1)
    keys = torch.repeat_interleave(first_keys, lengths.sum(1), output_size=len(codes)).add_(codes)
    # the ids of a feature are in the order of bags: a stable sort by key suffices, and narrow keys sort faster
    order = torch.sort(keys.to(_narrowest(num_features * buckets_per_bag - 1)), stable=True).indices
    buckets = torch.repeat_interleave(first_buckets.flatten(), lengths.flatten(), output_size=len(codes))
    buckets.add_(codes, alpha=batch_size)
    num_in_bucket = rows.new_zeros(num_features * buckets_per_bag * batch_size)
    num_in_bucket.scatter_add_(0, buckets, torch.ones_like(buckets))
    num_in_key = num_in_bucket.view(num_features * buckets_per_bag, batch_size).sum(1)
    is_filled = num_in_key > 0
    # the first id of each key that occurs stands for all of its ids: they have equal rows in the small partitions
    one_of_each_key = order[(num_in_key.cumsum(0) - num_in_key)[is_filled]]
    small_offsets = _offsets(is_filled)
    return Buckets(
        rows=[row.index_select(0, order if j == largest else one_of_each_key) for j, row in enumerate(rows)],
        offsets=[_offsets(num_in_bucket) if j == largest else small_offsets for j in range(len(num_rows))],
        order=order,
        largest=largest,
        buckets_per_bag=buckets_per_bag,
    )


def _codes(rows: Int64[Tensor, "small *shape"], num_rows: Sequence[int]) -> Int64[Tensor, "*shape"]:
    """Returns one number for each tuple of rows: ``(q1, q2, q3) -> (q1 * n2 + q2) * n3 + q3``."""
    codes = rows[0]
    for row, radix in zip(rows[1:], num_rows[1:], strict=True):
        codes = codes * radix + row
    return codes


def _offsets(lengths: Tensor) -> Int64[Tensor, " bags_plus_1"]:
    """Returns where each bag begins, and the last one ends."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.long, device=lengths.device)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    return offsets


def _narrowest(largest: int) -> torch.dtype:
    """Returns the integer type with fewest bytes that goes up to ``largest``."""
    dtypes = (torch.uint8, torch.int16, torch.int32, torch.int64)
    return next(dtype for dtype in dtypes if largest <= torch.iinfo(dtype).max)


class _MultiplyAndSum(torch.autograd.Function):
    """Computes ``(vectors * factors.unsqueeze(1)).sum(0)`` without a tensor of all products or of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, vectors: Float[Tensor, "codes batch width"], factors: Float[Tensor, "codes width"]
    ) -> Float[Tensor, "batch width"]:
        ctx.save_for_backward(vectors, factors)
        summed = vectors[0] * factors[0]
        for bucket, factor in zip(vectors[1:], factors[1:], strict=True):
            summed.addcmul_(bucket, factor)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        vectors, factors = ctx.saved_tensors
        (gradient,) = gradients
        # out[b] = sum_c vectors[c, b] * factors[c], so  d factors[c] = sum_b vectors[c, b] * d out[b]
        factor_gradients = torch.stack([(bucket * gradient).sum(0) for bucket in vectors])
        return cast(Tensor, gradient * factors.unsqueeze(1)), factor_gradients
