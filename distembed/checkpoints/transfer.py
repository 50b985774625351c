"""Writing and reading a checkpoint's tensors by ``torch.distributed.checkpoint``, with errors that name the remedy."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.ranks import Collectives
from distembed.base.units import format_bytes
from distembed.checkpoints.content import CheckpointContent
from distembed.checkpoints.shards import ShardsLoadPlanner, ShardsSavePlanner, TensorShards
from distembed.checkpoints.store import CheckpointStore
from distembed.checkpoints.verified_files import ChecksumWriter, DamagedFile, VerifyingReader


def write_checkpoint(
    store: CheckpointStore,
    content: CheckpointContent,
    remove_old: Callable[[], None] | None,
    collectives: Collectives,
) -> None:
    """Writes a checkpoint and declares it whole; all ranks call it, and all raise what any of them does.

    Args:
        store: The place to write to.
        content: What this rank writes.
        remove_old: Removes the checkpoints that do not stay, on rank 0; None where all stay.
        collectives: The ranks that write.

    Raises:
        UserError: Other files are in its way.
        RunError: The checkpoint cannot be written, or older ones cannot be removed.
    """
    try:
        collectives.on_first(partial(store.start, content.name))
        writer = ChecksumWriter(store.checkpoint_path(content.name))
        dcp.save(
            {section: dict(entries) for section, entries in content.state.items()},
            storage_writer=writer,
            planner=ShardsSavePlanner(),
            process_group=collectives.group,
        )
        last_file = {**content.last_file, "metadata_checksum": writer.metadata_checksum}  # the first rank's has one
        collectives.on_first(partial(store.finish, content.name, last_file))
    except UserError:
        raise
    except (Exception, dcp.api.CheckpointException) as error:  # file systems raise errors of their own kinds
        failure = not_written(store, content.name, error, content.num_bytes)
        if collectives.rank == 0:
            with suppress(Exception):
                store.discard(content.name)
        raise failure from error
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
    checkpoint: str, metadata: Metadata, tensors: dict[str, TensorShards], collectives: Collectives
) -> None:
    """Fills shards with a checkpoint's numbers, in place; all ranks call it.

    Args:
        checkpoint: Local path or URL of the checkpoint.
        metadata: Where its blocks lie.
        tensors: The shards to fill, by the saved tensor.
        collectives: The ranks that read.

    Raises:
        UserError: The checkpoint may not be read.
        RunError: It cannot be reached.
        DamagedCheckpoint: It is damaged; some of the shards may be filled by then.
    """
    try:
        dcp.load(
            tensors,
            storage_reader=VerifyingReader(checkpoint, metadata),
            planner=ShardsLoadPlanner(flatten_state_dict=False),
            process_group=collectives.group,
        )
    except (Exception, dcp.api.CheckpointException) as error:  # a damaged file may fail to read in any way
        raise not_read(checkpoint, error) from error


def not_written(store: CheckpointStore, name: str, error: BaseException, num_bytes: int | None = None) -> RunError:
    """Returns what is raised where a checkpoint cannot be written, of which this rank's part has so many bytes."""
    needed = "" if num_bytes is None else f"; this rank has {format_bytes(num_bytes)} to write"
    return RunError(
        f"The checkpoint {store.checkpoint_path(name)} could not be written ({_reason(error)}){needed}"
        f"{store.room_left()}. "
        "Older checkpoints are kept; free space or mend the permissions, then go on with --resume."
    )


def not_read(checkpoint: str, error: BaseException) -> DamagedCheckpoint | RunError | UserError:
    """Returns what is raised where a checkpoint cannot be read: it is damaged, or it cannot be reached."""
    found = _first_failure(error)
    if _is_damage(found):
        return DamagedCheckpoint(f"{checkpoint} is damaged: {_reason(error)}.")
    kind = UserError if isinstance(found, PermissionError | ImportError) else RunError
    return kind(f"{checkpoint} cannot be reached ({_reason(error)}); see that every rank may read it.")


def _is_damage(error: BaseException) -> bool:
    """Returns whether an error says that a file is not as it was written, and not that it could not be read just now.

    Blocks that have their checksum can only fail for lack of memory; what fails in others is what they hold.
    """
    if isinstance(error, MemoryError) or "alloc" in str(error):
        return False
    decoding = (DamagedFile, pickle.UnpicklingError, FileNotFoundError, ValueError, LookupError, EOFError, TypeError)
    return isinstance(error, (*decoding, AttributeError, AssertionError, RuntimeError, RecursionError))


def _reason(error: BaseException) -> str:
    """Returns an error in one line; torch's own lists the whole traceback of every rank."""
    error = _first_failure(error)
    if isinstance(error, DamagedFile):
        return str(error)
    if isinstance(error, pickle.UnpicklingError):  # torch's own text says how to run the code that may be in there
        return "a block holds something else than a tensor"
    return f"{type(error).__name__}: {error}".strip()


def _first_failure(error: BaseException) -> BaseException:
    """Returns the error itself or, where it is torch's list of the ranks' errors, the first of them."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]
    return error
