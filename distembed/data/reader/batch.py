"""A batch of named fields, which the dataset's schema declares, in a form that TorchRec's pipelines take.

Ids are a ``KeyedJaggedTensor`` with the features in the schema's order, feature by feature::

    keys      [ C1                | genres              ]
    lengths     1    1    1         2       0    1            ids of each row, feature by feature
    values      17   4    17        3  9         5            int64

Numbers beside the ids of lists are a KeyedJaggedTensor too, with float32 values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from distembed.data.dataset.periods import StepPeriods
from distembed.data.dataset.records import Jagged, RecordBlock, RecordLayout
from distembed.data.dataset.schema import DENSE_SEQUENCES, SPARSE_FEATURES, Schema
from distembed.data.single_ids import carry_single_ids, has_single_ids, mark_single_ids

Field: TypeAlias = Tensor | KeyedJaggedTensor
"""The values of a field: a float32 tensor with one row a sample, or int64 ids or float32 numbers in lists."""


@dataclass
class Batch(Pipelineable):
    """The rows of one step on one rank; models and tasks take a field by its name, ``batch["labels"]``.

    Attributes:
        fields: The fields by name; see :attr:`Schema.fields`.
        global_batch_size: Number of rows of this step on all ranks, 1 or more, to weigh a rank's share of the loss.
        counts_by_rank: Numbers of entries on each rank, by name, that a task knows; they stay on the host.
        periods: The days or hours of a stream's rows, on the host; None where no metrics are reported by them.
    """

    fields: Mapping[str, Field]
    global_batch_size: int
    counts_by_rank: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    periods: StepPeriods | None = None

    def __getitem__(self, name: str) -> Field:
        return self.fields[name]

    def __contains__(self, name: object) -> bool:
        return name in self.fields

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Copies this batch to a device; for one id a bag, a GPU's cached lengths and offsets spare copying them."""
        device = torch.device(device)

        def move(field: Field) -> Field:
            if device.type == "cpu" or not _has_unit_bags(field):
                return field.to(device=device, non_blocking=non_blocking)
            values = field.values().to(device, non_blocking=non_blocking)
            return _with_bags(field, values, *unit_bags(values.numel(), device))

        return self._changed_fields(move)

    def record_stream(self, stream: torch.Stream) -> None:
        for field in self.fields.values():
            field.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Copies fields on the CPU to page-locked memory, for asynchronous copies to a GPU; GPU fields stay."""

        def pin(field: Field) -> Field:
            if (field.device() if isinstance(field, KeyedJaggedTensor) else field.device).type != "cpu":
                return field
            if not _has_unit_bags(field):
                return field.pin_memory()
            # lengths and offsets are shared by many batches, and no copy of them to a GPU is made: see ``to``
            return _with_bags(field, field.values().pin_memory(), field.lengths(), field.offsets())

        return self._changed_fields(pin)

    def write(self, path: Path) -> None:
        """Writes the rows as a NumPy archive: an array a field; names, values and lengths of a field of lists."""
        arrays: dict[str, np.ndarray] = {}
        for name, values in self.fields.items():
            if isinstance(values, KeyedJaggedTensor):
                array_names = (f"{name}_names", name, f"{name}_lengths")
                names, ids, lengths = ("feature_names", "ids", "lengths") if name == SPARSE_FEATURES else array_names
                arrays[names] = np.array(values.keys())
                arrays[ids], arrays[lengths] = values.values().numpy(), values.lengths().numpy()
            else:
                arrays[name] = values.numpy()
        np.savez(path, **arrays)  # type: ignore[arg-type]

    def _changed_fields(self, change: Callable[[Field], Field]) -> Batch:
        fields = {}
        for name, field in self.fields.items():
            changed = fields[name] = change(field)
            if isinstance(field, KeyedJaggedTensor) and isinstance(changed, KeyedJaggedTensor):
                carry_single_ids(field, changed)
        return dataclasses.replace(self, fields=fields)


def _has_unit_bags(field: Field) -> TypeGuard[KeyedJaggedTensor]:
    """Returns whether each bag of a CPU field has exactly one id, without reading lengths: marked, and ids = bags."""
    if not isinstance(field, KeyedJaggedTensor) or not has_single_ids(field) or field.weights_or_none() is not None:
        return False
    return field.values().numel() == field.lengths().numel() and field.values().device.type == "cpu"


def _with_bags(field: KeyedJaggedTensor, values: Tensor, lengths: Tensor, offsets: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        field.keys(),
        values,
        lengths=lengths,
        offsets=offsets,
        stride=field.stride(),
        length_per_key=field.length_per_key(),
        offset_per_key=field.offset_per_key(),
    )


@lru_cache(maxsize=16)
def unit_bags(num_bags: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns lengths (all 1) and offsets (0, 1, 2, ...) of bags of one id, int32; cached, so nobody may write them."""
    lengths = torch.ones(num_bags, dtype=torch.int32, device=device)
    offsets = torch.arange(num_bags + 1, dtype=torch.int32, device=device)
    if device.type == "cuda":  # once, so that batches on other streams may use them
        torch.cuda.current_stream(device).synchronize()
    return lengths, offsets


