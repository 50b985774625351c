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

from distembed.base.tracing import is_as_on_cuda

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
class QueriedRows:
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

    first_tokens: _Integers
    lengths: _Integers
    num_queries: _Integers

    @classmethod
    def cut(cls, queried: "QueriedRows", max_length: int) -> "_Rows":
        full_lengths = queried.lengths.numpy().astype(np.int64)
        lengths = np.minimum(full_lengths, max_length)
        return cls(np.cumsum(full_lengths) - lengths, lengths, queried.num_queries.numpy().astype(np.int64))

    def query_tokens(self) -> tuple[_Integers, _Integers]:
        """Returns the row of each query and its token's number within the row, below 0 where there is none.

        The q queries of a row of n tokens are at its last tokens: n - q to n - 1, below 0 if q > n.
        """
        rows = np.repeat(np.arange(len(self.lengths)), self.num_queries)
        return rows, np.arange(len(rows)) - (np.cumsum(self.num_queries) - self.lengths)[rows]


def _may_read(lengths: Tensor) -> bool:
    """Returns whether values of lengths may decide shapes: on a CPU, and not in a program for any lengths."""
    return lengths.device.type == "cpu" and not torch.compiler.is_exporting() and not is_as_on_cuda()


def lay_out(queried: QueriedRows, max_length: int) -> SequenceLayout:
    """Returns the layout of a batch's rows; tokens older than the last ``max_length`` are left out."""
    if not _may_read(queried.lengths):
        return _one_group(queried, max_length)
    # Rows go from the longest to the shortest, so a group is a run of rows, each as wide as the group's longest row.
    # Rows a b c of 1, 3, 2 tokens in one group (- is padding, which repeats the row's last token):
    #   by_length        b c a               num_slots     3 3 3          first_slots    0 3 6
    #   slots            b0 b1 b2 c0 c1 - a0 - -
    #   row_of_slot      b  b  b  c  c  c a  a a
    #   token_in_row     0  1  2  0  1  2 0  1 2
    rows = _Rows.cut(queried, max_length)
    groups = _group_lengths(np.bincount(rows.lengths, minlength=2))
    num_slots = np.repeat([length for _, length in groups], [count for count, _ in groups])
    by_length = np.argsort(-rows.lengths, kind="stable")[: len(num_slots)]  # rows without tokens have no slots
    first_slots = np.cumsum(num_slots) - num_slots
    row_of_slot = np.repeat(by_length, num_slots)
    token_in_row = np.arange(len(row_of_slot)) - np.repeat(first_slots, num_slots)
    last_in_row = rows.lengths[row_of_slot] - 1
    first_slot_of_row = np.zeros(len(rows.lengths), np.int64)
    first_slot_of_row[by_length] = first_slots
    query_rows, query_tokens = rows.query_tokens()
    queries = np.where(query_tokens >= 0, first_slot_of_row[query_rows] + query_tokens, len(row_of_slot))
    return SequenceLayout(
        torch.from_numpy(rows.first_tokens[row_of_slot] + np.minimum(token_in_row, last_in_row)),
        torch.from_numpy(np.maximum(last_in_row - token_in_row, 0)),
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


def _one_group(queried: QueriedRows, max_length: int) -> SequenceLayout:
    """Returns the layout with all rows in one group of ``max_length`` slots, on their device, without synchronising."""
    # as in lay_out, but every row has max_length slots, so the slots of row r begin at r * max_length
    full_lengths, num_queries, device = queried.lengths.long(), queried.num_queries.long(), queried.lengths.device
    lengths, num_rows = full_lengths.clamp(max=max_length), full_lengths.shape[0]
    token_in_row = torch.arange(max_length, device=device)
    last_in_row = (lengths - 1).clamp(min=0).unsqueeze(1)
    first_tokens = (full_lengths.cumsum(0) - lengths).unsqueeze(1)
    total = queried.total_queries
    query_rows = torch.arange(num_rows, device=device).repeat_interleave(num_queries, output_size=total)
    query_tokens = torch.arange(total, device=device) - (num_queries.cumsum(0) - lengths)[query_rows]
    queries = torch.where(query_tokens >= 0, query_rows * max_length + query_tokens, num_rows * max_length)
    tokens = (first_tokens + torch.minimum(token_in_row, last_in_row)).flatten()
    return SequenceLayout(
        # empty rows at the end of the batch would take their padding from an index beyond the last token
        torch.minimum(tokens, (full_lengths.sum() - 1).clamp(min=0)),
        (last_in_row - token_in_row).clamp(min=0).flatten(),
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


def pack(queried: QueriedRows, max_length: int) -> PackedLayout:
    """Returns the layout of a batch on the CPU for a recurrent network; a batch without tokens has one slot."""
    # Step t has a slot for each row longer than t, the longest row first; rows a b c of 1, 3, 2 tokens:
    #   slots            b0 c0 a0 b1 c1 b2          batch_sizes    3 2 1     first_slots    0 3 5
    #   step_of_slot     0  0  0  1  1  2           by_length      b c a
    #   rank_of_slot     0  1  2  0  1  0           rank_of_row    2 0 1     b1: first_slots[1] + rank 0 = 3
    rows = _Rows.cut(queried, max_length)
    num_rows_of_length = np.bincount(rows.lengths, minlength=2)
    batch_sizes = np.trim_zeros(np.cumsum(num_rows_of_length[:0:-1])[::-1], "b")
    first_slots = np.cumsum(batch_sizes) - batch_sizes
    step_of_slot = np.repeat(np.arange(len(batch_sizes)), batch_sizes)
    rank_of_slot = np.arange(len(step_of_slot)) - np.repeat(first_slots, batch_sizes)
    by_length = np.argsort(-rows.lengths, kind="stable")
    rank_of_row = np.empty(len(by_length), np.int64)
    rank_of_row[by_length] = np.arange(len(by_length))
    query_rows, query_tokens = rows.query_tokens()
    with_token = np.flatnonzero(query_tokens >= 0)
    queries = np.full(len(query_rows), max(1, len(step_of_slot)))
    queries[with_token] = first_slots[query_tokens[with_token]] + rank_of_row[query_rows[with_token]]
    tokens = rows.first_tokens[by_length[rank_of_slot]] + step_of_slot
    if not len(step_of_slot):
        tokens, batch_sizes = np.zeros(1, np.int64), np.ones(1, np.int64)
    return PackedLayout(torch.from_numpy(tokens), torch.from_numpy(batch_sizes.copy()), torch.from_numpy(queries))


def take_tokens(tokens: Float[Tensor, "tokens dim"], chosen: Int64[Tensor, " slots"]) -> Float[Tensor, "slots dim"]:
    """Returns the vector of each slot; zeros where a batch has slots of padding and no tokens."""
    # zeros are concatenated, not returned alone, so that they depend on the tokens: the backward pass of a sharded
    # lookup is a collective, and a rank that skipped it would block the other ranks
    is_padded = torch.compiler.is_exporting() or len(tokens) == 0  # a program is made for any number of tokens
    padded = torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])]) if is_padded else tokens
    return padded.index_select(0, chosen)


