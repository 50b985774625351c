"""Makes batches of tensors from decoded rows.

Trade-off: ids become int64 here, since what looks them up takes one type for all tables; records keep int32 until then,
which halves what gathering random rows has to fetch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.dataset.schema import DENSE_SEQUENCES, SPARSE_FEATURES, Schema
from distembed.data.jagged import Jagged
from distembed.data.reader.batch import Batch, unit_bags
from distembed.data.reader.decode import Block, RecordLayout
from distembed.data.single_ids import mark_single_ids

_CPU = torch.device("cpu")


class BatchAssembler:
    """Makes batches of the rows of one schema.

    Args:
        schema: Columns of the batches.
    """

    def __init__(self, schema: Schema) -> None:
        self.layout = RecordLayout.from_schema(schema)
        self._schema = schema

    def assemble(self, blocks: Sequence[Block], global_sizes: Sequence[int]) -> Iterator[Batch]:
        """Yields batches of equally many rows each.

        Args:
            blocks: Parts of the batches; each block has its part of every batch, batch after batch. No blocks make
                batches without rows. Rows with lists are made one batch at a time.
            global_sizes: Rows of each batch on all ranks.
        """
        layout, schema, count = self.layout, self._schema, len(global_sizes)
        empty = np.empty((count, 0, layout.width), layout.dtype)
        each = (block.records.reshape(count, len(block.records) // count, layout.width) for block in blocks)
        records = np.concatenate([empty, *each], axis=1)
        floats = records.view(np.float32)[:, :, layout.first_float : layout.first_float + len(layout.numbers)]
        numbers = {}
        for field in (field for field in schema.fields if not field.is_jagged):
            first = layout.numbers.index(field.columns[0]) if field.columns else 0
            columns = first if field.is_vector else slice(first, first + len(field.columns))
            numbers[field.name] = np.ascontiguousarray(floats[:, :, columns])
        ids = np.ascontiguousarray(records[:, :, : len(layout.single)].transpose(0, 2, 1)).astype(np.int64)
        for index, global_size in enumerate(global_sizes):
            jagged = self._jagged_fields(ids[index], blocks) if layout.has_lists else self._single_valued(ids[index])
            fields = {
                field.name: jagged[field.name] if field.is_jagged else torch.from_numpy(numbers[field.name][index])
                for field in schema.fields
            }
            yield Batch(fields, global_size)

    def _single_valued(self, ids: NDArray[np.int64]) -> dict[str, KeyedJaggedTensor]:
        """Returns the jagged field of features with one id a row, ``[num_keys, num_rows]``."""
        # what depends on the shape alone is made once, so that no batch pays for sums of ones
        num_keys, num_rows = ids.shape
        lengths, offsets = unit_bags(num_keys * num_rows, _CPU)
        features = KeyedJaggedTensor(
            list(self._schema.categorical_names),
            torch.from_numpy(ids.reshape(-1)),
            lengths=lengths,
            offsets=offsets,
            stride=num_rows,
            length_per_key=[num_rows] * num_keys,
            offset_per_key=[num_rows * key for key in range(num_keys + 1)],
        )
        return {SPARSE_FEATURES: mark_single_ids(features)}

    def _jagged_fields(self, ids: NDArray[np.int64], blocks: Sequence[Block]) -> dict[str, KeyedJaggedTensor]:
        """Returns the jagged fields of rows, of ids ``[num_keys, num_rows]`` of single-valued features and of lists."""
        num_rows = ids.shape[1]
        ones = np.ones(num_rows, np.int64)
        columns = {
            feature.name: [Jagged.from_lengths(values, ones)]
            for feature, values in zip(self.layout.single, ids, strict=True)
        }
        fields = {}
        for field in (each for each in self._schema.fields if each.is_jagged):
            parts = [columns.get(name) or [block.jagged[name] for block in blocks] for name in field.columns]
            dtype = np.float32 if field.name == DENSE_SEQUENCES else np.int64
            whole = [part for each in parts for part in each]
            values = np.concatenate([np.zeros(0, dtype), *(part.values for part in whole)])
            lengths = np.concatenate([np.zeros(0, np.int64), *(part.lengths for part in whole)])
            counts = [sum(len(part.values) for part in each) for each in parts]
            fields[field.name] = KeyedJaggedTensor(
                list(field.columns),
                torch.from_numpy(values),
                lengths=torch.from_numpy(lengths.astype(np.int32)),
                stride=num_rows,
                # else a GPU would be asked for them
                length_per_key=counts,
                offset_per_key=[0, *accumulate(counts)],
            )
        return fields
