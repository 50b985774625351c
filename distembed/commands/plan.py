"""The command ``distembed plan``: whether a config fits a cluster."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.commands.parameters import flattened
from distembed.commands.shared import ConfigArgument, OverridesArgument, console, errors
from distembed.units import parse_bytes

if TYPE_CHECKING:
    from distembed.planning.cluster import Cluster

app = typer.Typer()


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster to plan for."""

    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, and ranks, on each machine.")] = 8
    gpu: Annotated[
        str,
        typer.Option(
            help="Device of each rank; an unknown name lists the known ones. Other numbers may follow: "
            "`h100-80gb,memory=96GiB,node_bandwidth=25GB`."
        ),
    ] = "h100-80gb"
    memory: Annotated[str | None, typer.Option(help="Memory of a device in place of the catalogue's: 80GiB.")] = None
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of each machine, where `plan.host_memory` lets tables lie in it: 1TiB.")
    ] = None

    def cluster(self) -> "Cluster":
        """Returns the cluster.

        Raises:
            UserError: The device is unknown, or a size cannot be read.
        """
        from distembed.planning.cluster import Cluster
        from distembed.planning.devices import find_device

        device = find_device(self.gpu)
        if self.memory is not None:
            device = dataclasses.replace(device, memory_bytes=parse_bytes("--memory", self.memory))
        host_memory_bytes = 0 if self.host_memory is None else parse_bytes("--host-memory", self.host_memory)
        return Cluster(device=device, nodes=self.nodes, ranks_per_node=self.gpus, host_memory_bytes=host_memory_bytes)


@dataclass(frozen=True)
class FileOptions:
    """The files to write."""

    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New JSON file to write, for `distembed train --plan`.")
    ] = None
    report: Annotated[
        Path | None, typer.Option("--report", help="Page or chart of the plan to write: .html, .png or .svg.")
    ] = None
    compress: Annotated[
        Path | None,
        typer.Option("--compress", "--fit", help="New YAML file to write: the config, compressed as little as fits."),
    ] = None
    overwrite: Annotated[bool, typer.Option(help="Replace files that are there.")] = False


@app.command("plan", epilog="Example: `distembed plan configs/criteo_kaggle.yaml --nodes 1 --gpus 8 --gpu h100-80gb`")
@flattened
def plan_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    cluster: ClusterOptions,
    files: FileOptions,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Plan a config for a cluster that need not be there: where tables go, and what each rank holds.

    Exit code 0 where it fits, 3 where it does not.
    """
    from distembed.capacity.plan_files import PlanFiles
    from distembed.config import load_config

    planned_for = cluster.cluster()
    loaded = load_config(config, overrides or [])
    loaded.data.load_schema()
    to_write = PlanFiles(files.output, files.compress, files.report, files.overwrite)
    to_write.require_writable()
    from distembed.capacity.configured_model import ConfiguredModel
    from distembed.capacity.run_plan import run_plan

    fits = run_plan(
        ConfiguredModel(loaded),
        planned_for,
        to_write,
        memory_is_given=cluster.memory is not None,
        as_json=as_json,
        console=console,
        errors=errors,
    )
    if not fits:
        raise typer.Exit(3)
