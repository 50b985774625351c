"""What is known of a job, in TorchX's words, while the controller answers and while it does not."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchx.specs import AppState, is_terminal

from distembed.base.errors import RunError, UserError
from distembed.launch.schedulers.slurm.queries import list_jobs, query_job
from distembed.launch.schedulers.slurm.scheduler import create_scheduler
from distembed.launch.schedulers.slurm.script import CANCEL_SECONDS
from distembed.launch.schedulers.slurm.states import STATES, FollowedJobs, app_state, log_lines
from distembed.launch.schedulers.slurm.submission import cancel, expected_start, submit


@settings(max_examples=25)
@given(st.text(max_size=20), st.sampled_from(sorted(STATES)))
def test_every_state_has_an_answer(noise: str, state: str) -> None:
    for expected, states in {
        AppState.CANCELLED: ["CANCELLED by 0", "CANCELLED+"],
        AppState.RUNNING: ["COMPLETING"],
        AppState.PENDING: ["CONFIGURING", "REQUEUE_HOLD"],
        AppState.FAILED: ["OUT_OF_MEMORY"],
        AppState.UNKNOWN: ["OUT_OF_ME+", "BORED", ""],
    }.items():
        assert {app_state(one) for one in states} == {expected}
    assert isinstance(app_state(noise), AppState)
    assert app_state(f"{state} {noise}") == STATES[state]


def test_without_slurm_the_remedy_is_named_unless_a_number_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for call in (list_jobs, lambda: query_job("1"), lambda: cancel("1")):
        with pytest.raises(UserError, match=r"tests/launch/mini_slurm\.sh up"):
            call()
    for job_id in ("", "x", "--help", "1 2", "1;2", "12\n"):
        assert query_job(job_id) is None


# Questions are counted by what they ask, and the first so many are not answered: `scontrol write` ends with 0 then too.
HEARD = """
heard() {
    echo >>"asked-$1"
    (($(wc -l <"asked-$1") > $(cat "away-$1" 2>/dev/null || echo 0))) || silent "$2"
}
silent() { echo "Socket timed out on send/recv operation" >&2; exit "$1"; }
"""
FAKES = {
    "scontrol": """
