"""Which of several failures is named."""

import json
import os
import shutil
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessRaisedException

from distembed.base.errors import FolderInUse, RunError, UserError
from distembed.commands.error_file import TOLD_VARIABLE, record_error, user_exit_code
from launch.jobs.follow import first_failure
from tests.processes import run_processes


def fail(monkeypatch: pytest.MonkeyPatch, file: Path, error: BaseException) -> None:
    """What a rank leaves that dies of an error."""
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    try:
        raise error
    except BaseException as raised:
        record_error(raised)


def test_the_cause_comes_before_its_consequences_and_the_first_before_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_failure(tmp_path) is None
    for node, error in (
        ("node-3", RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.1]:4")),
        ("node-2", RunError("the loss is nan")),
        ("node-1", RunError("of a rank that was late")),
    ):
        fail(monkeypatch, tmp_path / node / "error.json", error)
    torn = tmp_path / "node-0" / "error.json"
    torn.parent.mkdir()
    torn.write_text('{"message": {"mess')
    failure = first_failure(tmp_path)
    assert failure is not None
    assert failure.message == "RunError: the loss is nan" and failure.where.parent.name == "node-2"
    assert "in fail" in failure.traceback and "raise error" in failure.traceback
    assert first_failure(tmp_path, since=failure.time + 1e9) is None


def test_where_there_are_only_consequences_the_first_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ("node-b", "node-a"):
        fail(monkeypatch, tmp_path / node / "error.json", ConnectionError(f"Connection reset by peer of {node}"))
    failure = first_failure(tmp_path)
    assert failure is not None and failure.message.endswith("of node-b")


def test_the_time_of_errors_that_torch_itself_has_written_is_in_whole_seconds(tmp_path: Path) -> None:
    for node, seconds in (("node-a", 20), ("node-b", 10)):
        (tmp_path / node).mkdir()
        extra = {"py_callstack": "Traceback", "timestamp": str(seconds)}
        noted = {"message": {"message": f"of {node}", "extraInfo": extra}}
        (tmp_path / node / "error.json").write_text(json.dumps(noted))
    failure = first_failure(tmp_path)
    assert failure is not None and (failure.message, failure.time) == ("of node-b", 10.0)


TWICE = """
import os, sys
from distembed.commands.error_file import record_error
number = os.environ["TORCHELASTIC_RESTART_COUNT"]
record_error(RuntimeError(f"of start {number} on rank {os.environ['RANK']}"))
sys.exit(1)
"""


def launch_failing_rank(_: int, logs: Path, program: Path) -> None:
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    from torch.distributed.run import main

    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--monitor-interval", "0.1"]
    main(["--nproc-per-node", "1", "--max-restarts", "1", *meeting, "--log-dir", str(logs), str(program)])


def test_an_error_that_was_recovered_from_is_not_the_one_that_ended_the_job(tmp_path: Path) -> None:
    """What the launcher itself leaves of two starts of its ranks, and of the whole job."""
    (tmp_path / "fails.py").write_text(TWICE)
    node = tmp_path / "logs" / "app" / "node-0"
    with pytest.raises(ProcessRaisedException, match="ChildFailedError"):
        run_processes(1, launch_failing_rank, node, tmp_path / "fails.py")
    # the launcher gives each start of the job a folder of its own; this one has another name and is older
    (start,) = node.iterdir()
    shutil.copytree(start, node / f"{start.name}-earlier")
    an_hour_ago = start.stat().st_mtime - 3600
    os.utime(node / f"{start.name}-earlier", (an_hour_ago, an_hour_ago))
    assert len(list(node.rglob("error.json"))) == 4
    failure = first_failure(tmp_path / "logs")
    assert failure is not None and failure.message == "RuntimeError: of start 1 on rank 0"
    newest = max(node.iterdir(), key=lambda folder: folder.stat().st_mtime_ns)
    assert newest in failure.where.parents


def test_a_folder_in_use_is_no_mistake_to_a_launcher_that_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_exit_code(FolderInUse("of another")) == user_exit_code(UserError("wrong")) == 2
    monkeypatch.setenv(TOLD_VARIABLE, "1")
    assert (user_exit_code(FolderInUse("of another")), user_exit_code(UserError("wrong"))) == (1, 2)
