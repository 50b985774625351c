"""The batch script of a job, by its request, with commands of Slurm that only pretend."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchx.specs import AppDef, Resource, Role

from distembed.base.errors import UserError
from distembed.launch.apps.roles import GRACE_SECONDS
from distembed.launch.schedulers.slurm.scheduler import create_scheduler
from distembed.launch.schedulers.slurm.script import SlurmJob, time_limit_seconds

# Runs the step as one node would; the command is srun's last argument.
SRUN = 'printf "%s\\n" "$@" >"$FAKE/asked"; exec env SLURM_PROCID="${FAKE_PROCID:-0}" bash -c "${@: -1}"'
# Of the controller's first answers some are none. What is asked is noted before.
SCONTROL = """
[[ $1 == show ]] && what=$2 || what=$1
echo "$what" >>"$FAKE/questions"
[[ $what == hostnames || $(grep -c "^$what$" "$FAKE/questions") -gt ${FAKE_AWAY:-0} ]] || exit ${FAKE_AWAY_CODE:-1}
case $what in
hostnames) if [[ $3 == "a[1-2]" ]]; then printf 'a1\\na2\\n'; else echo "$3"; fi ;;
job)
    state=${FAKE_STATE:-RUNNING}
    [[ ! -e $FAKE/requeued ]] || state=PENDING
    printf 'JobId=7\\n   JobState=%s PreemptTime=%s\\n   ReqNodeList=(null)\\n' "$state" "${FAKE_PREEMPTED:-None}"
    printf '   NodeList=%s\\n   NumNodes=%s\\n' "${FAKE_NODES:-a[1-2]}" "${FAKE_NUM_NODES:-2}"
    ;;
*)
    echo "$what" >>"$FAKE/requeued"
    [[ ! $FAKE_END ]] || : >"$FAKE_END"
    ;;
esac
"""
SCANCEL = 'echo "$@" >>"$FAKE/cancelled"; [[ ! $FAKE_END ]] || : >"$FAKE_END"'
# Between two questions, and what a job that was told has in one of the tests.
SLEEP = 'case $1 in 2|10|40) s=0.02 ;; *) s=$1 ;; esac; exec /bin/sleep "$s"'

PYTHON = [sys.executable, "-S"]
"""Starts in a tenth of the time: nothing that is installed is looked for."""

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30).map(
    lambda text: text.replace("$$", "$")  # means $ on every scheduler of TorchX
)


def job(folder: Path, *program: str, **changes: object) -> SlurmJob:
    given: dict[str, object] = {"program": program or ("true",), "log_dir": folder, "min_nodes": 2, "max_nodes": 2}
    given |= {"name": "dlrm", "role": "train", "environment": {}, "options": {}}
    return SlurmJob(**{**given, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pretend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with commands of Slurm."""
    folder = tmp_path_factory.mktemp("pretend")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL), ("sleep", SLEEP)):
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def run(pretend: Path, script: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    variables = {"PATH": f"{pretend}:{os.environ['PATH']}", "FAKE": str(pretend), "SLURM_JOB_ID": "7"}
    variables |= {"SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    for noted in ("asked", "questions", "requeued", "cancelled"):
        (pretend / noted).unlink(missing_ok=True)
    return subprocess.run(
        ["bash"], input=script.encode(), env={**variables, **environment}, capture_output=True, timeout=60
    )


def requeued(pretend: Path) -> bool:
    return (pretend / "requeued").exists()


def told_to_cancel(pretend: Path) -> list[str]:
    return (pretend / "cancelled").read_text().splitlines() if (pretend / "cancelled").exists() else []


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


@settings(max_examples=8)
@given(st.lists(texts, min_size=1, max_size=16))
def test_arguments_and_variables_arrive_as_they_are(pretend: Path, values: list[str]) -> None:
    environment = {f"VALUE_{i}": value for i, value in enumerate(values)}
    printing = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:]))); "
    printing += "sys.stdout.buffer.write(b'\\0'.join(os.environb[b'VALUE_%d' % i] for i in range(len(sys.argv) - 1)))"
    script = job(pretend, *PYTHON, "-c", printing, *values, environment=environment).script()
    done = run(pretend, script, PYTHONUTF8="1")
    joined = "\0".join(values).encode()
    assert joined + joined in done.stdout, done.stderr


