"""The description of a checkpoint on disk, without its numbers, and how it differs from a live model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distembed.base.checksums import Verification, checksum_of
from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.units import enumerate_lines
from distembed.checkpoints.blocks import DamagedFile, SavedTensor, dtype_name, parse_index, read_block, require_sizes
from distembed.checkpoints.content import random_state
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
from distembed.checkpoints.transfer import not_read

_MAX_DIFFERENCES = 10
STEPS_BEFORE = "steps_before"
"""Key of a run's progress: number of steps that its optimizers' states had when it began."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """The description of a checkpoint on disk, without its numbers.

    Attributes:
        path: Local path or URL of the checkpoint.
        tensors: Its tensors by their names (:mod:`distembed.checkpoints.content`).
        tables: Meaning of the weights of compositional tables, by module and table.
        optimizers: Name of the optimizer of every parameter.
        world_size: Number of ranks that wrote it.
        progress: Its writer's progress.
    """

    path: str
    tensors: Mapping[str, SavedTensor]
    tables: Mapping[str, str]
    optimizers: Mapping[str, str]
    world_size: int
    progress: dict[str, Any]

    @classmethod
    def read(cls, path: str) -> "SavedCheckpoint":
        """Reads the description; nothing of it is executed.

        Raises:
            UserError: The checkpoint may not be read.
            RunError: It cannot be reached.
            DamagedCheckpoint: It is damaged.
        """
        try:
            last_file = read_last_file(path)
            tensors = _read_index(path, last_file)
            require_sizes(tensors, file_sizes(path))
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
        """Number of steps in the states of optimizers: the run's own, and the steps that they had when it began."""
        return int(self.progress["step"]) + int(self.progress.get(STEPS_BEFORE, 0))

    def differences(
        self, weights: Mapping[str, TensorShards], tables: Mapping[str, str], optimizers: Mapping[str, str] | None
    ) -> str | None:
        """Returns how the live model and its optimizers differ from the saved ones; None where they do not.

        Args:
            weights: The live weights.
            tables: Meaning of the weights of compositional tables.
            optimizers: Name of the optimizer of every live parameter; None where optimizers do not matter.
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
        """Returns the shards to fill with optimizer states, by the saved tensor.

        Args:
            states: The live states, by ``PARAMETER.STATE``.
        """
        saved: dict[str, list[str]] = {}
        for key in self.tensors:
            if key.startswith("optimizer."):
                parameter, _, state = key.removeprefix("optimizer.").rpartition(".")
                saved.setdefault(parameter, []).append(state)
        to_read: dict[str, TensorShards] = {}
        for name, shards in states.items():
            parameter, _, state = name.rpartition(".")
            for saved_state, part in blend_columns(state, shards, saved.get(parameter, [])).items():
                key = f"optimizer.{parameter}.{saved_state}"
                before = to_read[key].shards if key in to_read else []
                to_read[key] = TensorShards(part.size, part.dtype, [*before, *part.shards])
        return to_read

    def random_state_to_read(self, rank: int) -> dict[str, Tensor]:
        """Returns tensors to fill with the random state of the first rank and of this one, by the saved tensor."""
        keys = ["random.cpu.0", *[f"random.{device}.{rank}" for device in random_state()]]
        return {key: self.empty(key) for key in keys if key in self.tensors}

    def rank_tensors_to_read(self, rank: int, world_size: int) -> dict[str, Tensor]:
        """Returns tensors to fill with the tensors that ranks had each for itself, by the saved tensor.

        On another number of ranks, rank r of n gets the tensors of the ranks r, r + n, r + 2n and so on.
        """
        found = {}
        for key in self.tensors:
            section, _, name = key.partition(".")
            if section == "ranks" and int(name.rpartition(".")[2]) % world_size == rank:
                found[key] = self.empty(key)
        return found

    def empty(self, key: str) -> Tensor:
        """Returns a tensor to fill with a saved one.

        Raises:
            DamagedCheckpoint: It would be larger than the checkpoint's files.
        """
        tensor = self.tensors[key]
        if tensor.num_bytes > sum(block.length for each in self.tensors.values() for block in each.blocks):
            raise not_read(self.path, DamagedFile(f"its index says that {key} has {tensor.num_bytes:,} bytes"))
        return torch.empty(tensor.size, dtype=tensor.dtype)


def _read_index(path: str, last_file: Mapping[str, Any]) -> dict[str, SavedTensor]:
    """Returns the tensors that a checkpoint's index lists; the index is ours, or torch's own of an earlier version."""
    is_ours = "index_checksum" in last_file
    name = INDEX_FILE if is_ours else METADATA_FILE
    data = read_file(path, name)
    if checksum_of(data) != last_file["index_checksum" if is_ours else "metadata_checksum"]:
        raise DamagedFile(f"{name} does not have the checksum that it was written with")
    try:
        tensors = parse_index(data) if is_ours else parse_torch_index(data)
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
    """Verifies every block of every file of a checkpoint against its checksum.

    Args:
        checkpoint: Local path or URL of the checkpoint.

    Returns:
        All problems, not only the first.

    Raises:
        UserError: The checkpoint cannot be reached.
    """
    try:
        saved = SavedCheckpoint.read(checkpoint)
    except DamagedCheckpoint as damage:
        return Verification([str(damage)], num_files=1)
    files, path = open_file_system(checkpoint)
    blocks = [block for tensor in saved.tensors.values() for block in tensor.blocks]
    names = {block.file for block in blocks}
    found = Verification(num_files=2 + len(names))
    sizes = file_sizes(checkpoint)
    found.num_bytes = sum(sizes.get(name, 0) for name in (LAST_FILE, INDEX_FILE, METADATA_FILE))
    for block in sorted(blocks, key=lambda block: (block.file, block.start)):
        try:
            read_block(files, path, block, memoryview(bytearray(block.length)))
            found.num_bytes += block.length
        except DamagedFile as damage:
            found.problems.append(f"{checkpoint}: {damage}.")
        except Exception as error:  # file systems raise errors of their own kinds
            found.problems.append(str(not_read(f"{checkpoint}/{block.file}", error)))
    return found
