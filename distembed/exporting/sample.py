"""``sample.json``: rows with their raw values, ids, numbers and outputs, to check an installation by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from distembed.data.prepare.vocabulary import FIRST_ID, MISSING_ID
from distembed.exporting.feature_vectors import PlainFeature

SAMPLE_NAME = "sample.json"


def write_sample(
    folder: Path,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Sequence[Any]],
    features: Sequence[PlainFeature],
    vocabularies: Mapping[str, str],
) -> None:
    """Writes the sample.

    ::

        {"values": [17, 4, ...], "lengths": [[1, 1, ...], ...], "dense": [[0.3, ...], ...],
         "outputs": {"prediction": [0.21, ...]},
         "rows": [{"C1": "68fd1e64", "genres": ["drama"], "C2": null}, ...]}

    A row has the raw values of the features with a vocabulary; null is a missing one, and an empty text one that has no
    id of its own.

    Args:
        folder: The folder of the exported model, with its vocabularies.
        inputs: The inputs of the program for these rows.
        outputs: What it returned for each row, by name.
        features: The features, in the order of ``lengths``.
        vocabularies: File of the raw values of each feature that has one.
    """
    pieces = inputs["values"].split(inputs["lengths"].sum(1).tolist())
    num_rows = inputs["lengths"].shape[1]
    rows: list[dict[str, Any]] = [{} for _ in range(num_rows)]
    for feature, ids, lengths in zip(features, pieces, inputs["lengths"].tolist(), strict=True):
        if feature.name not in vocabularies:
            continue
        known = _raw_values(folder / vocabularies[feature.name], set(ids.tolist()))
        raw = [None if each == MISSING_ID else known.get(each, "") for each in ids.tolist()]
        start = 0
        for row, length in zip(rows, lengths, strict=True):
            own = raw[start : start + length]
            row[feature.name] = own if feature.is_list else own[0]
            start += length
    plain = {name: tensor.tolist() for name, tensor in inputs.items()}
    values = {**plain, "outputs": {name: list(each) for name, each in outputs.items()}, "rows": rows}
    (folder / SAMPLE_NAME).write_text(json.dumps(values) + "\n", encoding="utf-8")


def _raw_values(file: Path, ids: set[int]) -> dict[int, str]:
    """Returns the raw values of these ids, reading a file of any size line by line."""
    with file.open(encoding="utf-8") as lines:
        return {number: json.loads(line) for number, line in enumerate(lines, FIRST_ID) if number in ids}