_CPU = torch.device("cpu")


class BatchAssembler:
    """Makes batches of the rows of one schema."""

    def __init__(self, schema: Schema) -> None:
        self.layout = RecordLayout.from_schema(schema)
        self._schema = schema

    def assemble(self, blocks: Sequence[RecordBlock], global_sizes: Sequence[int]) -> Iterator[Batch]:
        """Yields a batch for each of ``global_sizes``, the number of rows of its step on all ranks.

        A block has one lane's rows of all these batches, batch after batch, equally many in each. A batch has the rows
        of its lanes in the order of the blocks; without blocks it has none. Rows with lists make one batch a call.
        """
        layout, schema, num_steps = self.layout, self._schema, len(global_sizes)
        empty = np.empty((num_steps, 0, layout.width), layout.dtype)
        block_records = (
            block.records.reshape(num_steps, len(block.records) // num_steps, layout.width) for block in blocks
        )
        records = np.concatenate([empty, *block_records], axis=1)
        floats = records.view(np.float32)[:, :, layout.first_float : layout.first_float + len(layout.numbers)]
        numbers = {}
        for field in (field for field in schema.fields if not field.is_jagged):
            first_column = layout.numbers.index(field.columns[0]) if field.columns else 0
            columns = first_column if field.is_vector else slice(first_column, first_column + len(field.columns))
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
        """Makes the KeyedJaggedTensor of ids ``[num_keys, num_rows]``, one id a row, and marks it as single-id."""
        # lengths and offsets depend on the shape alone, and are made once for all batches
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

    def _jagged_fields(self, ids: NDArray[np.int64], blocks: Sequence[RecordBlock]) -> dict[str, KeyedJaggedTensor]:
        """Makes all jagged fields of a batch from single-valued ids ``[num_keys, num_rows]`` and the blocks' lists."""
        num_rows = ids.shape[1]
        one_id = np.ones(num_rows, np.int64)
        columns = {
            feature.name: [Jagged.from_lengths(values, one_id)]
            for feature, values in zip(self.layout.single, ids, strict=True)
        }
        fields = {}
        for field in (jagged_field for jagged_field in self._schema.fields if jagged_field.is_jagged):
            column_parts = [columns.get(name) or [block.jagged[name] for block in blocks] for name in field.columns]
            dtype = np.float32 if field.name == DENSE_SEQUENCES else np.int64
            all_parts = [jagged for column in column_parts for jagged in column]
            values = np.concatenate([np.zeros(0, dtype), *(jagged.values for jagged in all_parts)])
            lengths = np.concatenate([np.zeros(0, np.int64), *(jagged.lengths for jagged in all_parts)])
            counts = [sum(len(jagged.values) for jagged in column) for column in column_parts]
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
