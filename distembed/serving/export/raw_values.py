"""What became of raw values on their way into a dataset, in plain values, and raw numbers that become given ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.table.encoder import raw_schema
from distembed.data.table.schema import TableSchema

Change = Mapping[str, Any]


def number_changes(manifest: Manifest) -> dict[str, Change]:
    """Returns what is done to each column of numbers; nothing is known of datasets that were made elsewhere."""
    schema = _raw_schema(manifest)
    columns = {} if schema is None else schema.dense
    return {name: _settings(schema, columns.get(name)) | _learnt(manifest, name) for name in manifest.schema.dense}


def feature_changes(manifest: Manifest) -> dict[str, Change]:
    """Returns how each feature's raw values become ids; nothing is known of datasets that were made elsewhere."""
    schema = _raw_schema(manifest)
    found: dict[str, Change] = {}
    for name in manifest.schema.categorical_names:
        column = None if schema is None else schema.categorical.get(name)
        hashed = {} if schema is None or column is None else {"hash_size": schema.hash_size_of(column)}
        found[name] = _settings(schema, column) | hashed | _learnt(manifest, name)
    return found


def raw_number(change: Change, number: float) -> float | None:
    """Returns a raw number that becomes this one, as far as rounding allows; None for a missing one.

    Args:
        change: What is done to the column, as :func:`number_changes` has it.
        number: The number in the dataset.
    """
    if math.isnan(number):
        return None
    if change.get("transform") == "log":
        return math.expm1(number)
    if "mean" in change:
        raw: float = number * change["std"] + change["mean"]
        return raw
    return number


def raw_quantile(edges: Sequence[float], bin_: int) -> float:
    """Returns a number in a bin of ``quantile_bins``: the edge at which it begins, or a number below the first edge.

    Args:
        edges: The edges, ascending.
        bin_: The bin, from 1 on; bins past the last one have its number.
    """
    if not edges:
        return 0.0
    below = float(np.nextafter(np.float32(edges[0]), np.float32(-np.inf)))
    return [below, *edges][min(bin_ - 1, len(edges))]


def raw_log(bin_: int) -> float:
    """Returns a number in a bin of ``log_bins``: the square of its logarithm is a quarter above the bin."""
    return float(bin_) if bin_ <= 2 else math.exp(math.sqrt(bin_ + 0.25))


def _raw_schema(manifest: Manifest) -> TableSchema | None:
    try:
        return raw_schema(manifest)
    except UserError:
        return None


def _settings(schema: TableSchema | None, column: Any) -> dict[str, Any]:
    if schema is None or column is None:
        return {}
    return dataclasses.asdict(column) | {"missing_values": schema.text.missing_values}


def _learnt(manifest: Manifest, name: str) -> dict[str, Any]:
    learnt: Mapping[str, dict[str, Any]] = manifest.preparation.get("learnt", {})
    return learnt.get(name, {})
