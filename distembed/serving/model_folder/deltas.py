"""A delta on disk: the rows of weights that changed from one version of an exported model to the next.

::

    delta.json    the version before, the changed weights, checksums (manifest.py: DeltaManifest)
    rows.npz      of the weight number i in delta.json: i.rows [n], i.0 [n, columns] and so on for each of its tensors

Identities of managed ids are a weight too: i.rows has the slots, and i.0 their new ids (identities.py).
Neither file can hold code. Rows are exchanged in the loaded weights in place: the memory of a table is the largest part
of a server, and a second copy of it would double the server. Sorted identities are replaced, which takes no time.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from distembed.base.checksums import KEY, checksum_differs, with_checksum
from distembed.base.errors import UserError
from distembed.base.files import finite, read_folder_json, require_inside, write_json
from distembed.serving.model_folder.identities import IDS_BY_SLOT, SORTED_IDS, SORTED_SLOTS, ids_of_slots, sort_ids
from distembed.serving.model_folder.manifest import ChangedWeight, DeltaManifest, ExportManifest
from distembed.serving.model_folder.programs import Program, ShardedProgram
from distembed.serving.model_folder.reading import require_known_format, validated

DELTA_NAME = "delta.json"
ROWS_NAME = "rows.npz"
_REMEDY = "make it with `distembed export RUN --output FOLDER --delta-since VERSION`"
_DAMAGED = "copy the folder again"


def read_delta_manifest(folder: Path) -> DeltaManifest:
    """Returns the description of a delta; a :class:`UserError` where there is none, or it is damaged."""
    file = folder / DELTA_NAME
    values = read_folder_json(file, "delta", _REMEDY)
    require_known_format(values, file)
    if not isinstance(values, dict) or KEY not in values or checksum_differs(values):
        raise UserError(f"{file} is damaged: its checksum differs from the recorded one; {_DAMAGED}.")
    manifest = validated(DeltaManifest, values, f"{file} is no description of a delta", _DAMAGED)
    require_inside(manifest.rows, "rows", file)
    return manifest


@dataclass(frozen=True, eq=False)
class RowChange:
    """New rows of one weight: ascending ``rows``, or None for all of them, and the rows of each of its tensors."""

    program: str
    rows: Int64[Tensor, " rows"] | None
    values: Mapping[str, Tensor]


Weights = Mapping[str, Mapping[str, Tensor]]
"""The tensors of loaded programs, by the program's file and the tensor's name."""


def write_delta(folder: Path, changes: Sequence[RowChange], manifest: DeltaManifest) -> DeltaManifest:
    """Writes a delta's files; returns ``manifest`` with the file of rows, its checksum and the list of weights."""
    arrays: dict[str, Any] = {}
    for number, change in enumerate(changes):
        if change.rows is not None:
            arrays[f"{number}.rows"] = change.rows.to(torch.int32 if _are_short(change.rows) else torch.int64).numpy()
        arrays |= {f"{number}.{index}": each.numpy() for index, each in enumerate(change.values.values())}
    np.savez(folder / ROWS_NAME, **arrays)
    weights = [
        ChangedWeight(change.program, list(change.values), None if change.rows is None else len(change.rows))
        for change in changes
    ]
    checksum = hashlib.sha256((folder / ROWS_NAME).read_bytes()).hexdigest()
    manifest = replace(manifest, rows=ROWS_NAME, rows_checksum=checksum, weights=weights)
    write_json(folder / DELTA_NAME, with_checksum(finite(manifest.to_json())))
    return manifest


def _are_short(rows: Tensor) -> bool:
    return not len(rows) or int(rows[-1]) < 2**31


def read_delta(folder: Path) -> tuple[DeltaManifest, list[RowChange]]:
    """Reads a delta; a :class:`UserError` where it is damaged."""
    manifest = read_delta_manifest(folder)
    file = folder / manifest.rows
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} of the delta cannot be read: {error}; {_DAMAGED}.") from error
    if hashlib.sha256(content).hexdigest() != manifest.rows_checksum:
        raise UserError(f"{file} is damaged: its checksum differs from the recorded one; {_DAMAGED}.")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return manifest, [_change(arrays, number, weight) for number, weight in enumerate(manifest.weights)]
    except (ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} does not have the rows that {DELTA_NAME} lists: {error}; {_DAMAGED}.") from error


