"""Checkpoints: ``torch.distributed.checkpoint`` in a folder that appears whole or not at all.

::

    checkpoints/step-00000600/
        .metadata  __0_0.distcp  ...    weights and optimizer state, by torch.distributed.checkpoint
        progress.json                   step, epoch, the reader's position
    checkpoints/.partial-step-00000700  one that is being written, or was when the process died
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchrec.distributed.model_parallel import DistributedModelParallel

from distembed.errors import RunError, UserError
from distembed.training.files import write_json
from distembed.training.optimizers import Optimizers

PROGRESS_KEYS = ("step", "samples", "seconds", "reader")
"""What a run tells :meth:`Checkpoints.save` and gets back from :func:`load_progress`."""

_PARTIAL = ".partial-"
_MAX_DIFFERENCES = 10


class Checkpoints:
    """The checkpoints of one run, newest last; all ranks construct and call it together.

    Args:
        folder: where they lie.
        keep: how many of the newest are kept.
        is_first: whether this rank renames and removes folders.
    """

    def __init__(self, folder: Path, keep: int, is_first: bool) -> None:
        self._folder = folder
        self._keep = keep
        self._is_first = is_first

    def save(
        self, step: int, model: DistributedModelParallel, optimizers: Optimizers, progress: Mapping[str, Any]
    ) -> Path:
        """Writes a checkpoint; on failure the older ones stay.

        Raises:
            RunError: where it cannot be written, with the reason.
        """
        target = self._folder / f"step-{step:08d}"
        partial = self._folder / f"{_PARTIAL}{target.name}"
        if target.exists():
            return target
        try:
            if self._is_first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            dist.barrier()
            state = {"model": model.state_dict(), "optimizer": optimizers.combined.state_dict()}
            dcp.save(state, checkpoint_id=str(partial))
            if self._is_first:
                write_json(partial / "progress.json", dict(progress))
                os.rename(partial, target)
                self._remove_old()
            dist.barrier()
        except (OSError, dcp.api.CheckpointException) as error:
            free_mib = shutil.disk_usage(self._folder).free >> 20
            if self._is_first:
                shutil.rmtree(partial, ignore_errors=True)
            raise RunError(
                f"The checkpoint {target} could not be written ({_reason(error)}); {free_mib:,} MiB were left. "
                "Older checkpoints are kept; free space or mend the folder's permissions, then go on with --resume."
            ) from error
        return target

    def _remove_old(self) -> None:
        for old in list_checkpoints(self._folder)[: -self._keep]:
            # renamed first: a process killed while it removes files must not leave half a checkpoint by that name
            os.rename(old, self._folder / f"{_PARTIAL}{old.name}")
        for partial in self._folder.glob(f"{_PARTIAL}*"):
            shutil.rmtree(partial, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "progress.json").is_file())


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint."""
    return next(reversed(list_checkpoints(folder)), None)


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest whole checkpoint of a run.

    Raises:
        UserError: where it has none.
    """
    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    if checkpoint is None:
        raise UserError(f"{run_dir} has no checkpoint; give the folder of a run that `distembed train` made.")
    return checkpoint


def load_progress(checkpoint: Path) -> dict[str, Any]:
    """What :meth:`Checkpoints.save` was told: step, epoch, the reader's position."""
    try:
        progress: dict[str, Any] = json.loads((checkpoint / "progress.json").read_text())
        missing = [key for key in PROGRESS_KEYS if key not in progress]
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(checkpoint, error) from error
    if missing:
        raise _damaged(checkpoint, KeyError(f"progress.json has no {', '.join(missing)}"))
    return progress


def _damaged(checkpoint: Path, error: BaseException) -> UserError:
    return UserError(f"{checkpoint} cannot be read ({_reason(error)}); remove it to use the one before.")


def _reason(error: BaseException) -> str:
    """An error in one line; torch's own lists the whole traceback of every rank."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".strip()


def load_checkpoint(
    checkpoint: Path, model: DistributedModelParallel, optimizers: Optimizers | None = None
) -> dict[str, Any]:
    """Reads weights, and optimizer state where asked, into the live model, whatever the number of ranks that saved it.

    Raises:
        UserError: for a checkpoint of another model, with the differences.
    """
    if optimizers is not None:
        optimizers.init_state()
    state: dict[str, Any] = {"model": model.state_dict()}
    _require_same_model(checkpoint, state["model"])
    if optimizers is not None:
        state["optimizer"] = optimizers.combined.state_dict()
    _read(checkpoint, state)
    model.load_state_dict(dict(state["model"]))  # a copy: TorchRec changes the one it is given
    if optimizers is not None:
        optimizers.combined.load_state_dict(state["optimizer"])
    return load_progress(checkpoint)


def load_weights(checkpoint: Path, suffixes: Sequence[str]) -> list[torch.Tensor]:
    """Reads some of the model's weights and nothing else, on one process, without a model.

    Args:
        checkpoint: a whole one.
        suffixes: how the names of the weights end, after a dot.

    Raises:
        UserError: where the checkpoint has no such weight, or cannot be read.
    """
    saved = _saved_weights(checkpoint)
    state = {}
    for suffix in suffixes:
        names = [name for name in saved if name.endswith(f".{suffix}")]
        if len(names) != 1:
            raise UserError(
                f"{checkpoint} has {len(names)} weights that end in .{suffix}; use the config that the run was started "
                "with."
            )
        entry = saved[names[0]]
        state[names[0]] = torch.empty(entry.size, dtype=entry.properties.dtype)
    _read(checkpoint, {"model": state})
    return list(state.values())


def _read(checkpoint: Path, state: dict[str, Any]) -> None:
    """Fills the tensors of ``state``."""
    try:
        dcp.load(state, checkpoint_id=str(checkpoint))
    except (OSError, EOFError, RuntimeError, dcp.api.CheckpointException) as error:
        raise _damaged(checkpoint, error) from error


def _saved_weights(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    try:
        metadata = dcp.FileSystemReader(str(checkpoint)).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged file may fail to read in any way
        raise _damaged(checkpoint, error) from error
    return {
        key.removeprefix("model."): entry
        for key, entry in metadata.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }


def _require_same_model(checkpoint: Path, live: Mapping[str, torch.Tensor]) -> None:
    saved = {key: tuple(entry.size) for key, entry in _saved_weights(checkpoint).items()}
    shapes = {key: tuple(value.size()) for key, value in live.items()}
    differences = [
        f"{key}: {saved.get(key, 'absent')} in the checkpoint, {shapes.get(key, 'absent')} in the model"
        for key in sorted(saved.keys() | shapes.keys())
        if saved.get(key) != shapes.get(key)
    ]
    if differences:
        shown = "\n  ".join(differences[:_MAX_DIFFERENCES])
        raise UserError(
            f"{checkpoint} is of another model; {len(differences)} parameters differ:\n  {shown}\n"
            "Use the config that the run was started with."
        )
