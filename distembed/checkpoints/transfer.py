"""Writing and reading a checkpoint's tensors by ``torch.distributed.checkpoint``, with errors that name the remedy."""

from contextlib import suppress
from functools import partial

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from distembed.checkpoints.content import CheckpointContent
from distembed.checkpoints.shards import ShardsLoadPlanner, ShardsSavePlanner, TensorShards
from distembed.checkpoints.store import CheckpointStore
from distembed.errors import RunError, UserError
from distembed.ranks import Collectives


def write_checkpoint(
    store: CheckpointStore, content: CheckpointContent, keep: int | None, collectives: Collectives
) -> None:
    """Writes a checkpoint and declares it whole; all ranks call it, and all raise what any of them does.

    Args:
        store: The place to write to.
        content: What this rank writes.
        keep: Number of newest checkpoints that stay; None for all.
        collectives: The ranks that write.

    Raises:
        UserError: Other files are in its way.
        RunError: The checkpoint cannot be written, or older ones cannot be removed.
    """
    try:
        collectives.on_first(partial(store.start, content.name))
        dcp.save(
            {section: dict(entries) for section, entries in content.state.items()},
            storage_writer=FsspecWriter(store.checkpoint_path(content.name), per_thread_copy_ahead=0),
            planner=ShardsSavePlanner(),
            process_group=collectives.group,
        )
        collectives.on_first(partial(store.finish, content.name, content.last_file))
    except UserError:
        raise
    except (Exception, dcp.api.CheckpointException) as error:  # file systems raise errors of their own kinds
        failure = not_written(store, content.name, error)
        if collectives.rank == 0:
            with suppress(Exception):
                store.discard(content.name)
        raise failure from error
    if keep is None:
        return
    try:
        collectives.on_first(partial(store.keep_newest, keep))
    except Exception as error:
        raise RunError(
            f"The checkpoint {store.checkpoint_path(content.name)} is written, but older ones in {store.url} could not "
            f"be removed ({_reason(error)}). Mend the permissions, then go on with --resume."
        ) from error


def read_tensors(checkpoint: str, tensors: dict[str, TensorShards], collectives: Collectives) -> None:
    """Fills shards with a checkpoint's numbers, in place; all ranks call it.

    Args:
        checkpoint: Local path or URL of the checkpoint.
        tensors: The shards to fill, by the saved tensor.
        collectives: The ranks that read.

    Raises:
        UserError: The checkpoint cannot be reached, or is damaged; some of the shards may be filled by then.
    """
    try:
        dcp.load(
            tensors,
            storage_reader=FsspecReader(checkpoint),
            planner=ShardsLoadPlanner(flatten_state_dict=False),
            process_group=collectives.group,
        )
    except (Exception, dcp.api.CheckpointException) as error:  # a damaged file may fail to read in any way
        raise damaged(checkpoint, error) from error


def not_written(store: CheckpointStore, name: str, error: BaseException) -> RunError:
    """Returns what is raised where a checkpoint cannot be written."""
    return RunError(
        f"The checkpoint {store.checkpoint_path(name)} could not be written ({_reason(error)}){store.room_left()}. "
        "Older checkpoints are kept; free space or mend the permissions, then go on with --resume."
    )


def damaged(checkpoint: str, error: BaseException) -> UserError:
    """Returns what is raised where a checkpoint cannot be read."""
    if isinstance(error, (PermissionError, ConnectionError, TimeoutError, ImportError)):
        return UserError(f"{checkpoint} cannot be reached ({_reason(error)}); see that every rank may read it.")
    return UserError(
        f"{checkpoint} cannot be read ({_reason(error)}); if every rank can reach it, it is damaged: remove it to use "
        "the one before."
    )


def _reason(error: BaseException) -> str:
    """Returns an error in one line; torch's own lists the whole traceback of every rank."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".strip()
