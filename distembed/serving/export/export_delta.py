"""Exports a delta: the rows of weights that changed since an earlier export, found by comparing all of them.

Every row of the run's checkpoint is stored as the export stores it and compared, byte by byte, with the earlier
export's file and the deltas since. No record of touched rows is kept in training. Trade-off: both are read whole, which
takes as long for one changed row as for all; in exchange a delta is exact for any optimizer, partition and precision,
for weight decay and reset rows, and for a run that was interrupted, resumed or initialised from another run.

No program is traced: the config has to be the one that the earlier export was made with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.base.version import __version__
from distembed.data.dataset.kept import KEPT_FOLDER, has_same_ids
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.staging import staged_folder
from distembed.embedding import CompositionalEmbeddingConfig
from distembed.serving.export.export_run import SAMPLE_ROWS, config_checksum, exportable, in_float32, parity_check
from distembed.serving.export.parity import SplitRows
from distembed.serving.export.recommenders import RecommendingModel
from distembed.serving.export.score_program import ScoredModel
from distembed.serving.export.table_groups import ExportStorage, Materialise, RowsOnDemand, SlotIds
from distembed.serving.export.two_towers import TowerModel
from distembed.serving.model_folder.deltas import DELTA_NAME, RowChange, read_delta, write_delta
from distembed.serving.model_folder.identities import IDS_BY_SLOT, SORTED_IDS, SORTED_SLOTS, ids_of_slots
from distembed.serving.model_folder.manifest import DeltaManifest, ExportManifest
from distembed.serving.model_folder.programs import Program, join_programs
from distembed.serving.model_folder.reading import read_manifest, read_sample, sample_inputs
from distembed.serving.model_folder.versions import (
    Version,
    find_version,
    newest_version,
    numbering_versions,
    version_chain,
)
from distembed.serving.whole_model import load_whole_model
from distembed.training.trained_run import TrainedRun

_WEIGHTS_CONFIG = "data/weights/model_weights_config.json"
_ROWS_AT_ONCE = 1 << 15
_MOST_THREADS = 4
_WHOLE = "export the run whole, without --delta-since"


@dataclass(frozen=True)
class ExportedDelta:
    """A delta that was written: its description, the bytes of its folder and of the whole export's programs."""

    manifest: DeltaManifest
    num_bytes: int
    whole_bytes: int


def export_delta(run: TrainedRun, output: Path, since: Path) -> ExportedDelta:
    """Writes the folder of a delta, which appears whole or not at all.

    Args:
        run: The run that the earlier version was exported from, or one initialised from it.
        output: The folder.
        since: The earlier version: an exported model, or a delta beside the versions that it goes back to. The folder
            of all versions stands for the newest one.

    Raises:
        UserError: The run's programs are not the earlier version's, a later version is there, a version is missing, or
            nothing changed.
        RunError: The scores differ from the trained model's, or the folder cannot be written.
    """
    parent = output.resolve().parent
    with (
        numbering_versions(parent) as highest,
        staged_folder(output, overwrite=False, kind="delta", marker=DELTA_NAME) as folder,
    ):
        chain = version_chain(find_version(since))
        _require_newest(chain[-1], parent, highest)
        exported, manifest = chain[0].folder, read_manifest(chain[0].folder)
        _require_same_programs(run, exported, manifest)
        trained = load_whole_model(in_float32(run), torch.device("cpu"), maps_weights=True)
        model = exportable(trained, run.manifest, manifest.recommends.num_best if manifest.recommends else 1)
        assert not isinstance(model, TowerModel)
        _require_fixed_rows(model.tables, exported, manifest)
        modules = _programs(model, manifest)
        earlier = [change for version in chain[1:] for change in read_delta(version.folder)[1]]
        changes: list[RowChange] = []
        for file, module in modules.items():
            saved = SavedWeights(exported / file, [change for change in earlier if change.program == file])
            changes += changed_rows(file, module, saved)
        if not changes:
            raise UserError(f"{run.folder} has not changed since {chain[-1].folder}: export after its next checkpoint.")
        network, *shards = modules.values()
        program = join_programs(network, shards, manifest)
        check = parity_check(trained, model, program, manifest.precision)
        rows = SplitRows.find(run.config.data.path) if run.config.data.path else None
        parity = check.on_sample(check.sample(rows, SAMPLE_ROWS))
        described = DeltaManifest(
            sequence=chain[-1].sequence + 1,
            base=chain[-1].identity,
            step=trained.step,
            rows="",
            rows_checksum="",
            weights=(),
            outputs=_sample_outputs(exported, manifest, program),
            parity=parity,
            versions={"distembed": __version__, "torch": torch.__version__},
        )
        described = write_delta(folder, changes, described)
        num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    return ExportedDelta(described, num_bytes, sum((exported / file).stat().st_size for file in modules))


