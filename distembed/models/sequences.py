"""Sequences of unequal length: where their tokens lie while a network runs over them.

Published code pads all sequences of a batch to the model's greatest length. Here rows of similar length are put side by
side, and each group is padded to its own longest row alone. Tokens stand at the left of their row, so that a causal
network never sees the padding beyond the end, and no mask is needed::

    lengths  3 1 2 3                    slots of two groups of rows
    tokens   a a a | b | c c | d d d    a a a | d d d  (2 rows of 3)      c c | b -  (2 rows of 2)

The trade-off: a further group saves padding, and costs the calls of the operators that go over groups. On CUDA, where
lengths could only be known by waiting for the device, all rows form one group of the greatest length.

The shapes: ``tokens`` are the entries of all rows, end to end; ``slots`` are tokens with padding; ``queries`` are the
places at which a state is asked for.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, Int64
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

_MOST_PADS = 32
"""Most padding slots of a group; shorter rows form a further group, whose calls take about as long as the padding."""

_Integers = NDArray[np.int64]


@dataclass(frozen=True)
class SequenceLayout:
    """Where tokens and queries lie while a network runs.

    Attributes:
        tokens: The token of each slot; padding repeats a token of the batch, whose state no query reads.
        ages: How many tokens of its row are more recent than the slot's, 0 for the last one and for padding.
        groups: (number of rows, slots a row) of each group, in the order of the slots.
        queries: The slot of each query; the number of slots, which is out of range, where its row has too few tokens.
    """

    tokens: Int64[Tensor, " slots"]
    ages: Int64[Tensor, " slots"]
    groups: tuple[tuple[int, int], ...]
    queries: Int64[Tensor, " queries"]


@dataclass(frozen=True)
class Asked:
    """The rows of a batch, and the tokens at which a state is asked for.

    Attributes:
        lengths: Number of tokens of each row.
        num_queries: Number of queries of each row, at its last tokens.
        total_queries: Number of all queries.
    """

    lengths: Int[Tensor, " rows"]
    num_queries: Int[Tensor, " rows"]
    total_queries: int


@dataclass(frozen=True)
class _Rows:
    """The rows of a batch, cut to their most recent tokens: each row's first token left, and its counts."""

    firsts: _Integers
    lengths: _Integers
    num_queries: _Integers

    @classmethod
    def cut(cls, asked: "Asked", max_length: int) -> "_Rows":
        whole = asked.lengths.numpy().astype(np.int64)
        left = np.minimum(whole, max_length)
        return cls(np.cumsum(whole) - left, left, asked.num_queries.numpy().astype(np.int64))

    def query_places(self) -> tuple[_Integers, _Integers]:
        """Returns the row of each query and its token's number within the row, below 0 where there is none.

        The q queries of a row of n tokens are at its last tokens: n - q to n - 1, below 0 if q > n.
        """
        rows = np.repeat(np.arange(len(self.lengths)), self.num_queries)
        return rows, np.arange(len(rows)) - (np.cumsum(self.num_queries) - self.lengths)[rows]


def lay_out(asked: Asked, max_length: int) -> SequenceLayout:
    """Returns the layout of a batch's rows; tokens older than the last ``max_length`` are left out."""
    if asked.lengths.device.type != "cpu":
        return _one_group(asked, max_length)
    # Rows go from the longest to the shortest, so a group is a run of rows. ``widths`` is the number of slots of each
    # row, which is its group's length. Rows without tokens come last, and get no slots.
    rows = _Rows.cut(asked, max_length)
    order = np.argsort(-rows.lengths, kind="stable")
    groups = _group_lengths(np.bincount(rows.lengths, minlength=2))
    widths = np.repeat([length for _, length in groups], [count for count, _ in groups])
    order = order[: len(widths)]
    starts = np.cumsum(widths) - widths
    row_of_slot = np.repeat(order, widths)
    numbers = np.arange(len(row_of_slot)) - np.repeat(starts, widths)
    lasts = rows.lengths[row_of_slot] - 1
    start_of_row = np.zeros(len(rows.lengths), np.int64)
    start_of_row[order] = starts
    query_rows, query_numbers = rows.query_places()
    queries = np.where(query_numbers >= 0, start_of_row[query_rows] + query_numbers, len(row_of_slot))
    return SequenceLayout(
        torch.from_numpy(rows.firsts[row_of_slot] + np.minimum(numbers, lasts)),
        torch.from_numpy(np.maximum(lasts - numbers, 0)),
        tuple(groups),
        torch.from_numpy(queries),
    )


def _group_lengths(counts: _Integers) -> list[tuple[int, int]]:
    """Returns (number of rows, length) of each group, the longest first, given the number of rows by length.

    Greedy: a group takes ever shorter rows until its padding exceeds ``_MOST_PADS``. Rows of length 0 are in no group.
    A batch without tokens has one group without rows.
    """
    groups: list[tuple[int, int]] = []
    num_rows = longest = pads = 0
    for length in range(len(counts) - 1, 0, -1):
        count = int(counts[length])
        pads += count * (longest - length)
        if num_rows and count and pads > _MOST_PADS:
            groups.append((num_rows, longest))
            num_rows = 0
        if count and num_rows == 0:
            longest, pads = length, 0
        num_rows += count
    return [*groups, (num_rows, longest)] if num_rows else [(0, 1)]