def test_macros_and_the_first_node_become_what_they_stand_for(pretend: Path) -> None:
    text = "${app_id} '${replica_id}' $$ ${other}"
    script = job(pretend, "printf", "%s|", text, environment={"A": text}).script()
    script = script.replace("exec printf", 'printf "%s|" "$A"; exec printf')
    expected = b"7 '0' $$ ${other}|"
    assert expected + expected in run(pretend, script).stdout
    assert b"[a1]" in run(pretend, job(pretend, "bash", "-c", 'echo "[$TORCHX_RANK0_HOST]"').script()).stdout


@pytest.mark.parametrize(
    ("state", "code"),
    [*(("RUNNING", code) for code in (0, 1, 75, 137)), ("COMPLETING", 1), ("COMPLETING", 75), ("CANCELLED", 75)],
)
def test_what_fails_or_was_interrupted_is_requeued_unless_the_job_is_ended(
    pretend: Path, tmp_path: Path, state: str, code: int
) -> None:
    done = run(pretend, job(tmp_path, "bash", "-c", f"exit {code}", max_retries=1).script(), FAKE_STATE=state)
    assert done.returncode == code
    assert requeued(pretend) == (state == "RUNNING" and code != 0)


@pytest.mark.parametrize("code", [2, 3, 4, 22])
@pytest.mark.parametrize("grace_seconds", [0, 60])
def test_a_mistake_of_the_users_is_not_tried_again_by_what_saves_a_state(
    pretend: Path, tmp_path: Path, code: int, grace_seconds: int
) -> None:
    script = job(tmp_path, "bash", "-c", f"exit {code}", max_retries=1, grace_seconds=grace_seconds).script()
    done = run(pretend, script)
    is_mistake = code in (2, 3) and grace_seconds > 0
    assert done.returncode == code
    assert requeued(pretend) == (not is_mistake)
    assert (b"no retry" in done.stdout) == is_mistake


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
    step = f"exec {shlex.join(PYTHON)} -c {shlex.quote(_TELLING)} {code} USR1 0.5"
    done = run(pretend, job(tmp_path, "bash", "-c", step, max_retries=0).script())
    assert b"told" in done.stdout, done.stderr
    assert done.returncode == code
    assert requeued(pretend) == is_requeued


# A shell cannot take back that a signal is ignored, which it was born with; a program can. Its parent is the batch
# script: srun, env and bash have replaced one another.
_TELLING = """
import os, signal, sys, time
code, name, seconds = sys.argv[1:]
def tell(*_):
    print("told", flush=True); time.sleep(float(seconds)); os._exit(int(code))
signal.signal(signal.SIGUSR1, tell)
os.kill(os.getppid(), getattr(signal, "SIG" + name))
time.sleep(30)
"""


@pytest.mark.parametrize("how", ["full", "gone"])
def test_failures_that_cannot_be_counted_are_no_reason_to_go_on_for_ever(
    pretend: Path, tmp_path: Path, how: str
) -> None:
    log_dir = tmp_path / "logs"
    if how == "full":
        log_dir.mkdir()
        (log_dir / "slurm-7.failures").symlink_to("/dev/full")
    script = job(log_dir, "bash", "-c", "exit 3", max_retries=5).script()
    done = run(pretend, script, SLURM_RESTART_COUNT="1")
    assert done.returncode == 3 and not requeued(pretend)
    assert b"failures cannot be counted in" in done.stdout


@pytest.mark.parametrize("answer_code", [0, 1])
@pytest.mark.parametrize("silent", [0, 1, 5])
def test_a_controller_that_does_not_answer_is_asked_again(
    pretend: Path, tmp_path: Path, silent: int, answer_code: int
) -> None:
    script = job(tmp_path, "bash", "-c", "exit 75").script()
    done = run(pretend, script, FAKE_AWAY=str(silent), FAKE_AWAY_CODE=str(answer_code))
    questions = (pretend / "questions").read_text().split()
    assert questions.count("job") >= silent + 1 and done.returncode == 75
    # what it is told has an exit code, and need not be heard
    assert questions.count("requeue") == (silent + 1 if answer_code else 1)
    assert requeued(pretend) == (answer_code == 1 or not silent)


