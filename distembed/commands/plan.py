"""The command ``distembed plan``: whether a config, or someone's own model, fits a cluster."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.base.units import parse_bytes
from distembed.commands.shared import JsonOption, OverridesArgument, console, errors, flattened, say

if TYPE_CHECKING:
    from distembed.data.dataset.config import DataConfig
    from distembed.planning.config import PlanConfig
    from distembed.planning.devices import Cluster
    from distembed.reports.plan.plan_files import PlanFiles
    from distembed.reports.plan.plannable import Plannable
    from distembed.reports.plan.report import TrainingRun

app = typer.Typer()

_DEVICE = "h100-80gb"
_IN_CONFIG = {
    "batch_size": "train.batch_size=NUMBER",
    "example": "its model's batches",
    "sparse_optimizer": "train.sparse_optimizer.name=NAME",
    "dense_optimizer": "train.dense_optimizer.name=NAME",
    "bf16": "train.precision=bf16",
}
"""A config's setting in the place of each option."""


@dataclass(frozen=True)
class ClusterOptions:
    """The cluster to plan for."""

    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, and ranks, on each machine.")] = 8
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Device of each rank, in place of `plan.device` or else h100-80gb; an unknown name lists the known "
            "ones. A device file of --calibrate stands in its place, and other numbers may follow: "
            "`h100-80gb,memory=96GiB,node_bandwidth=25GB`."
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of a device in place of the catalogue's: 80GiB. Ranks that differ have one each: 80GiB,40GiB."
        ),
    ] = None
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of each machine, where `plan.host_memory` lets tables lie in it: 1TiB.")
    ] = None

    def cluster(self, device: str | None = None) -> "Cluster":
        """Returns the cluster; ``device`` is that of each rank where ``--gpu`` names none."""
        from distembed.planning.devices import Cluster, find_device

        rank_device = find_device(device or _DEVICE, "plan.device") if self.gpu is None else find_device(self.gpu)
        memory = [parse_bytes("--memory", text) for text in self.memory.split(",")] if self.memory is not None else []
        if len(memory) == 1:
            rank_device = dataclasses.replace(rank_device, memory_bytes=memory[0])
        host_memory_bytes = 0 if self.host_memory is None else parse_bytes("--host-memory", self.host_memory)
        memory_by_rank = tuple(memory) if len(memory) > 1 else ()
        return Cluster(rank_device, self.nodes, self.gpus, host_memory_bytes, memory_by_rank)


