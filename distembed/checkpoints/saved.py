"""The description of a checkpoint on disk, without its numbers, and how it differs from a live model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distembed.base.checksums import Verification, checksum_of
from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.units import enumerate_lines
from distembed.checkpoints.blocks import (
    BlockRead,
    DamagedFile,
    SavedTensor,
    dtype_name,
    not_read,
    parse_index,
    require_files,
)
from distembed.checkpoints.content import AVERAGE, random_state
from distembed.checkpoints.optimizer_state import blend_columns
from distembed.checkpoints.shards import TensorShards
from distembed.checkpoints.store import (
    INDEX_FILE,
    LAST_FILE,
    METADATA_FILE,
    file_sizes,
    open_file_system,
    read_file,
    read_last_file,
)
from distembed.checkpoints.torch_format import parse_torch_index

_MAX_DIFFERENCES = 10
STEPS_BEFORE = "steps_before"
"""Key of a run's progress: number of steps that the optimizer states had taken in when the run started from them."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """The description of a checkpoint on disk, without its numbers.

    Attributes:
        path: Local path or URL of the checkpoint.
        tensors: Its tensors by their names (:mod:`distembed.checkpoints.content`).
        tables: The words of :func:`~distembed.checkpoints.content.describe_tables`.
        optimizers: Name of the optimizer of every parameter.
    """

    path: str
    tensors: Mapping[str, SavedTensor]
    tables: Mapping[str, str]
    optimizers: Mapping[str, str]
    world_size: int
    progress: dict[str, Any]

    @classmethod
    def read(cls, path: str) -> "SavedCheckpoint":
        """Reads ``progress.json`` and the index, checks the sizes of files, and raises the errors of ``not_read``."""
        try:
            last_file = read_last_file(path)
            tensors = _read_index(path, last_file)
            require_files(tensors, file_sizes(path))
            return cls(
                path,
                tensors,
                tables=last_file["tables"],
                optimizers={name: kind for kind, names in last_file["optimizers"].items() for name in names},
                world_size=last_file["world_size"],
                progress=last_file["progress"],
            )
        except (UserError, RunError):
            raise
        except Exception as error:  # a damaged file may fail to read in any way
            raise not_read(path, error) from error

    @property
    def optimizer_steps(self) -> int:
        """Number of steps that the optimizer states have taken in: this run's steps, and :data:`STEPS_BEFORE`."""
        return int(self.progress["step"]) + int(self.progress.get(STEPS_BEFORE, 0))

    def tensors_for_use(self) -> Mapping[str, SavedTensor]:
        """Returns the tensors as a trained model is used: an averaged weight has the name of its weight."""
        averages = {
            f"model.{key.removeprefix(AVERAGE)}": tensor
            for key, tensor in self.tensors.items()
            if key.startswith(AVERAGE)
        }
        return {**{key: self.tensors[key] for key in self.tensors if not key.startswith(AVERAGE)}, **averages}

    def differences(
        self, weights: Mapping[str, TensorShards], tables: Mapping[str, str], optimizers: Mapping[str, str] | None
    ) -> str | None:
        """Returns an error text that lists how a live model differs from the saved one; None if they match.

        Compares sizes and types of ``weights``, the descriptions of ``tables``, and, unless None, ``optimizers``.
        """
        saved = {
            key.removeprefix("model."): f"{tensor.size} {dtype_name(tensor.dtype)}"
            for key, tensor in self.tensors.items()
            if key.startswith("model.")
        }
        live = {name: f"{tuple(shards.size)} {dtype_name(shards.dtype)}" for name, shards in weights.items()}
        differences = _differences(saved, live, "") + _differences(self.tables, tables, "table ")
        if optimizers is not None:
            differences += _differences(self.optimizers, optimizers, "optimizer of ")
        if not differences:
            return None
        return (
            f"{self.path} is of another model; {len(differences)} of its parameters, tables or optimizers "
            f"differ:{enumerate_lines(differences, _MAX_DIFFERENCES)}\nUse the config that the run was started with."
        )

    def states_to_read(self, states: Mapping[str, TensorShards]) -> dict[str, TensorShards]:
        """Returns the live shards to fill, by the saved tensor to fill them from; ``states`` are by PARAMETER.STATE.

        Where columns are cut otherwise than in the checkpoint, a saved state fills shards of several live states, and
        the live states are set to 0 here, since the saved ones are added (:func:`blend_columns`).
        """
        saved: dict[str, list[str]] = {}
        for key in self.tensors:
            if key.startswith("optimizer."):
                parameter, _, state = key.removeprefix("optimizer.").rpartition(".")
                saved.setdefault(parameter, []).append(state)
        to_read: dict[str, TensorShards] = {}
        for name, shards in states.items():
            parameter, _, state = name.rpartition(".")
            for saved_state, target in blend_columns(state, shards, saved.get(parameter, [])).items():
                key = f"optimizer.{parameter}.{saved_state}"
                before = to_read[key].shards if key in to_read else []
                to_read[key] = TensorShards(target.size, target.dtype, [*before, *target.shards])
        return to_read

    def run_tensors_to_read(self, rank: int, world_size: int) -> dict[str, Tensor]:
        """Returns uninitialised tensors, by saved tensor, for this rank's part of a run's state.

        They are the random states of rank 0's CPU and of this rank, where saved, and the ``ranks.`` tensors of the
        saved ranks r, r + n, r + 2n and so on, for rank r of n now: each of these goes to exactly one rank.
        """
        random_keys = {"random.cpu.0", *(f"random.{device}.{rank}" for device in random_state())}
        try:
            keys = [
                key
                for key in self.tensors
                if key in random_keys or (key.startswith("ranks.") and int(key.rpartition(".")[2]) % world_size == rank)
            ]
        except ValueError as error:  # the number of a rank is none
            raise not_read(self.path, error) from error
        return {key: self.empty(key) for key in keys}

    def empty(self, key: str) -> Tensor:
        """Returns uninitialised memory for a saved tensor; a size that exceeds all blocks together is damage."""
        tensor = self.tensors[key]
        if tensor.num_bytes > sum(block.length for saved in self.tensors.values() for block in saved.blocks):
            raise not_read(self.path, DamagedFile(f"its index says that {key} has {tensor.num_bytes:,} bytes"))
        return torch.empty(tensor.size, dtype=tensor.dtype)


