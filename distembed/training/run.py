"""A whole run of a config: which folder, whether it is resumed, which plan is applied, then training and evaluation."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from distembed.config import Config
from distembed.data.dataset.manifest import Manifest, id_fingerprint
from distembed.data.prepare.vocabulary import reserved_ids
from distembed.describe import describe
from distembed.embedding import assignment_checksums
from distembed.errors import UserError
from distembed.files import write_json
from distembed.graph.prepare.value_ids import require_same_ids
from distembed.planning.saved_plan import read_saved_plan
from distembed.ranks import Collectives, Ranks
from distembed.runs.folder import RunFolder, default_run_folder, holds_run, require_new_or_resume
from distembed.runs.lock import DEAD_MACHINE_SECONDS
from distembed.sse import SSE
from distembed.sse.config import build_sse, graph_fingerprints
from distembed.training.build import PlanChoice
from distembed.training.resume import load_run_plan, require_same_config, require_same_graphs
from distembed.training.trainer import RunStart, Trainer


@dataclass(frozen=True)
class RunOptions:
    """The options of a run beside its config.

    Attributes:
        run_dir: The run's folder; None for one in ``runs`` that is named after ``name`` and the time.
        name: How the name of such a folder begins.
        resume: Whether to resume the folder's run from its newest checkpoint.
        resume_or_start: Whether to resume where the folder holds a run and to start a run where it does not. It then
            waits for another process that owns the folder, until that counts as dead.
        plan: A file of ``distembed plan --output`` that says where tables are placed. With ``resume_or_start`` it is
            applied only where its inputs are those of this run, and a resumed run's own plan comes before it.
    """

    run_dir: Path | None = None
    name: str = "run"
    resume: bool = False
    resume_or_start: bool = False
    plan: Path | None = None

    def __post_init__(self) -> None:
        if (self.resume or self.resume_or_start) and self.run_dir is None:
            raise UserError("--resume needs --run-dir, the folder of the run to go on with.")


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end.

    Attributes:
        folder: The run's folder.
        evaluation: The metrics of the final evaluation on rank 0; None on other ranks, and without a test split.
        described: The metrics as one line; None where there are none.
    """

    folder: Path
    evaluation: dict[str, Any] | None
    described: str | None


def train_run(
    config: Config, options: RunOptions, ranks: Ranks, console: Console | None, say: Callable[[str], None]
) -> FinishedRun:
    """Trains a config and evaluates it on its test split; all ranks call it.

    Args:
        config: The whole config.
        options: The folder, whether to resume, and a plan.
        ranks: This rank among all.
        console: Where rank 0 shows the progress; None for nowhere.
        say: Prints a line; called on rank 0 only.

    Raises:
        UserError: The folder, the dataset, a plan or a setting cannot be used.
        RunError: The tables do not fit into the memory of the ranks, the loss is not finite, or a checkpoint cannot be
            written.
        Interrupted: After a signal, once a checkpoint is written.
    """
    collectives = Collectives()
    folder = _agree_on_folder(options, collectives)
    resume = options.resume
    if options.resume_or_start:
        resume = collectives.on_first(lambda: holds_run(folder))
    collectives.on_first(lambda: _require_usable(folder, config, resume))
    start = RunStart(
        resume,
        _choose_plans(config, options, folder, resume, collectives, say),
        DEAD_MACHINE_SECONDS if options.resume_or_start else 0.0,
    )
    dataset = config.data.require_path()
    manifest = Manifest.load(dataset)
    sse = _replaced_ids(config, dataset, manifest)
    info = _run_info(config, dataset, manifest, sse)
    if resume:
        collectives.on_first(lambda: require_same_graphs(folder, info["graphs"]))
    if ranks.is_first:
        for line in info["kept_full"]:
            say(line)
    run_folder = RunFolder(folder)
    trainer = Trainer(config, sse, run_folder, ranks, start, console)
    if not ranks.is_first:
        trainer.train()
        if config.data.test is not None:
            trainer.evaluate(config.data.test)
        return FinishedRun(folder, None, None)
    info |= {"world_size": ranks.world_size, "device": ranks.device.type, "precision": trainer.precision}
    with run_folder.open(config.to_yaml(), info, trainer.step):
        trainer.train()
        evaluation = described = None
        if config.data.test is not None:
            evaluation = trainer.evaluate(config.data.test)
            described = f"{config.data.test}: {config.task.build().describe(evaluation)}"
            write_json(folder / "evaluation.json", evaluation)
        run_folder.end("finished")
    return FinishedRun(folder, evaluation, described)


def _require_usable(folder: Path, config: Config, resume: bool) -> None:
    """Makes sure that the run can be started, or resumed, in its folder."""
    require_new_or_resume(folder, resume)
    if resume:
        require_same_config(folder, config)


def _agree_on_folder(options: RunOptions, collectives: Collectives) -> Path:
    """Returns rank 0's folder on every rank; the names that ranks give it by their clocks may differ."""
    own = options.run_dir or default_run_folder(options.name)
    return collectives.on_first(lambda: own.absolute())


def _choose_plans(
    config: Config,
    options: RunOptions,
    folder: Path,
    resume: bool,
    collectives: Collectives,
    say: Callable[[str], None],
) -> PlanChoice:
    """Returns the saved plans to apply: the one that is given, or that of the run that is resumed.

    With ``resume_or_start`` both are only preferred, the resumed run's before the one that is given.
    """
    if options.plan is not None and not options.resume_or_start:
        return PlanChoice(required=read_saved_plan(options.plan))
    preferred = collectives.on_first(lambda: load_run_plan(folder, config, say)) if resume else None
    if preferred is None and options.plan is not None:
        preferred = read_saved_plan(options.plan)
    return PlanChoice(preferred=preferred)


def _replaced_ids(config: Config, dataset: str, manifest: Manifest) -> dict[str, SSE]:
    """Returns the rule by which ids are replaced in training, by feature.

    Raises:
        UserError: A graph is not over the ids of its table.
    """
    num_embeddings = {feature.name: feature.num_embeddings for feature in manifest.schema.categorical}
    sse = build_sse(config.sse, num_embeddings, reserved_ids(manifest))
    for table, rule in sse.items():
        if rule.graph is not None:
            require_same_ids(rule.graph, dataset, manifest, table)
    return sse


def _run_info(config: Config, dataset: str, manifest: Manifest, sse: dict[str, SSE]) -> dict[str, Any]:
    """Returns what ``run.json`` records of the config and the dataset."""
    description = describe(config)
    schemes = [table.config.scheme.name for table in description.tables]
    return {
        "seed": config.train.seed,
        "batch_size": config.train.batch_size,
        "id_fingerprint": id_fingerprint(dataset, manifest),
        "graphs": graph_fingerprints(sse),
        "assignments": assignment_checksums(config.embedding),
        "kept_full": description.full_table_lines(),
        "schemes": {scheme: schemes.count(scheme) for scheme in dict.fromkeys(schemes)},
        "parameters": description.num_parameters,
        "embedding_parameters": description.num_embedding_parameters,
        "embedding_bytes": description.embedding_bytes,
        "metrics": [dataclasses.asdict(metric) for metric in config.task.build().reported_metrics],
    }
