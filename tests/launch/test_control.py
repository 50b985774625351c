"""What may be done with a job by the state that its scheduler reports."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torchx.specs import AppState, AppStatus

from distembed.base.errors import RunError, UserError
from launch.jobs.follow import cancel_job, job_log_lines, job_state, require_ended, run_progress
from launch.jobs.job import Job, Submission
from launch.jobs.start import launch_job

ACTIVE = AppStatus(state=AppState.RUNNING, msg="on 2 nodes")
ENDED = AppStatus(state=AppState.SUCCEEDED)


class FakeRunner:
    """A runner whose scheduler gives one answer.

    Args:
        answer: The state that it reports, or the error that it raises.
    """

    def __init__(self, answer: AppStatus | Exception | None) -> None:
        self.answer = answer
        self.cancelled: list[str] = []

    def status(self, handle: str) -> AppStatus | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def cancel(self, handle: str) -> None:
        self.cancelled.append(handle)


def answering(monkeypatch: pytest.MonkeyPatch, answer: AppStatus | Exception | None) -> FakeRunner:
    runner = FakeRunner(answer)

    @contextmanager
    def get_runner() -> Iterator[FakeRunner]:
        yield runner

    monkeypatch.setattr("launch.jobs.follow.get_runner", get_runner)
    return runner


def job(scheduler: str = "slurm") -> Job:
    return Job("run", scheduler, "2x1", submissions=(Submission(f"{scheduler}://s/1", "", "2x1"),))


@pytest.mark.parametrize(
    ("scheduler", "answer", "text", "is_known", "is_active"),
    [
        ("slurm", ACTIVE, "running: on 2 nodes", True, True),
        ("slurm", ENDED, "succeeded", True, False),
        ("slurm", None, "unknown", False, False),
        ("local_cwd", None, "launched on this machine", True, False),
    ],
)
def test_the_state_says_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
    scheduler: str,
    answer: AppStatus | None,
    text: str,
    is_known: bool,
    is_active: bool,
) -> None:
    answering(monkeypatch, answer)
    state = job_state(job(scheduler))
    assert (state.text, state.is_known, state.is_active) == (text, is_known, is_active)


def test_a_scheduler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, OSError("no route"))
    with pytest.raises(RunError, match="slurm cannot be used: OSError: no route"):
        job_state(job())


def test_only_an_active_job_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = answering(monkeypatch, ACTIVE)
    cancel_job(job())
    assert runner.cancelled == ["slurm://s/1"]
    for answer, text in ((ENDED, "succeeded"), (None, "unknown")):
        runner = answering(monkeypatch, answer)
        with pytest.raises(UserError, match=f"run runs no longer: {text}"):
            cancel_job(job())
        assert not runner.cancelled
    with pytest.raises(UserError, match="press Ctrl-C there"):
        cancel_job(job("local_cwd"))


def test_only_a_job_that_is_not_active_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, ACTIVE)
    with pytest.raises(UserError, match=r"run is running: on 2 nodes \(1\); cancel it first"):
        require_ended(job())
    require_ended(job("local_cwd"))
    require_ended(Job("run", "slurm", "1x1"))
    for answer in (ENDED, None):
        answering(monkeypatch, answer)
        require_ended(job())


def test_logs_are_of_nodes_that_there_are() -> None:
    with pytest.raises(UserError, match="--node is 2; the nodes of run are 0 to 1"):
        next(job_log_lines(job(), 2, follow=False, say=print))
    with pytest.raises(UserError, match="are files, in run/launch/logs"):
        next(job_log_lines(job("local_cwd"), None, follow=False, say=print))


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