def _read_index(path: str, last_file: Mapping[str, Any]) -> dict[str, SavedTensor]:
    """Returns the tensors in ``index.json`` or, for a checkpoint of an earlier version, in torch's ``.metadata``.

    Refuses an index that does not match its checksum in ``last_file``, or has a block without a checksum.
    """
    is_ours = "index_checksum" in last_file
    name, parse = (INDEX_FILE, parse_index) if is_ours else (METADATA_FILE, parse_torch_index)
    data = read_file(path, name)
    if checksum_of(data) != last_file["index_checksum" if is_ours else "metadata_checksum"]:
        raise DamagedFile(f"{name} does not have the checksum that it was written with")
    try:
        tensors = parse(data)
    except Exception as error:  # a damaged file may fail to read in any way
        raise DamagedFile(f"{name}: {error}") from error
    if any(block.checksum is None for tensor in tensors.values() for block in tensor.blocks):
        raise DamagedFile(f"{name} has no checksums of some blocks")
    return tensors


def _differences(saved: Mapping[str, str], live: Mapping[str, str], kind: str) -> list[str]:
    return [
        f"{kind}{name}: {saved.get(name, 'absent')} in the checkpoint, {live.get(name, 'absent')} in the model"
        for name in sorted(saved.keys() | live.keys())
        if saved.get(name) != live.get(name)
    ]


def verify_checkpoint(checkpoint: str) -> Verification:
    """Reads and verifies every block; returns all damage, but raises if the description cannot be reached."""
    try:
        saved = SavedCheckpoint.read(checkpoint)
    except DamagedCheckpoint as damage:
        return Verification([str(damage)], num_files=1)
    files, path = open_file_system(checkpoint)
    reads = [BlockRead(block, tensor.dtype) for tensor in saved.tensors.values() for block in tensor.blocks]
    verification = Verification(num_files=2 + len({read.block.file for read in reads}))
    sizes = file_sizes(checkpoint)
    verification.num_bytes = sum(sizes.get(name, 0) for name in (LAST_FILE, INDEX_FILE, METADATA_FILE))
    for read in sorted(reads, key=lambda read: (read.block.file, read.block.start)):
        try:
            read.run(files, path)
            verification.num_bytes += read.block.length
        except DamagedFile as damage:
            verification.problems.append(f"{checkpoint}: {damage}.")
        except Exception as error:  # file systems raise errors of their own kinds
            verification.problems.append(str(not_read(f"{checkpoint}/{read.block.file}", error)))
    return verification