def _require_newest(base: Version, parent: Path, highest: int) -> None:
    """Refuses a base after which there is, or was, a version: servers would not know which one to take."""
    if highest <= base.sequence:
        return
    newest = newest_version(parent)
    if newest is not None and newest.sequence == highest:
        raise UserError(
            f"--delta-since is {base.folder}, version {base.sequence}, and {newest.folder} is version "
            f"{newest.sequence} already: give --delta-since {newest.folder}, or export the run whole."
        )
    raise UserError(
        f"--delta-since is {base.folder}, version {base.sequence}, and version {highest} of {parent} was removed or "
        f"cannot be read, though servers may have it: copy it there again, or {_WHOLE}."
    )


def _require_same_programs(run: TrainedRun, exported: Path, manifest: ExportManifest) -> None:
    """Refuses an export whose programs, ids or torch are not the ones that the run would be exported with."""
    if manifest.towers:
        raise UserError(
            "task.name=retrieval has no deltas: a step of the item's tower changes the vectors of all items, which the "
            f"export holds; {_WHOLE}."
        )
    if manifest.config_checksum != config_checksum(run.config):
        raise UserError(
            f"{exported} was exported from a run with other sections model, embedding or task, or other assignments, "
            f"or by an earlier distembed; {_WHOLE}."
        )
    kept = exported / KEPT_FOLDER
    if not has_same_ids(kept, Manifest.load(kept), run.dataset, run.manifest):
        raise UserError(f"{exported} has other ids or statistics of numbers than the run's dataset; {_WHOLE}.")
    if manifest.versions.get("torch") != torch.__version__:
        raise UserError(f"{exported} has programs of torch {manifest.versions.get('torch')}; {_WHOLE}.")


def _require_fixed_rows(
    tables: Sequence[CompositionalEmbeddingConfig], exported: Path, manifest: ExportManifest
) -> None:
    """Refuses tables whose rows of ids are constants of a program and change in training."""
    forms = {table.name: table.form for table in manifest.tables}
    for table in tables:
        if table.scheme.state and forms.get(table.name) == "compositional":
            raise UserError(
                f"embedding.tables.{table.name}.partition is {table.scheme.name}: re-clustering changes the rows of "
                f"its ids, which are part of the program in {exported} and which deltas leave as they are; {_WHOLE}."
            )


def _programs(model: ScoredModel | RecommendingModel, manifest: ExportManifest) -> dict[str, nn.Module]:
    """Returns the programs of an export by their files, not traced, with rows that are stored when they are read."""
    forms = {table.name: table.form for table in manifest.tables}
    storages = [ExportStorage(manifest.precision, option, on_demand=True) for option in get_args(Materialise)]
    of_forms = [each for each in storages if all(each.form(table) == forms.get(table.name) for table in model.tables)]
    if not of_forms:
        raise UserError(f"this distembed stores tables of the earlier version in other forms; {_WHOLE}.")
    storage = of_forms[0]
    if not manifest.shards:
        return {manifest.network.file: model.whole_program(storage).eval()}
    assert isinstance(model, ScoredModel), "other tables are not divided"
    names = [
        [table.name for table in manifest.tables if table.shard == number] for number in range(len(manifest.shards))
    ]
    network, shards = model.sharded_programs(names, storage)
    programs = [network.eval(), *(shard.eval() for shard in shards)]
    return dict(zip([each.file for each in (manifest.network, *manifest.shards)], programs, strict=True))


def _sample_outputs(exported: Path, manifest: ExportManifest, program: Program) -> dict[str, Any]:
    """Returns the outputs, by name, for the rows in the sample of an export."""
    inputs = sample_inputs(read_sample(exported), manifest)
    with torch.inference_mode():
        scored = program(*inputs)
    outputs = [scored] if isinstance(scored, Tensor) else list(scored)
    return {name: output.tolist() for name, output in zip(manifest.network.outputs, outputs, strict=True)}


