"""What a program returned as columns of answers: numbers, or lists of recommended items as their raw values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from distembed.data.dataset.schema import ITEM
from distembed.data.prepare.vocabulary import FIRST_ID
from distembed.serving.model_folder.manifest import ExportManifest

Outputs = Mapping[str, NDArray[Any] | pa.Array]
"""A column for each output by its name: float32, NaN where it is missing, or a list for each row, or null."""
ITEMS = "items"
"""The output that has ids of recommended items."""


class ProgramOutputs:
    """Makes columns of the outputs of a program.

    Args:
        folder: Folder of the exported model.
        manifest: Its manifest.
    """

    def __init__(self, folder: Path, manifest: ExportManifest) -> None:
        self._names = manifest.network.outputs
        self._recommends = ITEMS in self._names
        vocabularies = {feature.name: feature.vocabulary for feature in manifest.features}
        file = vocabularies.get(ITEM) if self._recommends else None
        self._items = None if file is None else _raw_values(folder / file)

    def columns(self, outputs: Mapping[str, NDArray[Any]], is_good: NDArray[np.bool_]) -> Outputs:
        """Returns a column for each output.

        Args:
            outputs: Outputs of the rows that are good, ``[good]`` or ``[good, k]``; none where no row is good.
            is_good: Which rows are good.
        """
        return {name: self._column(name, outputs.get(name), is_good) for name in self._names}

    def _column(self, name: str, values: NDArray[Any] | None, is_good: NDArray[np.bool_]) -> NDArray[Any] | pa.Array:
        if values is None and self._recommends:
            ids = pa.int64() if self._items is None else pa.string()
            return pa.nulls(len(is_good), pa.list_(ids if name == ITEMS else pa.float32()))
        if values is None:
            return np.full(len(is_good), np.nan, np.float32)
        if values.ndim == 1:
            if is_good.all():
                return values
            spread = np.full(len(is_good), np.nan, values.dtype)
            spread[is_good] = values
            return spread
        # where there are fewer items than are recommended, ids are -1 and scores -inf
        is_none = values < 0 if name == ITEMS else ~np.isfinite(values)
        flat = pa.array(values.reshape(-1), mask=is_none.reshape(-1))
        if name == ITEMS and self._items is not None:
            flat = self._items.take(flat)
        offsets = np.concatenate([[0], np.cumsum(is_good)]).astype(np.int32) * np.int32(values.shape[1])
        return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=pa.array(~is_good))


def _raw_values(file: Path) -> pa.Array:
    """Returns raw values by their ids; ids below the first one are of no value."""
    with file.open(encoding="utf-8") as lines:
        return pa.array([*[None] * FIRST_ID, *(str(json.loads(line)) for line in lines)], pa.string())
