"""The commands ``distembed launch``, ``status``, ``logs``, ``cancel`` and ``resume``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.base.errors import RunError, UserError
from distembed.commands.shared import ConfigArgument, OverridesArgument, flattened, say
from launch.options import JobOptions, SubmitOptions, TrainingOptions

if TYPE_CHECKING:
    from launch.jobs.job import Job

app = typer.Typer()

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under `runs`.")]
_SHAPE = typer.Option("-j", help="[MIN:]NODESxPROCESSES: 4x8, or 2:4x8 to continue with 2 nodes.")


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
    asked: JobOptions,
    training: TrainingOptions,
    submit: SubmitOptions,
) -> None:
    """Train on a cluster: check, keep what is needed to repeat it, submit, and follow the logs.

    Exit code 3 where the model does not fit or a check fails; nothing is submitted then.
    """
    _require_torchx()
    from launch.jobs.asking import require_package

    require_package(scheduler, dry_run=submit.dry_run)
    from distembed.training.config import load_config
    from distembed.training.run_folder.folder import default_run_folder
    from launch.jobs.job import Job, default_request

    loaded = load_config(config, overrides or [])
    folder = str(run_dir or default_run_folder(config.stem))
    job = Job(folder, scheduler, j, component=default_request(scheduler, folder, j))
    job = training.applied_to(asked.applied_to(job))
    from launch.jobs.start import launch_job

    launch_job(job, loaded, dry_run=submit.dry_run, detach=submit.detach, say=say)


@app.command("status", epilog="Example: `distembed status runs/big`")
def status_command(run: RunArgument) -> None:
    """Print the state of a launched run."""
    job = _load(run)
    from launch.jobs.control import job_state, run_progress

    state = job_state(job)
    say(f"{job.run_dir}: {state.text} ({job.scheduler} {job.app_id}, submission {len(job.submissions)})")
    for line in run_progress(Path(job.run_dir)):
        say(line)
    if not state.is_known:
        raise RunError(f"{job.scheduler} knows nothing of {job.app_id}, or nothing any longer.")


@app.command("logs", epilog="Example: `distembed logs runs/big --node 1 --follow`")
def logs_command(
    run: RunArgument,
    node: Annotated[int | None, typer.Option(min=0, help="Number of the only node to show.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
) -> None:
    """Print what the nodes of a launched run have printed."""
    job = _load(run)
    from launch.jobs.control import job_log_lines

    for line in job_log_lines(job, node, follow=follow, say=say):
        say(line)


@app.command("cancel", epilog="Example: `distembed cancel runs/big`")
def cancel_command(run: RunArgument) -> None:
    """End a launched run; `distembed resume` continues it."""
    job = _load(run)
    from launch.jobs.control import cancel_job

    cancel_job(job)
    say(f"told to end: {job.scheduler} {job.app_id}")


@app.command("resume", epilog="Example: `distembed resume runs/big -o time=48:00:00`")
@flattened
def resume_command(
    run: RunArgument, *, j: Annotated[str | None, _SHAPE] = None, asked: JobOptions, submit: SubmitOptions
) -> None:
    """Check and submit a launched run again, with what is changed here; it resumes from its newest checkpoint."""
    job = _load(run)
    from launch.jobs.asking import require_package

    require_package(job.scheduler, dry_run=submit.dry_run)
    from launch.jobs.start import resume_job

    resume_job(asked.applied_to(job, j), dry_run=submit.dry_run, detach=submit.detach, say=say)


def _load(run: str) -> "Job":
    """Returns the job of a run, as far as its scheduler has it; see :func:`launch.jobs.job.load_job`."""
    _require_torchx()
    from launch.jobs.job import load_job
    from launch.jobs.pending import settled

    return settled(load_job(run))


def _require_torchx() -> None:
    """Makes sure that TorchX is installed.

    Raises:
        UserError: TorchX cannot be imported; the message says how to install it.
    """
    try:
        import torchx.runner  # noqa: F401
    except ImportError as error:
        raise UserError(f"launching needs TorchX, and it cannot be imported ({error}): run tools/setup.sh.") from None
