"""``distembed convert``: another model's weights as a run of no steps, from which training starts (``--init-from``).

All commands that take a run take the written folder: ``distembed train --init-from``, ``evaluate``, ``predict``.
Networks are copied, with their optimizer states. Full tables are fitted; where both models train them by Adagrad, the
sums of squared gradients are carried over too: without them the first steps would be as large as for new tables, and
undo the fit.
"""

import dataclasses
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.base.files import write_json
from distembed.base.names import pair
from distembed.base.ranks import Collectives, Ranks
from distembed.base.units import format_bytes
from distembed.checkpoints.checkpoint import write_checkpoint
from distembed.checkpoints.content import CheckpointContent, describe_tables, live_weights, tensors_to_save
from distembed.checkpoints.optimizer_state import name_with_columns
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.shards import TensorShards
from distembed.checkpoints.store import CheckpointStore, checkpoint_name, checkpoint_place
from distembed.data.dataset.kept import keep_dataset
from distembed.data.dataset.manifest import Manifest
from distembed.embedding.collections import embedding_modules, weight_names_of_table
from distembed.embedding.occurrences import id_occurrences
from distembed.embedding.tables import CompositionalTables
from distembed.models import Model
from distembed.optim.kinds import OPTIMIZERS, NumberPer
from distembed.optim.optimizers import table_parameters
from distembed.partitions import Clustered
from distembed.serving.convert.models import from_stock, full_table_names
from distembed.serving.convert.run_source import RunAsStock
from distembed.serving.convert.tables import FitError, carried_sums
from distembed.tasks import batch_schema
from distembed.tasks.seen_items import decided_task
from distembed.training.build import Blueprint
from distembed.training.config import Config, load_config, relative_path, relative_to_run
from distembed.training.pipeline import TaskModel
from distembed.training.run import run_info
from distembed.training.run_folder.folder import RunFolder, holds_run, require_new_or_resume
from distembed.training.start import RunStart
from distembed.training.trained_run import find_trained_run, whole_dataset

_FIT_FILE = "fit.json"
"""File in the folder with the error of each table."""
_TASK_MODEL = "model."
_ADAGRAD = "adagrad"


def convert(
    source: Path, config_file: Path | None, overrides: Sequence[str], output: Path, names: Sequence[str] = ()
) -> list[FitError]:
    """Converts a run, or a stock model's checkpoint, into a run of no steps, and returns how well each table fits.

    Args:
        source: The folder of a run, or a stock checkpoint.
        config_file: The config of the new run; unless given, the config of the converted run.
        overrides: Settings that replace the config's, as ``dotted.key=value``.
        output: The folder to make.
        names: ``OURS=THEIRS`` each: a module of this model, and its name in the stock model.

    Raises:
        UserError: The source, the config or a name cannot be used, there is something in the folder, the weights do not
            match, or a table cannot be fitted.
        RunError: The checkpoint cannot be written.
    """
    require_new_or_resume(output, resume=False)
    renamed = dict(pair("--name", text, "OURS=THEIRS", "embeddings=sparse_arch.ebc") for text in names)
    if not holds_run(source):
        if config_file is None:
            raise UserError(
                f"{source} is no run, so it is taken for the checkpoint of a stock model; say with --config which "
                "model its weights go into."
            )
        config = load_config(config_file, list(overrides))
        dataset = config.data.require_path()
        return write_converted(source, config, NewRun(output, dataset, Manifest.load(dataset)), renamed).errors
    if renamed:
        raise UserError("--name is for checkpoints of stock models; a run's modules have the same names.")
    run = find_trained_run(source, None)
    config = load_config(config_file or source / "config.yaml", list(overrides))
    new_run = NewRun(output, *whole_dataset(run, config))
    blueprint = Blueprint.for_ranks(run.config, run.manifest.schema, Ranks(0, 1, 1, torch.device("cpu")), {})
    return write_converted(RunAsStock(source, run.config, blueprint), config, new_run).errors


