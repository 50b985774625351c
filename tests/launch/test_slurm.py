"""The scheduler on a real Slurm of two nodes, with trivial commands."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torchx.schedulers.api import DescribeAppResponse
from torchx.specs import AppDef, AppState, Resource, Role, is_terminal, macros

from distembed.base.errors import RunError, UserError
from distembed.launch.apps.roles import GRACE_SECONDS
from distembed.launch.schedulers.slurm.scheduler import SlurmScheduler, create_scheduler
from distembed.launch.schedulers.slurm.states import FollowedJobs
from tests.launch.conftest import MiniSlurm, wait_until

pytestmark = pytest.mark.timeout(300)

NOTED = "date '+%s %N' >>starts; n=$(wc -l <starts); "
"""Beginning of a command of one node that counts how often it was started."""


@pytest.fixture
def scheduler(slurm: MiniSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmScheduler]:
    """In a folder of its own, which jobs run in; what it says of them is of now."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distembed.launch.schedulers.slurm.states.ASK_SECONDS", 0.0)
    yield create_scheduler("session")


def app(command: str, **changes: object) -> AppDef:
    # $$: the scheduler's way to write a dollar
    role: dict[str, object] = {
        "name": "train",
        "image": "",
        "entrypoint": "bash",
        "args": ["-c", command.replace("$", "$$")],
        "resource": Resource(cpu=1, gpu=0, memMB=100),
    }
    return AppDef("dlrm", [Role(**{**role, **changes})])  # type: ignore[arg-type]


def submit(scheduler: SlurmScheduler, application: AppDef, **cfg: object) -> str:
    return str(scheduler.submit(application, cfg))


def described(scheduler: SlurmScheduler, job_id: str) -> DescribeAppResponse:
    response = scheduler.describe(job_id)
    assert response is not None
    return response