@dataclass(frozen=True)
class ModelOptions:
    """A model of one's own in the place of a config, and its step."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="In place of CONFIG: a function that returns a TorchRec model, or (model, sharders). Its tables take "
            "no memory, and no device has to be there; modules of the current folder are found.",
        ),
    ] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, max=2**31 - 1, help="With --model: rows of a step on all ranks.")
    ] = None
    example: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="With --model: a function that, given a number of rows, returns the model's arguments: a "
            "tuple of arguments, a dict of named ones, or the only one. Networks and ids of a row are counted by it.",
        ),
    ] = None
    ids_per_row: Annotated[
        str | None,
        typer.Option(
            metavar="FEATURE=NUMBER,...",
            help="Mean number of ids of a row, by feature: of --model, or of a config without a dataset.",
        ),
    ] = None
    sparse_optimizer: Annotated[
        str | None, typer.Option(help="With --model: optimizer of tables that declare none; sgd unless given.")
    ] = None
    dense_optimizer: Annotated[
        str | None, typer.Option(help="With --model: optimizer of the networks; adam unless given.")
    ] = None
    bf16: Annotated[bool, typer.Option("--bf16", help="With --model: networks compute in bf16.")] = False

    def require_none(self) -> None:
        """Refuses the options that stand in for settings of a config."""
        for name, instead in _IN_CONFIG.items():
            if getattr(self, name) not in (None, False):
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{option} goes with --model MODULE:FUNCTION; a config has {instead} instead.")

    def plannable(self, plan: "PlanConfig") -> "Plannable":
        """Makes the model, for placements that ``plan`` allows; options are checked before torch is loaded."""
        from distembed.reports.plan.own_options import OwnStep, find_function, parse_ids_per_row

        assert self.model is not None
        if self.batch_size is None:
            raise UserError("--model needs --batch-size as well: rows of a step on all ranks, such as 65536.")
        step = OwnStep(
            self.batch_size,
            {} if self.ids_per_row is None else parse_ids_per_row(self.ids_per_row),
            bf16=self.bf16,
            sparse_optimizer=self.sparse_optimizer,
            dense_optimizer=self.dense_optimizer or OwnStep.dense_optimizer,
        )
        function = find_function("--model", self.model)
        if self.example is not None:
            step = dataclasses.replace(step, example=find_function("--example", self.example))
        from distembed.reports.plan.own_model import OwnModel, make_own_model

        return OwnModel(make_own_model(function), step, plan)


@dataclass(frozen=True)
class _RunOptions:
    """The training run to cost."""

    rows: Annotated[
        int | None,
        typer.Option(min=1, max=10**15, help="Rows of a training run, epochs added up: says how many hours it takes."),
    ] = None
    price: Annotated[
        float | None, typer.Option(help="With --rows: price of one device, such as one GPU, for an hour.")
    ] = None

    def training_run(self) -> "TrainingRun | None":
        """Returns the run; None where there is none to cost."""
        if self.price is not None and not 0 < self.price < math.inf:
            raise UserError(f"--price is {self.price}; give a number above 0, the price of one device for an hour.")
        if self.price is not None and self.rows is None:
            raise UserError("--price needs --rows as well: the rows of the training run, such as 4200000000.")
        if self.rows is None:
            return None
        from distembed.reports.plan.report import TrainingRun

        return TrainingRun(self.rows, self.price)


@dataclass(frozen=True)
class FileOptions:
    """The files to write."""

    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="New JSON file, for `distembed train --plan` or `load_plan`.")
    ] = None
    report: Annotated[
        Path | None, typer.Option("--report", help="Page or chart of the plan to write: .html, .png or .svg.")
    ] = None
    compress: Annotated[
        Path | None,
        typer.Option("--compress", "--fit", help="New YAML file to write: the config, compressed as little as fits."),
    ] = None
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="New JSON device file to write, for --gpu: measures this machine, best on all ranks of "
            "`python -m torch.distributed.run`. Nothing is planned."
        ),
    ] = None
    overwrite: Annotated[bool, typer.Option(help="Replace files that are there.")] = False


@app.command("plan", epilog="Example: `distembed plan configs/criteo_kaggle.yaml --nodes 1 --gpus 8 --gpu h100-80gb`")
@flattened
def plan_command(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="YAML file; none with --model.")] = None,
    overrides: OverridesArgument = None,
    *,
    cluster: ClusterOptions,
    model_options: ModelOptions,
    run: _RunOptions,
    files: FileOptions,
    smallest: Annotated[
        bool,
        typer.Option("--smallest", help="Find the fewest GPUs that fit: up to --gpus on one node, then whole nodes."),
    ] = False,
    polish: Annotated[
        float | None, typer.Option(help="Seconds in which HiGHS looks for a faster plan: `plan.polish_seconds`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan where tables go, and the memory of each rank, for a config or your own model on a cluster of any size.

    Exit code 0 where it fits, 3 where it does not.
    """
    if files.calibrate is not None:
        _calibrate(files.calibrate, files.overwrite, is_planned=config is not None or model_options.model is not None)
        return
    from distembed.reports.plan.plan_files import PlanFiles

    cluster.cluster()  # tells mistakes before torch is loaded
    if smallest:
        _require_searchable(cluster, files)
    training_run = run.training_run()
    arguments = [] if config is None else [config, *(overrides or [])]
    if polish is not None and (arguments or model_options.model is not None):
        arguments.append(f"plan.polish_seconds={polish}")
    to_write = PlanFiles(files.output, files.compress, files.report, files.overwrite)
    make_plannable = _configured_model if model_options.model is None else _own_model
    plannable = make_plannable(arguments, model_options, to_write)
    from distembed.reports.plan.run_plan import run_plan

    fits = run_plan(
        plannable,
        cluster.cluster(plannable.plan.device),
        to_write,
        memory_is_given=cluster.memory is not None,
        smallest=smallest,
        training_run=training_run,
        console=None if as_json else console,
        errors=errors,
    )
    if not fits:
        raise typer.Exit(3)