def last_tokens(
    tokens: Float[Tensor, "tokens dim"], lengths: Int[Tensor, " rows"], max_length: int
) -> tuple[Float[Tensor, "left dim"], Int[Tensor, " rows"]]:
    """Returns the last ``max_length`` tokens of each row, and the number of tokens of each row.

    On a CPU, older tokens are left out. Elsewhere their vectors become zeros, since leaving them out would wait for the
    device to tell how many tokens are left.
    """
    if _may_read(lengths):
        full_lengths = lengths.numpy().astype(np.int64)
        left = np.minimum(full_lengths, max_length)
        # tokens left out before row r: a shift from the token's new index to its old one
        shift = np.repeat(np.cumsum(full_lengths - left), left)
        return tokens.index_select(0, torch.from_numpy(np.arange(len(shift)) + shift)), lengths.clamp(max=max_length)
    ends = lengths.cumsum(0).repeat_interleave(lengths, output_size=tokens.shape[0])
    ages = ends - torch.arange(1, tokens.shape[0] + 1, device=tokens.device)
    return tokens * (ages < max_length).unsqueeze(1), lengths


def take_queries(slots: Float[Tensor, "slots dim"], queries: Int64[Tensor, " queries"]) -> Float[Tensor, "queries dim"]:
    """Returns the state of each query; zeros for the index ``len(slots)``, of a query without a token."""
    return torch.cat([slots, slots.new_zeros(1, slots.shape[1])]).index_select(0, queries)


def feature_lengths(features: KeyedJaggedTensor, feature: str) -> Int[Tensor, " rows"]:
    """Returns how many ids of a feature each row has, also where the batch has no rows."""
    return features.lengths().view(len(features.keys()), features.stride())[features.keys().index(feature)]


def feature_values(features: KeyedJaggedTensor, feature: str) -> Tensor:
    """Returns the ids, or the numbers, of a feature, row after row."""
    return features.values().split(features.length_per_key())[features.keys().index(feature)]
