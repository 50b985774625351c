"""Whether the disk has room for a run's checkpoints, found out before the first step."""

from collections.abc import Callable
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.files import free_bytes, require_free_space
from distembed.base.ranks import Collectives
from distembed.base.units import format_bytes
from distembed.checkpoints.content import CheckpointContent, Progress
from distembed.checkpoints.places import checkpoint_names
from distembed.checkpoints.store import open_file_system


def require_room(url: str, keep: int, model: nn.Module, optimizer: KeyedOptimizer, say: Callable[[str], None]) -> None:
    """Makes sure that the disk has room for one more checkpoint, and warns where it has none for all that are kept.

    Of object stores nothing is known. States that an optimizer makes with the first step only are not counted. All
    ranks call it.

    Args:
        url: Local path or URL of the place where the checkpoints lie.
        keep: Number of checkpoints that stay; one more is there while the next is written.
        model: The model.
        optimizer: The optimizer of its parameters.
        say: Prints a line.

    Raises:
        RunError: Not a single checkpoint fits.
    """
    collectives = Collectives()
    content = CheckpointContent.collect("", model, optimizer, Progress({"step": 0}), collectives)
    num_bytes = sum(collectives.gather(content.num_bytes))
    collectives.on_first(lambda: require_bytes(url, keep, num_bytes, say))


def require_bytes(url: str, keep: int, num_bytes: int, say: Callable[[str], None]) -> None:
    """Does what :func:`require_room` does for checkpoints of so many bytes, in one process."""
    files, path = open_file_system(url)
    if not isinstance(files, LocalFileSystem):
        return
    remedy = "that is one checkpoint; free space, or give another place as train.checkpoint_dir"
    require_free_space(Path(path), num_bytes, remedy)
    num_missing = keep + 1 - len(checkpoint_names(url))
    free = free_bytes(Path(path))
    if num_missing * num_bytes > free:
        say(
            f"{path} will not hold train.keep_checkpoints={keep} checkpoints and the one that is being written: "
            f"{num_missing} more of {format_bytes(num_bytes)} are needed, and {format_bytes(free)} are free"
        )
