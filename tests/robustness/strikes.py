"""Training processes that are killed, or told to stop, at a moment that is known beforehand.

A strike is installed in the process that it hits: it counts how often its moment comes, and sends its signal the n-th
time. So every moment can be forced, and what happened can be had again.
"""

import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.multiprocessing import ProcessExitedException

from tests.processes import start_processes
from tests.ranks import free_port
from tests.small_runs import run_command

Come = Callable[[], None]
"""To be called whenever a moment comes."""


@dataclass(frozen=True)
class Strike:
    """A signal at a moment."""

    moment: str
    count: int = 0
    signal: int = signal.SIGKILL
    rank: int = 0
    all_ranks: bool = True


@dataclass(frozen=True)
class Surroundings:
    """What processes find, beside what strikes them."""

    sync: bool = False
    quick_retries: bool = False


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    codes: list[int]
    struck: bool
    text: str


def run_and_strike(
    arguments: tuple[object, ...], run: Path, ranks: int, strike: Strike | None, found: Surroundings
) -> Ended:
    """Runs the command on ranks that are ended as a launcher ends them: once one has failed, the others soon."""
    notes = run.with_name(f"{run.name}-notes-{sum(1 for _ in run.parent.glob(f'{run.name}-notes-*'))}")
    notes.mkdir()
    started = start_processes(ranks, run_and_be_struck, arguments, run, notes, ranks, free_port(), strike, found)
    with suppress(ProcessExitedException):
        while not started.join(grace_period=10):
            pass
    codes = [process.exitcode for process in started.processes]
    text = "\n".join((notes / name).read_text() for name in ("output", "errors"))
    return Ended(codes, (notes / "struck").exists(), text)


def run_and_be_struck(
    rank: int,
    arguments: tuple[object, ...],
    run: Path,
    notes: Path,
    ranks: int,
    port: int,
    strike: Strike | None,
    found: Surroundings,
) -> None:
    (notes / f".pid-{rank}").write_text(str(os.getpid()))
    (notes / f".pid-{rank}").rename(notes / f"pid-{rank}")
    if found.quick_retries:
        retry_at_once()
    if found.sync:
        from distembed.checkpoints import run_checkpoints

        run_checkpoints.available_memory_bytes = lambda: 0
    if strike is not None and strike.rank == rank:
        MOMENTS[strike.moment](run, counted(strike, notes, ranks))
    run_command(rank, arguments, notes, ranks, port)


def retry_at_once() -> None:
    from botocore import retryhandler

    retryhandler.delay_exponential = lambda base, growth_factor, attempts: 0.0


def counted(strike: Strike, notes: Path, ranks: int) -> Come:
    """Strikes when it is called for the time after ``strike.count`` times."""
    times, lock = itertools.count(), threading.Lock()

    def come() -> None:
        with lock:
            if next(times) == (0 if strike.moment == "time" else strike.count):
                hit(strike, notes, ranks)

    if strike.moment != "time":
        return come

    def come_later() -> None:
        timer = threading.Timer(strike.count / 100, come)
        timer.daemon = True
        timer.start()

    return come_later


def hit(strike: Strike, notes: Path, ranks: int) -> None:
    (notes / "struck").touch()
    for rank in range(ranks) if strike.all_ranks else ():
        if rank != strike.rank:
            path = notes / f"pid-{rank}"
            while not path.exists():
                time.sleep(0.001)
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text()), strike.signal)
    os.kill(os.getpid(), strike.signal)


def before(owner: Any, name: str, come: Come, when: Callable[..., bool] = lambda *_: True) -> None:
    """The moment before each call of a method for whose arguments ``when`` is true."""
    usual = getattr(owner, name)

    def called(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            come()
        return usual(*arguments, **named)

    setattr(owner, name, called)


def before_change(run: Path, come: Come, pattern: str, events: tuple[str, ...] = ()) -> None:
    """The moment before each change of a file or folder below the run's, by Python, whose path ends in the pattern."""
    changes = events or ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in changes or (event == "open" and not arguments[2] & writing):
            return
        path = arguments[1] if event == "os.rename" else arguments[0]
        if isinstance(path, int):
            return
        # a folder that is removed is open, and its files go by their names alone
        within = event in ("os.remove", "os.rmdir") and arguments[-1] != -1
        path = os.fsdecode(path)
        if (within or path.startswith(f"{run}/")) and re.search(f"(?:{pattern})$", path):
            come()

    sys.addaudithook(hear)


def before_step(_: Path, come: Come) -> None:
    """After each step, before it is known whether to stop."""
    from distembed.training.interruption import Interruption

    before(Interruption, "requested", come)


def before_training(_: Path, come: Come) -> None:
    from distembed.training.trainer import Trainer

    before(Trainer, "train", come)


def before_evaluation(_: Path, come: Come, split: str = "validation") -> None:
    from distembed.training.trainer import Trainer

    before(Trainer, "evaluate", come, lambda _trainer, of: of == split)


def before_recording(_: Path, come: Come, split: str = "validation") -> None:
    """Between making an evaluation and recording it."""
    from distembed.training.run_folder.folder import RunFolder

    before(RunFolder, "record", come, lambda _folder, _kind, _step, values: values.get("split") == split)


def before_request(_: Path, come: Come) -> None:
    """Before each request to S3."""
    from s3fs import S3FileSystem

    before(S3FileSystem, "_call_s3", come)


def before_end(_: Path, come: Come) -> None:
    """Before it is recorded how the run ended."""
    from distembed.training.run_folder.folder import RunFolder

    before(RunFolder, "end", come)


MOMENTS: dict[str, Callable[[Path, Come], None]] = {
    "time": before_training,
    "step": before_step,
    "change": lambda run, come: before_change(run, come, ".*"),
    "saving": lambda run, come: before_change(run, come, r"\.blocks|index\.json|progress\.json.*", ("open",)),
    "saved": lambda run, come: before_change(run, come, r"step-[^/]*/progress\.json", ("os.remove",)),
    "removing": lambda run, come: before_change(run, come, r"\.blocks|index\.json", ("os.remove",)),
    "validation": before_evaluation,
    "validated": before_recording,
    "final evaluation": lambda run, come: before_evaluation(run, come, "test"),
    "finally evaluated": lambda run, come: before_recording(run, come, "test"),
    "evaluation file": lambda run, come: before_change(run, come, r"evaluation\.json", ("os.rename",)),
    "end": before_end,
    "request": before_request,
}
"""Name -> function that is given the run's folder and what to call, on the rank on which the moment comes.

``saved`` is the moment between the last file of a checkpoint and the removal of an older one.
"""
