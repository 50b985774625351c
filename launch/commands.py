"""The commands ``distembed launch``, ``status``, ``logs``, ``cancel`` and ``resume``."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.errors import RunError, UserError

if TYPE_CHECKING:
    from launch.jobs.job import Job

Say = Callable[[str], None]
_SHAPE = typer.Option("-j", help="[MIN:]NODESxPROCESSES: 4x8, or 2:4x8 to go on with 2 nodes.")
_OPTIONS = typer.Option("--option", "-o", help="Of the scheduler: `-o partition=gpu -o time=12:00:00`.")
_RESOURCE = typer.Option("--resource", help="Named resource of a node, such as gpu_8_h100, in place of its numbers.")
_CPUS = typer.Option("--cpus", help="CPUs of a node.")
_GPUS = typer.Option("--gpus", help="GPUs of a node; one a process where --gpu is given.")
_GPU = typer.Option(
    "--gpu", help="Device of each process, where --resource does not say, as for the plan: `h100-80gb`."
)
_MEMORY = typer.Option("--memory-mb", help="Memory of a node in MB.")
_IMAGE = typer.Option("--image", help="Container image that holds distembed.")
_ENV = typer.Option("--env", help="Environment variable, NAME=VALUE; may be repeated.")
_DRY_RUN = typer.Option("--dry-run", help="Print what would be submitted, and the plan.")
_DETACH = typer.Option("--detach", help="Do not follow the job.")
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under `runs`.")]


def add_commands(app: typer.Typer, say: Say) -> None:
    """Adds the commands to another command.

    Args:
        app: to add them to.
        say: prints a line, as it is.
    """

    @app.command(
        epilog="Example: `distembed launch configs/criteo_kaggle.yaml data.path=/shared/criteo -s slurm -j 4x8 "
        "--resource gpu_8_h100 --run-dir /shared/runs/big -o partition=gpu -o time=24:00:00`"
    )
    def launch(
        config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")],
        overrides: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
        ] = None,
        scheduler: Annotated[
            str, typer.Option("--scheduler", "-s", help="local_cwd, local_docker, slurm, kubernetes, aws_batch or ray.")
        ] = "local_cwd",
        j: Annotated[str, _SHAPE] = "1x1",
        run_dir: Annotated[
            Path | None, typer.Option("--run-dir", help="Run folder, which every node must see; runs/NAME-TIME.")
        ] = None,
        options: Annotated[list[str] | None, _OPTIONS] = None,
        resource: Annotated[str | None, _RESOURCE] = None,
        cpus: Annotated[int | None, _CPUS] = None,
        gpus: Annotated[int | None, _GPUS] = None,
        gpu: Annotated[str | None, _GPU] = None,
        memory_mb: Annotated[int | None, _MEMORY] = None,
        image: Annotated[str | None, _IMAGE] = None,
        env: Annotated[list[str] | None, _ENV] = None,
        mount: Annotated[
            list[str] | None, typer.Option(help="Mount of a container: type=bind,src=/host,dst=/container.")
        ] = None,
        max_restarts: Annotated[int, typer.Option(help="How often dead processes are started again in place.")] = 3,
        max_retries: Annotated[int, typer.Option(help="How often the whole job is started again.")] = 0,
        grace_seconds: Annotated[
            int, typer.Option(help="How long processes may take to save their state when the job is told to end.")
        ] = 120,
        rdzv_port: Annotated[
            int | None,
            typer.Option(help="Port of the first node where nodes meet; one from 20000 to 29999 by the run folder."),
        ] = None,
        python: Annotated[
            str | None, typer.Option(help="Interpreter on the nodes; this one, or `python` in a container.")
        ] = None,
        dry_run: Annotated[bool, _DRY_RUN] = False,
        detach: Annotated[bool, _DETACH] = False,
    ) -> None:
        """Train on a cluster: check, keep what is needed to repeat it, submit, and follow the logs.

        Exit code 3 where the model does not fit or a check fails; nothing is submitted then.
        """
        _require_torchx()
        from distembed.config import load_config
        from launch.jobs.job import LOCAL, Job, default_arguments
        from launch.jobs.start import start

        loaded = load_config(config, overrides or [])
        folder = str(run_dir or Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}")
        if detach and scheduler in LOCAL:
            raise UserError(f"--detach: jobs of {scheduler} end with the command that started them; leave it out.")
        job = Job(folder, scheduler, j, component=default_arguments(scheduler, folder, j)).changed(
            options=_pairs("--option", options),
            device=gpu,
            h=resource,
            cpu=cpus,
            gpu=gpus,
            memMB=memory_mb,
            image=image,
            env=_pairs("--env", env),
            mounts=[part for one in mount or [] for part in one.split(",")],
            max_restarts=max_restarts,
            max_retries=max_retries,
            grace_seconds=grace_seconds,
            rdzv_port=rdzv_port,
            python=python,
        )
        job.require_new()
        start(job, loaded, dry_run=dry_run, detach=detach, say=say)

    @app.command(epilog="Example: `distembed status runs/big`")
    def status(run: RunArgument) -> None:
        """Say how a launched run does."""
        job = _find(run)
        from torchx.runner import get_runner

        from launch.jobs.follow import state_text
        from launch.jobs.job import LOCAL, asking

        with get_runner() as runner, asking(job.scheduler):
            found = runner.status(job.handle)
        state = state_text(found) if found else "launched on this machine" if job.scheduler in LOCAL else "unknown"
        say(f"{job.run_dir}: {state} ({job.scheduler} {job.app_id}, submission {len(job.submissions)})")
        for line in _progress(Path(job.run_dir)):
            say(line)
        if state == "unknown":
            raise RunError(f"{job.scheduler} knows nothing of {job.app_id}, or nothing any longer.")

    @app.command(epilog="Example: `distembed logs runs/big --node 1 --follow`")
    def logs(
        run: RunArgument,
        node: Annotated[int | None, typer.Option(min=0, help="Number of the only node to show.")] = None,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    ) -> None:
        """Print what the nodes of a launched run have printed."""
        job = _find(run)
        from torchx.runner import get_runner

        from launch.jobs.follow import Watch, node_lines
        from launch.jobs.job import LOCAL

        if job.scheduler in LOCAL:
            raise UserError(f"logs of {job.scheduler} are files, in {job.folder / 'logs'}.")
        handle, nodes = job.handle, job.nodes
        if node is not None and node not in nodes:
            raise UserError(f"--node is {node}; the nodes of {run} are 0 to {len(nodes) - 1}.")
        with get_runner() as runner:
            has_ended = Watch(runner, handle, say).has_ended if follow else None
            for line in node_lines(job, runner, nodes if node is None else [node], has_ended):
                say(line)

    @app.command(epilog="Example: `distembed cancel runs/big`")
    def cancel(run: RunArgument) -> None:
        """End a launched run; `distembed resume` goes on with it."""
        job = _find(run)
        from torchx.runner import get_runner

        from launch.jobs.follow import state_text
        from launch.jobs.job import LOCAL, asking

        if job.scheduler in LOCAL:
            raise UserError(f"{job.run_dir} runs under the command that launched it: press Ctrl-C there.")
        with get_runner() as runner, asking(job.scheduler):
            found = runner.status(job.handle)
            if found is None or found.is_terminal():
                raise UserError(f"{job.run_dir} runs no longer: {'unknown' if found is None else state_text(found)}.")
            runner.cancel(job.handle)
        say(f"told to end: {job.scheduler} {job.app_id}")

    @app.command(epilog="Example: `distembed resume runs/big -o time=48:00:00`")
    def resume(
        run: RunArgument,
        j: Annotated[str | None, _SHAPE] = None,
        options: Annotated[list[str] | None, _OPTIONS] = None,
        resource: Annotated[str | None, _RESOURCE] = None,
        cpus: Annotated[int | None, _CPUS] = None,
        gpus: Annotated[int | None, _GPUS] = None,
        gpu: Annotated[str | None, _GPU] = None,
        memory_mb: Annotated[int | None, _MEMORY] = None,
        image: Annotated[str | None, _IMAGE] = None,
        env: Annotated[list[str] | None, _ENV] = None,
        dry_run: Annotated[bool, _DRY_RUN] = False,
        detach: Annotated[bool, _DETACH] = False,
    ) -> None:
        """Check and submit a launched run again, changed as said here; it goes on from its newest checkpoint."""
        job = _find(run)
        from torchx.runner import get_runner

        from distembed.config import load_config
        from launch.jobs.follow import state_text
        from launch.jobs.job import LOCAL, asking
        from launch.jobs.start import start

        if job.submissions and job.scheduler not in LOCAL:
            with get_runner() as runner, asking(job.scheduler):
                found = runner.status(job.handle)
            if found is not None and not found.is_terminal():
                raise UserError(f"{job.run_dir} is {state_text(found)} ({job.app_id}); cancel it first, or let it be.")
        changes = {"h": resource, "cpu": cpus, "gpu": gpus, "memMB": memory_mb, "image": image}
        job = job.changed(j, _pairs("--option", options), gpu, env=_pairs("--env", env), **changes)
        start(job, load_config(job.folder / "config.yaml"), dry_run=dry_run, detach=detach, say=say)


def _find(run: str) -> "Job":
    _require_torchx()
    from launch.jobs.job import load_job

    return load_job(run)


def _require_torchx() -> None:
    """Says what to do where TorchX is not installed.

    Raises:
        UserError: It is not.
    """
    try:
        import torchx.runner  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"launching needs TorchX, and it cannot be imported ({error}): run tools/setup.sh launch."
        ) from None


def _progress(run: Path) -> list[str]:
    """How far a run has come, from its own record."""
    import json

    lines = []
    try:
        lines.append(f"run: {json.loads((run / 'run.json').read_text())['status']}")
        last = (run / "metrics.jsonl").read_text().splitlines()[-1]
        lines.append(f"last metrics: {last}")
    except (OSError, ValueError, KeyError, IndexError):
        pass
    return lines


def _pairs(option: str, texts: Sequence[str] | None) -> Mapping[str, str]:
    pairs = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"{option} is {text!r}; give NAME=VALUE.")
        pairs[name] = value
    return pairs
