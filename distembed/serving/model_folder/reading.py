"""Reads the folder of an exported model: its manifest, and whether its files are as they were written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from distembed.base.errors import UserError
from distembed.base.files import read_folder_json, read_json, require_inside
from distembed.serving.model_folder.manifest import FORMAT, MANIFEST_NAME, ExportManifest
from distembed.serving.model_folder.programs import Program

SAMPLE_NAME = "sample.json"
_REMEDY = "make it with `distembed export RUN --output FOLDER`"
_DAMAGED = "copy the folder again, or export the run again"
_MOST_DIFFERENCE = 1e-4
"""Largest difference of a score, relative for scores above 1, to the score on the exporting machine."""

_Manifest = TypeVar("_Manifest")
_adapter: Any = cache(TypeAdapter)  # an adapter takes longer to make than to use


def read_manifest(folder: Path) -> ExportManifest:
    """Returns the manifest of an exported model.

    Raises:
        UserError: There is none, it is of a later version, or it was damaged or changed.
    """
    file = folder / MANIFEST_NAME
    values = read_folder_json(file, "exported model", _REMEDY)
    require_known_format(values, file)
    manifest = validated(ExportManifest, values, f"{file} is no manifest of an exported model", _DAMAGED)
    compiled = () if manifest.compiled is None else (manifest.compiled,)
    towers = [tower.program for tower in manifest.towers]
    for program in (manifest.network, *manifest.shards, *towers, *compiled):
        if require_inside(program.file, "a program", file) not in manifest.checksums:
            raise UserError(f"{file} has no checksum of {program.file}; {_DAMAGED}.")
    return manifest


def require_unchanged(folder: Path, manifest: ExportManifest) -> None:
    """Raises a :class:`UserError` where a file is missing, or has another checksum than the recorded one."""
    for name, checksum in manifest.checksums.items():
        path = folder / require_inside(name, "a checksum", folder / MANIFEST_NAME)
        try:
            with path.open("rb") as file:
                actual = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{path} of the exported model cannot be read: {error}; {_DAMAGED}.") from error
        if actual != checksum:
            raise UserError(f"{path} is damaged: its checksum differs from the recorded one; {_DAMAGED}.")


def read_sample(folder: Path) -> dict[str, Any]:
    """Returns the inputs of the sample's rows and their ``outputs``; a :class:`UserError` where it cannot be read."""
    sample: dict[str, Any] = read_json(folder / SAMPLE_NAME, _DAMAGED)
    return sample


def require_sample(
    folder: Path, manifest: ExportManifest, program: Program, sample: Mapping[str, Any] | None = None
) -> float:
    """Scores the sample and returns the largest difference to the scores on the exporting machine.

    ``sample`` is None for the sample in the file; a delta has other ``outputs`` of it.

    Raises:
        UserError: The scores differ by more than rounding.
    """
    sample = read_sample(folder) if sample is None else sample
    with torch.inference_mode():
        scored = program(*sample_inputs(sample, manifest))
    found = [scored] if isinstance(scored, Tensor) else list(scored)
    worst = 0.0
    for name, output in zip(manifest.network.outputs, found, strict=True):
        if output.dtype != torch.float32:
            continue
        recorded = np.array(sample["outputs"][name], np.float64)
        difference = np.abs(output.numpy() - recorded) / np.maximum(1, np.abs(recorded))
        difference = difference[np.isfinite(recorded)]
        worst = float(np.max(difference, initial=worst))  # NaN is the largest of all
    if not worst <= _MOST_DIFFERENCE:
        raise UserError(
            f"{folder} scores otherwise here than where it was exported: by up to {worst:.3g} in {SAMPLE_NAME}, and "
            f"{_MOST_DIFFERENCE:g} is rounding. Use torch {manifest.versions.get('torch')}, of which it is."
        )
    return worst


def sample_inputs(sample: Mapping[str, Any], manifest: ExportManifest) -> list[Tensor]:
    """Returns the inputs of the whole program for the rows of the sample."""
    numbers = [name for name in ("dense", "sequences") if name in manifest.network.inputs]
    dtypes = {"values": torch.int64, "lengths": torch.int64, **dict.fromkeys(numbers, torch.float32)}
    return [torch.tensor(sample[name], dtype=dtype) for name, dtype in dtypes.items()]


def require_known_format(values: object, file: Path) -> None:
    """Raises a :class:`UserError` for a manifest that a later version of distembed wrote."""
    if isinstance(values, dict) and isinstance(values.get("format"), int) and values["format"] > FORMAT:
        raise UserError(
            f"{file} has format {values['format']}, and this distembed knows {FORMAT}: install a later one."
        )


def validated(kind: type[_Manifest], values: object, problem: str, remedy: str) -> _Manifest:
    """Returns a manifest read from JSON; a :class:`UserError` of the problem, field and remedy if it is none."""
    try:
        found: _Manifest = _adapter(kind).validate_json(json.dumps(values))
        return found
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{problem}: {where}: {first['msg']}; {remedy}.") from error
