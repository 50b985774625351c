"""``sample.json``: rows with their raw values, ids, numbers and outputs, to check an installation by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from distembed.data.table.vocabulary import FIRST_ID, MISSING_ID
from distembed.serving.export.raw_values import raw_log, raw_number, raw_quantile
from distembed.serving.model_folder.manifest import ExportedFeature, ExportedNumber

_CANDIDATES = 100
SAMPLE_NAME = "sample.json"


def write_sample(
    folder: Path,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Sequence[Any]],
    features: Sequence[ExportedFeature],
    numbers: Sequence[ExportedNumber],
) -> None:
    """Writes the sample.

    ::

        {"values": [17, 4, ...], "lengths": [[1, 1, ...], ...], "dense": [[0.3, ...], ...],
         "outputs": {"prediction": [0.21, ...]},
         "rows": [{"C1": "68fd1e64", "genres": ["drama"], "C2": null, "I1": 2.0}, ...]}

    A row has a value for each feature and each number, by its name in the dataset. Null is a missing value. For a
    feature with a vocabulary, it is the raw value as written in the vocabulary, or a value of the same kind that the
    vocabulary lacks. For bins it is a number in the bin, and for any other feature the id. For a number, it is a raw
    number that becomes the given number.

    Args:
        folder: The folder of the exported model, with its vocabularies.
        inputs: The inputs of the program for these rows.
        outputs: What it returned for each row, by name.
        features: The features, in the order of ``lengths``.
        numbers: The columns of numbers, in the order of ``dense``.
    """
    pieces = inputs["values"].split(inputs["lengths"].sum(1).tolist())
    num_rows = inputs["lengths"].shape[1]
    rows: list[dict[str, Any]] = [{} for _ in range(num_rows)]
    for feature, ids, lengths in zip(features, pieces, inputs["lengths"].tolist(), strict=True):
        raw = _raw_values(folder, feature, ids.tolist())
        start = 0
        for row, length in zip(rows, lengths, strict=True):
            own = raw[start : start + length]
            row[feature.name] = own if feature.is_list else own[0]
            start += length
    for place, number in enumerate(numbers):
        for row, value in zip(rows, inputs["dense"][:, place].tolist(), strict=True):
            row[number.name] = raw_number(number.change, value)
    plain = {name: tensor.tolist() for name, tensor in inputs.items()}
    values = {**plain, "outputs": {name: list(each) for name, each in outputs.items()}, "rows": rows}
    (folder / SAMPLE_NAME).write_text(json.dumps(values) + "\n", encoding="utf-8")


def _raw_values(folder: Path, feature: ExportedFeature, ids: Sequence[int]) -> list[Any]:
    """Returns the raw values of ids, reading a vocabulary of any size line by line; the ids, where there is none."""
    kind = feature.change.get("kind")
    if kind == "quantile_bins":
        return [None if each == MISSING_ID else raw_quantile(feature.change["edges"], each) for each in ids]
    if feature.vocabulary is None:
        return list(ids)
    wanted, known = set(ids), dict[int, Any]({MISSING_ID: None})
    unknown = {_value(kind, number) for number in range(_CANDIDATES)}
    with (folder / feature.vocabulary).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, FIRST_ID):
            value = json.loads(line)
            unknown.discard(value)
            if number in wanted:
                known[number] = value
    found = [known.get(each, min(unknown)) for each in ids]
    return [None if each is None else raw_log(int(each)) for each in found] if kind == "log_bins" else found


def _value(kind: str | None, number: int) -> str:
    """Returns one of many values of a kind, of which a vocabulary rarely has some."""
    if kind == "hexadecimal":
        return f"{2**32 - 1 - number:08x}"
    if kind == "log_bins":
        return f"{1 - 2**53 + number}"
    return f"{2**63 - 1 - number}" if kind == "integer" else f"unknown {number}"