def _require_searchable(cluster: ClusterOptions, files: FileOptions) -> None:
    """Refuses options that contradict ``--smallest``: several nodes, memory by rank, and compression."""
    if cluster.memory is not None and "," in cluster.memory:
        raise UserError(
            f"--smallest finds the number of ranks, and --memory {cluster.memory} is of each; give one size."
        )
    if cluster.nodes != 1:
        raise UserError(f"--smallest finds the number of nodes, and --nodes is {cluster.nodes}; leave one of them out.")
    if files.compress is not None:
        raise UserError(
            "--compress compresses tables for a given number of GPUs, and --smallest looks for that number; leave one "
            "of them out."
        )


def _calibrate(file: Path, overwrite: bool, is_planned: bool) -> None:
    """Measures this machine on all ranks, and writes the device file on the first."""
    if is_planned:
        raise UserError(
            "--calibrate measures this machine and plans nothing; leave CONFIG and --model out, and plan with "
            f"--gpu {file} afterwards."
        )
    if file.suffix != ".json":
        raise UserError(f"--calibrate is {str(file)!r}; name a file that ends in .json, by which --gpu knows it.")
    from distembed.base.files import require_file

    require_file("--calibrate", file, overwrite)
    from distembed.base.ranks import Collectives, process_group
    from distembed.planning.calibrate import calibrate
    from distembed.planning.devices import write_device

    with process_group("auto") as ranks:
        measured = calibrate(ranks)
        Collectives().on_first(lambda: write_device(file, measured))
    if ranks.is_first:
        say(f"{file}: {len(measured.measured)} numbers measured on {ranks.world_size} rank(s)")
        say(f"estimates differ from the steps that were measured by {measured.device.error:.0%} (median)")


def _configured_model(arguments: Sequence[str], model_options: ModelOptions, to_write: "PlanFiles") -> "Plannable":
    """Reads a config and its overrides, and checks them as far as that needs no torch."""
    model_options.require_none()
    if not arguments:
        raise UserError(
            "there is nothing to plan: give CONFIG, a YAML file, or --model MODULE:FUNCTION; or measure this machine, "
            "with --calibrate FILE."
        )
    from distembed.training.config import load_config
    from distembed.training.initial_run import begun_config

    config = begun_config(load_config(Path(arguments[0]), arguments[1:]))
    if model_options.ids_per_row is not None:
        config = dataclasses.replace(config, data=_with_ids_per_row(config.data, model_options.ids_per_row))
    config.data.load_schema()
    to_write.require_writable()
    from distembed.reports.plan.plannable import ConfiguredModel

    return ConfiguredModel(config)


def _with_ids_per_row(data: "DataConfig", text: str) -> "DataConfig":
    """Returns the section with the counts of ``--ids-per-row``; features that it does not name keep theirs."""
    from distembed.data.dataset.config import COUNTS_REFUSED
    from distembed.reports.plan.own_options import parse_ids_per_row

    overridden = parse_ids_per_row(text)
    if data.path is not None:
        raise UserError(
            f"{COUNTS_REFUSED} --ids-per-row; leave it out, or plan with data.schema in place of data.path."
        )
    # load_schema applies data.ids_per_row, so these are the counts that the config gives
    configured = {feature.name: feature.mean_ids_per_row for feature in data.load_schema().categorical}
    for feature in overridden:
        one_of("--ids-per-row", feature, configured)
    return dataclasses.replace(data, ids_per_row={**configured, **overridden})


def _own_model(arguments: Sequence[str], model_options: ModelOptions, to_write: "PlanFiles") -> "Plannable":
    """Makes someone's own model."""
    if to_write.compress is not None:
        raise UserError("--compress writes a config, and with --model there is none; leave it out.")
    plan = _plan_settings(arguments)
    to_write.require_writable()
    return model_options.plannable(plan)


def _plan_settings(arguments: Sequence[str]) -> "PlanConfig":
    """Returns the section ``plan`` of ``plan.KEY=VALUE`` arguments, the only settings of a model of one's own."""
    for argument in arguments:
        if "=" not in argument:
            raise UserError(f"give CONFIG or --model, not both: {argument!r} is no plan.KEY=VALUE.")
        if not argument.startswith("plan."):
            raise UserError(
                f"{argument!r} is a setting of a config; with --model only plan.KEY=VALUE are taken, and "
                "options such as --batch-size."
            )
    from distembed.training.config import load_config

    return load_config(None, arguments).plan
