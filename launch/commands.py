"""The commands ``distembed launch``, ``status``, ``logs``, ``cancel`` and ``resume``."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distembed.errors import RunError, UserError
from launch.shape import parse_shape

if TYPE_CHECKING:
    from torchx.runner import Runner
    from torchx.specs import AppStatus

    from distembed.config import Config
    from distembed.doctor import Finding
    from launch.job import Job

Say = Callable[[str], None]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or its name under `runs`.")]
_ROLE = "train"


def add_commands(app: typer.Typer, say: Say) -> None:
    """Adds the commands to another command.

    Args:
        app: to add them to.
        say: prints a line, as it is.
    """

    @app.command(
        epilog="Example: `distembed launch configs/criteo_kaggle.yaml data.path=criteo -s slurm -j 4x8 --gpu h100-80gb "
        "--run-dir runs/big -o partition=gpu -o time=24:00:00`"
    )
    def launch(
        config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")],
        overrides: Annotated[
            list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's.")
        ] = None,
        scheduler: Annotated[
            str, typer.Option("--scheduler", "-s", help="local_cwd, local_docker, slurm, kubernetes, aws_batch or ray.")
        ] = "local_cwd",
        j: Annotated[
            str, typer.Option("-j", help="[MIN:]NODESxPROCESSES: 4x8, or 2:4x8 to go on with 2 nodes.")
        ] = "1x1",
        run_dir: Annotated[
            Path | None, typer.Option("--run-dir", help="Run folder, which every node must see; runs/NAME-TIME.")
        ] = None,
        options: Annotated[
            list[str] | None,
            typer.Option("--option", "-o", help="Of the scheduler: `-o partition=gpu -o time=12:00:00`."),
        ] = None,
        gpu: Annotated[
            str | None, typer.Option(help="Device of each process, for the plan: `h100-80gb`; see `distembed plan`.")
        ] = None,
        resource: Annotated[
            str | None, typer.Option("--resource", help="Named resource of a node, in place of the next three.")
        ] = None,
        cpus: Annotated[int | None, typer.Option(help="CPUs of a node.")] = None,
        gpus: Annotated[int | None, typer.Option(help="GPUs of a node; one a process where --gpu is given.")] = None,
        memory_mb: Annotated[int | None, typer.Option(help="Memory of a node in MB.")] = None,
        image: Annotated[str, typer.Option(help="Container image that holds distembed.")] = "",
        env: Annotated[
            list[str] | None, typer.Option(help="Environment variable, NAME=VALUE; may be repeated.")
        ] = None,
        mount: Annotated[
            list[str] | None, typer.Option(help="Mount of a container: type=bind,src=/host,dst=/container.")
        ] = None,
        max_restarts: Annotated[int, typer.Option(help="How often dead processes are started again in place.")] = 3,
        max_retries: Annotated[int, typer.Option(help="How often the whole job is started again.")] = 0,
        rdzv_port: Annotated[
            int, typer.Option(help="Port of the first node where nodes meet; another for each job that shares a node.")
        ] = 29500,
        python: Annotated[str, typer.Option(help="Interpreter on the nodes.")] = "python",
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Print what would be submitted, and the plan.")
        ] = False,
        detach: Annotated[bool, typer.Option("--detach", help="Do not follow the job.")] = False,
    ) -> None:
        """Train on a cluster: check, keep what is needed to repeat it, submit, and follow the logs.

        Exit code 3 where the model does not fit or a check fails; nothing is submitted then.
        """
        from distembed.config import load_config
        from launch.job import LOCAL, Job

        loaded = load_config(config, overrides or [])
        folder = run_dir or Path("runs") / f"{config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
        processes = parse_shape(j).processes
        component: dict[str, Any] = {
            "h": resource,
            "cpu": cpus,
            "gpu": gpus if gpus is not None or gpu is None or resource is not None else processes,
            "memMB": memory_mb,
            "image": image,
            "env": _pairs("--env", env or []),
            "mounts": [part for one in mount or [] for part in one.split(",")] or None,
            "max_restarts": max_restarts,
            "max_retries": max_retries,
            "rdzv_port": rdzv_port,
            "python": python,
        }
        job = Job(str(folder), scheduler, j, _pairs("--option", options or []), component)
        if detach and scheduler in LOCAL:
            raise UserError(f"--detach: jobs of {scheduler} end with the command that started them; leave it out.")
        _launch(job, loaded, gpu, dry_run=dry_run, detach=detach, say=say)

    @app.command(epilog="Example: `distembed status runs/big`")
    def status(run: RunArgument) -> None:
        """Say how a launched run does."""
        from launch.job import find_job

        job = find_job(run)
        with _runner() as runner:
            found = runner.status(job.handle)
        if found is None:
            raise RunError(f"{job.scheduler} knows nothing of {job.app_id}, which was submitted for {job.run_dir}.")
        say(f"{job.run_dir}: {_state(found)} ({job.scheduler} {job.app_id}, submission {len(job.submissions)})")
        for line in _progress(Path(job.run_dir)):
            say(line)

    @app.command(epilog="Example: `distembed logs runs/big --node 1 --follow`")
    def logs(
        run: RunArgument,
        node: Annotated[int | None, typer.Option(min=0, help="Number of the only node to show.")] = None,
        follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    ) -> None:
        """Print what the nodes of a launched run have printed."""
        from launch.follow import node_lines
        from launch.job import find_job

        job = find_job(run)
        nodes = range(parse_shape(job.j).max_nodes)
        if node is not None and node not in nodes:
            raise UserError(f"--node is {node}; the nodes of {run} are 0 to {len(nodes) - 1}.")
        with _runner() as runner:
            for line in node_lines(runner, job.handle, _ROLE, nodes if node is None else [node], should_tail=follow):
                say(line)

    @app.command(epilog="Example: `distembed cancel runs/big`")
    def cancel(run: RunArgument) -> None:
        """End a launched run; `distembed resume` goes on with it."""
        from launch.job import find_job

        job = find_job(run)
        with _runner() as runner:
            runner.cancel(job.handle)
        say(f"cancelled: {job.scheduler} {job.app_id}")

    @app.command(epilog="Example: `distembed resume runs/big`")
    def resume(
        run: RunArgument,
        detach: Annotated[bool, typer.Option("--detach", help="Do not follow the job.")] = False,
    ) -> None:
        """Submit a launched run again as it was; it goes on from its newest checkpoint."""
        from launch.job import find_job

        job = find_job(run)
        with _runner() as runner:
            found = runner.status(job.handle) if job.submissions else None
            if found is not None and not found.is_terminal():
                raise UserError(f"{job.run_dir} is {_state(found)} ({job.app_id}); cancel it first, or let it be.")
            _submit(job, runner, detach=detach, say=say)


def _launch(job: "Job", config: "Config", gpu: str | None, *, dry_run: bool, detach: bool, say: Say) -> None:
    from distembed.fit import find_fit
    from launch import preflight
    from launch.job import snapshot

    shape, folder = parse_shape(job.j), Path(job.run_dir)
    if (folder / "config.yaml").exists() or (job.folder / "job.json").exists():
        raise UserError(
            f"--run-dir {folder} holds a run already; give another, or go on with `distembed resume {folder}`."
        )
    role = job.app().roles[0]
    fit = find_fit(config, _cluster(shape.max_nodes, shape.processes, gpu, role.resource.memMB))
    least = fit
    if shape.elastic:
        least = find_fit(config, dataclasses.replace(fit.cluster, nodes=shape.min_nodes))
    findings = [
        *preflight.check_trio(),
        preflight.check_fit(least, shape),
        preflight.check_dataset(config),
        preflight.check_writable("run folder", folder),
        preflight.check_checkpoints(config, folder),
    ]
    if job.scheduler == "slurm":
        findings.append(preflight.check_partition(shape, role, job.options))
    _report(findings, say)
    plan = {**fit.as_json(), "made_for": _made_for(config, fit)}
    with _runner() as runner:
        if dry_run:
            from distembed.planning import describe_plan

            say(str(job.dry_run(runner)))
            assert fit.planned is not None
            say(f"plan: {describe_plan(fit.planned.plan)}")
            return
        job.dry_run(runner)  # refused before anything is written
        snapshot(job.folder, _with_absolute_paths(config).to_yaml(), plan)
        job.save()
        _submit(job, runner, detach=detach, say=say)


def _with_absolute_paths(config: "Config") -> "Config":
    """As the nodes read it, whose working folder may be another one."""
    place = config.train.checkpoint_dir
    if place is not None and "://" not in place:
        place = str(Path(place).absolute())
    data = dataclasses.replace(config.data, path=str(Path(config.data.require_path()).absolute()))
    return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, checkpoint_dir=place))


def _made_for(config: "Config", fit: Any) -> dict[str, Any]:
    from distembed.training.build import made_for

    cluster = fit.cluster
    return made_for(
        config.model, config.train, fit.tables, cluster.world_size, cluster.gpus, cluster.device.kind
    ).as_json()


def _cluster(nodes: int, processes: int, gpu: str | None, memory_mb: int) -> Any:
    """What is planned for: the named device, or, without one, nodes of CPUs with so much memory."""
    from distembed.planning.cluster import Cluster
    from distembed.planning.devices import DEVICES, find_device

    if gpu is not None:
        return Cluster(find_device(gpu), nodes, processes)
    cpu = next(device for device in DEVICES.values() if device.kind == "cpu")
    return Cluster(dataclasses.replace(cpu, name="cpu", memory_bytes=memory_mb * 2**20), nodes, processes)


def _report(findings: Sequence["Finding"], say: Say) -> None:
    """Says what was found.

    Raises:
        typer.Exit: something is wrong.
    """
    for finding in findings:
        remedy = f" ({finding.remedy})" if finding.status == "wrong" and finding.remedy else ""
        say(f"{finding.status:5}  {finding.subject}: {finding.detail}{remedy}")
    if any(finding.status == "wrong" for finding in findings):
        say("nothing was submitted")
        raise typer.Exit(3)


def _submit(job: "Job", runner: "Runner", *, detach: bool, say: Say) -> None:
    from torchx.specs import AppState

    from launch.follow import first_failure, follow

    started = time.time()
    job = job.submit(runner)
    say(f"submitted: {job.scheduler} {job.app_id}, run folder {job.run_dir}")
    if detach:
        say(f"follow it with `distembed logs {job.run_dir} --follow`")
        return
    ended = follow(runner, job.handle, _ROLE, parse_shape(job.j).max_nodes, say)
    if ended is not None and ended.state == AppState.SUCCEEDED:
        say(f"run {job.run_dir}")
        return
    failure = first_failure(job.folder / "logs", since=started - 1)
    if failure is not None:
        say(f"first to fail: {failure.message} ({failure.where})")
        say(failure.traceback.rstrip())
    raise RunError(
        f"the job {job.app_id} has ended: {'its state is not known' if ended is None else _state(ended)}. Logs are in "
        f"{job.folder / 'logs'}; go on with `distembed resume {job.run_dir}`."
    )


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


def _state(status: "AppStatus") -> str:
    msg = f": {status.msg}" if status.msg else ""
    return f"{status.state.name.lower()}{msg}"


def _pairs(option: str, texts: Sequence[str]) -> Mapping[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"{option} is {text!r}; give NAME=VALUE.")
        pairs[name] = value
    return pairs


def _runner() -> "Runner":
    """TorchX's, with our schedulers.

    Raises:
        UserError: TorchX is not installed.
    """
    try:
        from torchx.runner import get_runner
    except ImportError as error:
        raise UserError(
            f"launching needs TorchX, and it cannot be imported ({error}): run tools/setup.sh launch."
        ) from None
    return get_runner()
