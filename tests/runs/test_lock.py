"""Owning a folder, by processes that lock it, hold leases, wait, are killed and are overtaken."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from distembed.base.errors import RunError, UserError
from distembed.training.run_folder import owner
from distembed.training.run_folder.flock import locks_are_local
from distembed.training.run_folder.lease import LeaseTimes
from distembed.training.run_folder.lock import LOCK_NAME, owned

WAYS = ["flock", "lease"]
TIMES = LeaseTimes(renew_seconds=0.1, lease_seconds=4.0, settle_seconds=0.5, poll_seconds=0.02)
FOR_EVER = 240.0  # seconds; longer than any test takes that goes well
SPAWN = multiprocessing.get_context("spawn")
FORKSERVER = multiprocessing.get_context("forkserver")  # imports once for all processes
FORKSERVER.set_forkserver_preload([__name__])


def prepare(way: str, machine: str | None = None) -> None:
    """In a process of its own: no locks for a lease, and another machine where one is named."""
    if way == "lease":
        fcntl.flock = without_locks  # type: ignore[assignment]
    if machine is not None:
        owner.machine_id = lambda: machine


def without_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


class Process:
    """A process that owns a folder until it is asked to leave, and notes what happens to it."""

    def __init__(
        self,
        folder: Path,
        way: str,
        machine: str | None = None,
        wait_seconds: float = 0.0,
        job: str | None = None,
        is_own_child: bool = False,
    ) -> None:
        number = sum(1 for _ in folder.parent.glob("notes-*"))
        self._notes = folder.parent / f"notes-{number}"
        self._leave = folder.parent / f"leave-{number}"
        self._notes.touch()
        arguments = (folder, way, machine, wait_seconds, job, self._notes, self._leave)
        self.process = start(own, *arguments, context=SPAWN if is_own_child else FORKSERVER)

    @property
    def notes(self) -> str:
        return self._notes.read_text()

    def until(self, note: str) -> "Process":
        """Waits until it has noted something."""
        while note not in self.notes:
            assert self.process.is_alive() or note in self.notes, self.notes
            time.sleep(0.01)
        return self

    def leave(self) -> None:
        self._leave.touch()
        self.process.join()
        assert self.process.exitcode == 0, self.notes

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def start(function: Callable[..., None], *arguments: object, context: Any = FORKSERVER) -> BaseProcess:
    process: BaseProcess = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def own(
    folder: Path, way: str, machine: str | None, wait_seconds: float, job: str | None, notes: Path, leave: Path
) -> None:
    prepare(way, machine)
    if job is not None:
        os.environ["SLURM_JOB_ID"] = job
    os.dup2(os.open(notes, os.O_WRONLY | os.O_APPEND), 2)

    def note(text: str) -> None:
        with notes.open("a") as file:
            file.write(f"{text}\n")

    try:
        with owned(folder, wait_seconds, say=lambda text: note(f"says {text}"), times=TIMES):
            note("owns")
            while not leave.exists():
                time.sleep(0.01)
    except UserError as error:
        note(f"refused: {error}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def started(folder: Path) -> Iterator[Callable[..., Process]]:
    """Starts processes on the folder, and ends those that are left."""
    processes: list[Process] = []

    def start_one(way: str, *arguments: Any, **options: Any) -> Process:
        processes.append(Process(folder, way, *arguments, **options))
        return processes[-1]

    yield start_one
    for process in processes:
        process.kill()


def contend(folder: Path, way: str, machine: str | None, log: Path, times: int) -> None:
    prepare(way, machine)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for _ in range(times):
        with owned(folder, FOR_EVER, say=lambda _: None, times=TIMES):
            os.write(descriptor, f"{os.getpid()} enters\n".encode())
            time.sleep(0.05)
            os.write(descriptor, f"{os.getpid()} leaves\n".encode())


@pytest.mark.parametrize(("way", "machines"), [("flock", 1), ("lease", 1), ("lease", 3)])
def test_never_two_own_it(folder: Path, tmp_path: Path, way: str, machines: int) -> None:
    (log := tmp_path / "log").touch()
    names = [None] * 3 if machines == 1 else [f"machine {number}" for number in range(machines)]
    processes = [start(contend, folder, way, name, log, 3) for name in names]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    lines = log.read_text().splitlines()
    assert len(lines) == 2 * 3 * 3
    for enters, leaves in zip(lines[::2], lines[1::2], strict=True):
        assert enters.endswith("enters") and leaves == enters.replace("enters", "leaves")


def test_a_second_one_is_refused_with_the_owners_name(started: Callable[..., Process], way: str) -> None:
    first = started(way, job="4711").until("owns")
    second = started(way).until("refused")
    second.process.join()
    assert "owns" not in second.notes
    assert "folder is in use by another process (" in second.notes and "--run-dir" in second.notes
    host = os.uname().nodename
    assert f"process {first.process.pid} on {host}, job 4711, since 20" in second.notes
    first.leave()


def test_the_next_one_waits_saying_so_once_and_gets_it(started: Callable[..., Process], way: str) -> None:
    first = started(way).until("owns")
    second = started(way, wait_seconds=FOR_EVER).until("says")
    assert "owns" not in second.notes
    first.leave()
    second.until("owns").leave()
    assert second.notes.count("says") == 1 and f"process {first.process.pid}" in second.notes


def test_a_clean_end_leaves_it_free(folder: Path, started: Callable[..., Process], way: str) -> None:
    from distembed.training.run_folder.folder import require_new_or_resume

    for _ in range(2):
        first = started(way).until("owns")
        require_new_or_resume(folder, resume=False)  # which counts no lock as a file of somebody's
        first.leave()
        assert [path.name for path in folder.iterdir()] in ([], [LOCK_NAME])
        assert not any(path.read_text() for path in folder.iterdir())
        require_new_or_resume(folder, resume=False)
    assert "says" not in first.notes


def test_of_a_killed_owner_the_next_one_gets_it_at_once(started: Callable[..., Process], way: str) -> None:
    started(way).until("owns").kill()
    second = started(way).until("owns")
    assert "says" not in second.notes
    second.leave()


def test_an_owner_that_nobody_has_waited_for_yet_is_gone(folder: Path, started: Callable[..., Process]) -> None:
    first = started("lease", is_own_child=True).until("owns")
    assert first.process.pid is not None
    os.kill(first.process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)  # it stays in the table of processes
    started("lease").until("owns").leave()


def test_of_an_id_that_another_process_has_by_now_the_owner_is_gone(
    folder: Path, started: Callable[..., Process]
) -> None:
    first = started("lease").until("owns")
    first.kill()
    text = (folder / LOCK_NAME).read_text()
    assert f'"pid": {first.process.pid},' in text
    (folder / LOCK_NAME).write_text(text.replace(f'"pid": {first.process.pid},', f'"pid": {os.getpid()},'))
    started("lease").until("owns").leave()


def test_a_silent_lease_of_another_machine_is_watched_and_taken(started: Callable[..., Process]) -> None:
    started("lease", "elsewhere").until("owns").kill()
    second = started("lease").until("owns")
    assert "sign of life" in second.notes and second.notes.count("says") == 1
    second.leave()


def test_a_text_that_nobody_can_read_is_watched_and_taken(folder: Path, started: Callable[..., Process]) -> None:
    (folder / LOCK_NAME).write_text('{"host": "half of')
    second = started("lease").until("owns")
    assert "left by another process," in second.notes
    second.leave()


@pytest.mark.parametrize("second_way", WAYS)
@pytest.mark.parametrize("wait_seconds", [0.0, 0.5])
def test_a_living_owner_on_another_machine_is_heeded(
    started: Callable[..., Process], way: str, second_way: str, wait_seconds: float
) -> None:
    first = started(way, "elsewhere").until("owns")
    second = started(second_way, wait_seconds=wait_seconds).until("refused")
    assert "owns" not in second.notes and f"process {first.process.pid}" in second.notes
    first.leave()


def test_an_owner_that_was_suspended_ends_when_another_has_taken_over(started: Callable[..., Process]) -> None:
    first = started("lease", "elsewhere").until("owns")
    assert first.process.pid is not None
    os.kill(first.process.pid, signal.SIGSTOP)
    second = started("lease").until("owns")
    os.kill(first.process.pid, signal.SIGCONT)
    first.process.join()
    assert first.process.exitcode == 1
    assert f"was taken over by another process (process {second.process.pid}" in first.notes
    second.leave()


def test_on_one_machine_a_suspended_owner_stays_the_owner(started: Callable[..., Process]) -> None:
    first = started("lease").until("owns")
    assert first.process.pid is not None
    os.kill(first.process.pid, signal.SIGSTOP)
    second = started("lease", wait_seconds=TIMES.lease_seconds + 0.5).until("refused")
    assert "owns" not in second.notes
    os.kill(first.process.pid, signal.SIGCONT)
    first.leave()


def test_an_owner_whose_folder_is_gone_ends(folder: Path, started: Callable[..., Process]) -> None:
    first = started("lease").until("owns")
    folder.rename(folder.with_name("away"))
    first.process.join()
    assert first.process.exitcode == 1 and "no longer owns the folder" in first.notes


def own_until_nothing_can_be_written(folder: Path, errors: Path) -> None:
    prepare("lease")
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    with owned(folder, times=TIMES):
        os.replace = without_space
        time.sleep(FOR_EVER)


def without_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_owner_whose_lease_cannot_be_renewed_ends(folder: Path, tmp_path: Path) -> None:
    process = start(own_until_nothing_can_be_written, folder, tmp_path / "errors")
    process.join()
    assert process.exitcode == 1
    assert "could not be renewed for 4 s ([Errno 28] No space left" in (tmp_path / "errors").read_text()


def test_a_renewal_is_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", without_locks)
    failed, really = threading.Event(), os.replace

    def fail(*_: object) -> None:
        failed.set()
        without_space()

    with owned(folder, times=LeaseTimes(renew_seconds=0.05, settle_seconds=0.05)):
        text = (folder / LOCK_NAME).read_text()
        monkeypatch.setattr(os, "replace", fail)
        failed.wait()
        monkeypatch.setattr(os, "replace", really)
        before = (folder / LOCK_NAME).read_text()
        while (folder / LOCK_NAME).read_text() == before:
            time.sleep(0.01)
        assert before != "" and text != (folder / LOCK_NAME).read_text()
    assert list(folder.iterdir()) == []


def test_an_error_within_passes_through_and_leaves_it_free(folder: Path) -> None:
    for _ in range(2):
        with pytest.raises(OSError, match="somebody's"), owned(folder):
            raise OSError("somebody's own")


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be locked"), owned(tmp_path / "nowhere"):
        pass


def test_a_refusal_is_said_in_the_callers_words(folder: Path) -> None:
    refusal = "{folder.parent} is launched by {owner}."
    with owned(folder), pytest.raises(UserError) as refused, owned(folder, refusal=refusal):
        pass
    assert str(refused.value).startswith(f"{folder.parent} is launched by another process (process {os.getpid()} on ")


@pytest.mark.parametrize(
    ("folder", "is_local"),
    [
        ("/home/a/run", False),
        ("/scratch/run", True),
        ("/scratch", True),
        ("/scratches/run", False),
        ("/scratch/with locks/run", False),
        ("/nfs3/run", True),
        ("/nfs/run", False),
        ("/bee/run", True),
        ("/twice/run", False),
    ],
)
def test_the_nearest_mount_says_whether_locks_are_local(folder: str, is_local: bool) -> None:
    mounts = r"""
