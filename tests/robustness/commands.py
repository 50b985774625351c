"""Many commands in little time: each is forked from a process that has loaded all of the product already."""

import hashlib
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.processes import start_processes
from tests.small_runs import run_command

SECONDS = 60.0
"""After them a command counts as one that hangs."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int | None
    output: str
    errors: str


class Commands:
    """A process that waits to run commands, one after the other, in a folder."""

    def __init__(self, folder: Path, notes: Path) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._notes = notes
        self._count = 0
        self._processes = start_processes(1, serve, theirs, folder)
        theirs.close()

    def run(self, *arguments: object) -> Done:
        notes = self._notes / str(self._count)
        self._count += 1
        notes.mkdir(parents=True)
        self._connection.send(([str(argument) for argument in arguments], notes))
        code = self._connection.recv()
        output, errors = ((notes / name).read_text(errors="replace") for name in ("output", "errors"))
        return Done(code, output, errors)

    def close(self) -> None:
        self._connection.close()
        self._processes.join()


def serve(_: int, connection: Connection, folder: Path) -> None:
    # what takes long, so that it is loaded once
    import distembed.commands.cli
    import distembed.data.prepare
    import distembed.graph.prepare
    import distembed.reports.plan.run_plan
    import distembed.reports.report
    import distembed.training.inference
    import distembed.training.materialise
    import distembed.training.run  # noqa: F401

    while True:
        try:
            arguments, notes = connection.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            os.chdir(folder)
            run_and_leave(arguments, notes)
        connection.send(wait_for(child))


def run_and_leave(arguments: Sequence[str], notes: Path) -> None:
    """Does what ``python -m distembed`` does, without what the process that forked it would do at its end."""
    code = 1
    try:
        run_command(0, tuple(arguments), notes)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(child: int) -> int | None:
    """Returns the exit code of a process; kills one that hangs and returns None."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def everything(folder: Path) -> dict[Path, str]:
    """What a folder holds: the sum of each file, by its path; but for locks, which are empty when nobody has them."""
    return {
        path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "other"
        for path in folder.rglob("*")
        if path.name != ".lock" and (path.is_symlink() or not path.is_dir())
    }


@dataclass(frozen=True)
class Workspace:
    """The folder in which commands are given, a copy of it as it was, and what both hold."""

    folder: Path
    copy: Path
    contents: dict[Path, str]
    commands: Commands

    def changes(self) -> list[str]:
        """What is other than it was in the beginning; it is made as it was."""
        now = everything(self.folder)
        if now == self.contents:
            return []
        self.restore()
        return sorted(str(path) for path in now.keys() | self.contents if now.get(path) != self.contents.get(path))

    def restore(self) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(self.copy, self.folder, symlinks=True)


@contextmanager
def made_workspace(
    tmp_path_factory: pytest.TempPathFactory, write: Callable[[Path, Commands], None]
) -> Iterator[Workspace]:
    """Within the block there is a folder that holds what ``write`` has put there, in part by commands."""
    folder = tmp_path_factory.mktemp("workspace")
    commands = Commands(folder, tmp_path_factory.mktemp("printed"))
    try:
        write(folder, commands)
        copy = folder.with_name(f"{folder.name}-copy")
        shutil.copytree(folder, copy, symlinks=True)
        yield Workspace(folder, copy, everything(folder), commands)
    finally:
        commands.close()