def changed_rows(file: str, module: nn.Module, saved: SavedWeights) -> Iterator[RowChange]:
    """Yields the changed rows of each weight of a program; refuses a program with other weights than the file's."""
    compared: set[str] = set()
    for weight in _weights(module):
        names = list(weight.read(0, 1))
        # a weight with two names, such as the items of a history and of the catalogue, is one record of the file
        if not saved.records(names) <= compared:
            compared |= saved.records(names)
            if (change := _change(file, weight, saved)) is not None:
                yield change
    saved.require_all(compared)


@dataclass(frozen=True)
class _Weight:
    """A weight of ``num_rows`` rows; ``read`` returns its tensors, by their names in the program, for some rows."""

    num_rows: int
    read: Callable[[int, int], dict[str, Tensor]]


def _weights(module: nn.Module) -> Iterator[_Weight]:
    for name, tensor in module.state_dict().items():
        yield _Weight(len(tensor) if tensor.dim() else 1, partial(_between, name, tensor))
    for prefix, child in module.named_modules():
        if isinstance(child, RowsOnDemand):
            yield _Weight(child.num_rows, partial(_stored, prefix, child))
        elif isinstance(child, SlotIds):
            ids = child.ids_by_slot()
            yield _Weight(len(ids), partial(_between, f"{prefix}.{IDS_BY_SLOT}", ids))


def _between(name: str, tensor: Tensor, first: int, stop: int) -> dict[str, Tensor]:
    return {name: tensor[first:stop] if tensor.dim() else tensor}


def _stored(prefix: str, weight: RowsOnDemand, first: int, stop: int) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": rows for name, rows in weight.stored(first, stop).items()}


def _change(file: str, weight: _Weight, saved: SavedWeights) -> RowChange | None:
    """Compares a weight with the saved one, some rows at a time; returns the changed rows, or None without any."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "distembed-delta") as pool:
        pieces = pool.map(partial(_changed_piece, weight, saved), range(0, weight.num_rows, _ROWS_AT_ONCE))
        changed = [piece for piece in pieces if len(piece[0])]
    if not changed:
        return None
    rows = torch.cat([rows for rows, _ in changed])
    values = {name: [tensors[name] for _, tensors in changed] for name in changed[0][1]}
    tensors = {name: torch.cat(each) if each[0].dim() else each[0] for name, each in values.items()}
    return RowChange(file, None if len(rows) == weight.num_rows else rows, tensors)


def _changed_piece(weight: _Weight, saved: SavedWeights, first: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the changed rows among a piece's rows from ``first`` on, and their tensors."""
    tensors = weight.read(first, min(first + _ROWS_AT_ONCE, weight.num_rows))
    is_changed = torch.zeros(min(_ROWS_AT_ONCE, weight.num_rows - first), dtype=torch.bool)
    for name, tensor in tensors.items():
        is_changed |= saved.differs(name, first, tensor, weight.num_rows)
    rows = is_changed.nonzero().flatten()
    return rows + first, {name: tensor[rows] if tensor.dim() else tensor for name, tensor in tensors.items()}