/dev/sda / ext4 rw,relatime 0 0
10.0.0.1@tcp:/fs /scratch lustre rw,localflock,lazystatfs 0 0
10.0.0.1@tcp:/fs2 /scratch/with\040locks lustre rw,flock,lazystatfs 0 0
server:/a /nfs nfs4 rw,vers=4.2,local_lock=none,addr=10.0.0.2 0 0
server:/b /nfs3 nfs rw,vers=3,nolock,local_lock=all,addr=10.0.0.2 0 0
beegfs_nodev /bee beegfs rw,relatime,cfgFile=/etc/beegfs/beegfs-client.conf 0 0
server:/c /twice nfs rw,vers=3,local_lock=flock 0 0
server:/c /twice nfs rw,vers=3,local_lock=none 0 0
""".strip()
    assert locks_are_local(folder, mounts) is is_local
    assert locks_are_local(folder, "") is False


def test_what_another_process_has_trained_meanwhile_is_not_written_over(folder: Path) -> None:
    from distembed.training.run_folder.folder import RunFolder

    first, second = RunFolder(folder), RunFolder(folder)
    for run in (first, second):
        run.require_free()
    with second.open("seed: 2", {}, 0):
        second.end("finished")
    with pytest.raises(UserError, match="has trained into"), first.open("seed: 1", {}, 0):
        pass
    assert (folder / "config.yaml").read_text() == "seed: 2"
