"""The commands ``distembed launch``, ``status``, ``logs``, ``cancel`` and ``resume``; their options in groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.base.errors import RunError, UserError
from distembed.commands.shared import ConfigArgument, OverridesArgument, flattened, say
from distembed.launch.apps.request import ElasticRequest

if TYPE_CHECKING:
    from distembed.launch.jobs.job import Job

app = typer.Typer()

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under `runs`.")]
_SHAPE = typer.Option("-j", help="[MIN:]NODESxPROCESSES: 4x8, or 2:4x8 to continue with 2 nodes.")


@dataclass(frozen=True)
class JobOptions:
    """Options of the scheduler and resources of the nodes for one submission; None changes nothing."""

    options: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="Of the scheduler: `-o partition=gpu -o time=12:00:00`."),
    ] = None
    resource: Annotated[
        str | None,
        typer.Option("--resource", help="Named resource of a node, such as gpu_8_h100, in place of its numbers."),
    ] = None
    cpus: Annotated[int | None, typer.Option("--cpus", help="CPUs of a node.")] = None
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs of a node; one a process where --gpu is given.")] = (
        None
    )
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", help="Device of each process, where --resource does not say, as for the plan: `h100-80gb`."
        ),
    ] = None
    memory_mb: Annotated[int | None, typer.Option("--memory-mb", help="Memory of a node in MB.")] = None
    image: Annotated[
        str | None, typer.Option("--image", help="Container image that holds distembed; that of tools/Dockerfile.")
    ] = None
    env: Annotated[
        list[str] | None, typer.Option("--env", help="Environment variable, NAME=VALUE; may be repeated.")
    ] = None

    def applied_to(self, job: "Job", j: str | None = None) -> "Job":
        """Returns the job with these options, on other nodes and processes where ``j`` is given."""
        return job.changed(
            j,
            _pairs("--option", self.options),
            self.gpu,
            h=self.resource,
            cpu=self.cpus,
            gpu=self.gpus,
            memMB=self.memory_mb,
            image=self.image,
            env=_pairs("--env", self.env),
        )


@dataclass(frozen=True)
class TrainingOptions:
    """How a job's processes are started and started again, for all submissions."""

    mount: Annotated[
        list[str] | None, typer.Option(help="Mount of a container: type=bind,src=/host,dst=/container.")
    ] = None
    max_restarts: Annotated[int, typer.Option(help="How often dead processes are started again in place.")] = (
        ElasticRequest.max_restarts
    )
    max_retries: Annotated[int, typer.Option(help="How often the whole job is started again.")] = (
        ElasticRequest.max_retries
    )
    grace_seconds: Annotated[
        int, typer.Option(help="How long processes may take to save their state when the job is asked to end.")
    ] = ElasticRequest.grace_seconds
    rdzv_port: Annotated[
        int | None,
        typer.Option(help="Port of the first node where nodes meet; one from 20000 to 29999 by the run folder."),
    ] = None
    python: Annotated[
        str | None, typer.Option(help="Interpreter on the nodes; this one, or `python` in a container.")
    ] = None

    def applied_to(self, job: "Job") -> "Job":
        """Returns the job with these options."""
        return job.changed(
            mounts=[part for mount in self.mount or [] for part in mount.split(",")],
            max_restarts=self.max_restarts,
            max_retries=self.max_retries,
            grace_seconds=self.grace_seconds,
            rdzv_port=self.rdzv_port,
            python=self.python,
        )


