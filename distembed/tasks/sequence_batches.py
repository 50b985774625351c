"""Cuts rows of sequences into a model's inputs and its targets, as pure functions on a batch.

A row of training becomes its items but the last as inputs, and its items but the first as targets; a row of an
evaluation, its history but the last item as input, and that item as the target::

    row           training: input    target        evaluation: input   target   seen
    a b c d e     a b c d            b c d e       a b c d             e        a b c d
    a b c d e     c d                d e           c d                 e        a b c d      max_length 2
    a             -                  -             -                   a        -
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import ITEM

_Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Ranges:
    """Consecutive entries of each row of a list column: their number by row, and their indices in the flat values."""

    counts: _Integers
    entries: _Integers

    @classmethod
    def before(cls, ends: _Integers, counts: _Integers) -> "Ranges":
        """Returns, for each row r, the ``counts[r]`` entries that precede the flat index ``ends[r]``."""
        # entry n of the result belongs to a row r: its index is n + (first entry of r - entries of the rows before r)
        firsts = ends - counts
        shifts = firsts - (np.cumsum(counts) - counts)
        return cls(counts, np.repeat(shifts, counts) + np.arange(int(counts.sum())))


@dataclass(frozen=True)
class Cuts:
    """The entries of a batch's rows that are the model's inputs, its targets, and, in evaluations, the seen items."""

    inputs: Ranges
    targets: Ranges
    seen: Ranges

    @classmethod
    def of_training(cls, lengths: _Integers, max_length: int) -> "Cuts":
        counts, ends = np.clip(lengths - 1, 0, max_length), np.cumsum(lengths)
        return cls(Ranges.before(ends - 1, counts), Ranges.before(ends, counts), Ranges.before(ends, counts * 0))

    @classmethod
    def of_evaluation(cls, lengths: _Integers, max_length: int) -> "Cuts":
        before, ends = np.maximum(lengths - 1, 0), np.cumsum(lengths)
        inputs = Ranges.before(ends - 1, np.minimum(before, max_length))
        return cls(inputs, Ranges.before(ends, np.minimum(lengths, 1)), Ranges.before(ends - 1, before))


def item_lengths(features: KeyedJaggedTensor) -> _Integers:
    """Returns the number of items of each row."""
    by_feature = features.lengths().view(len(features.keys()), features.stride())
    return by_feature[features.keys().index(ITEM)].numpy().astype(np.int64)


def columns(features: KeyedJaggedTensor) -> dict[str, tuple[Tensor, _Integers]]:
    """Returns, by feature, its values, row after row, and the number of values of each row."""
    lengths = features.lengths().view(len(features.keys()), features.stride()).numpy().astype(np.int64)
    values = features.values().split(features.length_per_key())
    return {
        key: (feature_values, lengths[i])
        for i, (key, feature_values) in enumerate(zip(features.keys(), values, strict=True))
    }


def cut_lists(
    features: KeyedJaggedTensor, lists: frozenset[str], lengths: _Integers, cuts: Cuts
) -> dict[str, tuple[Tensor, _Integers]]:
    """Returns :func:`columns` of a batch, with lists cut to the model's inputs and other features unchanged.

    Args:
        features: Ids, or numbers, of a batch.
        lists: Names of the lists that have one entry for each item of their row.
        lengths: Number of items of each row.
        cuts: The entries that are the model's inputs.

    Raises:
        UserError: A list is not as long as the items of its row.
    """
    cut = {}
    for name, (values, own_lengths) in columns(features).items():
        if name not in lists:
            cut[name] = values, own_lengths
            continue
        differ = np.flatnonzero(own_lengths != lengths)
        if len(differ):
            row = int(differ[0])
            raise UserError(
                f"column {name!r}: a row has {own_lengths[row]} entries and {lengths[row]} items; lists of sequences "
                "have an entry for each item: prepare the data again."
            )
        cut[name] = values[torch.from_numpy(cuts.inputs.entries)], cuts.inputs.counts
    return cut


def jagged(features: Mapping[str, tuple[Tensor, _Integers]], num_rows: int) -> KeyedJaggedTensor:
    """Returns a KeyedJaggedTensor of features, given as :func:`columns` returns them; the inverse of that function."""
    lengths = np.concatenate([lengths for _, lengths in features.values()])
    counts = [len(values) for values, _ in features.values()]
    return KeyedJaggedTensor(
        list(features),
        torch.cat([values for values, _ in features.values()]),
        lengths=torch.from_numpy(lengths.astype(np.int32)),
        stride=num_rows,
        length_per_key=counts,
        offset_per_key=[0, *np.cumsum(counts).tolist()],
    )
