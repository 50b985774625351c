"""The ids of a batch as a lookup needs them: their rows in all partitions, and the distinct ones.

A GPU that is handed a list, or asked for a number, stops the step until all earlier work is done. So numbers of ids are
kept on both sides, and the constants of the partitions are copied to the device once.

Ids repeat within a batch, as in clicks. On a CPU the vector of an id is composed once for all its occurrences, then
pooled. Sorting finds the distinct ids, and orders the occurrences of each, so that the gradient of its vector is a sum
over a run of them::

    occurrences, sorted by id   | 3 3 3 | 7 | 9 9 |
    distinct ids                | 3     | 7 | 9   |

A GPU would have to be waited for to know their number, and computes a vector again faster than it sorts: there every
occurrence counts as an id of its own (:func:`every_id`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.partitions import Partition


class IdCounts:
    """The number of ids of each feature, as a list on the host (for shapes) and as a tensor on the ids' device.

    ``lengths`` are the batch's bag sizes, feature after feature with equal numbers of bags; the tensor is computed from
    them on a GPU, because a copy from the host would wait.
    """

    def __init__(self, on_host: Sequence[int], lengths: Int[Tensor, " bags"]) -> None:
        self.on_host = on_host
        self._lengths = lengths

    @classmethod
    def of_batch(cls, features: KeyedJaggedTensor) -> "IdCounts":
        """Returns a batch's numbers of ids; TorchRec already has them on the host, as ``length_per_key``."""
        return cls(features.length_per_key(), features.lengths())

    @cached_property
    def on_device(self) -> Int64[Tensor, " features"]:
        if self._lengths.device.type == "cpu":
            return torch.tensor(self.on_host)
        return self._lengths.view(len(self.on_host), -1).sum(1)

    @property
    def total(self) -> int:
        return sum(self.on_host)

    @property
    def is_uniform(self) -> bool:
        """Whether all features have equal numbers of ids, so that ids reshape to ``[features, ids of each]``."""
        return len(set(self.on_host)) == 1

    def of_each_id(self, numbers: Int64[Tensor, "*k features"]) -> Int64[Tensor, "*k ids"]:
        """Repeats a number for each feature into a number for each id of the feature."""
        return numbers.repeat_interleave(self.on_device, dim=-1, output_size=self.total)


class FeatureRows:
    """Maps ids to their rows in all partitions, for features whose tables have one kind of scheme.

    ``partitions`` has the scheme of each feature's table, all of one class with k partitions; sizes may differ.
    """

    def __init__(self, partitions: Sequence[Partition]) -> None:
        self._partitions = list(partitions)
        self._scheme = type(self._partitions[0])
        self._constants = self._scheme.constants(self._partitions)

    def __call__(self, ids: Int64[Tensor, " ids"], counts: IdCounts) -> Int64[Tensor, "k ids"]:
        """Returns the row of each id in each partition, contiguous."""
        # broadcasting may return rows with gaps, but operators read an address and a number of elements
        return self._map(ids, counts).contiguous()

    def _map(self, ids: Int64[Tensor, " ids"], counts: IdCounts) -> Int64[Tensor, "k ids"]:
        # constants: the numbers that a scheme computes rows by, like moduli, [constants, features]; None if it has none
        if self._constants is None:
            return self._by_table(ids, counts)
        if self._constants.device != ids.device:
            self._constants = self._constants.to(ids.device)  # once
        if counts.is_uniform:
            by_feature = ids.view(len(self._partitions), -1)
            return self._scheme.rows_by_constants(by_feature, self._constants.unsqueeze(2)).flatten(1)
        if ids.device.type == "cpu":  # a division by one number takes less than one by a tensor
            return self._by_table(ids, counts)
        return self._scheme.rows_by_constants(ids, counts.of_each_id(self._constants))

    def _by_table(self, ids: Int64[Tensor, " ids"], counts: IdCounts) -> Int64[Tensor, "k ids"]:
        if counts.is_uniform:
            return self._scheme.rows_of_tables(self._partitions, ids.view(len(self._partitions), -1)).flatten(1)
        partition_ids = zip(self._partitions, ids.split(list(counts.on_host)), strict=True)
        return torch.cat([partition.rows(feature_ids) for partition, feature_ids in partition_ids], dim=1)


_MAX, _MAX_INT32 = 2**63 - 1, 2**31 - 1


@dataclass(frozen=True)
class DistinctIds:
    """The distinct ids of each feature, and how the given ids follow from them.

    Ids go feature after feature, ascending within each unless :func:`every_id` made the object.
    """

    ids: Int64[Tensor, " distinct"]  # the distinct ids
    counts: IdCounts  # number of distinct ids of each feature
    inverse: Int64[Tensor, " ids"]  # index in ``ids`` of each given id
    # indices of the given ids, sorted by ``inverse``; None where every given id is one of ``ids``, in order
    order: Int64[Tensor, " ids"] | None
    # index in ``order`` of the first occurrence of each distinct id; None where there is no ``order``
    starts: Int64[Tensor, " distinct"] | None

    def record_stream(self, stream: Any) -> None:
        for tensor in (self.ids, self.counts.on_device, self.inverse, self.order, self.starts):
            if tensor is not None:
                tensor.record_stream(stream)

    def slots(self) -> Int64[Tensor, " distinct"]:
        """Returns each id's index in the flattened ``[positions, features]`` layout, features padded to one length.

        Id i of feature f has slot ``i * features + f``: a TBE's output for bags of one id, flattened, has this layout.
        """
        counts, device = self.counts.on_device, self.ids.device
        # slot of each feature's first id, less the slots that earlier features' ids would take
        firsts = torch.arange(len(counts), device=device) - (counts.cumsum(0) - counts) * len(counts)
        return torch.arange(len(self.ids), device=device) * len(counts) + self.counts.of_each_id(firsts)

    def pool(
        self,
        vectors: Float[Tensor, "distinct width"],
        offsets: Int64[Tensor, " bags_plus_1"],
        pooling: Literal["sum", "max"],
        weights: Float[Tensor, " ids"] | None = None,
    ) -> Float[Tensor, "bags width"]:
        """Pools the distinct ids' vectors over the bags of the given ids; an empty bag gives zeros.

        ``offsets`` are bag starts among the given ids. ``weights``, one for each given id, apply to ``sum`` alone; they
        get gradients too.
        """
        if pooling == "max":
            pooled = nn.functional.embedding_bag(self.inverse, vectors, offsets, mode="max", include_last_offset=True)
            return pooled
        summed = _SumBags.apply(  # type: ignore[no-untyped-call]
            vectors, self.inverse, offsets, self.order, self.starts, weights
        )
        return cast(Tensor, summed)


