"""A batch as steps have it that take much memory, in rows that are as even as they can be.

Lists are a little longer than on average: how long those of a batch are together varies from step to step, by
``mean / sqrt(rows)`` where lengths vary as much as their mean, and what counts is the fullest of many steps.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.dataset.schema import SPARSE_FEATURES, BatchField, Schema
from distembed.data.reader.batch import Batch

_DEVIATIONS, _MOST_LONGER = 2.0, 0.2
"""By how many standard deviations a batch is longer than on average, and by which share of it at most."""
_LARGEST_MULTIPLE = 10_000
"""Ids of a feature to each id of another up to which they are taken for a multiple of it."""


def typical_batch(schema: Schema, num_rows: int, pads_lists: bool = False) -> Batch:
    """Returns a batch of the schema's fields, with as many ids, and numbers beside them, as there are in many steps.

    Where it pads lists, those that have a greatest length are all of that, as networks lay them out that cannot wait
    for a device to tell how long they are.
    """
    longer = 1 + min(_MOST_LONGER, _DEVIATIONS / math.sqrt(max(1, num_rows)))
    lists = {feature.name for feature in schema.categorical if feature.multi_hot} | {*schema.dense_sequences}
    means = {name: longer * mean for name, mean in _ids_per_row(schema).items() if name in lists}
    lengths = dict.fromkeys(schema.categorical_names, torch.ones(num_rows, dtype=torch.int32))
    lengths |= typical_lengths(means, num_rows)
    if pads_lists:
        own = (each for each in schema.categorical if each.table is None)  # others are of a task, which knows lengths
        most = {each.name: each.max_ids_per_row for each in own if each.max_ids_per_row is not None}
        most |= dict.fromkeys(schema.dense_sequences, max(most.values())) if most else {}
        lengths |= {name: torch.full((num_rows,), count, dtype=torch.int32) for name, count in most.items()}
    sizes = {feature.name: feature.num_embeddings for feature in schema.categorical}

    def jagged(field: BatchField) -> KeyedJaggedTensor:
        own = [lengths[name] for name in field.columns]
        counts = [int(each.sum()) for each in own]
        if field.name == SPARSE_FEATURES:
            values = [torch.arange(count) % sizes[name] for name, count in zip(field.columns, counts, strict=True)]
        else:
            values = [torch.zeros(count) for count in counts]
        return KeyedJaggedTensor(list(field.columns), _joined(values), lengths=_joined(own), stride=num_rows)

    return _batch(schema, num_rows, jagged)


def batch_of_shapes(schema: Schema, num_rows: int) -> Batch:
    """Returns a batch of the same shapes, without values, where tensors are fake: one that is too large to be made."""
    means = _ids_per_row(schema)

    def jagged(field: BatchField) -> KeyedJaggedTensor:
        counts = [math.ceil(num_rows * means[name]) for name in field.columns]
        return KeyedJaggedTensor(
            list(field.columns),
            torch.empty(sum(counts), dtype=torch.int64 if field.name == SPARSE_FEATURES else torch.float32),
            lengths=torch.empty(num_rows * len(counts), dtype=torch.int32),
            stride=num_rows,
            length_per_key=counts,
            offset_per_key=list(accumulate(counts, initial=0)),
        )

    return _batch(schema, num_rows, jagged)


def _ids_per_row(schema: Schema) -> dict[str, float]:
    means = {feature.name: feature.mean_ids_per_row for feature in schema.categorical}
    return means | dict.fromkeys(schema.dense_sequences, schema.mean_list_length)


def _batch(schema: Schema, num_rows: int, jagged: Callable[[BatchField], KeyedJaggedTensor]) -> Batch:
    shapes = {field: (num_rows,) if field.is_vector else (num_rows, len(field.columns)) for field in schema.fields}
    fields = {field.name: jagged(field) if field.is_jagged else torch.zeros(shape) for field, shape in shapes.items()}
    return Batch(fields, num_rows)


def typical_lengths(means: Mapping[str, float], num_rows: int) -> dict[str, Int[Tensor, " rows"]]:
    """Returns how many ids each row has of each list feature, of which a row has ``means`` on average.

    Rows differ by one at most where the mean is no whole number. Features with the same mean have the same lengths,
    and one with a multiple of another's has this multiple in each row, such as the negative items of sequences.
    """
    lengths: dict[float, Tensor] = {}
    for mean in sorted(set(means.values())):
        # the largest of the smaller means that this one is a multiple of
        ratios = {base: mean / base for base in lengths if base * _LARGEST_MULTIPLE >= mean > 0}
        bases = (base for base, ratio in ratios.items() if math.isclose(ratio, round(ratio), rel_tol=1e-9))
        base = max(bases, default=None)
        ends = torch.ceil(torch.arange(num_rows + 1, dtype=torch.float64) * mean - 1e-9).clamp_(min=0)
        lengths[mean] = ends.diff().int() if base is None else lengths[base] * round(mean / base)
    return {name: lengths[mean] for name, mean in means.items()}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if tensors else torch.zeros(0, dtype=torch.int64)