def _one_group(asked: Asked, max_length: int) -> SequenceLayout:
    """Returns the layout with all rows in one group of ``max_length`` slots, on their device, without synchronising."""
    # as in lay_out, but every row has max_length slots, so the slots of row r begin at r * max_length
    whole, wanted, device = asked.lengths.long(), asked.num_queries.long(), asked.lengths.device
    left, num_rows = whole.clamp(max=max_length), len(whole)
    numbers = torch.arange(max_length, device=device)
    lasts = (left - 1).clamp(min=0).unsqueeze(1)
    firsts = (whole.cumsum(0) - left).unsqueeze(1)
    row_of_query = torch.arange(num_rows, device=device).repeat_interleave(wanted, output_size=asked.total_queries)
    query_numbers = torch.arange(asked.total_queries, device=device) - (wanted.cumsum(0) - left)[row_of_query]
    queries = torch.where(query_numbers >= 0, row_of_query * max_length + query_numbers, num_rows * max_length)
    tokens = (firsts + torch.minimum(numbers, lasts)).flatten()
    return SequenceLayout(
        # empty rows at the end of the batch would take their padding from an index beyond the last token
        torch.minimum(tokens, (whole.sum() - 1).clamp(min=0)),
        (lasts - numbers).clamp(min=0).flatten(),
        ((num_rows, max_length),),
        queries,
    )


@dataclass(frozen=True)
class PackedLayout:
    """Where tokens and queries lie for a recurrent network: all rows' first tokens, then all second ones, and so on.

    Rows are in descending order of length, so the rows that still have a token at a step are the first ones.

    Attributes:
        tokens: The token of each slot.
        batch_sizes: Number of rows that have a token at each step, as torch's ``PackedSequence`` has them.
        queries: The slot of each query; the number of slots, which is out of range, where its row has too few tokens.
    """

    tokens: Int64[Tensor, " slots"]
    batch_sizes: Int64[Tensor, " steps"]
    queries: Int64[Tensor, " queries"]


def pack(asked: Asked, max_length: int) -> PackedLayout:
    """Returns the layout of a batch on the CPU for a recurrent network; a batch without tokens has one slot."""
    # token t of the k-th longest row is in slot starts[t] + k: step t has one slot for each row longer than t
    rows = _Rows.cut(asked, max_length)
    counts = np.bincount(rows.lengths, minlength=2)
    batch_sizes = np.trim_zeros(np.cumsum(counts[:0:-1])[::-1], "b")
    order = np.argsort(-rows.lengths, kind="stable")
    starts = np.cumsum(batch_sizes) - batch_sizes
    steps = np.repeat(np.arange(len(batch_sizes)), batch_sizes)
    ranked = np.arange(len(steps)) - np.repeat(starts, batch_sizes)
    rank_of_row = np.empty(len(order), np.int64)
    rank_of_row[order] = np.arange(len(order))
    query_rows, query_numbers = rows.query_places()
    found = np.flatnonzero(query_numbers >= 0)
    queries = np.full(len(query_rows), max(1, len(steps)))
    queries[found] = starts[query_numbers[found]] + rank_of_row[query_rows[found]]
    tokens = rows.firsts[order[ranked]] + steps
    if not len(steps):
        tokens, batch_sizes = np.zeros(1, np.int64), np.ones(1, np.int64)
    return PackedLayout(torch.from_numpy(tokens), torch.from_numpy(batch_sizes.copy()), torch.from_numpy(queries))


def take_tokens(tokens: Float[Tensor, "tokens dim"], chosen: Int64[Tensor, " slots"]) -> Float[Tensor, "slots dim"]:
    """Returns the vector of each slot; zeros where a batch has slots of padding and no tokens."""
    # zeros are concatenated, not returned alone, so that they depend on the tokens: the backward pass of a sharded
    # lookup is a collective, and a rank that skipped it would block the other ranks
    padded = tokens if len(tokens) else torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
    return padded.index_select(0, chosen)


def take_queries(slots: Float[Tensor, "slots dim"], queries: Int64[Tensor, " queries"]) -> Float[Tensor, "queries dim"]:
    """Returns the state of each query; zeros for the index ``len(slots)``, of a query without a token."""
    return torch.cat([slots, slots.new_zeros(1, slots.shape[1])]).index_select(0, queries)


def feature_lengths(features: KeyedJaggedTensor, feature: str) -> Int[Tensor, " rows"]:
    """Returns how many ids of a feature each row has, also where the batch has no rows."""
    return features.lengths().view(len(features.keys()), features.stride())[features.keys().index(feature)]


def feature_values(features: KeyedJaggedTensor, feature: str) -> Tensor:
    """Returns the ids, or the numbers, of a feature, row after row."""
    return features.values().split(features.length_per_key())[features.keys().index(feature)]
