"""The batch script and what TorchX's application becomes, with commands of Slurm that only pretend."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchx.specs import AppDef, AppState, Resource, Role

from distembed.errors import RunError, UserError
from launch.log_lines import log_lines
from launch.slurm import STATES, app_state, create_scheduler
from launch.slurm_commands import cancel, find_job, list_jobs
from launch.slurm_script import SlurmJob, time_limit_seconds

# Runs the step as node 0 would; the command is srun's last argument.
SRUN = 'printf "%s\\n" "$@" >"$FAKE/asked"; exec env SLURM_PROCID=0 bash -c "${@: -1}"'
SCONTROL = """
case $2 in
hostnames) printf 'a1\\na2\\n' ;;
job) echo "JobState=${FAKE_STATE:-RUNNING} PreemptTime=None" ;;
*) echo "$2" >>"$FAKE/requeued" ;;
esac
"""

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30).map(
    lambda text: text.replace("$$", "$")  # means $ on every scheduler of TorchX
)


def job(folder: Path, *program: str, **changes: object) -> SlurmJob:
    arguments: dict[str, object] = {
        "name": "dlrm",
        "role": "train",
        "program": program or ("true",),
        "log_dir": folder,
        "environment": {},
        "min_nodes": 2,
        "max_nodes": 2,
        "options": {},
    }
    return SlurmJob(**{**arguments, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pretend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with commands of Slurm."""
    folder = tmp_path_factory.mktemp("pretend")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def run(pretend: Path, script: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    variables = {"PATH": f"{pretend}:{os.environ['PATH']}", "FAKE": str(pretend), "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    (pretend / "requeued").unlink(missing_ok=True)
    return subprocess.run(
        ["bash"], input=script.encode(), env={**variables, **environment}, capture_output=True, timeout=60
    )


def requeued(pretend: Path) -> bool:
    return (pretend / "requeued").exists()


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


@settings(max_examples=25)
@given(st.lists(texts, min_size=1, max_size=4))
def test_arguments_and_variables_arrive_as_they_are(pretend: Path, values: list[str]) -> None:
    environment = {f"VALUE_{i}": value for i, value in enumerate(values)}
    printing = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:]))); "
    printing += "sys.stdout.buffer.write(b'\\0'.join(os.environb[b'VALUE_%d' % i] for i in range(len(sys.argv) - 1)))"
    script = job(pretend, "python3", "-c", printing, *values, environment=environment).script()
    done = run(pretend, script, PYTHONUTF8="1")
    joined = "\0".join(values).encode()
    assert joined + joined in done.stdout, done.stderr


def test_macros_become_what_they_stand_for(pretend: Path) -> None:
    text = "${app_id} '${replica_id}' $$ ${other}"
    script = job(pretend, "printf", "%s|", text, environment={"A": text}).script()
    script = script.replace("exec printf", 'printf "%s|" "$A"; exec printf')
    expected = b"7 '0' $$ ${other}|"
    assert expected + expected in run(pretend, script).stdout


def test_the_first_node_is_known(pretend: Path) -> None:
    assert b"[a1]" in run(pretend, job(pretend, "bash", "-c", 'echo "[$TORCHX_RANK0_HOST]"').script()).stdout


@pytest.mark.parametrize(
    ("code", "state", "is_requeued"),
    [
        (0, "RUNNING", False),
        (1, "RUNNING", True),
        (75, "RUNNING", True),
        (137, "RUNNING", True),
        (1, "COMPLETING", False),
        (75, "COMPLETING", False),
        (75, "CANCELLED", False),
    ],
)
def test_what_fails_or_was_interrupted_is_requeued_unless_the_job_is_ended(
    pretend: Path, tmp_path: Path, code: int, state: str, is_requeued: bool
) -> None:
    done = run(pretend, job(tmp_path, "bash", "-c", f"exit {code}", max_retries=1).script(), FAKE_STATE=state)
    assert done.returncode == code
    assert requeued(pretend) == is_requeued


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_failures_are_counted_and_interruptions_are_not(pretend: Path, tmp_path: Path, max_retries: int) -> None:
    failing = job(tmp_path, "bash", "-c", "exit 1", max_retries=max_retries).script()
    interrupted = job(tmp_path, "bash", "-c", "exit 75", max_retries=max_retries).script()
    for restart in range(max_retries):
        run(pretend, failing, SLURM_RESTART_COUNT=str(2 * restart))
        assert requeued(pretend), restart
        run(pretend, interrupted, SLURM_RESTART_COUNT=str(2 * restart + 1))
        assert requeued(pretend), restart
    run(pretend, failing, SLURM_RESTART_COUNT=str(2 * max_retries))
    assert not requeued(pretend)
    # Another job with this number, long after: its first start forgets what the former one's failures were.
    run(pretend, job(tmp_path, "bash", "-c", "exit 1", max_retries=1).script())
    assert requeued(pretend)


@pytest.mark.parametrize(("code", "is_requeued"), [(0, False), (1, True)])
def test_a_warned_step_is_told_and_waited_for(pretend: Path, tmp_path: Path, code: int, is_requeued: bool) -> None:
    step = f"exec python3 -c {shlex.quote(_TELLING)} {code}"
    done = run(pretend, job(tmp_path, "bash", "-c", step, max_retries=0).script())
    assert b"told" in done.stdout, done.stderr
    assert done.returncode == code
    assert requeued(pretend) == is_requeued


