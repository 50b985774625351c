"""Whether the disk has room for a run's checkpoints, found out before the first step."""

from collections.abc import Callable
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.checkpoints.content import CheckpointContent
from distembed.checkpoints.places import num_checkpoints
from distembed.checkpoints.store import open_file_system
from distembed.files import free_bytes, require_free_space
from distembed.ranks import Collectives
from distembed.units import format_bytes


def checkpoint_bytes(model: nn.Module, optimizer: KeyedOptimizer, step: int, collectives: Collectives) -> int:
    """Returns the bytes of the weights and states of a checkpoint, of all ranks together; all ranks call it.

    Args:
        model: The model.
        optimizer: The optimizer of its parameters; states that it makes with the first step only are not counted.
        step: Number of steps done.
        collectives: The ranks.
    """
    content = CheckpointContent.collect("", model, optimizer, {"step": step}, collectives)
    return sum(collectives.gather(content.num_bytes))


def require_room(url: str, num_bytes: int, keep: int, say: Callable[[str], None]) -> None:
    """Makes sure that the disk has room for one more checkpoint, and warns where it has none for all that are kept.

    Of object stores nothing is known.

    Args:
        url: Local path or URL of the place where the checkpoints lie.
        num_bytes: Bytes of a checkpoint.
        keep: Number of checkpoints that stay; one more is there while the next is written.
        say: Prints a line.

    Raises:
        RunError: Not a single checkpoint fits.
    """
    files, path = open_file_system(url)
    if not isinstance(files, LocalFileSystem):
        return
    remedy = "that is one checkpoint; free space, or give another place as train.checkpoint_dir"
    require_free_space(Path(path), num_bytes, remedy)
    num_missing = keep + 1 - num_checkpoints(url)
    free = free_bytes(Path(path))
    if num_missing * num_bytes > free:
        say(
            f"{path} will not hold train.keep_checkpoints={keep} checkpoints and the one that is being written: "
            f"{num_missing} more of {format_bytes(num_bytes)} are needed, and {format_bytes(free)} are free"
        )
