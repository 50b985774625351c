"""The commands ``distembed launch``, ``status``, ``logs``, ``cancel`` and ``resume``."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.commands.shared import ConfigArgument, OverridesArgument, say
from distembed.errors import RunError, UserError
from launch.options import JobOptions, SubmitOptions, TrainingOptions
from launch.parameters import flattened

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppStatus

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
    from distembed.config import load_config
    from launch.jobs.job import LOCAL_SCHEDULERS, Job, default_request
    from launch.jobs.start import start

    loaded = load_config(config, overrides or [])
    folder = str(run_dir or Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    if submit.detach and scheduler in LOCAL_SCHEDULERS:
        raise UserError(f"--detach: jobs of {scheduler} end with the command that started them; leave it out.")
    job = Job(folder, scheduler, j, component=default_request(scheduler, folder, j))
    job = training.applied_to(asked.applied_to(job))
    job.require_new()
    start(job, loaded, dry_run=submit.dry_run, detach=submit.detach, say=say)


@app.command("status", epilog="Example: `distembed status runs/big`")
def status_command(run: RunArgument) -> None:
    """Print the state of a launched run."""
    job = _load(run)
    from torchx.runner import get_runner

    from launch.jobs.follow import state_text
    from launch.jobs.job import LOCAL_SCHEDULERS

    with get_runner() as runner:
        found = _status(job, runner)
    state = (
        state_text(found) if found else "launched on this machine" if job.scheduler in LOCAL_SCHEDULERS else "unknown"
    )
    say(f"{job.run_dir}: {state} ({job.scheduler} {job.app_id}, submission {len(job.submissions)})")
    for line in _progress(Path(job.run_dir)):
        say(line)
    if state == "unknown":
        raise RunError(f"{job.scheduler} knows nothing of {job.app_id}, or nothing any longer.")


@app.command("logs", epilog="Example: `distembed logs runs/big --node 1 --follow`")
def logs_command(
    run: RunArgument,
    node: Annotated[int | None, typer.Option(min=0, help="Number of the only node to show.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
) -> None:
    """Print what the nodes of a launched run have printed."""
    job = _load(run)
    from torchx.runner import get_runner

    from launch.jobs.follow import Watch, node_lines
    from launch.jobs.job import LOCAL_SCHEDULERS

    if job.scheduler in LOCAL_SCHEDULERS:
        raise UserError(f"logs of {job.scheduler} are files, in {job.folder / 'logs'}.")
    handle, nodes = job.handle, job.nodes
    if node is not None and node not in nodes:
        raise UserError(f"--node is {node}; the nodes of {run} are 0 to {len(nodes) - 1}.")
    with get_runner() as runner:
        has_ended = Watch(runner, handle, say).has_ended if follow else None
        for line in node_lines(job, runner, nodes if node is None else [node], has_ended):
            say(line)


@app.command("cancel", epilog="Example: `distembed cancel runs/big`")
def cancel_command(run: RunArgument) -> None:
    """End a launched run; `distembed resume` continues it."""
    job = _load(run)
    from torchx.runner import get_runner

    from launch.jobs.follow import state_text
    from launch.jobs.job import LOCAL_SCHEDULERS, asking

    if job.scheduler in LOCAL_SCHEDULERS:
        raise UserError(f"{job.run_dir} runs under the command that launched it: press Ctrl-C there.")
    with get_runner() as runner:
        found = _status(job, runner)
        if found is None or found.is_terminal():
            raise UserError(f"{job.run_dir} runs no longer: {'unknown' if found is None else state_text(found)}.")
        with asking(job.scheduler):
            runner.cancel(job.handle)
    say(f"told to end: {job.scheduler} {job.app_id}")


@app.command("resume", epilog="Example: `distembed resume runs/big -o time=48:00:00`")
@flattened
def resume_command(
    run: RunArgument, *, j: Annotated[str | None, _SHAPE] = None, asked: JobOptions, submit: SubmitOptions
) -> None:
    """Check and submit a launched run again, with what is changed here; it resumes from its newest checkpoint."""
    job = _load(run)
    from torchx.runner import get_runner

    from distembed.config import load_config
    from launch.jobs.follow import state_text
    from launch.jobs.job import LOCAL_SCHEDULERS
    from launch.jobs.start import start

    if job.submissions and job.scheduler not in LOCAL_SCHEDULERS:
        with get_runner() as runner:
            found = _status(job, runner)
        if found is not None and not found.is_terminal():
            raise UserError(f"{job.run_dir} is {state_text(found)} ({job.app_id}); cancel it first, or let it be.")
    job = asked.applied_to(job, j)
    start(job, load_config(job.folder / "config.yaml"), dry_run=submit.dry_run, detach=submit.detach, say=say)


def _load(run: str) -> "Job":
    """Returns the job of a run; see :func:`launch.jobs.job.load_job`."""
    _require_torchx()
    from launch.jobs.job import load_job

    return load_job(run)


def _status(job: "Job", runner: "Runner") -> "AppStatus | None":
    """Returns the state of the newest submission; None where the scheduler knows no such job."""
    from launch.jobs.job import asking

    with asking(job.scheduler):
        return runner.status(job.handle)


def _require_torchx() -> None:
    """Makes sure that TorchX is installed.

    Raises:
        UserError: TorchX cannot be imported; the message says how to install it.
    """
    try:
        import torchx.runner  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"launching needs TorchX, and it cannot be imported ({error}): run tools/setup.sh launch."
        ) from None


def _progress(run: Path) -> list[str]:
    """Returns lines that say how far a run has come, from its own record."""
    import json

    lines = []
    try:
        lines.append(f"run: {json.loads((run / 'run.json').read_text())['status']}")
        last = (run / "metrics.jsonl").read_text().splitlines()[-1]
        lines.append(f"last metrics: {last}")
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return lines
