"""The command ``distembed plan``: whether a config fits a cluster."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from distembed.commands.shared import ConfigArgument, OverridesArgument, console, errors
from distembed.units import parse_bytes

app = typer.Typer()


@app.command("plan", epilog="Example: `distembed plan configs/criteo_kaggle.yaml --nodes 1 --gpus 8 --gpu h100-80gb`")
def plan_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, and ranks, on each machine.")] = 8,
    gpu: Annotated[
        str,
        typer.Option(
            help="Device of each rank; an unknown name lists the known ones. Other numbers may follow: "
            "`h100-80gb,memory=96GiB,node_bandwidth=25GB`."
        ),
    ] = "h100-80gb",
    memory: Annotated[str | None, typer.Option(help="Memory of a device in place of the catalogue's: 80GiB.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of each machine, where `plan.host_memory` lets tables lie in it: 1TiB.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New JSON file to write, for `distembed train --plan`.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", help="Page or chart of the plan to write: .html, .png or .svg.")
    ] = None,
    compress: Annotated[
        Path | None,
        typer.Option("--compress", "--fit", help="New YAML file to write: the config, compressed as little as fits."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Plan a config for a cluster that need not be there: where tables go, and what each rank holds.

    Exit code 0 where it fits, 3 where it does not.
    """
    from distembed.capacity.run_plan import PlanFiles, run_plan
    from distembed.config import load_config
    from distembed.planning.cluster import Cluster
    from distembed.planning.devices import find_device

    device = find_device(gpu)
    if memory is not None:
        device = dataclasses.replace(device, memory_bytes=parse_bytes("--memory", memory))
    host_memory_bytes = 0 if host_memory is None else parse_bytes("--host-memory", host_memory)
    cluster = Cluster(device, nodes, gpus, host_memory_bytes)
    files = PlanFiles(output, compress, report)
    loaded = load_config(config, overrides or [])
    given = memory is not None
    if not run_plan(loaded, cluster, files, memory_is_given=given, as_json=as_json, console=console, errors=errors):
        raise typer.Exit(3)
