"""A whole run of a config: training, evaluation and their records in the run's folder. Start reading here."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from distembed.base.files import write_json
from distembed.base.ranks import Collectives, Ranks
from distembed.data.dataset.kept import keep_dataset
from distembed.data.dataset.manifest import id_fingerprint
from distembed.embedding import assignment_checksums
from distembed.sse.config import graph_fingerprints
from distembed.tasks import build_task
from distembed.tasks.seen_items import SEEN_ITEMS
from distembed.training.build import used_precision
from distembed.training.config import Config, relative_path, relative_to_run
from distembed.training.describe import describe
from distembed.training.initial_run import RECORD
from distembed.training.kept_codes import keep_codes
from distembed.training.loggers import require_loggers
from distembed.training.resume import require_same_precision
from distembed.training.run_folder.folder import RunFolder
from distembed.training.start import RunOptions, RunStart, find_start
from distembed.training.trainer import Trainer


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder, and on rank 0 the final metrics and their line, if there is a test split."""

    folder: Path
    evaluation: dict[str, Any] | None
    described: str | None


def train_run(
    config: Config,
    options: RunOptions,
    ranks: Ranks,
    console: Console | None,
    say: Callable[[str], None],
    start: RunStart | None = None,
    evaluated: Callable[[int, float], None] | None = None,
) -> FinishedRun:
    """Trains a config and evaluates it on its test split; all ranks call it.

    Args:
        config: The whole config.
        options: The folder, whether to resume, and a plan.
        ranks: This rank among all.
        console: Where rank 0 shows the progress; None for nowhere.
        say: Prints a line; called on rank 0 only.
        start: The start of the run, where it was found already.
        evaluated: Is called on rank 0 after each evaluation during training, with the number of steps and the task's
            headline metric; it may raise :class:`~distembed.base.errors.Interrupted`, in a process that trains alone.

    Raises:
        UserError: The folder, the dataset, a plan or a setting cannot be used.
        InsufficientMemory: The tables or the networks do not fit into the memory of the ranks.
        RunError: The loss is not finite, or a checkpoint cannot be written.
        Interrupted: After a signal, once a checkpoint is written.
    """
    start = start or find_start(config, options, Collectives().on_first, say)
    config = start.config  # in which tables are as they have grown
    if start.resume:
        precision = used_precision(config.train.precision, ranks)
        Collectives().on_first(lambda: require_same_precision(start.folder, precision))
    info = run_info(config, start)
    if ranks.is_first:
        for line in info["kept_full"]:
            say(line)
    run_folder = RunFolder(start.folder)
    Collectives().on_first(lambda: require_loggers(config.train.loggers))
    trainer = Trainer(start, run_folder, ranks, console, evaluated)
    if not ranks.is_first:
        trainer.train()
        trainer.load_best()
        if config.data.test is not None:
            trainer.evaluate(config.data.test)
        return FinishedRun(start.folder, None, None)
    info |= {"world_size": ranks.world_size, "device": ranks.device.type, "precision": trainer.precision}
    loggers = config.train.loggers
    own = keep_codes(config, start.folder)
    checksums = assignment_checksums(own.embedding)
    info["assignments"] = {relative_path(path, start.folder): checksum for path, checksum in checksums.items()}
    config_yaml = relative_to_run(own, start.folder).to_yaml()
    with run_folder.open(config_yaml, info, trainer.step, trainer.repeats_evaluations, loggers):
        keep_dataset(start.folder, config.data.require_path(), start.manifest)
        trainer.train()
        trainer.load_best()
        evaluation = described = None
        if config.data.test is not None:
            evaluation = trainer.evaluate(config.data.test)
            described = f"{config.data.test}: {build_task(config.task, start.manifest.schema).describe(evaluation)}"
            write_json(start.folder / "evaluation.json", evaluation)
        best = None if trainer.best is None else trainer.best.to_json()
        facts = {} if best is None else {"best": best, "steps": trainer.step}
        facts |= {"unreadable_row_groups": sorted(trainer.unreadable)} if trainer.unreadable else {}
        run_folder.end("finished", facts=facts)
    return FinishedRun(start.folder, evaluation, described)


def run_info(config: Config, start: RunStart) -> dict[str, Any]:
    """Returns the part of ``run.json`` that follows from the config and the dataset."""
    description = describe(config)
    schemes = [table.config.scheme.name for table in description.tables]
    task = build_task(config.task, start.manifest.schema)
    return {
        "id": start.run_id,
        "seed": config.train.seed,
        "batch_size": config.train.batch_size,
        "id_fingerprint": id_fingerprint(config.data.require_path(), start.manifest),
        **({} if start.init_from is None else {RECORD: start.init_from}),
        **({} if start.seen_items is None else {SEEN_ITEMS: start.seen_items}),
        "graphs": graph_fingerprints(start.sse),
        "assignments": assignment_checksums(config.embedding),
        "kept_full": description.full_table_lines(),
        "schemes": {scheme: schemes.count(scheme) for scheme in dict.fromkeys(schemes)},
        "parameters": description.num_parameters,
        "embedding_parameters": description.num_embedding_parameters,
        **description.sizes_as_json(),
        "embedding_rows": description.embedding_rows,
        "full_embedding_rows": description.full_embedding_rows,
        "metrics": [dataclasses.asdict(metric) for metric in task.reported_metrics],
    }
