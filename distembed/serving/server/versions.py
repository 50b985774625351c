"""The version that a server scores by, and the newer versions that it takes from a folder while it answers.

::

    folder of versions --poll--> read and verified in a thread --between two batches--> rows exchanged in place (delta)
                                                                                        model replaced (whole export)

A batch is scored by one version, since versions change between batches alone. A delta exchanges rows in place, without
a second copy of the tables, and scores the sample; rows are put back where the scores are not the ones of the export.
Trade-off: requests wait for as long. A whole export is loaded beside the served one and needs its memory once more.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.base.units import format_bytes
from distembed.serving.model_folder.deltas import (
    RowChange,
    Weights,
    exchange,
    fitting_changes,
    loaded_weights,
    read_delta,
)
from distembed.serving.model_folder.manifest import DeltaManifest, ExportManifest
from distembed.serving.model_folder.programs import Program, load_programs
from distembed.serving.model_folder.reading import read_manifest, read_sample, require_sample, require_unchanged
from distembed.serving.model_folder.versions import Version, read_version, version_folders
from distembed.serving.server.batching import Batcher
from distembed.serving.server.scoring import RowRequest, Scorer, Scores

POLL_SECONDS = 1.0
RETRY_SECONDS = 30.0
"""Seconds after which a version is tried again that could not be read, or for which memory was missing."""
_log = logging.getLogger(__name__)
Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class LoadedVersion:
    """A version that is loaded and verified: its program scored the sample as the exporting machine did."""

    version: Version
    folder: Path  # of the whole export
    manifest: ExportManifest
    program: Program
    sample: Mapping[str, Any]
    scorer: Scorer
    difference: float

    @classmethod
    def load(cls, folder: Path, most_rows: int, compiled: bool = False) -> LoadedVersion:
        """Loads a whole export; a :class:`UserError` where it is damaged or scores otherwise here."""
        version = read_version(folder)
        if version.base is not None:
            raise UserError(
                f"{folder} is a delta, version {version.sequence}: serve the whole export before it, with --deltas "
                f"{folder.resolve().parent}."
            )
        manifest = read_manifest(folder)
        require_unchanged(folder, manifest)
        program, sample = load_programs(folder, manifest, compiled), read_sample(folder)
        difference = require_sample(folder, manifest, program, sample)
        scorer = Scorer(folder, manifest, program, most_rows)
        _require_same(version)
        return cls(version, folder, manifest, program, sample, scorer, difference)


class ServedModel:
    """Scores requests by one version at a time; versions are replaced while no request is scored."""

    def __init__(self, loaded: LoadedVersion) -> None:
        self._loaded = loaded
        self.version = loaded.version
        self.manifest = loaded.manifest
        self.taken: dict[str, int] = {"delta": 0, "export": 0}
        self.since = time.time()

    def score(self, requests: Sequence[RowRequest]) -> list[Scores]:
        """Returns the scores of each request, with the version that gave them."""
        name = str(self.version)
        return [replace(scores, version=name) for scores in self._loaded.scorer.score(requests)]

    @property
    def weights(self) -> Weights:
        """The tensors of the programs."""
        return loaded_weights(self._loaded.program, self._loaded.manifest)

    def replace(self, loaded: LoadedVersion) -> None:
        """Serves another whole export from now on."""
        self._loaded, self.manifest = loaded, loaded.manifest
        self._took(loaded.version, "export")

    def change(self, version: Version, delta: DeltaManifest, changes: Sequence[RowChange]) -> None:
        """Applies a delta that fits; a :class:`UserError` leaves the version as it was."""
        loaded, weights = self._loaded, self.weights
        sample = {**loaded.sample, "outputs": delta.outputs}
        exchange(changes, weights)
        try:
            require_sample(loaded.folder, loaded.manifest, loaded.program, sample)
        except BaseException:
            exchange(changes, weights)
            raise
        self.manifest = replace(self.manifest, step=delta.step, sequence=delta.sequence, parity=delta.parity)
        self._took(version, "delta")

    def _took(self, version: Version, kind: str) -> None:
        self.version, self.since = version, time.time()
        self.taken[kind] += 1


@dataclass(frozen=True)
class NewVersion:
    """A version that was read and verified; ``take`` makes the model score by it."""

    version: Version
    take: Callable[[], None]
    text: str


class VersionFollower:
    """Finds the next version of a model in a folder of whole exports and deltas.

    The newest whole export goes first, then the delta that changes the served version. Damaged versions, and deltas of
    versions that are not there, are refused with a line in the log; a folder is tried again once its files changed, and
    after :data:`RETRY_SECONDS` where the error may pass.

    Attributes:
        refused: The reason of each refused version, by the name of its folder.
    """

    def __init__(self, folder: Path, model: ServedModel, most_rows: int, say: Callable[[str], None]) -> None:
        self._folder, self._model, self._most_rows, self._say = folder, model, most_rows, say
        self._known: dict[Path, tuple[Stamp, Version | None]] = {}
        self._tried: dict[Path, Stamp] = {}
        self._retry_at: dict[Path, float] = {}  # on time.monotonic
        self.refused: dict[str, str] = {}
        version_folders(folder)

    def take_all(self) -> None:
        """Takes all versions that are there, where no request is scored yet."""
        while (new := self.read_next()) is not None:
            self._take(new)

    async def follow(self, batcher: Batcher) -> None:
        """Takes versions as they appear, between batches, until it is cancelled."""
        while True:
            try:
                while (new := await asyncio.to_thread(self.read_next)) is not None:
                    await batcher.between_batches(partial(self._take, new))
            except Exception:
                _log.exception("the folder of versions %s could not be followed", self._folder)
            await asyncio.sleep(POLL_SECONDS)

    def _take(self, new: NewVersion) -> None:
        began = time.perf_counter()
        try:
            new.take()
        except Exception as error:
            self._failed(new.version.folder, error)
            return
        self._say(f"version {new.version}: {new.text} in {1e3 * (time.perf_counter() - began):.0f} ms")

    def read_next(self) -> NewVersion | None:
        """Reads and verifies the next version, without changing the model; None where there is none to take."""
        served, versions = self._model.version, self._versions()
        for old in (each for each in versions if each.sequence <= served.sequence):
            self.refused.pop(old.folder.name, None)
            if old.sequence == served.sequence and old.identity != served.identity:
                self._refuse(old.folder, f"{served} is served; export whole with a later number into this folder")
        newer = [version for version in versions if version.sequence > served.sequence]
        whole = sorted((each for each in newer if each.base is None), key=lambda each: -each.sequence)
        deltas = [each for each in newer if each.base is not None]
        for version in [*whole, *(each for each in deltas if each.base == served.identity)]:
            if self._tried.get(version.folder) == self._known[version.folder][0]:
                continue
            self._tried[version.folder] = self._known[version.folder][0]
            try:
                return self._read_whole(version) if version.base is None else self._read_delta(version)
            except Exception as error:
                self._failed(version.folder, error)
        for version in deltas:
            if version.base != served.identity:
                self._refuse(version.folder, _does_not_follow(version, served))
        return None

    def _versions(self) -> list[Version]:
        """Returns the versions in the folder; reads the files of folders that changed since the last call."""
        folders = dict.fromkeys(version_folders(self._folder))
        for kept in (self._known, self._tried, self._retry_at):
            for gone in kept.keys() - folders.keys():
                del kept[gone]
        self.refused = {name: reason for name, reason in self.refused.items() if self._folder / name in folders}
        for folder in folders:
            stamp = _stamp(folder)
            is_due = time.monotonic() >= self._retry_at.get(folder, math.inf)
            is_changed = self._known.get(folder, (None, None))[0] != stamp
            if not is_due and not is_changed:
                continue
            if is_changed:
                self.refused.pop(folder.name, None)
            self._tried.pop(folder, None)
            self._retry_at.pop(folder, None)
            try:
                self._known[folder] = (stamp, read_version(folder))
            except Exception as error:
                self._known[folder] = (stamp, None)
                self._failed(folder, error)
        return [version for _, version in self._known.values() if version is not None]

    def _read_whole(self, version: Version) -> NewVersion:
        own, served = _kind(read_manifest(version.folder)), _kind(self._model.manifest)
        if own != served:
            raise UserError(
                f"{version.folder} is an export of another model: its task, model and outputs are {own}, and {served} "
                "is served; give each model a folder of its own"
            )
        loaded = LoadedVersion.load(version.folder, self._most_rows)
        _require_same(version)
        return NewVersion(version, lambda: self._model.replace(loaded), f"the whole export {version.folder}")

    def _read_delta(self, version: Version) -> NewVersion:
        if version.sequence != self._model.version.sequence + 1:
            raise UserError(
                f"{version.folder} has the number {version.sequence} and changes {self._model.version}; a delta "
                "has the next number"
            )
        delta, changes = read_delta(version.folder)
        _require_same(version)
        num_bytes = sum(tensor.nbytes for change in changes for tensor in change.values.values())
        changes = fitting_changes(changes, self._model.weights, version.folder)
        text = f"the delta {version.folder}, {format_bytes(num_bytes)} of rows,"
        return NewVersion(version, lambda: self._model.change(version, delta, changes), text)

    def _failed(self, folder: Path, error: Exception) -> None:
        """Refuses a version for an error; one of the machine, and not of the files' content, may pass."""
        if not isinstance(error, UserError) or isinstance(error.__cause__, OSError):
            self._retry_at[folder] = time.monotonic() + RETRY_SECONDS
        self._refuse(folder, str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")

    def _refuse(self, folder: Path, reason: str) -> None:
        if self.refused.get(folder.name) != reason:
            self.refused[folder.name] = reason
            self._say(f"refused {folder}: {reason}")


def _require_same(version: Version) -> None:
    """Refuses a folder that another version was put into while it was read."""
    if read_version(version.folder) != version:
        raise UserError(f"{version.folder} was replaced while it was read; it is read again once it is whole.")


def _kind(manifest: ExportManifest) -> str:
    return f"{manifest.task}, {manifest.model} and {', '.join(manifest.network.outputs)}"


def _does_not_follow(version: Version, served: Version) -> str:
    missing = range(served.sequence + 1, version.sequence)
    reason = f"the versions {missing[0]} to {missing[-1]} come first" if missing else "it changes another version"
    return (
        f"it changes {version.sequence - 1}-{str(version.base)[:12]}, and {served} is served: {reason}. Copy "
        "the missing versions into the folder, or export the run whole."
    )


def _stamp(folder: Path) -> Stamp:
    """Returns names, sizes and times of a folder's files; a copy that is under way changes them.

    Copies may keep the time of modification, so the time at which the file's status changed is taken.
    """
    try:
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        return tuple((file.name, stat.st_size, stat.st_ctime_ns) for file in files for stat in (file.stat(),))
    except OSError:  # a file was removed meanwhile, or may not be looked at; reading the version says so
        return ()
