"""Batches of the reader as the plain inputs of programs, and made-up batches where there is no dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import DENSE_FEATURES, SPARSE_FEATURES, Schema
from distembed.data.reader import Batch, BatchOrder, BatchReader
from distembed.serving.export.feature_vectors import PlainFeature
from distembed.serving.export.programs import ANY, BATCH, ProgramInputs

_SPLITS = ("test", "validation", "train")
_MADE_UP_LIST = 3


@dataclass(frozen=True)
class SplitRows:
    """The rows of a dataset's split."""

    dataset: str
    split: str
    num_rows: int

    @classmethod
    def find(cls, dataset: str) -> SplitRows | None:
        """Returns the rows of the test split, else of validation, else of training; None for a dataset without rows."""
        if not Path(dataset).exists():
            return None
        manifest = Manifest.load(dataset)
        if manifest.is_without_rows:
            return None
        found = [name for name in _SPLITS if name in manifest.splits and manifest.splits[name].num_rows]
        return cls(dataset, found[0], manifest.splits[found[0]].num_rows) if found else None

    def batches(self, batch_size: int, most_rows: int) -> Iterator[Batch]:
        """Yields the first rows in batches of ``batch_size``; the last batch may have fewer."""
        rows = range(min(most_rows, self.num_rows))
        order = BatchOrder(batch_size, shuffle=False)
        with closing(BatchReader(self.dataset, self.split, order, rows=rows)) as reader:
            yield from reader


def made_up_batch(schema: Schema, num_rows: int, seed: int = 0) -> Batch:
    """Returns a batch of drawn ids and numbers, with labels of 0."""
    generator = torch.Generator().manual_seed(seed)
    ids, lengths = [], []
    for feature in schema.categorical:
        most = min(feature.max_ids_per_row or _MADE_UP_LIST, _MADE_UP_LIST)
        own = (
            torch.randint(0, most + 1, (num_rows,), generator=generator)
            if feature.multi_hot
            else torch.ones(num_rows, dtype=torch.int64)
        )
        lengths.append(own)
        ids.append(torch.randint(0, feature.num_embeddings, (int(own.sum()),), generator=generator))
    features = KeyedJaggedTensor(list(schema.categorical_names), torch.cat(ids), lengths=torch.cat(lengths))
    dense = torch.rand(num_rows, len(schema.dense), generator=generator)
    fields = {DENSE_FEATURES: dense, SPARSE_FEATURES: features}
    fields |= {field.name: torch.zeros(num_rows) for field in schema.fields if field.is_vector}
    return Batch(fields, num_rows)


def plain_inputs(batch: Batch, features: Sequence[PlainFeature], takes_numbers: bool) -> ProgramInputs:
    """Returns the ids of some features of a batch, and its numbers if asked for, as a program takes them."""
    has_lists = any(feature.is_list for feature in features)
    num_ids = ANY if has_lists else BATCH if len(features) == 1 else len(features) * BATCH
    dynamic = {"values": {0: num_ids}, "lengths": {1: BATCH}}
    dynamic |= {"dense": {0: BATCH}} if takes_numbers else {}
    return ProgramInputs(plain_tensors(batch, features, takes_numbers), dynamic)


def plain_tensors(batch: Batch, features: Sequence[PlainFeature], takes_numbers: bool) -> dict[str, Tensor]:
    """Returns the tensors of :func:`plain_inputs` alone, in a hundredth of the time."""
    ids = batch[SPARSE_FEATURES]
    assert isinstance(ids, KeyedJaggedTensor)
    names = [feature.name for feature in features]
    if ids.keys() == names:
        values, lengths = ids.values(), ids.lengths().view(len(names), -1)
    else:
        pieces = [ids[name] for name in names]
        values = torch.cat([piece.values() for piece in pieces])
        lengths = torch.stack([piece.lengths() for piece in pieces])
    tensors: dict[str, Tensor] = {"values": values.long(), "lengths": lengths.long()}
    if takes_numbers:
        numbers = batch[DENSE_FEATURES]
        assert isinstance(numbers, Tensor)
        tensors["dense"] = numbers
    return tensors
