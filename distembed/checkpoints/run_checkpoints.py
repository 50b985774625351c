"""The checkpoints of a run, and writing one while training goes on."""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import DamagedCheckpoint, UserError
from distembed.base.files import free_bytes, require_free_space
from distembed.base.machine import available_memory_bytes, give_back_freed_memory
from distembed.base.ranks import Collectives, Ranks
from distembed.base.units import enumerate_lines, format_bytes
from distembed.checkpoints.checkpoint import ResumedRun, on_every_rank, restore_run, write_checkpoint
from distembed.checkpoints.content import CheckpointContent, Progress
from distembed.checkpoints.store import (
    CheckpointStore,
    checkpoint_name,
    checkpoint_names,
    open_file_system,
    read_last_file,
    storage_errors,
)

_COPY_SHARE = 0.5
"""Largest share of the available host memory for copies of the tables."""


class Checkpoints:
    """The checkpoints of one run, written while training continues; all ranks construct it and call its methods.

    A thread with a process group of its own writes a copy in host memory, if the copies of a machine's ranks fit into
    half of its available memory; otherwise training waits. One checkpoint is written at a time. The end of the ``with``
    block and :meth:`wait` wait for it and raise its error; the next :meth:`save` waits and retries after an error.

    Args:
        url: Local path or URL of the folder of checkpoints.
        keep: Number of newest checkpoints to keep.
        ranks: This rank among all.
        owner: Name of the run, where other runs might be given the same folder.
        keep_best: Whether to keep also the checkpoints that the newest ones record as the best evaluated.
    """

    def __init__(self, url: str, keep: int, ranks: Ranks, owner: str | None = None, keep_best: bool = False) -> None:
        self._store = CheckpointStore(url)
        self._keep = keep
        self._keep_best = keep_best
        self._ranks = ranks
        self._owner = owner
        self._collectives = Collectives.in_own_group()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._said_that_steps_wait = False
        self._damaged: list[str] = []

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception) and self._thread is not None:
            self._thread.join()  # it may be the last checkpoint of the run
            if self._failure is not None:
                error.add_note(f"Besides: {self._failure}")

    def newest(self) -> str | None:
        """Returns the path or URL of the newest whole checkpoint, equal on all ranks; None where there is none."""
        names = self._names()
        return self._store.checkpoint_path(names[-1]) if names else None

    def kept_progress(self) -> list[dict[str, Any]]:
        """Returns the progress values of each whole checkpoint, oldest first; any one rank may call it."""
        return [read_last_file(self._store.checkpoint_path(name))["progress"] for name in self._store.names()]

    def path_of_step(self, step: int) -> str:
        """Returns the path or URL of the checkpoint after ``step`` steps, whether it is there or not."""
        return self._store.checkpoint_path(checkpoint_name(step))

    def _names(self) -> list[str]:
        with storage_errors(self._store.url):
            return self._collectives.on_first(self._store.names)

    def require_usable(self) -> None:
        """Checks the place before training: every rank writes a file there, and rank 0 must see all of these files.

        Claims the place for ``owner``, if given, and refuses a place that another run owns. All ranks call it.
        """
        store, collectives = self._store, self._collectives
        rank, ranks = collectives.rank, range(collectives.world_size)

        def write_probe() -> None:
            with storage_errors(store.url):
                store.write_probe(rank)

        try:
            on_every_rank(collectives, write_probe)
            with storage_errors(store.url):
                unseen = collectives.on_first(lambda: [str(number) for number in ranks if not store.sees_probe(number)])
            if unseen:
                raise UserError(
                    f"the file that rank(s) {', '.join(unseen)} wrote to {store.url} is not seen by rank 0; give a "
                    "place that all ranks share as train.checkpoint_dir."
                )
        finally:
            with suppress(Exception):  # a rank that cannot write has said so
                store.remove_probe(rank)
        if self._owner is not None:
            with storage_errors(store.url):
                collectives.on_first(partial(self._claim, self._owner))

    def require_room(
        self, model: nn.Module, optimizer: KeyedOptimizer, averages: Mapping[str, Tensor], say: Callable[[str], None]
    ) -> None:
        """Raises a ``RunError`` where the disk has no room for a checkpoint, and warns if it lacks room for all.

        States that an optimizer makes only with the first step are not counted. All ranks call it.
        """
        content = CheckpointContent.collect(
            "", model, optimizer, Progress({"step": 0}, {}, averages), self._collectives
        )
        num_bytes = sum(self._collectives.gather(content.num_bytes))
        keep = self._keep + self._keep_best
        self._collectives.on_first(lambda: require_bytes(self._store.url, keep, num_bytes, say))

    def _claim(self, owner: str) -> None:
        if self._store.owner() is None:
            self._store.claim(owner)
        current = self._store.owner()
        if current != owner:
            raise UserError(
                f"{self._store.url} keeps the checkpoints of {current}, not of {owner}; give another "
                "train.checkpoint_dir, or remove the file .run in it if that run is gone or has moved."
            )

    def restore(
        self,
        model: nn.Module,
        optimizer: KeyedOptimizer,
        say: Callable[[str], None],
        averages: Mapping[str, Tensor] | None = None,
    ) -> ResumedRun | None:
        """Reads the newest checkpoint that is not damaged into the live model, and sets torch's random state.

        Changes no files: :meth:`tidy` sets damaged checkpoints aside later, once the run owns the place. Returns None
        where there is no checkpoint. ``say`` prints a line for each damaged checkpoint. ``averages`` of weights are
        read too.

        Raises:
            UserError: The place cannot be used, the checkpoint is of another model or of other optimizers, or all
                checkpoints are damaged.
            RunError: The place or the checkpoint cannot be reached.
        """
        damages: list[str] = []
        for name in reversed(self._names()):
            checkpoint = self._store.checkpoint_path(name)
            try:
                resumed = restore_run(checkpoint, model, optimizer, self._collectives, averages)
            except DamagedCheckpoint as damage:
                self._damaged.append(name)
                damages.append(str(damage))
                continue
            for text in damages:
                say(f"{text} Going on from {checkpoint}.")
            return resumed
        if damages:
            raise UserError(
                f"no checkpoint in {self._store.url} is whole:{enumerate_lines(damages)}"
                "\nPut back a copy of one, or start anew in another folder."
            )
        return None

    def tidy(self, say: Callable[[str], None]) -> None:
        """Renames the checkpoints that :meth:`restore` found damaged, and removes incomplete and surplus ones."""
        with storage_errors(self._store.url):
            for name in self._damaged:
                aside = self._collectives.on_first(partial(self._store.set_aside, name))
                say(f"{self._store.checkpoint_path(name)}, which is damaged, is kept as {aside}")
            self._damaged = []
            self._collectives.on_first(partial(self._store.keep_newest, self._keep, self._keep_best))

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: KeyedOptimizer,
        progress: Progress,
        say: Callable[[str], None],
        is_due: bool = True,
    ) -> None:
        """Writes a checkpoint, in the background if a copy fits into memory; does nothing if it exists.

        After a failure in the background this checkpoint is written while training waits, so that a lasting failure is
        raised here. Older checkpoints stay when writing fails. All ranks call it.

        Args:
            step: Number of steps done.
            model: The model as it is now.
            optimizer: The optimizer of its parameters.
            progress: The progress that :meth:`restore` will return.
            say: Prints a line, when the checkpoint is whole.
            is_due: Whether an uninterrupted run would write it too; if not, the next checkpoint replaces it.
        """
        failed_before = self._join()
        name = checkpoint_name(step, interrupted=not is_due)
        try:
            is_there = self._collectives.on_first(partial(self._store.is_whole, name))
        except Exception as error:  # file systems raise errors of their own kinds
            raise self._store.not_written(name, error) from error
        if is_there:
            if failed_before is not None:
                raise failed_before
            return
        content = CheckpointContent.collect(name, model, optimizer, progress, self._collectives)
        if failed_before is None and self._copies_fit(content.num_bytes):
            self._thread = threading.Thread(
                target=self._write, args=(content.copied_to_host(), say), name=name, daemon=True
            )
            self._thread.start()
        else:
            if failed_before is not None:
                say(f"an earlier checkpoint could not be written: {failed_before}")
            elif not self._said_that_steps_wait:
                say("training waits while checkpoints are written: copies of the tables would not fit into memory")
                self._said_that_steps_wait = True
            self._write(content, say)
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being written, and raises the error of a checkpoint that could not be written."""
        failure = self._join()
        if failure is not None:
            raise failure

    def _join(self) -> Exception | None:
        """Waits until nothing is being written; returns the last checkpoint's error, once, or None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            give_back_freed_memory()  # that of the copy
        failure, self._failure = self._failure, None
        return failure

    def _write(self, content: CheckpointContent, say: Callable[[str], None]) -> None:
        try:
            keep_newest = partial(self._store.keep_newest, self._keep, self._keep_best)
            write_checkpoint(self._store, content, keep_newest, self._collectives)
            say(f"saved {self._store.checkpoint_path(content.name)}")
        except Exception as error:  # raised by wait, in the main thread
            self._failure = error

    def _copies_fit(self, num_bytes: int) -> bool:
        # all ranks have to decide alike: the writing is collective
        most = max(self._collectives.gather(num_bytes))
        fits = most * self._ranks.local_world_size <= _COPY_SHARE * available_memory_bytes()
        return all(self._collectives.gather(fits))


def require_bytes(url: str, keep: int, num_bytes: int, say: Callable[[str], None]) -> None:
    """Raises a ``RunError`` where a disk has no room for one checkpoint; warns if it has none for all of them.

    They are ``keep`` + 1, since older ones are removed only after the next is written. Object stores are not checked.
    """
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