def every_id(ids: Int64[Tensor, " ids"], counts: IdCounts) -> DistinctIds:
    """Treats every occurrence as a distinct id: without a sort, and without a wait for a GPU."""
    return DistinctIds(ids, counts, torch.arange(len(ids), device=ids.device), None, None)


def distinct_ids(ids: Int64[Tensor, " ids"], counts: Sequence[int], num_embeddings: int) -> DistinctIds:
    """Finds the distinct ids of every feature by one sort; on a GPU this would wait for their numbers.

    ``counts`` is the number of ids of each feature; ids lie in ``[0, num_embeddings)``.
    """
    values = None
    if len(counts) * num_embeddings > _MAX:  # keys would overflow int64: sort positions in the list of values instead
        values, ids = torch.unique(ids, return_inverse=True)
        num_embeddings = len(values)
    # one sort for all: ids of feature f are moved to [f * num_embeddings, (f + 1) * num_embeddings)
    shifts = torch.arange(len(counts), device=ids.device) * num_embeddings
    lengths = torch.tensor(counts, device=ids.device)
    moved = ids + torch.repeat_interleave(shifts, lengths, output_size=len(ids))
    # narrow keys sort faster
    moved, order = torch.sort(moved.int() if len(counts) * num_embeddings <= _MAX_INT32 else moved)
    is_first = torch.ones_like(moved, dtype=torch.bool)
    torch.ne(moved[1:], moved[:-1], out=is_first[1:])
    inverse = torch.empty_like(order).scatter_(0, order, is_first.cumsum(0) - 1)
    starts = is_first.nonzero().squeeze(1)
    distinct = moved[starts].long()
    ends = torch.searchsorted(distinct, shifts + num_embeddings)
    distinct_counts = ends.diff(prepend=ends.new_zeros(1))
    distinct = distinct - torch.repeat_interleave(shifts, distinct_counts, output_size=len(distinct))
    return DistinctIds(
        ids=distinct if values is None else values[distinct],
        counts=IdCounts(distinct_counts.tolist(), distinct_counts),
        inverse=inverse,
        order=order,
        starts=starts,
    )


def take_once(vectors: Float[Tensor, "places dim"], positions: Int64[Tensor, " taken"]) -> Float[Tensor, "taken dim"]:
    """Returns ``vectors[places]`` for distinct places: the backward pass copies gradients instead of adding them up."""
    return _TakeOnce.apply(vectors, positions)  # type: ignore[no-untyped-call]


class _TakeOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.num_places = len(vectors)
        return vectors.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        (positions,) = ctx.saved_tensors
        (gradient,) = gradients
        vector_gradients = gradient.new_zeros(ctx.num_places, gradient.shape[1])
        return vector_gradients.index_copy_(0, positions, gradient), None


class _SumBags(torch.autograd.Function):
    """Sums distinct ids' vectors over bags.

    The gradient of a distinct id's vector is a sum over its occurrences, which ``order`` has as one run: another sum
    over bags. ``embedding_bag``'s own backward pass would sort the ids again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        inverse: Tensor,
        offsets: Tensor,
        order: Tensor | None,
        starts: Tensor | None,
        weights: Tensor | None,
    ) -> Tensor:
        ctx.num_ids = len(inverse)
        # the vectors are read for the gradients of weights alone
        for_id_weights = (vectors, inverse) if weights is not None and weights.requires_grad else (None, None)
        ctx.save_for_backward(offsets, order, starts, weights, *for_id_weights)
        return _sum_bags(inverse, vectors, offsets, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None, None, Tensor | None]:
        offsets, order, starts, weights, vectors, inverse = ctx.saved_tensors
        bags = torch.arange(len(offsets) - 1, device=offsets.device)
        bag_of_id = torch.repeat_interleave(bags, offsets.diff(), output_size=ctx.num_ids)
        weight_gradients = None
        if vectors is not None:
            products = vectors.index_select(0, inverse) * gradients[0].index_select(0, bag_of_id)
            weight_gradients = products.sum(1).to(weights.dtype)
        if order is None:
            vector_gradients = gradients[0].index_select(0, bag_of_id)
            if weights is not None:
                vector_gradients = vector_gradients * weights.to(vector_gradients.dtype).unsqueeze(1)
        else:
            ends = nn.functional.pad(starts, (0, 1), value=len(order))
            ordered_weights = None if weights is None else weights[order]
            vector_gradients = _sum_bags(bag_of_id[order], gradients[0].contiguous(), ends, ordered_weights)
        return vector_gradients, None, None, None, None, weight_gradients


def _sum_bags(rows: Tensor, vectors: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    weights = None if weights is None else weights.to(vectors.dtype)
    summed = nn.functional.embedding_bag(
        rows, vectors, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    return summed
