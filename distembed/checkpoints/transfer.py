"""Writing and reading a checkpoint on all ranks, with errors that name the remedy."""

import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TypeVar, cast

from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.ranks import Collectives
from distembed.base.units import format_bytes
from distembed.checkpoints.blocks import DamagedFile, SavedTensor, index_bytes, read_blocks, write_blocks
from distembed.checkpoints.content import CheckpointContent
from distembed.checkpoints.shards import TensorShards
from distembed.checkpoints.store import CheckpointStore

T = TypeVar("T")


def write_checkpoint(
    store: CheckpointStore,
    content: CheckpointContent,
    remove_old: Callable[[], None] | None,
    collectives: Collectives,
) -> None:
    """Writes a checkpoint and declares it whole; all ranks call it, and all raise the error of any rank.

    Args:
        store: The place to write to.
        content: This rank's part of the checkpoint.
        remove_old: Removes the checkpoints that do not stay, on rank 0; None where all stay.
        collectives: The ranks that write.

    Raises:
        UserError: Files that are no checkpoint's have the name.
        RunError: The checkpoint cannot be written, or older ones cannot be removed.
    """

    def write_part() -> dict[str, SavedTensor]:
        try:
            return write_blocks(store.checkpoint_path(content.name), collectives.rank, content.tensors)
        except Exception as error:  # file systems raise errors of their own kinds
            raise not_written(store, content.name, error, content.num_bytes) from error

    try:
        collectives.on_first(partial(store.start, content.name))
        parts = collectives.gather(on_every_rank(collectives, write_part))
        collectives.on_first(lambda: store.finish(content.name, content.last_file, index_bytes(parts)))
    except UserError:
        raise
    except Exception as error:
        if collectives.rank == 0:
            with suppress(Exception):
                store.discard(content.name)
        if isinstance(error, RunError):
            raise
        raise not_written(store, content.name, error, content.num_bytes) from error
    if remove_old is None:
        return
    try:
        collectives.on_first(remove_old)
    except Exception as error:
        raise RunError(
            f"The checkpoint {store.checkpoint_path(content.name)} is written, but older ones in {store.url} could not "
            f"be removed ({_reason(error)}). Mend the permissions, then go on with --resume."
        ) from error


def read_tensors(
    checkpoint: str, tensors: Mapping[str, SavedTensor], live: Mapping[str, TensorShards], collectives: Collectives
) -> None:
    """Fills this rank's live shards with a checkpoint's numbers, in place; all ranks call it.

    Args:
        checkpoint: Local path or URL of the checkpoint.
        tensors: The tensors that the checkpoint holds.
        live: The shards to fill, by the name of the saved tensor.
        collectives: The ranks that read.

    Raises:
        UserError: The checkpoint may not be read.
        RunError: It cannot be reached.
        DamagedCheckpoint: It is damaged; some of the shards may be filled by then.
    """

    def read_part() -> None:
        try:
            read_blocks(checkpoint, tensors, live)
        except Exception as error:  # a damaged file may fail to read in any way
            raise not_read(checkpoint, error) from error

    on_every_rank(collectives, read_part)


def on_every_rank(collectives: Collectives, function: Callable[[], T]) -> T:
    """Returns a function's value on this rank, or raises the error of one rank on all of them; all ranks call it.

    Args:
        collectives: The ranks.
        function: Computes the value without any collective, and raises nothing but the errors below.

    Raises:
        UserError: A rank raised it.
        RunError: A rank raised it.
    """
    value: T | None = None
    problem: UserError | RunError | None = None
    try:
        value = function()
    except (UserError, RunError) as error:
        problem = error
    problems = [found for found in collectives.gather(problem) if found is not None]
    if problems:
        # a checkpoint that one rank cannot reach is not damaged
        raise min(problems, key=lambda found: isinstance(found, DamagedCheckpoint))
    return cast(T, value)


def not_written(store: CheckpointStore, name: str, error: BaseException, num_bytes: int | None = None) -> RunError:
    """Returns the error for a checkpoint that cannot be written; this rank has ``num_bytes`` to write."""
    needed = "" if num_bytes is None else f"; this rank has {format_bytes(num_bytes)} to write"
    return RunError(
        f"The checkpoint {store.checkpoint_path(name)} could not be written ({_reason(error)}){needed}"
        f"{store.room_left()}. "
        "Older checkpoints are kept; free space or mend the permissions, then go on with --resume."
    )


def not_read(checkpoint: str, error: BaseException) -> DamagedCheckpoint | RunError | UserError:
    """Returns the error for a checkpoint that cannot be read: it is damaged, or it cannot be reached."""
    if _is_damage(error):
        return DamagedCheckpoint(f"{checkpoint} is damaged: {_reason(error)}.")
    kind = UserError if isinstance(error, PermissionError | ImportError) else RunError
    return kind(f"{checkpoint} cannot be reached ({_reason(error)}); see that every rank may read it.")


def _is_damage(error: BaseException) -> bool:
    """Returns whether a file is not as it was written, as opposed to one that cannot be read just now."""
    if isinstance(error, MemoryError) or "alloc" in str(error):
        return False
    decoding = (DamagedFile, pickle.UnpicklingError, FileNotFoundError, ValueError, LookupError, EOFError, TypeError)
    return isinstance(error, (*decoding, AttributeError, AssertionError, RuntimeError, RecursionError))


def _reason(error: BaseException) -> str:
    """Returns an error in one line."""
    if isinstance(error, DamagedFile):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):  # torch's own text says how to run the code that may be in there
        return "a block holds something else than a tensor"
    return f"{type(error).__name__}: {error}".strip()