def error_table(errors: Sequence[FitError], codes_of: Callable[[str], str] | None = None) -> Table:
    """Returns the errors as a table for the terminal; ``codes_of`` describes the codes of a table, by its name."""
    sizes = ("compositional",) if codes_of is None else ("with codes", "codes")
    table = Table("table", "ids", "full", *sizes, "variance left", "worst id", "its distance", box=SIMPLE_HEAD)
    for error in errors:
        table.add_row(
            error.table,
            f"{error.num_embeddings:,}",
            format_bytes(error.full_bytes),
            format_bytes(error.compositional_bytes),
            *(() if codes_of is None else (codes_of(error.table),)),
            f"{error.variance_left:.2%}",
            f"{error.worst_id:,}",
            f"{error.worst_distance:.3g}",
        )
    return table


@dataclass(frozen=True)
class NewRun:
    """The run to write.

    Attributes:
        folder: Its folder, which holds no run.
        dataset: The folder of the dataset that describes it, with or without rows.
        manifest: The manifest of that dataset.
        kept: Names of tables whose partitions are the converted run's, and are copied with their optimizer states.
        facts: More values for ``run.json``.
    """

    folder: Path
    dataset: str
    manifest: Manifest
    kept: Collection[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Converted:
    """A converted run: the error of each table, and names of tables whose optimizer states begin at 0."""

    errors: list[FitError]
    without_states: list[str]


def write_converted(
    source: RunAsStock | Path, config: Config, new: NewRun, names: Mapping[str, str] | None = None
) -> Converted:
    """Fits the model of a config to a run or a stock checkpoint, and writes it as a run of no steps.

    Args:
        source: The run, or the checkpoint.
        config: The config of the new run; assignments within the new run's folder are recorded relative to it. Its
            ``data.path`` is recorded as it is, wherever the described dataset lies.
        new: The new run's folder, dataset and tables to copy.
        names: Renamed modules of a stock checkpoint.
    """
    output, dataset, manifest = new.folder, new.dataset, new.manifest
    data = config.data
    task, seen_items = decided_task(config.task, dataset, manifest, config.data.train)
    config = dataclasses.replace(
        config,
        task=task,
        data=dataclasses.replace(config.data, path=dataset),
        train=dataclasses.replace(config.train, init_from=None, checkpoint_dir=None),
    )
    ranks = Ranks(0, 1, 1, torch.device("cpu"))
    blueprint = Blueprint.for_ranks(config, manifest.schema, ranks, {})
    model = _on_cpu(blueprint.build_unsharded())
    tables = [table for _, table in full_table_names(embedding_modules(model)).values()]
    if not any(isinstance(table.scheme, Clustered) for table in tables):
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, recluster=None))
    counts = id_occurrences(dataset, manifest, batch_schema(task, manifest.schema), tables, config.data.train)
    errors = from_stock(model, source, counts, names, _kept_weights(model, source, new.kept))
    states = _optimizer_states(model, config, source, new.kept)
    info = run_info(config, RunStart(config, output, manifest, {}, uuid.uuid4().hex, seen_items=seen_items))
    info |= {"world_size": 1, "device": "cpu", "precision": blueprint.precision, **new.facts}
    in_run = relative_to_run(dataclasses.replace(config, data=data), output)
    info["assignments"] = {relative_path(path, output): checksum for path, checksum in info["assignments"].items()}
    with RunFolder(output).open(in_run.to_yaml(), info, 0) as folder:
        keep_dataset(output, dataset, manifest)
        steps = SavedCheckpoint.read(source.checkpoint).optimizer_steps if isinstance(source, RunAsStock) else 0
        task_model = TaskModel(model, blueprint.task, 1, ranks.device, blueprint.bf16)
        _write(output, task_model, config, states, steps)
        write_json(output / _FIT_FILE, [error.to_json() for error in errors])
        folder.end("finished", facts={"steps": 0})
    return Converted(errors, _without_states(model, config, states))


def _kept_weights(
    model: nn.Module, source: RunAsStock | Path, names: Collection[str]
) -> dict[str, Callable[[], Sequence[Tensor]]]:
    """Returns a function that reads the partitions of each of some tables from a run, by the table's name.

    The state of their partitions is set.
    """
    if not isinstance(source, RunAsStock):
        return {}
    tables = full_table_names(embedding_modules(model)).items()
    for full_name, (_, table) in tables:
        if table.name in names:
            table.scheme.load_state(source.partition_state(full_name))
    weights = {table.name: source.partition_weights(full_name) for full_name, (_, table) in tables}
    return {name: read for name, read in weights.items() if name in names and read is not None}


