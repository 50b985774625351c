"""Raw values of an exported model: how they become ids and numbers, the vocabularies, and the rows of the sample."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.table.encoder import raw_schema
from distembed.data.table.vocabulary import FIRST_ID, MISSING_ID, raw_values
from distembed.serving.model_folder.manifest import ExportedFeature, ExportedNumber, ExportedSequence
from distembed.serving.model_folder.reading import SAMPLE_NAME

Change = Mapping[str, Any]
"""How raw values of a column become numbers or ids, in plain values; empty if distembed did not prepare the dataset."""
_VALUES_AT_ONCE = 1 << 16
_CANDIDATES = 100


def column_changes(manifest: Manifest) -> tuple[dict[str, Change], dict[str, Change]]:
    """Returns the :data:`Change` of each column of numbers or lists of them, and of each categorical feature, by name.

    A change joins the column's settings in the schema with the values learnt in preparation, for example a mean.
    """
    learnt: Mapping[str, Change] = manifest.preparation.get("learnt", {})
    numbers = {name: learnt.get(name, {}) for name in (*manifest.schema.dense, *manifest.schema.dense_sequences)}
    features = {name: learnt.get(name, {}) for name in manifest.schema.categorical_names}
    try:
        schema = raw_schema(manifest)
    except UserError:  # distembed did not prepare the dataset
        return numbers, features
    missing = {"missing_values": schema.text.missing_values}
    for name in numbers.keys() & schema.dense.keys():
        numbers[name] = {**dataclasses.asdict(schema.dense[name]), **missing, **numbers[name]}
    for name in features.keys() & schema.categorical.keys():
        column = schema.categorical[name]
        hashed = {"hash_size": schema.hash_size_of(column)}
        features[name] = {**dataclasses.asdict(column), **missing, **hashed, **features[name]}
    return numbers, features


def write_vocabularies(folder: Path, dataset: Path, manifest: Manifest, features: Sequence[str]) -> dict[str, str]:
    """Writes the raw values of ids as text files, for programs without Arrow, and returns the file of each feature.

    Features of one table share a file; features without a vocabulary have none. A line is a JSON text. The first line
    has id 2: 0 is a missing value, and 1 any value that is not in the file::

        "68fd1e64"
        "05db9164"
    """
    tables = {feature.name: feature.table_name for feature in manifest.schema.categorical}
    files: dict[str, str] = {}
    for table in dict.fromkeys(tables[name] for name in features):
        if table not in manifest.vocabularies:
            continue
        values = raw_values(dataset, manifest, table)
        is_plain = re.fullmatch(r"[A-Za-z]\w{0,99}", table, re.ASCII) is not None
        file = folder / "vocabularies" / (f"{table}.jsonl" if is_plain else f"{len(files)}.jsonl")
        file.parent.mkdir(exist_ok=True)
        with file.open("w", encoding="utf-8") as vocabulary_file:
            for start in range(FIRST_ID, len(values), _VALUES_AT_ONCE):
                chunk = values.slice(start, _VALUES_AT_ONCE).to_pylist()
                vocabulary_file.writelines(f"{json.dumps(value)}\n" for value in chunk)
        files[table] = f"vocabularies/{file.name}"
    return {name: files[tables[name]] for name in features if tables[name] in files}


def write_sample(
    folder: Path,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Sequence[Any]],
    features: Sequence[ExportedFeature],
    numbers: Sequence[ExportedNumber],
    sequences: Sequence[ExportedSequence] = (),
) -> None:
    """Writes ``sample.json``: rows with their raw values, ids, numbers and outputs, to check an installation.

    ::

        {"values": [17, 4, ...], "lengths": [[1, 1, ...], ...], "dense": [[0.3, ...], ...],
         "outputs": {"prediction": [0.21, ...]},
         "rows": [{"C1": "68fd1e64", "genres": ["drama"], "C2": null, "I1": 2.0}, ...]}

    A row has a value for each feature and each number, by its name in the dataset. Null is a missing value. A feature
    with a vocabulary has a raw value of the vocabulary, or a value of its kind that the vocabulary lacks; bins have a
    number in the bin, and any other feature has the id. A number is a raw number that becomes the given one. A column
    that numbers of lists are subtracted from has the number 0 unless it is a column of the row itself.
    """
    ends = {sequence.change.get("gap_to") for sequence in sequences}
    ids_by_feature = inputs["values"].split(inputs["lengths"].sum(1).tolist())
    rows: list[dict[str, Any]] = [{} for _ in range(inputs["lengths"].shape[1])]
    for feature, ids, lengths in zip(features, ids_by_feature, inputs["lengths"].tolist(), strict=True):
        raw = _values_of_ids(folder, feature, ids.tolist(), feature.name in ends)
        start = 0
        for row, length in zip(rows, lengths, strict=True):
            row_values = raw[start : start + length]
            row[feature.name] = row_values if feature.is_list else row_values[0]
            start += length
    for index, number in enumerate(numbers):
        for row, value in zip(rows, inputs["dense"][:, index].tolist(), strict=True):
            row[number.name] = _raw_number(number.change, value)
    start = 0
    for sequence in sequences:
        index = [feature.name for feature in features].index(sequence.beside)
        end_column = sequence.change.get("gap_to")
        for row, length in zip(rows, inputs["lengths"][index].tolist(), strict=True):
            raw_numbers = [
                _raw_number(sequence.change, value) for value in inputs["sequences"][start : start + length].tolist()
            ]
            if end_column is not None:
                end = row.setdefault(end_column, 0.0)
                end = None if end is None else float(end)  # a categorical column has texts of numbers
                raw_numbers = [None if number is None or end is None else end - number for number in raw_numbers]
            row[sequence.name] = raw_numbers
            start += length
    plain = {name: tensor.tolist() for name, tensor in inputs.items()}
    values = {**plain, "outputs": {name: list(column) for name, column in outputs.items()}, "rows": rows}
    (folder / SAMPLE_NAME).write_text(json.dumps(values) + "\n", encoding="utf-8")


def _values_of_ids(folder: Path, feature: ExportedFeature, ids: Sequence[int], is_end: bool) -> list[Any]:
    """Returns a raw value that becomes each id: of its bin, of the vocabulary, or the id itself where there is neither.

    The vocabulary is read line by line, so that memory holds the wanted values alone. An id that it lacks gets a value
    that no line has, out of :data:`_CANDIDATES`; if ``is_end``, a number from which others are subtracted exactly.
    """
    kind = feature.change.get("kind")
    if kind == "quantile_bins":
        return [None if id_ == MISSING_ID else raw_quantile(feature.change["edges"], id_) for id_ in ids]
    if feature.vocabulary is None:
        return list(ids)
    wanted_ids, value_of_id = set(ids), dict[int, Any]({MISSING_ID: None})
    unknown = {str(99_999_999 - n) if is_end else _candidate(kind, n) for n in range(_CANDIDATES)}
    with (folder / feature.vocabulary).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, FIRST_ID):
            value = json.loads(line)
            unknown.discard(value)
            if number in wanted_ids:
                value_of_id[number] = value
    values = [value_of_id.get(id_, min(unknown)) for id_ in ids]
    return [None if value_ is None else raw_log(int(value_)) for value_ in values] if kind == "log_bins" else values


def _candidate(kind: str | None, number: int) -> str:
    """Returns the ``number``-th of some unusual values of a kind, to find one that a vocabulary lacks."""
    if kind == "hexadecimal":
        return f"{2**32 - 1 - number:08x}"
    if kind == "log_bins":
        return f"{1 - 2**53 + number}"
    return f"{2**63 - 1 - number}" if kind == "integer" else f"unknown {number}"


def _raw_number(change: Change, number: float) -> float | None:
    """Returns a raw number that becomes this one, up to rounding; None for a missing number."""
    if math.isnan(number):
        return None
    if change.get("transform") == "log":
        return math.expm1(number)
    if "mean" in change:
        raw: float = number * change["std"] + change["mean"]
        return raw
    return number


def raw_quantile(edges: Sequence[float], bin_: int) -> float:
    """Returns a number in a bin of ``quantile_bins``, from 1 on: its lower edge, or a number below the first edge."""
    if not edges:
        return 0.0
    below = float(np.nextafter(np.float32(edges[0]), np.float32(-np.inf)))
    return [below, *edges][min(bin_ - 1, len(edges))]


def raw_log(bin_: int) -> float:
    """Returns a number in a bin of ``log_bins``, where x > 2 has the bin floor(log(x)^2): log(x)^2 is bin + 1/4."""
    return float(bin_) if bin_ <= 2 else math.exp(math.sqrt(bin_ + 0.25))
