"""What TorchX's application becomes on Slurm: resources, run options, the time to save, and further options."""

import re
import shlex
from pathlib import Path

import pytest
from torchx.specs import AppDef, Resource, Role

from distembed.base.errors import UserError
from launch.apps.roles import GRACE_SECONDS
from launch.schedulers.slurm.scheduler import create_scheduler
from launch.schedulers.slurm.script import SlurmJob


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