def _change(arrays: Any, number: int, weight: ChangedWeight) -> RowChange:
    rows = None if weight.num_rows is None else torch.from_numpy(arrays[f"{number}.rows"]).long()
    values = {name: torch.from_numpy(arrays[f"{number}.{index}"]) for index, name in enumerate(weight.names)}
    return RowChange(weight.program, rows, values)


def fitting_changes(changes: Sequence[RowChange], weights: Weights, folder: Path) -> list[RowChange]:
    """Returns the changes of loaded weights that a delta makes: its own, with identities sorted as programs have them.

    Raises a :class:`UserError` unless all changed rows lie within weights of their types and sizes.
    """
    fitting = []
    for change in changes:
        own, fitted = weights.get(change.program, {}), change
        for name, values in change.values.items():
            path = name.removesuffix(f".{IDS_BY_SLOT}")
            weight = own.get(name if path == name else f"{path}.{SORTED_IDS}")
            if weight is None:
                raise UserError(f"{folder} changes {name} of {change.program}, which the served model does not have.")
            shape = weight.shape if change.rows is None else (len(change.rows), *weight.shape[1:])
            is_within = change.rows is None or _ascend_below(change.rows, len(weight))
            if values.dtype != weight.dtype or values.shape != shape or not is_within:
                raise UserError(
                    f"{folder} changes rows of {name} in {change.program} that the served weight, {weight.dtype} "
                    f"{list(weight.shape)}, does not have; export the run whole."
                )
            if path != name:
                ids = ids_of_slots(own, path)
                ids[slice(None) if change.rows is None else change.rows] = values
                in_order = zip((SORTED_IDS, SORTED_SLOTS), sort_ids(ids), strict=True)
                fitted = RowChange(change.program, None, {f"{path}.{each}": tensor for each, tensor in in_order})
        fitting.append(fitted)
    return fitting


def _ascend_below(rows: Int64[Tensor, " rows"], num_rows: int) -> bool:
    is_ascending = bool((rows[1:] > rows[:-1]).all())
    return is_ascending and (not len(rows) or (int(rows[0]) >= 0 and int(rows[-1]) < num_rows))


def exchange(changes: Sequence[RowChange], weights: Weights) -> None:
    """Swaps the values of changed rows with the rows of the weights, in place; a second call undoes the first.

    No second copy of a table is made, and an error leaves the weights as they were. The caller makes sure that no
    program runs meanwhile, and that the changes fit.
    """
    done: list[tuple[RowChange, str]] = []
    try:
        for change in changes:
            for name in change.values:
                _swap(change, name, weights[change.program][name])
                done.append((change, name))
    except BaseException:
        for change, name in done:
            _swap(change, name, weights[change.program][name])
        raise


def _swap(change: RowChange, name: str, weight: Tensor) -> None:
    values = change.values[name]
    rows = slice(None) if change.rows is None else change.rows
    if name.endswith((SORTED_IDS, SORTED_SLOTS)):  # all of them change, and no other weight has their memory
        weight.data, values.data = values.data, weight.data
        return
    with torch.no_grad():
        before = weight[rows].clone() if weight.dim() else weight.clone()
        if weight.dim():
            weight[rows] = values
        else:
            weight.copy_(values)
        values.copy_(before)


def loaded_weights(program: Program, manifest: ExportManifest) -> Weights:
    """Returns the tensors of the programs that :func:`load_programs` loaded, which :func:`exchange` may change."""
    files = [manifest.network.file, *(shard.file for shard in manifest.shards)]
    programs = [program.network, *program.shards] if isinstance(program, ShardedProgram) else [program]
    modules = {file: each for file, each in zip(files, programs, strict=True) if isinstance(each, nn.Module)}
    return {file: module.state_dict(keep_vars=True) for file, module in modules.items()}  # the programs' own tensors
