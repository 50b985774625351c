"""The checkpoints of a run, and writing one while training goes on."""

import threading
from collections.abc import Callable
from functools import partial

from torch import nn
from torchrec.optim.keyed import KeyedOptimizer

from distembed.base.errors import DamagedCheckpoint, RunError, UserError
from distembed.base.host_memory import available_memory_bytes, give_back_freed_memory
from distembed.base.ranks import Collectives, Ranks
from distembed.base.units import enumerate_lines
from distembed.checkpoints.checkpoint import ResumedRun, load_run
from distembed.checkpoints.content import CheckpointContent, Progress
from distembed.checkpoints.room import require_room
from distembed.checkpoints.store import CheckpointStore, checkpoint_name, missing_checksums_note, storage_errors
from distembed.checkpoints.transfer import not_written, write_checkpoint

_COPY_SHARE = 0.5
"""Share of the available host memory that the copies may take which are written beside training."""


class Checkpoints:
    """The checkpoints of one run, written beside training; all ranks construct it and call its methods together.

    A checkpoint is copied to host memory and written beside training, in a thread with a process group of its own,
    where the copies of a machine's ranks fit into half of its available memory; else the step waits for it. At most one
    is being written: the next one, the end of the block, and :meth:`wait` wait for it and raise what went wrong.

    Args:
        url: Local path or URL of the place where the checkpoints lie.
        keep: Number of newest checkpoints that stay.
        ranks: This rank among all.
        owner: Name of the run, where other runs might be given the same place.
        keep_best: Whether the checkpoint that the newest ones name as the best stays too.
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
            self._thread.join()  # what is being written may be the last that there will be
            if self._failure is not None:
                error.add_note(f"Besides: {self._failure}")

    def newest(self) -> str | None:
        """Returns the path or URL of the newest whole checkpoint, the same on all ranks; None where there is none.

        Raises:
            UserError: The place cannot be reached.
        """
        names = self._names()
        return self._store.checkpoint_path(names[-1]) if names else None

    def path_of_step(self, step: int) -> str:
        """Returns the path or URL of the checkpoint after so many steps, be it there or not."""
        return self._store.checkpoint_path(checkpoint_name(step))

    def _names(self) -> list[str]:
        with storage_errors(self._store.url):
            return self._collectives.on_first(self._store.names)

    def require_usable(self) -> None:
        """Makes sure that every rank can write, and that the first sees what the others wrote.

        Raises:
            UserError: A rank cannot write, the first rank does not see what another wrote, or the place belongs to
                another run.
            RunError: A rank cannot write, which may pass.
        """
        store, collectives = self._store, self._collectives
        problem: UserError | RunError | None = None
        try:
            with storage_errors(store.url):
                store.write_probe(collectives.rank)
        except (UserError, RunError) as error:
            problem = error
        problems = [found for found in collectives.gather(problem) if found is not None]
        try:
            with storage_errors(store.url):
                unseen = collectives.on_first(
                    lambda: [r for r in range(collectives.world_size) if not store.sees_probe(r)]
                )
                if not problems and unseen:
                    text = (
                        f"what rank(s) {', '.join(map(str, unseen))} wrote to {store.url} is not seen by rank 0; give "
                        "a place that all ranks share as train.checkpoint_dir."
                    )
                    problems = [UserError(text)]
        finally:
            if problem is None:
                with storage_errors(store.url):
                    store.remove_probe(collectives.rank)
        if problems:
            raise problems[0]
        if self._owner is not None:
            with storage_errors(store.url):
                collectives.on_first(partial(self._claim, self._owner))

    def require_room(self, model: nn.Module, optimizer: KeyedOptimizer, say: Callable[[str], None]) -> None:
        """Makes sure that there is room for one more checkpoint, as :func:`distembed.checkpoints.room.require_room`."""
        require_room(self._store.url, self._keep + self._keep_best, model, optimizer, say)

    def _claim(self, owner: str) -> None:
        if self._store.owner() is None:
            self._store.claim(owner)
        found = self._store.owner()
        if found != owner:
            raise UserError(
                f"{self._store.url} keeps the checkpoints of {found}, not of {owner}; give another "
                "train.checkpoint_dir, or remove the file .run in it if that run is gone or has moved."
            )

    def restore(self, model: nn.Module, optimizer: KeyedOptimizer, say: Callable[[str], None]) -> ResumedRun | None:
        """Reads the newest checkpoint that is not damaged into the live model, with the state of random numbers.

        Nothing is changed where checkpoints lie: that is for :meth:`tidy`, once the run owns them.

        Args:
            model: The model to restore.
            optimizer: The optimizer of its parameters.
            say: Prints a line; called for each checkpoint that is damaged, or has no checksums.

        Returns:
            What :meth:`save` was given as progress; None where there is no checkpoint.

        Raises:
            UserError: The place cannot be used, the checkpoint is of another model or of other optimizers, or all
                checkpoints are damaged.
            RunError: The place or the checkpoint cannot be reached.
        """
        damages: list[str] = []
        for name in reversed(self._names()):
            checkpoint = self._store.checkpoint_path(name)
            try:
                resumed = load_run(checkpoint, model, optimizer, self._collectives)
            except DamagedCheckpoint as damage:
                self._damaged.append(name)
                damages.append(str(damage))
                continue
            for text in damages:
                say(f"{text} Going on from {checkpoint}.")
            if not resumed.has_checksums:
                say(f"note: {missing_checksums_note(checkpoint)}")
            return resumed
        if damages:
            raise UserError(
                f"no checkpoint in {self._store.url} is whole:{enumerate_lines(damages)}"
                "\nPut back a copy of one, or start anew in another folder."
            )
        return None

    def tidy(self, say: Callable[[str], None]) -> None:
        """Sets aside the checkpoints that :meth:`restore` found damaged, and removes what a killed process has left.

        Args:
            say: Prints a line; called for each checkpoint that is set aside.

        Raises:
            UserError: The place cannot be used.
            RunError: The place cannot be reached.
        """
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
        """Writes a checkpoint, or has it written while training goes on; on failure the older ones stay.

        Args:
            step: Number of steps done.
            model: The model as it is now.
            optimizer: The optimizer of its parameters.
            progress: What :meth:`restore` returns.
            say: Prints a line, when the checkpoint is whole.
            is_due: Whether a run that is not interrupted would write it too.

        Raises:
            RunError: This checkpoint could not be written; the error gives the reason. Where the one before could not
                be, this one is written at once, to see whether that was a passing failure.
        """
        failed_before = self._join()
        name = checkpoint_name(step, interrupted=not is_due)
        try:
            is_there = self._collectives.on_first(partial(self._store.is_whole, name))
        except Exception as error:  # file systems raise errors of their own kinds
            raise not_written(self._store, name, error) from error
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
        """Waits until nothing is being written.

        Raises:
            RunError: What was being written could not be.
        """
        failure = self._join()
        if failure is not None:
            raise failure

    def _join(self) -> Exception | None:
        """Waits until nothing is being written; returns what went wrong."""
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
        most = max(self._collectives.gather(num_bytes))
        fits = most * self._ranks.local_world_size <= _COPY_SHARE * available_memory_bytes()
        return all(self._collectives.gather(fits))