@pytest.mark.thorough
def test_a_controller_that_stays_away_is_given_up(pretend: Path, tmp_path: Path) -> None:
    done = run(pretend, job(tmp_path, "bash", "-c", "exit 75").script(), FAKE_AWAY="1000")
    assert done.returncode == 75 and not requeued(pretend)
    assert b"Slurm did not take: scontrol requeue 7" in done.stdout
    assert (pretend / "questions").read_text().split().count("requeue") == 30


@pytest.mark.parametrize(("left", "is_requeued"), [("1", True), ("2", False), ("", False)])
def test_too_few_nodes_are_no_failure(pretend: Path, tmp_path: Path, left: str, is_requeued: bool) -> None:
    elastic = job(tmp_path, "bash", "-c", "exit 1", min_nodes=2, max_nodes=4).script()
    run(pretend, elastic, FAKE_NUM_NODES=left or "?")
    assert requeued(pretend) == is_requeued
    assert (tmp_path / "slurm-7.failures").exists() != is_requeued


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seconds", "grace_seconds", "preempted", "is_requeued"),
    [
        (0, 60, "None", True),
        (1.1, 1, "None", False),  # whole seconds are counted, and one is over
        (1.1, 0, "None", True),
        (1.1, 1, "2026-01-01T00:00:00", True),
    ],
)
def test_a_warned_step_that_was_killed_has_failed_unless_it_was_preempted(
    pretend: Path, tmp_path: Path, seconds: float, grace_seconds: int, preempted: str, is_requeued: bool
) -> None:
    step = f"exec {shlex.join(PYTHON)} -c {shlex.quote(_TELLING)} 1 USR1 {seconds}"
    script = job(tmp_path, "bash", "-c", step, grace_seconds=grace_seconds).script()
    done = run(pretend, script, FAKE_PREEMPTED=preempted)
    assert b"told" in done.stdout and requeued(pretend) == is_requeued
    assert (f"within grace_seconds, {grace_seconds}".encode() in done.stdout) != is_requeued


@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_cancelled_job_cancels_itself_when_it_has_saved(pretend: Path, tmp_path: Path, code: int) -> None:
    step = f"exec {shlex.join(PYTHON)} -c {shlex.quote(_TELLING)} {code} USR2 0.5"
    program = f"touch {tmp_path}/slurm-7.cancelled; {step}"
    done = run(pretend, job(tmp_path, "bash", "-c", program, max_retries=3, grace_seconds=60).script())
    assert b"told" in done.stdout and done.returncode == code
    assert told_to_cancel(pretend) == (["7"] if code else []), "one that has finished has succeeded"
    assert not requeued(pretend) and not (tmp_path / "slurm-7.cancelled").exists()


def test_a_cancelled_job_that_does_not_end_is_cancelled_by_slurm(pretend: Path, tmp_path: Path) -> None:
    step = "kill -USR2 $PPID; while [[ ! -e $FAKE/cancelled ]]; do sleep 0.1; done; exit 9"
    done = run(pretend, job(tmp_path, "bash", "-c", step, grace_seconds=10).script())
    assert done.returncode == 9 and told_to_cancel(pretend)[0] == "7" and not requeued(pretend)


def test_a_job_that_was_cancelled_before_its_script_ran_does_not_start(pretend: Path, tmp_path: Path) -> None:
    (tmp_path / "slurm-7.cancelled").touch()
    run(pretend, job(tmp_path).script())
    assert told_to_cancel(pretend) == ["7"] and not (pretend / "asked").exists()
    assert not (tmp_path / "slurm-7.cancelled").exists()


@pytest.mark.parametrize("program", ["exit 1", "while [[ ! -e $FAKE/requeued ]]; do sleep 0.1; done; exit 1"])
def test_nodes_see_that_the_first_is_lost(pretend: Path, tmp_path: Path, program: str) -> None:
    # launchers fail or hang; a fake cannot kill them as Slurm does, and ends the first node's instead
    script = job(tmp_path, "bash", "-c", program, min_nodes=1, max_nodes=2, max_retries=0).script()
    end = str(tmp_path / "slurm-7.first-ended-0")
    done = run(pretend, script, FAKE_PROCID="1", FAKE_NODES="a2", FAKE_NUM_NODES="1", FAKE_END=end)
    assert (pretend / "requeued").read_text() == "requeue\n", done.stderr
    assert b"has lost its first node, a1" in done.stdout


