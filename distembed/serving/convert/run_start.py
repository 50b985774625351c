"""Writes what another model's weights become under a config as a run that training begins with (``--init-from``).

The folder is that of a run of no steps, so that whatever takes a run takes it: ``distembed train --init-from``,
``evaluate``, ``predict``. Networks are copied, with their optimizer states. Full tables are fitted; where both are
trained by Adagrad, the sums of squared gradients go over too: with none, the first steps would be as large as those of
new tables, and undo the fit.
"""

import dataclasses
import uuid
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from distembed.base.files import write_json
from distembed.base.ranks import Collectives, Ranks
from distembed.checkpoints.content import CheckpointContent, describe_tables, live_weights, tensors_to_save
from distembed.checkpoints.optimizer_state import name_with_columns
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.shards import TensorShards
from distembed.checkpoints.store import CheckpointStore, checkpoint_name, checkpoint_place
from distembed.checkpoints.transfer import write_checkpoint
from distembed.data.dataset.kept import keep_dataset
from distembed.data.dataset.manifest import Manifest
from distembed.embedding.modules import embedding_modules, weight_names_of_table
from distembed.embedding.tables import CompositionalTables
from distembed.models import Model
from distembed.optim.kinds import OPTIMIZERS, NumberPer
from distembed.optim.tables import table_parameters
from distembed.serving.convert.models import from_stock, full_table_names
from distembed.serving.convert.run_source import RunAsStock, id_counts
from distembed.serving.convert.tables import FitError, carried_sums
from distembed.tasks.seen_items import decided_task
from distembed.training.build import Blueprint
from distembed.training.config import Config
from distembed.training.pipeline import TaskModel
from distembed.training.run import run_info
from distembed.training.run_folder.folder import RunFolder, require_new_or_resume
from distembed.training.start import RunStart

FIT_FILE = "fit.json"
"""File in the folder with how far each table is from the full one."""
_TASK_MODEL = "model."
_ADAGRAD = "adagrad"


def convert_to_run(
    source: RunAsStock | Path | str,
    config: Config,
    dataset: str,
    manifest: Manifest,
    output: Path,
    names: Mapping[str, str] | None = None,
) -> list[FitError]:
    """Fits the model of a config to a stock model, or to a run's, and writes it as a run of no steps.

    Args:
        source: A run, or the path of a stock model's checkpoint.
        config: The config of the run that begins with it; its dataset need not be there if ``dataset`` is.
        dataset: The dataset's folder, or what a run keeps of it; its counts of values weigh the ids.
        manifest: Its manifest.
        output: The folder to make.
        names: What the stock model calls modules that have other names there, as for
            :func:`distembed.serving.convert.from_stock`.

    Returns:
        How far each table is from the full one.

    Raises:
        UserError: There is something in the folder, the weights do not match, or a table cannot be fitted.
        RunError: The checkpoint cannot be written.
    """
    require_new_or_resume(output, resume=False)
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
    counts = id_counts(dataset, manifest, tables)
    errors = from_stock(model, source, counts, names)
    states = _optimizer_states(model, config, source)
    info = run_info(config, RunStart(config, output, manifest, {}, uuid.uuid4().hex, seen_items=seen_items))
    info |= {"world_size": 1, "device": "cpu", "precision": blueprint.precision}
    with RunFolder(output).open(config.to_yaml(), info, 0) as folder:
        keep_dataset(output, dataset, manifest)
        steps = SavedCheckpoint.read(source.checkpoint).optimizer_steps if isinstance(source, RunAsStock) else 0
        task_model = TaskModel(model, blueprint.task, 1, ranks.device, blueprint.bf16)
        _write(output, task_model, config, states, steps)
        write_json(output / FIT_FILE, [error.to_json() for error in errors])
        folder.end("finished", facts={"steps": 0})
    return errors


def _on_cpu(model: Model) -> Model:
    """Gives the weights on the meta device memory, to be written to; others keep theirs."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="cpu")))
    return model


def _optimizer_states(model: nn.Module, config: Config, source: RunAsStock | Path | str) -> dict[str, Tensor]:
    """Returns the states that go over from a run, by ``PARAMETER.STATE`` of the converted model."""
    if not isinstance(source, RunAsStock):
        return {}
    found: dict[str, Tensor] = {}
    collections = embedding_modules(model)
    for full_name, (path, table) in full_table_names(collections).items():
        sums = source.optimizer_state(full_name, "sum")
        if config.train.sparse_optimizer.name != _ADAGRAD or sums is None or sums.dim() != 2:
            continue
        module = collections[path]
        assert isinstance(module, CompositionalTables)
        own = carried_sums(table, module.weights(table.name), sums)
        for name, values in zip(weight_names_of_table(module, table), own, strict=True):
            found[f"{path}.{name}.sum"] = values
    for name, _ in model.named_parameters():
        for state in OPTIMIZERS[config.train.dense_optimizer.name].states:
            key = f"{name}.{state}"
            carried = None if key in found or name not in source else source.optimizer_state(name, state)
            if carried is not None:
                found[key] = carried
    return found


def _write(output: Path, model: TaskModel, config: Config, states: Mapping[str, Tensor], steps: int) -> None:
    """Writes the checkpoint of the model and of its optimizers, whose other states are those of a fresh start."""
    of_tables = {id(parameter) for parameter in table_parameters(model)}
    optimizers: dict[str, list[str]] = {}
    to_save: dict[str, TensorShards] = {}
    for name, parameter in model.named_parameters():
        train = config.train
        kind = (train.sparse_optimizer if id(parameter) in of_tables else train.dense_optimizer).name
        optimizers.setdefault(kind, []).append(name)
        for state, per in OPTIMIZERS[kind].states.items():
            size = {NumberPer.WEIGHT: parameter.shape, NumberPer.ROW: parameter.shape[:1]}.get(per, torch.Size([1]))
            key = name_with_columns(state, 0, parameter.shape[1]) if per is NumberPer.ROW else state
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