case $2 in
job) heard job 1; cat controller || silent 1 ;;
hostnames) heard hostnames 1; printf 'n1\\nn2\\n' ;;
batch_script) heard batch_script 0; cat script || echo "job script retrieval failed: $(cat no-script)" >&2 ;;
esac
""",
    "scancel": 'echo "$*" >>cancelled; heard scancel 1',
    "sacct": "cat accounting",
    "sbatch": 'cat >/dev/null; echo "sbatch: error: Batch job submission failed: $(cat refusal)" >&2; exit 1',
}


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files say what the controller and accounting answer, and how often the controller was asked.

    A controller without a file does not answer, and accounting without one knows nothing.
    """
    for name, text in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{HEARD}{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("distembed.launch.schedulers.slurm.queries.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("distembed.launch.schedulers.slurm.queries.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("distembed.launch.schedulers.slurm.states.ASK_SECONDS", 0.0)
    monkeypatch.setattr("distembed.launch.schedulers.slurm.scheduler.followed_jobs", FollowedJobs())
    return tmp_path


def asked(folder: Path, what: str) -> int:
    """How often the controller was asked something."""
    return len((folder / f"asked-{what}").read_text())


def says(folder: Path, state: str) -> None:
    fields = ("JobId=7 JobName=dlrm/train", f"JobState={state} Reason=None", "NodeList=n[1-2]")
    (folder / "controller").write_text("\n   ".join([*fields, f"StdOut={folder}/slurm-7.out\n"]))


def accounts(folder: Path, state: str) -> None:
    (folder / "accounting").write_text(f"7|{state}|1|n1|dlrm/train|sbatch --output=/logs/slurm-%j.out\n")


def test_one_question_a_while_does_for_all_nodes_that_are_followed(
    controller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distembed.launch.schedulers.slurm.states.ASK_SECONDS", 600.0)
    says(controller, "RUNNING")
    jobs = FollowedJobs()
    with ThreadPoolExecutor(64) as threads:
        assert not any(threads.map(lambda _: jobs.has_ended("7"), range(500)))
    assert asked(controller, "job") == 1
    monkeypatch.setattr("distembed.launch.schedulers.slurm.states.ASK_SECONDS", 0.0)
    says(controller, "COMPLETED")
    assert jobs.has_ended("7")


@pytest.mark.parametrize("accounted", [None, "RUNNING", "NODE_FAIL", "COMPLETED"])
def test_a_job_is_followed_while_the_controller_does_not_answer(
    controller: Path, accounted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr("distembed.launch.schedulers.slurm.states.FOLLOW_PATIENCE_SECONDS", 0.0)
    if accounted:
        assert jobs.has_ended("7") == (accounted != "RUNNING")
    else:
        with pytest.raises(RunError, match="Socket timed out"):
            jobs.has_ended("7")


def test_a_controller_that_answers_late_is_waited_for(controller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distembed.launch.schedulers.slurm.queries.PATIENCE_SECONDS", 60.0)
    accounts(controller, "NODE_FAIL")
    (controller / "away-job").write_text("1")
    says(controller, "PENDING")
    record = query_job("7")
    assert record is not None and record.state == "PENDING" and record.is_certain
    assert asked(controller, "job") == 2
    (controller / "controller").unlink()
    record = query_job("7", patience_seconds=0)
    assert record is not None and record.state == "NODE_FAIL" and not record.is_certain
    monkeypatch.setattr("distembed.launch.schedulers.slurm.queries.PATIENCE_SECONDS", 0.0)
    assert not FollowedJobs().has_ended("7")


@pytest.mark.parametrize("state", {answer: state for state, answer in STATES.items()}.values())
def test_an_end_that_only_accounting_knows_of_is_none(controller: Path, state: str) -> None:
    accounts(controller, state)
    answer = FollowedJobs().answer("7")
    assert not answer.has_ended and answer.record is not None
    assert answer.state == (AppState.UNKNOWN if is_terminal(STATES[state]) else STATES[state])
    # the controller has forgotten a job that ended long ago
    (controller / "scontrol").write_text("#!/bin/sh\necho 'Invalid job id specified' >&2; exit 1\n")
    assert FollowedJobs().answer("7").state == STATES[state]


@pytest.mark.parametrize("accounted", [None, "NODE_FAIL"])
def test_an_end_that_the_controller_has_told_stays_one(
    controller: Path, accounted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distembed.launch.schedulers.slurm.states.FOLLOW_PATIENCE_SECONDS", 0.0)
    jobs = FollowedJobs()
    says(controller, "COMPLETED")
    assert jobs.has_ended("7")
    (controller / "controller").unlink()
    if accounted:
        accounts(controller, accounted)
    for _ in range(2):
        assert jobs.answer("7").state == AppState.SUCCEEDED
    # someone has queued it again
    says(controller, "PENDING")
    assert jobs.answer("7").state == AppState.PENDING


def test_a_controller_that_is_silent_keeps_all_who_ask_waiting_once(
    controller: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distembed.launch.schedulers.slurm.states.ASK_SECONDS", 600.0)
    jobs = FollowedJobs()

    def error(_: int) -> str:
        with pytest.raises(RunError) as raised:
            jobs.has_ended("7")
        return str(raised.value)

    with ThreadPoolExecutor(8) as threads:
        errors = set(threads.map(error, range(64)))
    assert len(errors) == 1 and "Socket timed out" in errors.pop()
    assert asked(controller, "job") == 1
    monkeypatch.setattr("distembed.launch.schedulers.slurm.states.ASK_SECONDS", 0.0)
    says(controller, "RUNNING")
    assert not jobs.has_ended("7")


def test_all_who_follow_a_job_describe_it_with_one_question(controller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distembed.launch.schedulers.slurm.states.ASK_SECONDS", 600.0)
    says(controller, "RUNNING")
    with ThreadPoolExecutor(64) as threads:
        described = list(threads.map(lambda _: create_scheduler("session").describe("7"), range(64)))
    for one in described:
        assert one is not None and [replica.hostname for replica in one.roles_statuses[0].replicas] == ["n1", "n2"]
    assert (asked(controller, "job"), asked(controller, "hostnames")) == (1, 1)


def runs(folder: Path, grace_seconds: int = 40) -> None:
    """A job of ours runs."""
    says(folder, "RUNNING")
    (folder / "script").write_text(f"#!/bin/bash\nmin_nodes=1\ngrace={grace_seconds}\n")


def cancelled(folder: Path) -> list[str]:
    """What scancel was called with."""
    return (folder / "cancelled").read_text().splitlines() if (folder / "cancelled").exists() else []


TOLD = "--batch --signal=USR2 7"


@pytest.mark.parametrize("what", ["job", "batch_script", "scancel"])
def test_a_busy_controller_ends_no_job_without_saving(
    controller: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs(controller)
    says(controller, "SIGNALING" if what == "scancel" else "RUNNING")  # which count alike
    (controller / f"away-{what}").write_text("1000")
    for _ in range(2):
        with pytest.raises(
            RunError, match="not cancelled, because Slurm does not answer.*Try again, or `scancel 7` ends"
        ):
            cancel("7")
    assert set(cancelled(controller)) <= {TOLD} and not (controller / "slurm-7.cancelled").exists()
    # it answers after a while
    (controller / f"away-{what}").write_text(str(asked(controller, what) + 2))
    monkeypatch.setattr("distembed.launch.schedulers.slurm.queries.PATIENCE_SECONDS", 60.0)
    assert cancel("7") == 40 + CANCEL_SECONDS
    assert set(cancelled(controller)) == {TOLD} and (controller / "slurm-7.cancelled").exists()
    assert what == "scancel" or cancelled(controller) == [TOLD], "it is told once"
    assert cancel("7") == 0 and cancelled(controller)[-1] == "7", "the second time ends it at once"


@pytest.mark.parametrize(
    "why", ["waits", "has ended", "other script", "no script", "not mine", "nothing to save", "no folder"]
)
def test_a_job_that_has_nothing_to_save_or_cannot_be_told_is_cancelled_at_once(controller: Path, why: str) -> None:
    runs(controller, grace_seconds=0 if why == "nothing to save" else 40)
    if why in ("waits", "has ended"):
        says(controller, "PENDING" if why == "waits" else "COMPLETING")
    if why == "other script":
        (controller / "script").write_text("#!/bin/bash\nsleep 60\n")
    if why in ("no script", "not mine"):
        (controller / "script").unlink()
        reason = "Job script not specified" if why == "no script" else "Invalid user id"
        (controller / "no-script").write_text(reason)
    if why == "no folder":
        record = (controller / "controller").read_text()
        (controller / "controller").write_text(record.replace("StdOut=", "StdOut=/nowhere"))
    assert cancel("7") == 0 and cancelled(controller) == ["7"]


@pytest.mark.parametrize("state", ["RUNNING", "PENDING", "FAILED"])
def test_a_job_that_was_told_to_end_says_so_until_it_has(controller: Path, state: str) -> None:
    says(controller, state)
    before = create_scheduler("session").describe("7")
    (controller / "slurm-7.cancelled").touch()
    after = create_scheduler("session").describe("7")
    assert before is not None and after is not None and before.msg == state
    assert after.msg == (state if state == "FAILED" else f"{state} (told to end)")


@pytest.mark.parametrize(
    ("reason", "kind", "message"),
    [
        ("Socket timed out on send/recv operation", RunError, "look with `squeue --name=dlrm/train` before you try"),
        ("Zero Bytes were transmitted or received", RunError, "look with `squeue --name=dlrm/train` before you try"),
        ("Unable to contact slurm controller (connect failure)", RunError, "the job was not submitted"),
        ("Invalid account or account/partition combination specified", UserError, "does not accept the job: .*account"),
    ],
)
def test_a_job_that_slurm_may_have_taken_is_no_refusal(
    controller: Path, reason: str, kind: type[Exception], message: str
) -> None:
    (controller / "refusal").write_text(reason)
    with pytest.raises(kind, match=message) as raised:
        submit(["sbatch"], "#!/bin/bash\n", "dlrm/train")
    assert isinstance(raised.value, UserError) == (kind is UserError) and reason in str(raised.value)
    with pytest.raises(kind, match=re.escape(reason)) as raised:
        expected_start(["sbatch"], "#!/bin/bash\n")
    assert "squeue" not in str(raised.value), "nothing was to be submitted"


@pytest.fixture
def hurried_log(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASK_SECONDS", "LOOK_SECONDS", "LATE_SECONDS"):
        monkeypatch.setattr(f"distembed.launch.schedulers.slurm.states.{name}", 0.05)


@pytest.mark.usefixtures("hurried_log")
def test_a_log_is_followed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    asked = []

    def has_ended() -> bool:
        # what is written just before the end is read as well
        asked.append(path.write_text("one\ntwo\r\nthree") if asked else None)
        return len(asked) > 1

    assert list(log_lines(path, has_ended, "")) == ["one\n", "two\r\n", "three"]
    assert list(log_lines(path, None, "")) == ["one\n", "two\r\n", "three"]


@pytest.mark.usefixtures("hurried_log")
def test_a_log_that_never_comes_is_an_error(tmp_path: Path) -> None:
    for has_ended in (None, lambda: True):
        with pytest.raises(RunError, match="ask the cluster's staff"):
            list(log_lines(tmp_path / "log", has_ended, "ask the cluster's staff"))