# A shell cannot take back that a signal is ignored, which it was born with; a program can. Its parent is the batch
# script: srun, env and bash have replaced one another.
_TELLING = """
import os, signal, sys, time
def tell(*_):
    print("told", flush=True); time.sleep(0.5); os._exit(int(sys.argv[1]))
signal.signal(signal.SIGUSR1, tell)
os.kill(os.getppid(), signal.SIGUSR1)
time.sleep(30)
"""


def test_a_launcher_that_does_not_know_the_warning_lives_on(pretend: Path, tmp_path: Path) -> None:
    done = run(pretend, job(tmp_path, "bash", "-c", "kill -USR1 $$; kill -USR1 $PPID; sleep 0.5; echo alive").script())
    assert b"alive" in done.stdout and done.returncode == 0


def test_a_fixed_job_asks_for_all_its_nodes(tmp_path: Path) -> None:
    script = job(tmp_path, options={"cpus-per-task": "8"}, warning_seconds=90).script()
    assert options(script) == [
        "--job-name=dlrm/train",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--signal=B:USR1@90",
        "--requeue",
        "--open-mode=append",
    ]
    assert "--no-kill" not in script
    assert "--cpus-per-task=8 --export=ALL" in script, "a step does not take this over from its job"


def test_an_elastic_job_takes_what_is_free_and_outlives_a_node(pretend: Path, tmp_path: Path) -> None:
    script = job(tmp_path, min_nodes=1, max_nodes=4).script()
    assert "--nodes=1-4" in options(script) and "--no-kill" in options(script)
    run(pretend, script)
    step = (pretend / "asked").read_text().splitlines()
    assert "--no-kill" in step and "--nodes=2" in step, "the step takes the nodes that the job was given"


@pytest.mark.parametrize("folder", ["plain", "two words", "it's", "100%"])
def test_paths_are_quoted(pretend: Path, tmp_path: Path, folder: str) -> None:
    log_dir = tmp_path / folder
    log_dir.mkdir()
    made = job(log_dir, "bash", "-c", "exit 1", max_retries=1)
    run(pretend, made.script())
    assert (log_dir / "slurm-7.failures").read_text().endswith(" 1\n")
    pattern = f"{tmp_path}/{folder.replace('%', '%%')}/slurm-%j"
    assert f"--output={pattern}.out" in made.command
    assert f"--output={pattern}-train-%t.out" in (pretend / "asked").read_text().splitlines()


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "two words"},
        {"name": "a/b"},
        {"name": ""},
        {"environment": {"A-B": "1"}},
        {"environment": {"": "1"}},
        {"min_nodes": 3},
        {"min_nodes": 0},
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(UserError):
        job(tmp_path, **changes)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("1:00:01", 3601),
        ("2-0", 172800),
        ("1-2:03", 86400 + 7380),
        ("1-02:03:04", 86400 + 7384),
        ("UNLIMITED", None),
    ],
)
def test_time_limits(text: str, seconds: int | None) -> None:
    assert time_limit_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "1:2:3:4", "-5", "1-", "x-1"])
def test_time_limits_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="Slurm takes"):
        time_limit_seconds(text)


def app(**changes: object) -> AppDef:
    role: dict[str, object] = {"name": "train", "image": "", "entrypoint": "true", "num_replicas": 2}
    return AppDef("dlrm", [Role(**{**role, **changes})])  # type: ignore[arg-type]


def dryrun(application: AppDef, **cfg: object) -> SlurmJob:
    made = create_scheduler("session").submit_dryrun(application, cfg).request
    assert isinstance(made, SlurmJob)
    return made


@pytest.mark.parametrize(
    ("resource", "cfg", "expected"),
    [
        (Resource(cpu=-1, gpu=-1, memMB=-1), {}, {}),
        (Resource(cpu=0, gpu=0, memMB=0), {}, {}),
        (Resource(cpu=8, gpu=0, memMB=100), {}, {"cpus-per-task": "8", "mem": "100M"}),
        (Resource(cpu=96, gpu=8, memMB=100), {"mem": "0"}, {"cpus-per-task": "96", "gpus-per-node": "8", "mem": "0"}),
        (
            Resource(cpu=-1, gpu=-1, memMB=-1),
            {"account": "a", "mail-type": "END"},
            {"account": "a", "mail-type": "END"},
        ),
    ],
)
def test_resources_and_run_options(
    resource: Resource, cfg: dict[str, object], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no sinfo
    assert dryrun(app(resource=resource), **cfg).options == expected


@pytest.mark.parametrize(("min_replicas", "elastic"), [(None, False), (2, False), (1, True)])
def test_a_job_is_elastic_where_the_role_is(min_replicas: int | None, elastic: bool) -> None:
    assert dryrun(app(min_replicas=min_replicas)).elastic == elastic


def test_a_dry_run_shows_all_that_is_submitted(tmp_path: Path) -> None:
    made = dryrun(app(args=["a b"]), job_dir=str(tmp_path / "job"), time="1:00:00")
    text = str(made)
    assert made.script() in text and shlex.join(made.command) in text
    assert made.log_dir == tmp_path / "job" and f"--chdir={tmp_path}/job" in made.command


def test_a_time_limit_that_leaves_no_time_is_refused() -> None:
    assert dryrun(app(), time="4").warning_seconds == 120
    assert dryrun(app(), time="3", signal_seconds=0).warning_seconds == 0
    with pytest.raises(UserError, match="Ask for 4 minutes"):
        dryrun(app(), time="3")


def test_an_application_of_two_roles_is_refused() -> None:
    two = AppDef("dlrm", [*app().roles, *app(name="reader").roles])
    with pytest.raises(UserError, match="2 roles .train, reader."):
        dryrun(two)


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
