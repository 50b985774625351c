"""What is known of a job, in TorchX's words, while the controller answers and while it does not."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchx.specs import AppState

from distembed.errors import RunError, UserError
from launch.log_lines import log_lines
from launch.slurm_commands import cancel, find_job, list_jobs
from launch.slurm_states import STATES, FollowedJobs, app_state


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("CANCELLED by 0", AppState.CANCELLED),
        ("CANCELLED+", AppState.CANCELLED),
        ("COMPLETING", AppState.RUNNING),
        ("CONFIGURING", AppState.PENDING),
        ("REQUEUE_HOLD", AppState.PENDING),
        ("OUT_OF_MEMORY", AppState.FAILED),
        ("OUT_OF_ME+", AppState.UNKNOWN),
        ("BORED", AppState.UNKNOWN),
        ("", AppState.UNKNOWN),
    ],
)
def test_every_state_has_an_answer(state: str, expected: AppState) -> None:
    assert app_state(state) == expected


@given(st.text(max_size=20), st.sampled_from(sorted(STATES)))
def test_no_state_raises(noise: str, state: str) -> None:
    assert isinstance(app_state(noise), AppState)
    assert app_state(f"{state} {noise}") == STATES[state]


@pytest.mark.parametrize("call", [list_jobs, lambda: find_job("1"), lambda: cancel("1")])
def test_without_slurm_the_remedy_is_named(call: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert callable(call)
    with pytest.raises(UserError, match=r"tools/mini_slurm\.sh up"):
        call()


@pytest.mark.parametrize("job_id", ["", "x", "--help", "1 2", "1;2", "12\n"])
def test_what_is_no_job_number_is_no_job(job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_job(job_id) is None


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files say what the controller and accounting answer, and how often the controller was asked.

    A controller without a file does not answer, and accounting without one knows nothing.
    """
    scontrol = f'echo >>{tmp_path}/asked; cat {tmp_path}/controller || {{ echo "Socket timed out" >&2; exit 1; }}'
    for name, text in (("scontrol", scontrol), ("sacct", f"cat {tmp_path}/accounting")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("launch.slurm_commands.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("launch.slurm_commands.PATIENCE_SECONDS", 0.0)
    return tmp_path


def says(folder: Path, state: str) -> None:
    (folder / "controller").write_text(f"JobId=7 JobName=dlrm/train\n   JobState={state} Reason=None\n")


def accounts(folder: Path, state: str) -> None:
    (folder / "accounting").write_text(f"7|{state}|1|n1|dlrm/train|sbatch --output=/logs/slurm-%j.out\n")


def test_one_question_a_while_does_for_all_nodes_that_are_followed(
    controller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.slurm_states.ASK_SECONDS", 600.0)
    says(controller, "RUNNING")
    jobs = FollowedJobs()
    with ThreadPoolExecutor(64) as threads:
        assert not any(threads.map(lambda _: jobs.has_ended("7"), range(500)))
    assert (controller / "asked").read_text() == "\n"
    monkeypatch.setattr("launch.slurm_states.ASK_SECONDS", 0.0)
    says(controller, "COMPLETED")
    assert jobs.has_ended("7")


@pytest.mark.parametrize("accounted", [None, "RUNNING", "NODE_FAIL", "COMPLETED"])
def test_a_job_is_followed_while_the_controller_does_not_answer(
    controller: Path, accounted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.slurm_states.ASK_SECONDS", 0.0)
    jobs = FollowedJobs()
    says(controller, "RUNNING")
    assert not jobs.has_ended("7")
    (controller / "controller").unlink()
    if accounted:
        accounts(controller, accounted)
    for _ in range(3):
        assert not jobs.has_ended("7")
    # it was requeued after all
    says(controller, "PENDING")
    assert not jobs.has_ended("7")
    (controller / "controller").unlink()
    assert not jobs.has_ended("7")
    monkeypatch.setattr("launch.slurm_states.FOLLOW_PATIENCE_SECONDS", 0.0)
    if accounted:
        assert jobs.has_ended("7") == (accounted != "RUNNING")
    else:
        with pytest.raises(RunError, match="Socket timed out"):
            jobs.has_ended("7")


def test_a_controller_that_answers_late_is_waited_for(controller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.slurm_commands.PATIENCE_SECONDS", 60.0)
    accounts(controller, "NODE_FAIL")
    threading.Timer(0.5, says, (controller, "PENDING")).start()
    record = find_job("7")
    assert record is not None and record.state == "PENDING" and record.is_certain
    assert len((controller / "asked").read_text()) > 1
    (controller / "controller").unlink()
    record = find_job("7", patience_seconds=0)
    assert record is not None and record.state == "NODE_FAIL" and not record.is_certain
    monkeypatch.setattr("launch.slurm_commands.PATIENCE_SECONDS", 0.0)
    assert not FollowedJobs().has_ended("7")


def test_a_log_is_followed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    asked = []

    def has_ended() -> bool:
        # what is written just before the end is read as well
        asked.append(path.write_text("one\ntwo\r\nthree") if asked else None)
        return len(asked) > 1

    assert list(log_lines(path, has_ended, "")) == ["one\n", "two\r\n", "three"]
    assert list(log_lines(path, None, "")) == ["one\n", "two\r\n", "three"]


def test_a_log_that_never_comes_is_an_error(tmp_path: Path) -> None:
    for has_ended in (None, lambda: True):
        with pytest.raises(RunError, match="ask the cluster's staff"):
            list(log_lines(tmp_path / "log", has_ended, "ask the cluster's staff"))