def wait_for(scheduler: SlurmScheduler, job_id: str, *states: AppState, seconds: float = 90) -> DescribeAppResponse:
    """Waits for one of some states, or for the end; returns what is said then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        response = described(scheduler, job_id)
        if response.state in states or is_terminal(response.state):
            return response
        time.sleep(0.2)
    raise AssertionError(f"job {job_id} is {response.msg}\n{messages(scheduler, job_id)}")


def wait_for_text(path: Path, text: str, seconds: float = 60) -> None:
    wait_until(lambda: path.exists() and text in path.read_text(), f"{path} has no {text!r}", seconds)


def messages(scheduler: SlurmScheduler, job_id: str) -> str:
    path = scheduler.log_file(job_id)
    return path.read_text() if path.exists() else ""


def lines(scheduler: SlurmScheduler, job_id: str, k: int = 0) -> list[str]:
    return list(scheduler.log_iter(job_id, "train", k))


@pytest.mark.thorough
def test_variables_macros_and_replicas(
    scheduler: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = "a,b 'c' \"d\" $HOME `e` \\ #\nf=${PATH}"
    command = f'echo "$SLURMD_NODENAME ${{{macros.rank0_env[2:-1]}}} {macros.app_id} {macros.replica_id}"; echo "$ODD"'
    role = app("", args=["-c", command.replace("${rank0_env}", "$${${rank0_env}}")], env={"ODD": value}, num_replicas=2)
    job_id = submit(scheduler, role, log_dir="two words/100%")
    response = wait_for(scheduler, job_id)
    assert response.state == AppState.SUCCEEDED, messages(scheduler, job_id)
    assert [replica.hostname for replica in response.roles_statuses[0].replicas] == ["mini1", "mini2"]
    assert response.roles[0].name == "train" and response.roles[0].num_replicas == 2
    monkeypatch.chdir("/")  # logs are found from anywhere
    for k in range(2):
        text = "".join(lines(scheduler, job_id, k))
        assert text == f"mini{k + 1} mini1 {job_id} {k}\n{value}\n"
    assert list(scheduler.log_iter(job_id, "train", regex="^f")) == ["f=${PATH}\n"]
    assert (tmp_path / "two words" / "100%" / f"slurm-{job_id}-train-0.out").is_file()


@pytest.mark.thorough
def test_a_job_that_is_cancelled(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    # it is told, says that it could go on, and does not come back
    command = "trap 'sleep 0.3; exit 75' TERM; touch started; while :; do sleep 0.1; done"
    job_id = submit(scheduler, app(command, max_retries=3))
    wait_for_text(tmp_path / "started", "")
    assert scheduler.exists(job_id)
    assert described(scheduler, job_id).state == AppState.RUNNING
    scheduler.cancel(job_id)
    response = wait_for(scheduler, job_id)
    assert response.state == AppState.CANCELLED, messages(scheduler, job_id)
    scheduler.cancel(job_id)
    assert AppState.CANCELLED in {listed.state for listed in scheduler.list() if listed.app_id == job_id}
    time.sleep(1)
    assert described(scheduler, job_id).state == AppState.CANCELLED


@pytest.mark.slurm
def test_a_job_that_is_cancelled_saves_what_it_has_however_long_that_takes(
    scheduler: SlurmScheduler, tmp_path: Path
) -> None:
    # longer than this cluster's KillWait
    program = (
        "import signal, sys, time\n"
        "def save(*_): open('told', 'w'); time.sleep(8); open('saved', 'w').write('x'); sys.exit(1)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "open('started', 'w').write('x'); time.sleep(60)\n"
    )
    job = app("", entrypoint="python3", args=["-c", program], max_retries=3, metadata={GRACE_SECONDS: 20})
    job_id = submit(scheduler, job, log_dir="logs")
    wait_for_text(tmp_path / "started", "x")
    scheduler.cancel(job_id)
    response = wait_for(scheduler, job_id)
    assert response.state == AppState.CANCELLED, messages(scheduler, job_id)
    assert (tmp_path / "saved").exists() and not list((tmp_path / "logs").glob("*.cancelled"))
    time.sleep(1)
    assert described(scheduler, job_id).state == AppState.CANCELLED


def test_jobs_that_there_are_not_and_refusals_are_told(scheduler: SlurmScheduler) -> None:
    assert scheduler.describe("987654") is None
    assert not scheduler.exists("987654")
    scheduler.cancel("987654")
    with pytest.raises(UserError, match="invalid partition specified: gold"):
        submit(scheduler, app("true"), partition="gold")
    with pytest.raises(UserError, match="Node count specification invalid|More processors|not available"):
        submit(scheduler, app("true", num_replicas=3))


def test_options_arrive(scheduler: SlurmScheduler) -> None:
    job_id = submit(scheduler, app("sleep 30"), comment='it\'s "one" # of \\ many', time="7", mem="300M")
    text = subprocess.run(["scontrol", "show", "job", job_id], capture_output=True, text=True, check=True).stdout
    for expected in (
        'Comment=it\'s "one" # of \\ many',
        "TimeLimit=00:07:00",
        "mem=300M",
        "JobName=dlrm-",
        "Requeue=1",
    ):
        assert expected in text


@pytest.mark.slurm
def test_failures_and_interruptions(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    # fails, is interrupted, fails again: the only retry is used up
    command = NOTED + 'echo "start $n"; case $n in 2) exit 75 ;; *) exit 3 ;; esac'
    job_id = submit(scheduler, app(command, max_retries=1))
    wait_for_text(tmp_path / "starts", "\n")
    following = scheduler.log_iter(job_id, "train", should_tail=True)
    assert list(following) == ["start 1\n", "start 2\n", "start 3\n"], messages(scheduler, job_id)
    response = described(scheduler, job_id)
    assert response.state == AppState.FAILED
    assert response.num_restarts == 2
    assert "all used" in messages(scheduler, job_id)


def shadow(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a command in the way of one of Slurm's that fails as if what it asks were away."""
    folder.mkdir(exist_ok=True)
    (folder / command).write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller (connect failure)' >&2; exit 1\n"
    )
    (folder / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_without_accounting(scheduler: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow(tmp_path / "bin", "sacct", monkeypatch)
    job_id = submit(scheduler, app("exit 4"))
    response = wait_for(scheduler, job_id)
    assert response.state == AppState.FAILED and response.msg == "FAILED (NonZeroExitCode)"
    assert job_id in {listed.app_id for listed in scheduler.list()}
    assert scheduler.describe("987654") is None


@pytest.mark.thorough
def test_without_the_controller(scheduler: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job_id = submit(scheduler, app("echo here", num_replicas=2), log_dir="logs")
    assert wait_for(scheduler, job_id).state == AppState.SUCCEEDED
    # accounting is told of a job's name a little later
    names = ["sacct", "-Xnj", job_id, "-o", "JobName%60"]
    while "/train" not in subprocess.run(names, capture_output=True, text=True).stdout:
        time.sleep(0.2)
    monkeypatch.setattr("distembed.launch.schedulers.slurm.queries.PATIENCE_SECONDS", 0.0)
    for command in ("scontrol", "squeue"):
        shadow(tmp_path / "bin", command, monkeypatch)
    assert described(scheduler, job_id).state == AppState.SUCCEEDED, "the controller has said so"
    # to another process only accounting speaks, and of a job that was requeued it would say the same
    monkeypatch.setattr("distembed.launch.schedulers.slurm.scheduler.followed_jobs", FollowedJobs())
    response = described(scheduler, job_id)
    assert response.state == AppState.UNKNOWN and response.msg.startswith("COMPLETED (says accounting")
    assert [(role.name, role.num_replicas) for role in response.roles] == [("train", 2)]
    assert lines(scheduler, job_id, k=1) == ["here\n"]
    assert job_id in {listed.app_id for listed in scheduler.list()}
    with pytest.raises(RunError, match="Unable to contact"):
        scheduler.describe("987654")


@pytest.mark.slurm
@pytest.mark.parametrize("then", ["exit 1", "sleep 600"])
def test_an_elastic_job_that_loses_its_first_node_goes_on_with_the_others(
    scheduler: SlurmScheduler, slurm: MiniSlurm, tmp_path: Path, then: str
) -> None:
    # the launcher that is left fails, or hangs
    command = "if [[ -e again ]]; then echo went on; exit; fi; touch started-$SLURM_PROCID; "
    command += f"while [[ ! -e again ]]; do sleep 0.1; done; {then}"
    job_id = submit(scheduler, app(command, num_replicas=2, min_replicas=1))
    for k in range(2):
        wait_for_text(tmp_path / f"started-{k}", "")
    slurm.kill_node("mini1")
    try:
        (tmp_path / "again").touch()
        response = wait_for(scheduler, job_id, AppState.PENDING)
        assert response.state == AppState.PENDING, response.msg
        response = wait_for(scheduler, job_id)
    finally:
        slurm.start_node("mini1")
    assert response.state == AppState.SUCCEEDED, messages(scheduler, job_id)
    assert response.num_restarts == 1
    assert "start 2 on mini2" in messages(scheduler, job_id)
    assert lines(scheduler, job_id)[-1] == "went on\n"
    assert "has lost its first node, mini1" in "".join(lines(scheduler, job_id, k=1))


@pytest.mark.slurm
def test_an_elastic_job_with_too_few_nodes_waits_for_more(
    scheduler: SlurmScheduler, slurm: MiniSlurm, tmp_path: Path
) -> None:
    # MIN of two among the three that it asks for: as many as there are
    command = "if [[ -e again ]]; then exit; fi; touch started-$SLURM_PROCID; "
    command += "while [[ $(scontrol show job $SLURM_JOB_ID) != *NumNodes=1\\ * ]]; do sleep 0.5; done; exit 1"
    made = scheduler.submit_dryrun(app(command, num_replicas=3, min_replicas=2), {})
    job_id = scheduler.schedule(made)
    for k in range(2):
        wait_for_text(tmp_path / f"started-{k}", "")
    slurm.kill_node("mini2")
    try:
        response = wait_for(scheduler, job_id, AppState.PENDING)
        assert response.state == AppState.PENDING, messages(scheduler, job_id)
    finally:
        (tmp_path / "again").touch()
        slurm.start_node("mini2")
    assert "1 of the 2 nodes that it needs are left" in messages(scheduler, job_id)
    assert wait_for(scheduler, job_id).state == AppState.SUCCEEDED, messages(scheduler, job_id)


def test_an_elastic_job_starts_on_what_is_free(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    whole = Resource(cpu=4, gpu=0, memMB=100)
    other = submit(scheduler, app("touch other; sleep 60", resource=whole))
    wait_for_text(tmp_path / "other", "")
    job_id = submit(scheduler, app("true", num_replicas=2, min_replicas=1, resource=whole))
    response = wait_for(scheduler, job_id)
    assert response.state == AppState.SUCCEEDED and response.roles[0].num_replicas == 1
    assert described(scheduler, other).state == AppState.RUNNING


@pytest.mark.slurm
@pytest.mark.parametrize(("code", "nodes"), [(1, 1), (75, 1), (1, 2)])
def test_a_preempted_job_goes_on_later(scheduler: SlurmScheduler, tmp_path: Path, code: int, nodes: int) -> None:
    whole = Resource(cpu=4, gpu=0, memMB=100)
    # 1: a launcher's own code when it is told to end
    command = f"if [[ -e saved ]]; then echo went on; exit; fi; trap 'touch saved; exit {code}' TERM; touch started; "
    command += "while :; do sleep 0.1; done"
    # of two nodes it is elastic
    job_id = submit(scheduler, app(command, num_replicas=nodes, min_replicas=1, resource=whole))
    wait_for_text(tmp_path / "started", "")
    urgent = submit(scheduler, app("sleep 3", num_replicas=2, resource=whole), partition="urgent")
    wait_for_text(tmp_path / "saved", "")
    assert wait_for(scheduler, urgent).state == AppState.SUCCEEDED
    response = wait_for(scheduler, job_id)
    assert response.state == AppState.SUCCEEDED, messages(scheduler, job_id)
    assert lines(scheduler, job_id)[-1] == "went on\n"


@pytest.mark.slurm
def test_slurm_warns_before_the_time_limit(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time\n"
        "if os.path.exists('saved'): sys.exit()\n"
        "def save(*_): open('saved', 'w').write('x'); sys.exit(75)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "time.sleep(200)\n"
    )
    job = app("", entrypoint="python3", args=["-c", program])
    job_id = submit(scheduler, job, time="3", signal_seconds=60)
    wait_for_text(tmp_path / "saved", "x", seconds=200)
    response = wait_for(scheduler, job_id)
    assert response.state == AppState.SUCCEEDED and response.num_restarts == 1, messages(scheduler, job_id)