@dataclass(frozen=True)
class SubmitOptions:
    """Whether a job is submitted, and then followed."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and the plan.")] = False
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the job.")] = False


@app.command(
    "launch",
    epilog="Example: `distembed launch configs/criteo_kaggle.yaml data.path=/shared/criteo -s slurm -j 4x8 "
    "--resource gpu_8_h100 --run-dir /shared/runs/big -o partition=gpu -o time=24:00:00`",
)
@flattened
def launch_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    scheduler: Annotated[
        str, typer.Option("--scheduler", "-s", help="local_cwd, local_docker, slurm, kubernetes, aws_batch or ray.")
    ] = "local_cwd",
    j: Annotated[str, _SHAPE] = "1x1",
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Run folder, which every node must see; runs/NAME-TIME.")
    ] = None,
    job_options: JobOptions,
    training: TrainingOptions,
    submit: SubmitOptions,
) -> None:
    """Train on a cluster: check, keep all that is needed to repeat it, submit, and follow the logs.

    Exit code 3 where the model does not fit or a check fails; nothing is submitted then.
    """
    _require_torchx()
    from distembed.launch.jobs.asking import require_package

    require_package(scheduler, dry_run=submit.dry_run)
    from distembed.launch.jobs.job import Job, default_request
    from distembed.training.config import load_config
    from distembed.training.run_folder.folder import default_run_folder

    loaded = load_config(config, overrides or [])
    folder = str(run_dir or default_run_folder(config.stem))
    job = Job(folder, scheduler, j, component=default_request(scheduler, folder, j))
    job = training.applied_to(job_options.applied_to(job))
    from distembed.launch.jobs.start import launch_job

    launch_job(job, loaded, dry_run=submit.dry_run, detach=submit.detach, say=say)


@app.command("status", epilog="Example: `distembed status runs/big`")
def status_command(run: RunArgument) -> None:
    """Print the state of a launched run."""
    job = _load(run)
    from torchx.runner import get_runner

    from distembed.launch.jobs.follow import job_state, run_progress, state_text
    from distembed.launch.jobs.job import LOCAL_SCHEDULERS

    with get_runner() as runner:
        state = job_state(job, runner)
    is_here = job.scheduler in LOCAL_SCHEDULERS  # then only the command that launched it knows its state
    text = "launched on this machine" if state is None and is_here else state_text(state)
    say(f"{job.run_dir}: {text} ({job.scheduler} {job.app_id}, submission {len(job.submissions)})")
    for line in run_progress(Path(job.run_dir)):
        say(line)
    if state is None and not is_here:
        raise RunError(f"{job.scheduler} knows nothing of {job.app_id}, or nothing any longer.")


@app.command("logs", epilog="Example: `distembed logs runs/big --node 1 --follow`")
def logs_command(
    run: RunArgument,
    node: Annotated[int | None, typer.Option(min=0, help="Number of the only node to show.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
) -> None:
    """Print the output of the nodes of a launched run."""
    job = _load(run)
    from distembed.launch.jobs.follow import job_log_lines

    for line in job_log_lines(job, node, follow=follow, say=say):
        say(line)


@app.command("cancel", epilog="Example: `distembed cancel runs/big`")
def cancel_command(run: RunArgument) -> None:
    """End a launched run; `distembed resume` continues it."""
    job = _load(run)
    from distembed.launch.jobs.follow import cancel_job

    cancel_job(job)
    say(f"told to end: {job.scheduler} {job.app_id}")


@app.command("resume", epilog="Example: `distembed resume runs/big -o time=48:00:00`")
@flattened
def resume_command(
    run: RunArgument, *, j: Annotated[str | None, _SHAPE] = None, job_options: JobOptions, submit: SubmitOptions
) -> None:
    """Check and submit a launched run again, with these changes; it resumes from its newest checkpoint."""
    job = _load(run)
    from distembed.launch.jobs.asking import require_package

    require_package(job.scheduler, dry_run=submit.dry_run)
    from distembed.launch.jobs.start import resume_job

    resume_job(job_options.applied_to(job, j), dry_run=submit.dry_run, detach=submit.detach, say=say)


def _load(run: str) -> "Job":
    """Returns the job of a run, with the outcome of its newest submission."""
    _require_torchx()
    from distembed.launch.jobs.job import load_job, settled

    return settled(load_job(run))


def _require_torchx() -> None:
    """Makes sure that TorchX is installed."""
    try:
        import torchx.runner  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"launching needs TorchX, which cannot be imported ({error}): run `distembed doctor --fix`."
        ) from None


def _pairs(option: str, texts: Sequence[str] | None) -> Mapping[str, str]:
    """Returns the values by name that the texts ``NAME=VALUE`` of an option give."""
    pairs = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"{option} is {text!r}; give NAME=VALUE.")
        pairs[name] = value
    return pairs
