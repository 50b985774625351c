"""Owning a folder, by processes that lock it, wait and are killed."""

import errno
import fcntl
import multiprocessing
import os
import re
import time
from pathlib import Path

import pytest

from distembed.base.errors import RunError, UserError
from distembed.training.run_folder import lock
from distembed.training.run_folder.lock import LOCK_NAME, locks_are_local, owned

FORK = multiprocessing.get_context("fork")  # nothing else needs the seconds in which a fresh process loads this package
FOR_EVER = 240.0  # seconds; longer than any test takes that goes well


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "folder"
    folder.mkdir()
    return folder


def contend(folder: Path, log: Path, times: int) -> None:
    lock._POLL_SECONDS = 0.02
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for _ in range(times):
        with owned(folder, FOR_EVER, say=lambda _: None):
            os.write(descriptor, f"{os.getpid()} enters\n".encode())
            time.sleep(0.05)
            os.write(descriptor, f"{os.getpid()} leaves\n".encode())


def test_never_two_own_it(folder: Path, tmp_path: Path) -> None:
    (log := tmp_path / "log").touch()
    processes = [FORK.Process(target=contend, args=(folder, log, 3), daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    lines = log.read_text().splitlines()
    assert len(lines) == 2 * 3 * 3
    for enters, leaves in zip(lines[::2], lines[1::2], strict=True):
        assert enters.endswith("enters") and leaves == enters.replace("enters", "leaves")


def own(folder: Path, notes: Path) -> None:
    os.environ["SLURM_JOB_ID"] = "4711"
    with owned(folder):
        notes.write_text(str(os.getpid()))
        time.sleep(FOR_EVER)


def test_it_is_refused_with_the_owners_name_and_free_once_the_owner_is_killed(folder: Path, tmp_path: Path) -> None:
    from distembed.training.run_folder.folder import require_new_or_resume

    notes = tmp_path / "notes"
    process = FORK.Process(target=own, args=(folder, notes), daemon=True)
    process.start()
    while not notes.exists() or not notes.read_text():
        assert process.is_alive()
        time.sleep(0.01)
    described = f"process {notes.read_text()} on {os.uname().nodename}, job 4711, since 20"
    with (
        pytest.raises(UserError, match=f"folder is in use by another process \\({described}.*--run-dir"),
        owned(folder),
    ):
        pass
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        process.kill()

    with owned(folder, FOR_EVER, say):
        assert len(said) == 1 and re.search(described, said[0])
        require_new_or_resume(folder, resume=False)  # which counts no lock as a file of somebody's
    assert (folder / LOCK_NAME).read_text() == ""
    require_new_or_resume(folder, resume=False)


@pytest.mark.parametrize("text", ["", '{"host": "half of', "\0" * 5000])
def test_a_text_that_names_no_owner_is_none(folder: Path, text: str) -> None:
    with owned(folder):
        (folder / LOCK_NAME).write_text(text)
        with pytest.raises(UserError, match="folder is in use by another process;"), owned(folder):
            pass


def test_a_file_system_without_locks_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with pytest.raises(UserError, match=f"{folder} lies on a file system without locks .*local disk.*with locks"):
        with owned(folder):
            pass


def test_locks_of_one_machine_are_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_mounted_file_systems", lambda: "fs / lustre rw,localflock 0 0")
    said: list[str] = []
    with owned(folder, say=said.append):
        assert said == [f"note: locks in {folder} hold on this machine only; see that no other machine trains into it"]


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