def _on_cpu(model: Model) -> Model:
    """Gives uninitialised memory on the CPU to the weights on the meta device, which are filled from the source."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    return model


def _optimizer_states(
    model: nn.Module, config: Config, source: RunAsStock | Path, kept: Collection[str]
) -> dict[str, Tensor]:
    """Returns the optimizer states to carry over from a run, by ``PARAMETER.STATE`` of the converted model.

    They are the states of networks, of ``kept`` tables and, under Adagrad, of fitted tables. A stock checkpoint gives
    none.
    """
    if not isinstance(source, RunAsStock):
        return {}
    states: dict[str, Tensor] = {}
    collections = embedding_modules(model)
    for full_name, (path, table) in full_table_names(collections).items():
        if table.name in kept:
            for weight in weight_names_of_table(collections[path], table):
                states |= source.saved_states(f"{path}.{weight}".lstrip("."))
            continue
        sums = source.optimizer_state(full_name, "sum")
        if config.train.sparse_optimizer.name != _ADAGRAD or sums is None or sums.dim() != 2:
            continue
        module = collections[path]
        assert isinstance(module, CompositionalTables)
        partition_sums = carried_sums(table, module.weights(table.name), sums)
        for name, values in zip(weight_names_of_table(module, table), partition_sums, strict=True):
            states[f"{path}.{name}.sum"] = values
    for name, _ in model.named_parameters():
        for state in OPTIMIZERS[config.train.dense_optimizer.name].states:
            key = f"{name}.{state}"
            carried = None if key in states or name not in source else source.optimizer_state(name, state)
            if carried is not None:
                states[key] = carried
    return states


def _without_states(model: nn.Module, config: Config, states: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of compositional tables that have optimizer states, and for which none are carried over."""
    if not OPTIMIZERS[config.train.sparse_optimizer.name].states:
        return []
    collections = embedding_modules(model)
    weights = {
        table.name: tuple(f"{path}.{own}.".lstrip(".") for own in weight_names_of_table(collections[path], table))
        for path, table in full_table_names(collections).values()
    }
    return [name for name, prefixes in weights.items() if not any(key.startswith(prefixes) for key in states)]


def _write(output: Path, model: TaskModel, config: Config, states: Mapping[str, Tensor], steps: int) -> None:
    """Writes the checkpoint of the model and of its optimizers; states missing in ``states`` are 0.

    ``steps`` is the number of steps in the states, which bias corrections need.
    """
    in_tables = {id(parameter) for parameter in table_parameters(model)}
    optimizers: dict[str, list[str]] = {}
    to_save: dict[str, TensorShards] = {}
    for name, parameter in model.named_parameters():
        train = config.train
        kind = (train.sparse_optimizer if id(parameter) in in_tables else train.dense_optimizer).name
        optimizers.setdefault(kind, []).append(name)
        shapes = {NumberPer.WEIGHT: parameter.shape, NumberPer.ROW: parameter.shape[:1]}
        for state, number_per in OPTIMIZERS[kind].states.items():
            size = shapes.get(number_per, torch.Size([1]))
            key = name_with_columns(state, 0, parameter.shape[1]) if number_per is NumberPer.ROW else state
            values = states.get(f"{name.removeprefix(_TASK_MODEL)}.{key}")
            to_save[f"{name}.{key}"] = TensorShards.from_value(torch.zeros(size) if values is None else values)
    last_file = {
        "world_size": 1,
        "tables": describe_tables(model),
        "optimizers": {kind: sorted(names) for kind, names in optimizers.items()},
        "progress": {"step": steps},
    }
    content = CheckpointContent(checkpoint_name(0), tensors_to_save(live_weights(model), to_save, 0, 1), last_file)
    write_checkpoint(CheckpointStore(checkpoint_place(output, None)), content, None, Collectives.alone())