def test_a_cancelled_job_whose_first_node_is_lost_is_not_queued_again(pretend: Path, tmp_path: Path) -> None:
    program = f"touch {tmp_path}/slurm-7.cancelled; exit 1"
    script = job(tmp_path, "bash", "-c", program, min_nodes=1, max_nodes=2, grace_seconds=60).script()
    run(pretend, script, FAKE_PROCID="1", FAKE_NODES="a2", FAKE_END=str(tmp_path / "slurm-7.first-ended-0"))
    assert told_to_cancel(pretend) == ["7"] and not requeued(pretend)


@pytest.mark.parametrize(("code", "first_has_ended"), [(0, False), (1, True)])
def test_nodes_that_end_with_the_first_have_nothing_to_say(
    pretend: Path, tmp_path: Path, code: int, first_has_ended: bool
) -> None:
    ended = f"touch {tmp_path}/slurm-7.first-ended-0;" if first_has_ended else ""
    script = job(tmp_path, "bash", "-c", f"{ended} exit {code}", min_nodes=1, max_nodes=2).script()
    done = run(pretend, script, FAKE_PROCID="1")
    assert done.returncode == code and not requeued(pretend) and b"lost" not in done.stdout
    assert not list(tmp_path.glob("*first-ended*"))


def test_a_first_node_that_fails_is_noted_for_the_others(pretend: Path, tmp_path: Path) -> None:
    script = job(tmp_path, "bash", "-c", "exit 5", min_nodes=1, max_nodes=2).script()
    cleaning = '\nrm -f "$first_ended"-*\n'
    assert cleaning in script and run(pretend, script.replace(cleaning, "\n")).returncode == 5
    assert (tmp_path / "slurm-7.first-ended-0").exists()


def test_a_launcher_that_does_not_know_the_warning_lives_on(pretend: Path, tmp_path: Path) -> None:
    done = run(pretend, job(tmp_path, "bash", "-c", "kill -USR1 $$; kill -USR1 $PPID; sleep 0.5; echo alive").script())
    assert b"alive" in done.stdout and done.returncode == 0


def test_a_fixed_job_asks_for_all_its_nodes(tmp_path: Path) -> None:
    script = job(tmp_path, options={"cpus-per-task": "8"}, warning_seconds=90).script()
    expected = "--job-name=dlrm/train --nodes=2 --ntasks-per-node=1 --cpus-per-task=8 --signal=B:USR1@90 --requeue"
    assert options(script) == [*expected.split(), "--open-mode=append"]
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


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    wrong: list[dict[str, object]] = [{"role": "two words"}, {"name": "a/b"}, {"name": ""}, {"min_nodes": 3}]
    for changes in [*wrong, {"min_nodes": 0}, {"environment": {"A-B": "1"}}, {"environment": {"": "1"}}]:
        with pytest.raises(UserError):
            job(tmp_path, **changes)


def test_time_limits_are_read_as_slurm_does() -> None:
    day = {"1-2:03": 86400 + 7380, "1-02:03:04": 86400 + 7384, "2-0": 172800}
    for text, seconds in {"90": 5400, "1:30": 90, "1:00:01": 3601, "UNLIMITED": None, **day}.items():
        assert time_limit_seconds(text) == seconds, text
    for text in ("", "1h", "1:2:3:4", "-5", "1-", "x-1"):
        with pytest.raises(UserError, match="Slurm takes"):
            time_limit_seconds(text)


def app(**changes: object) -> AppDef:
    role: dict[str, object] = {"name": "train", "image": "", "entrypoint": "true", "num_replicas": 2}
    return AppDef("dlrm", [Role(**{**role, **changes})])  # type: ignore[arg-type]


def dryrun(application: AppDef, **cfg: object) -> SlurmJob:
    made = create_scheduler("session").submit_dryrun(application, cfg).request
    assert isinstance(made, SlurmJob)
    return made


