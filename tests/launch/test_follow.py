"""Which lines are shown while a job runs, the failure that is named, and what may be done with a job by its state."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing import ProcessRaisedException
from torchx.schedulers.local_scheduler import SignalException
from torchx.specs import AppState, AppStatus

from distembed.base.errors import FolderInUse, RunError, UserError
from distembed.commands.error_file import TOLD_VARIABLE, record_error, user_exit_code
from distembed.launch.commands import status_command
from distembed.launch.jobs import follow
from distembed.launch.jobs.follow import (
    cancel_job,
    first_failure,
    job_log_lines,
    job_state,
    node_lines,
    require_ended,
    run_progress,
)
from distembed.launch.jobs.job import Job, Submission
from distembed.launch.jobs.start import launch_job
from tests.processes import run_processes

ACTIVE = AppStatus(state=AppState.RUNNING, msg="on 2 nodes")
ENDED = AppStatus(state=AppState.SUCCEEDED)


class FakeRunner:
    """A scheduler's answers, one after the other; an exception is raised, the last one goes on.

    Args:
        answers: to what state the job has.
        logs: of each node, one for every time that it is read; the last one goes on.
    """

    def __init__(self, answers: list[Any], logs: dict[int, list[Any]]) -> None:
        self.answers, self.logs = answers, logs
        self.cancelled: list[str] = []
        self.lock = threading.Lock()

    def cancel(self, handle: str) -> None:
        self.cancelled.append(handle)

    def status(self, handle: str) -> AppStatus | None:
        with self.lock:
            answer = self._next(self.answers)
        return AppStatus(state=answer) if isinstance(answer, AppState) else answer

    def log_lines(self, handle: str, role: str, k: int, should_tail: bool) -> Iterator[str]:
        for line in self._next(self.logs[k]):
            if isinstance(line, Exception):
                raise line
            yield line

    @staticmethod
    def _next(answers: list[Any]) -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(follow, "_REREAD_SECONDS", 0.0)


def job(nodes: int = 1, scheduler: str = "kubernetes") -> Job:
    return Job("run", scheduler, "1x1", submissions=(Submission(f"{scheduler}://s/1", "", f"{nodes}x1"),))


def followed(runner: Any, nodes: int = 1, scheduler: str = "kubernetes") -> tuple[AppState | None, list[str]]:
    said: list[str] = []
    ended = follow.follow(job(nodes, scheduler), runner, said.append)
    return (None if ended is None else ended.state), said


def test_lines_of_rank_0_and_of_launchers_are_shown_whichever_node_they_come_from() -> None:
    logs = {
        0: [["[rank 2]:step 10\n", "[rank 3]:step 10\n", "restarting\n"]],
        1: [["[rank 0]:step 10 of [rank 1]:\n", "[rank 1]:step 10\n", "[rank 10]:step 10\n"]],
        2: [["2026-01-01T00:00:00.1Z [rank 0]:on Kubernetes\n", "2026-01-01T00:00:00.1Z [rank 4]:step\n"]],
    }
    runner = FakeRunner([AppState.PENDING, AppState.RUNNING, AppState.SUCCEEDED], logs)
    state, said = followed(runner, nodes=3)
    assert state == AppState.SUCCEEDED
    assert said[0] == "waiting: pending"
    assert sorted(said[1:]) == ["node 0: restarting", "on Kubernetes", "step 10 of [rank 1]:"]


AWAY = ConnectionError("timed out")
ENDS: dict[str, tuple[list[Any], list[Any], AppState | None, list[str]]] = {
    "a stream that breaks off is read again and shown once": (
        [*[AppState.RUNNING] * 8, AppState.SUCCEEDED],
        [["a\n", "b\n", AWAY], [AWAY], ["a\n", "b\n", "c\n"], ["a\n", "b\n", "c\n", "d"]],
        AppState.SUCCEEDED,
        ["a", "b", "timed out", "c", "d"],
    ),
    "the log of another start is shown from its beginning": (
        [*[AppState.RUNNING] * 4, AppState.SUCCEEDED],
        [["1 a\n", "1 b\n"], ["2 a\n"]],
        AppState.SUCCEEDED,
        ["1 a", "1 b", "2 a"],
    ),
    "a scheduler that does not answer for a while is no end of the job": (
        [AWAY, AppState.RUNNING, AWAY, AWAY, AppState.FAILED],
        [[]],
        AppState.FAILED,
        ["waiting for the scheduler: timed out"] * 3,
    ),
    "a job that nobody knows has no state": ([None], [], None, []),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_job_is_followed_to_its_end(name: str) -> None:
    answers, logs, state, said = ENDS[name]
    assert followed(FakeRunner([*answers], {0: [*logs]})) == (state, said)


@pytest.mark.parametrize(
    ("answer", "scheduler", "error", "text"),
    [
        (AWAY, "kubernetes", RunError, "nothing is known of kubernetes://s/1 any longer: timed out"),
        (OSError(28, "No space left on device"), "local_cwd", RunError, "No space left"),  # of this machine: at once
        (SignalException("SIGINT", signal.SIGINT), "local_cwd", SignalException, "SIGINT"),  # no answer of a scheduler
    ],
)
def test_what_ends_following(
    answer: BaseException, scheduler: str, error: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if answer is AWAY:
        monkeypatch.setattr(follow, "_PATIENCE_SECONDS", 0.05)
    with pytest.raises(error, match=text):
        followed(FakeRunner([answer], {}), scheduler=scheduler)


def test_logs_of_a_job_that_slurm_has_forgotten_are_those_in_its_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, said in (("scontrol", "Invalid job id specified"), ("sacct", "Slurm accounting storage is disabled")):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 1\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    forgotten = replace(job(2, "slurm"), run_dir=str(tmp_path / "run"))
    runner: Any = FakeRunner([None], {})
    with pytest.raises(RunError, match="there is no log"):
        list(node_lines(forgotten, runner, forgotten.nodes))
    logs = forgotten.folder / "logs"
    logs.mkdir(parents=True)
    (logs / "slurm-1-train-1.out").write_text("of node 1\n")
    lines = sorted(node_lines(forgotten, runner, forgotten.nodes))
    assert "node 1: of node 1" in lines and "node 0: there is no log" in lines[0]


def answering(monkeypatch: pytest.MonkeyPatch, answer: AppStatus | Exception | None) -> FakeRunner:
    runner = FakeRunner([answer], {})
    monkeypatch.setattr(follow, "get_runner", lambda: nullcontext(runner))
    return runner


@pytest.mark.parametrize(
    ("scheduler", "answer", "text"),
    [
        ("slurm", ACTIVE, "running: on 2 nodes"),
        ("slurm", ENDED, "succeeded"),
        ("slurm", None, "unknown"),
        ("local_cwd", None, "launched on this machine"),
    ],
)
def test_the_status_command_says_what_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scheduler: str, answer: Any, text: str
) -> None:
    runner: Any = FakeRunner([answer], {})
    monkeypatch.setattr("torchx.runner.get_runner", lambda: nullcontext(runner))
    monkeypatch.setattr("distembed.launch.jobs.job.load_job", lambda _: job(2, scheduler))
    with pytest.raises(RunError, match="slurm knows nothing of 1") if text == "unknown" else nullcontext():
        status_command("run")
    assert f"run: {text} ({scheduler} 1, submission 1)" in capsys.readouterr().out


def test_a_scheduler_that_fails_is_named() -> None:
    runner: Any = FakeRunner([OSError("no route")], {})
    with pytest.raises(RunError, match="slurm cannot be used: OSError: no route"):
        job_state(job(2, "slurm"), runner)


def test_only_an_active_job_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = answering(monkeypatch, ACTIVE)
    cancel_job(job(2, "slurm"))
    assert runner.cancelled == ["slurm://s/1"]
    for answer, text in ((ENDED, "succeeded"), (None, "unknown")):
        runner = answering(monkeypatch, answer)
        with pytest.raises(UserError, match=f"run runs no longer: {text}"):
            cancel_job(job(2, "slurm"))
        assert not runner.cancelled
    with pytest.raises(UserError, match="press Ctrl-C there"):
        cancel_job(job(2, "local_cwd"))


def test_only_a_job_that_is_not_active_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, ACTIVE)
    with pytest.raises(UserError, match=r"run is running: on 2 nodes \(1\); cancel it first"):
        require_ended(job(2, "slurm"))
    require_ended(job(2, "local_cwd"))
    require_ended(Job("run", "slurm", "1x1"))
    for answer in (ENDED, None):
        answering(monkeypatch, answer)
        require_ended(job(2, "slurm"))


def test_logs_are_of_nodes_that_there_are() -> None:
    with pytest.raises(UserError, match="--node is 2; the nodes of run are 0 to 1"):
        next(job_log_lines(job(2, "slurm"), 2, follow=False, say=print))
    with pytest.raises(UserError, match="are files, in run/launch/logs"):
        next(job_log_lines(job(2, "local_cwd"), None, follow=False, say=print))


def test_a_job_on_this_machine_is_not_detached(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--detach: jobs of local_cwd end with the command"):
        launch_job(Job(str(tmp_path), "local_cwd", "1x1"), None, dry_run=False, detach=True, say=print)  # type: ignore[arg-type]


def test_progress_is_that_of_the_runs_record(tmp_path: Path) -> None:
    assert run_progress(tmp_path) == []
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished"}))
    assert run_progress(tmp_path) == ["run: finished"]
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n{"kin')
    assert run_progress(tmp_path) == ["run: finished", 'last metrics: {"kind": "train", "step": 2}']
    (tmp_path / "run.json").write_text("{")
    assert run_progress(tmp_path) == []


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


def test_the_first_rank_to_fail_is_shown_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(job(), run_dir=str(tmp_path))
    monkeypatch.setattr(Job, "submit", lambda self, _: self)
    fail(monkeypatch, failed.folder / "logs" / "1" / "node-0" / "error.json", RunError("the loss is nan"))
    said: list[str] = []
    runner: Any = FakeRunner([AppState.FAILED], {0: [[]]})
    with pytest.raises(RunError, match=f"the job 1 has ended: failed.*go on with `distembed resume {tmp_path}`"):
        follow.submit_and_follow(failed, runner, detach=False, say=said.append)
    assert said[-2].startswith("first to fail: RunError: the loss is nan (")
    assert said[-1].startswith("Traceback (most recent call last)")


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


@pytest.mark.thorough
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