class SavedWeights:
    """The weights of a program in its file, memory-mapped, as later deltas changed them.

    Trade-off: the file is not compared with its checksum, which takes longer than all else. A damaged row differs from
    its new value, and a delta has it once more.

    Raises:
        UserError: The file is no program of ``torch.export``.
    """

    def __init__(self, file: Path, changes: Sequence[RowChange] = ()) -> None:
        self._file = file
        self._changes: dict[str, tuple[Tensor, Tensor]] = {}  # rows in ascending order, and their bytes
        self._bytes: dict[str, Tensor] = {}
        self._records: dict[str, str] = {}
        try:
            reader: Any = torch._C.PyTorchFileReader(str(file))
            described = json.loads(reader.get_record(_WEIGHTS_CONFIG))["config"]
            content = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
            for name, about in described.items():
                record = self._records[name] = f"data/weights/{about['path_name']}"
                start = reader.get_record_offset(record)
                self._bytes[name] = content[start : start + reader.get_record_size(record)]
            for name in [name for name in self._records if name.endswith(f".{SORTED_IDS}")]:
                self._read_identities(name.removesuffix(f".{SORTED_IDS}"))
        except (OSError, RuntimeError, ValueError, LookupError, TypeError) as error:
            raise UserError(
                f"{file} is no program of torch.export, or it is damaged ({error}); export again."
            ) from error

        for name in dict.fromkeys(name for change in changes for name in change.values):
            self._apply(name, [change for change in changes if name in change.values])

    def _apply(self, name: str, changes: Sequence[RowChange]) -> None:
        """Joins the changes of a weight: the last whole one takes the place of the file, and later rows of earlier."""
        rows, values = [torch.empty(0, dtype=torch.int64)], list[Tensor]()
        for change in changes:
            if change.rows is None:
                self._bytes[name] = _as_bytes(change.values[name], 1).flatten()
                rows, values = rows[:1], []
            else:
                rows.append(change.rows)
                values.append(_as_bytes(change.values[name], len(change.rows)))
        if values:
            ascending, order = torch.cat(rows).sort(stable=True)
            is_last = torch.cat([ascending[1:] != ascending[:-1], torch.tensor([True])])
            self._changes[name] = ascending[is_last], torch.cat(values)[order[is_last]]

    def _read_identities(self, path: str) -> None:
        """Puts ids by slot in the place of the ids that are sorted, as one weight."""
        pair = {
            f"{path}.{name}": self._bytes[f"{path}.{name}"].view(torch.int64) for name in (SORTED_IDS, SORTED_SLOTS)
        }
        by_slot = f"{path}.{IDS_BY_SLOT}"
        self._bytes[by_slot] = ids_of_slots(pair, path).view(torch.uint8)
        self._records[by_slot] = self._records.pop(f"{path}.{SORTED_IDS}")
        del self._records[f"{path}.{SORTED_SLOTS}"]

    def records(self, names: Sequence[str]) -> set[str]:
        """Returns the records of the file that hold weights; a :class:`UserError` names a weight that has none."""
        for name in names:
            if name not in self._records:
                raise UserError(f"{self._file} has no weight {name}, which the run's program has; {_WHOLE}.")
        return {self._records[name] for name in names}

    def require_all(self, compared: set[str]) -> None:
        """Raises a :class:`UserError` unless ``compared`` are all records with weights."""
        missing = [name for name, record in self._records.items() if record not in compared]
        if missing:
            raise UserError(f"{self._file} has the weight {missing[0]}, which the run's program has not; {_WHOLE}.")

    def differs(self, name: str, first: int, rows: Tensor, num_rows: int) -> Bool[Tensor, " rows"]:
        """Returns which ``rows``, from row ``first`` of the ``num_rows`` of a weight, have other bytes than saved."""
        own, saved = _as_bytes(rows, len(rows) if rows.dim() else 1), self._bytes[name]
        if own.shape[1] * num_rows != len(saved):
            raise UserError(
                f"{name} of {self._file} has {len(saved):,} bytes, and the run's {own.shape[1] * num_rows:,}: tables "
                f"or networks have grown; {_WHOLE}."
            )
        stop = first + len(own)
        before = saved.view(num_rows, -1)[first:stop]
        if name in self._changes:
            changed, values = self._changes[name]
            start, end = torch.searchsorted(changed, torch.tensor([first, stop])).tolist()
            before = before.index_copy(0, changed[start:end] - first, values[start:end])
        return unequal_rows(own, before)


def unequal_rows(first: UInt8[Tensor, "rows bytes"], second: UInt8[Tensor, "rows bytes"]) -> Bool[Tensor, " rows"]:
    """Returns which rows differ in a byte; rows that are mapped may begin anywhere in their file."""
    # whole words are compared several times as fast as bytes
    starts = (first.shape[1], first.storage_offset(), second.storage_offset())
    words = (torch.int64, torch.int32, torch.uint8)
    word = next(each for each in words if all(start % each.itemsize == 0 for start in starts))
    return (first.view(word) != second.view(word)).any(1)


def _as_bytes(values: Tensor, num_rows: int) -> UInt8[Tensor, "rows bytes"]:
    return values.contiguous().view(-1).view(torch.uint8).view(num_rows, -1)