def test_resources_and_run_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no sinfo
    for (cpu, gpu, memory), cfg, expected in (
        ((-1, -1, -1), {}, {}),
        ((0, 0, 0), {}, {}),
        ((8, 0, 100), {}, {"cpus-per-task": "8", "mem": "100M"}),
        ((96, 8, 100), {"mem": "0"}, {"cpus-per-task": "96", "gpus-per-node": "8", "mem": "0"}),
        ((-1, -1, -1), {"account": "a", "mail-type": "END"}, {"account": "a", "mail-type": "END"}),
    ):
        assert dryrun(app(resource=Resource(cpu=cpu, gpu=gpu, memMB=memory)), **cfg).options == expected


def test_a_job_is_elastic_where_the_role_is() -> None:
    assert [dryrun(app(min_replicas=least)).elastic for least in (None, 2, 1)] == [False, False, True]


def test_a_dry_run_shows_all_that_is_submitted(tmp_path: Path) -> None:
    made = dryrun(app(args=["a b"]), job_dir=str(tmp_path / "job"), time="1:00:00")
    text = str(made)
    assert made.script() in text and shlex.join(made.command) in text
    assert made.log_dir == tmp_path / "job" and f"--chdir={tmp_path}/job" in made.command


def test_the_warning_comes_before_the_grace_and_a_time_limit_leaves_time_for_it() -> None:
    assert dryrun(app(), time="4").warning_seconds == 120
    assert dryrun(app(), time="3", signal_seconds=0).warning_seconds == 0
    with pytest.raises(UserError, match="Ask for 4 minutes"):
        dryrun(app(), time="3")
    role = app(metadata={GRACE_SECONDS: 300})
    assert (dryrun(role).warning_seconds, dryrun(role).grace_seconds) == (360, 300)
    assert dryrun(role, signal_seconds=301).warning_seconds == 301
    assert (dryrun(app()).warning_seconds, dryrun(app()).grace_seconds) == (120, 0)
    with pytest.raises(UserError, match="Ask for 8 minutes"):
        dryrun(role, time="7")


@pytest.mark.parametrize("seconds", [1, 30, 300])
def test_a_warning_that_comes_too_late_to_save_is_refused(seconds: int) -> None:
    role = app(metadata={GRACE_SECONDS: 300})
    with pytest.raises(
        UserError, match=f"signal_seconds is {seconds} and grace_seconds 300: .* Set signal_seconds to 360"
    ):
        dryrun(role, signal_seconds=seconds)
    assert dryrun(role, signal_seconds=0).warning_seconds == 0, "without a warning none is late"
    assert dryrun(app(), signal_seconds=seconds).warning_seconds == seconds


def test_further_options_arrive_as_they_are(tmp_path: Path) -> None:
    text = "--exclusive --nodelist=n[1-4] --dependency=afterok:12 --begin=now+1hour --container-image='a \"b\"'"
    lines = dryrun(app(), sbatch=text).script().splitlines()
    assert [line for line in lines if line.startswith("#SBATCH ")][-5:] == [
        "#SBATCH --exclusive",
        '#SBATCH --nodelist="n[1-4]"',
        "#SBATCH --dependency=afterok:12",
        "#SBATCH --begin=now+1hour",
        r'#SBATCH --container-image="a \"b\""',
    ]
    assert dryrun(app(), sbatch="").further == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--nodelist n1", "'n1'; each option is --NAME or --NAME=VALUE"),
        ("-w n1", "'-w'; each"),
        ("--", "'--'; each"),
        ("--x;y", "each option"),
        ("--comment='a", "No closing quotation"),
        ("--nodes=3", "--nodes is decided by the job's request"),
        ("--no-requeue", "--no-requeue is decided"),
        ("--ntas=3", "--ntasks is decided"),
        ("--mem-per-cpu=1G", "--mem-per-cpu is decided"),
        ("--partition=gpu", "give -o partition=VALUE instead"),
        ("--mem=3G", "give -o mem=VALUE instead"),
        ("--exclusive --wrap=x", "--wrap is decided"),
        ("--comment='a\nb'", "give -o comment"),
        ("--licenses='a\nb'", "more than one line"),
    ],
)
def test_further_options_that_contradict_the_job_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        dryrun(app(), sbatch=text)


def test_an_application_of_two_roles_is_refused() -> None:
    two = AppDef("dlrm", [*app().roles, *app(name="reader").roles])
    with pytest.raises(UserError, match="2 roles .train, reader."):
        dryrun(two)
