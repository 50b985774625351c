"""What a checkpoint on disk holds, without the numbers themselves, and how it differs from a live model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from distembed.base.errors import RunError, UserError
from distembed.base.units import enumerate_lines
from distembed.checkpoints.content import RANKS
from distembed.checkpoints.optimizer_state import blend_columns
from distembed.checkpoints.random_state import random_state
from distembed.checkpoints.shards import TensorShards
from distembed.checkpoints.store import METADATA_FILE, file_sizes, read_file, read_last_file
from distembed.checkpoints.transfer import not_read
from distembed.checkpoints.verified_files import DamagedFile, read_verified_metadata, require_sizes

_MAX_DIFFERENCES = 10
STEPS_BEFORE = "steps_before"
"""Key of a run's progress: number of steps that its optimizers' states had when it began."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """What a checkpoint on disk holds, without the numbers themselves.

    Attributes:
        path: Local path or URL of the checkpoint.
        tensors: Sizes and types of its tensors, by section and name.
        tables: What the weights of compositional tables mean, by module and table.
        optimizers: Name of the optimizer of every parameter.
        world_size: Number of ranks that wrote it.
        progress: What its writer gave as progress.
        has_checksums: Whether its files have checksums; those of early versions of distembed have none.
        metadata: Where the blocks of its tensors lie.
    """

    path: str
    tensors: Mapping[str, TensorStorageMetadata]
    tables: Mapping[str, str]
    optimizers: Mapping[str, str]
    world_size: int
    progress: dict[str, Any]
    has_checksums: bool
    metadata: Metadata

    @classmethod
    def read(cls, path: str) -> "SavedCheckpoint":
        """Reads what a checkpoint holds.

        Raises:
            UserError: The checkpoint may not be read.
            RunError: It cannot be reached.
            DamagedCheckpoint: It is damaged.
        """
        try:
            last_file = read_last_file(path)
            metadata = read_verified_metadata(partial(read_file, path), last_file.get("metadata_checksum"))
            require_sizes(metadata, file_sizes(path))
            entries = metadata.state_dict_metadata
            tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
            return cls(
                path,
                tensors,
                tables=last_file["tables"],
                optimizers={name: kind for kind, names in last_file["optimizers"].items() for name in names},
                world_size=last_file["world_size"],
                progress=last_file["progress"],
                has_checksums="metadata_checksum" in last_file,
                metadata=metadata,
            )
        except (UserError, RunError):
            raise
        except Exception as error:  # a damaged file may fail to read in any way
            raise not_read(path, error) from error

    @property
    def optimizer_steps(self) -> int:
        """Number of steps that the states of optimizers have gathered: the run's own, and those it began with."""
        return int(self.progress["step"]) + int(self.progress.get(STEPS_BEFORE, 0))

    def differences(
        self, weights: Mapping[str, TensorShards], tables: Mapping[str, str], optimizers: Mapping[str, str] | None
    ) -> str | None:
        """Returns how the live model and its optimizers differ from the saved ones; None where they do not.

        Args:
            weights: The live weights.
            tables: What those of compositional tables mean.
            optimizers: Name of the optimizer of every live parameter; None where optimizers do not matter.
        """
        saved = {
            key.removeprefix("model."): _describe(entry.size, entry.properties.dtype)
            for key, entry in self.tensors.items()
            if key.startswith("model.")
        }
        live = {name: _describe(shards.size(), shards.dtype) for name, shards in weights.items()}
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
        """Returns where live optimizer states are read from: the shards to fill, by the saved tensor.

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
                to_read[key] = TensorShards(part.size(), part.dtype, [*before, *part.shards])
        return to_read

    def random_state_to_read(self, rank: int) -> dict[str, Tensor]:
        """Returns tensors to fill with the random state of the first rank and of this one, by the saved tensor."""
        keys = ["random.cpu.0", *[f"random.{device}.{rank}" for device in random_state()]]
        return {key: self.empty(key) for key in keys if key in self.tensors}

    def rank_tensors_to_read(self, rank: int, world_size: int) -> dict[str, Tensor]:
        """Returns tensors to fill with those that ranks had each for itself, by the saved tensor.

        On another number of ranks, rank r of n gets those of the ranks r, r + n, r + 2n and so on.
        """
        found = {}
        for key in self.tensors:
            section, _, name = key.partition(".")
            if section == RANKS and int(name.rpartition(".")[2]) % world_size == rank:
                found[key] = self.empty(key)
        return found

    def empty(self, key: str) -> Tensor:
        """Returns a tensor to fill with a saved one.

        Raises:
            DamagedCheckpoint: It would be larger than the checkpoint's files.
        """
        entry = self.tensors[key]
        num_bytes = math.prod(entry.size) * entry.properties.dtype.itemsize
        if num_bytes > sum(info.length for info in self.metadata.storage_data.values()):
            raise not_read(self.path, DamagedFile(f"{METADATA_FILE} says that {key} has {num_bytes:,} bytes"))
        return torch.empty(entry.size, dtype=entry.properties.dtype)


def _describe(size: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(size)} {str(dtype).removeprefix('torch.')}"


def _differences(saved: Mapping[str, str], live: Mapping[str, str], what: str) -> list[str]:
    return [
        f"{what}{name}: {saved.get(name, 'absent')} in the checkpoint, {live.get(name, 'absent')} in the model"
        for name in sorted(saved.keys() | live.keys())
        if saved.get(name) != live.get(name)
    ]
