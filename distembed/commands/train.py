"""The commands ``distembed train``, ``evaluate``, ``predict`` and ``materialise``: a run, and what is made of it."""

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distembed.commands.shared import ConfigArgument, OverridesArgument, console, say
from distembed.errors import UserError

if TYPE_CHECKING:
    from distembed.config import Config
    from distembed.planning.saved_plan import SavedPlan
    from distembed.ranks import Ranks

app = typer.Typer()

RunFolderArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that `distembed train` made.")]
DataOption = Annotated[
    str | None, typer.Option("--data", help="Where the dataset is now, or another one whose ids mean the same.")
]


@app.command(
    "train",
    epilog="Example: `distembed train configs/criteo_kaggle.yaml data.path=criteo --run-dir runs/first`; "
    "on two processes: `python -m torch.distributed.run --nproc-per-node 2 -m distembed train ...`",
)
def train_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", help="Folder for config, metrics and checkpoints; runs/NAME-TIME unless given."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint of --run-dir.")] = False,
    resume_or_start: Annotated[
        bool,
        typer.Option("--resume-or-start", help="Go on where --run-dir holds a run, else start it: for schedulers."),
    ] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="Place tables as this file of `distembed plan --output` says; with --resume-or-start, if it is for as "
            "many ranks as there are.",
        ),
    ] = None,
) -> None:
    """Train a model, evaluate it on the test split, and keep all that is needed to repeat it."""
    from distembed.config import load_config
    from distembed.planning.saved_plan import read_saved_plan
    from distembed.ranks import Collectives, process_group
    from distembed.runs.folder import holds_run, require_new_or_resume
    from distembed.runs.lock import DEAD_MACHINE_SECONDS
    from distembed.training.resume import plan_of_run, require_same_config, require_same_graphs
    from distembed.training.trainer import describe_metrics, run_training

    loaded = load_config(config, overrides or [])
    if (resume or resume_or_start) and run_dir is None:
        raise UserError("--resume needs --run-dir, the folder of the run to go on with.")
    with process_group(loaded.train.device) as processes:
        folder = _agree_on_run_dir(run_dir or _default_run_dir(config), processes)
        if resume_or_start:
            resume = Collectives().on_first(lambda: holds_run(folder))
        if processes.is_first:
            require_new_or_resume(folder, resume)
            if resume:
                require_same_config(folder, loaded)
        strict = None if resume_or_start else plan
        previous = None
        if resume and strict is None:
            previous = Collectives().on_first(lambda: plan_of_run(folder, loaded, say))
        if previous is None and resume_or_start and plan is not None:
            previous = read_saved_plan(plan)
        settings = _settings(loaded, strict, previous)
        if processes.is_first:
            if resume:
                require_same_graphs(folder, settings.info["graphs"])
            for line in settings.info["kept_full"]:
                say(line)
        wait_seconds = DEAD_MACHINE_SECONDS if resume_or_start else 0.0
        evaluation = run_training(settings, folder, processes, resume, console, wait_seconds)
        if processes.is_first and evaluation is not None:
            say(describe_metrics(evaluation))
        if processes.is_first:
            say(f"run {folder}")


@app.command("evaluate", epilog="Example: `distembed evaluate runs/first --split validation`")
def evaluate_command(
    run: RunFolderArgument,
    split: Annotated[str, typer.Option(help="Split to evaluate on.")] = "test",
    data: DataOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a line.")] = False,
) -> None:
    """Evaluate a run's newest checkpoint: logloss, AUC, normalised entropy, calibration, accuracy."""
    from distembed.files import finite
    from distembed.ranks import process_group
    from distembed.training.evaluation import score_split
    from distembed.training.inference import load_training_state
    from distembed.training.resume import config_of_run, dataset_for
    from distembed.training.trainer import describe_metrics

    loaded = config_of_run(run)
    dataset = dataset_for(run, loaded, data)
    with process_group("auto") as processes:
        training_state = load_training_state(
            run, dataset, loaded.model, loaded.embedding, loaded.train, loaded.plan, processes
        )
        metrics = {
            "split": split,
            **dataclasses.asdict(score_split(training_state, dataset, split, processes).metrics()),
        }
        if processes.is_first:
            print(json.dumps(finite(metrics), indent=2) if as_json else describe_metrics(metrics))


@app.command("predict", epilog="Example: `distembed predict runs/first --split test --output predictions.parquet`")
def predict_command(
    run: RunFolderArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write: .parquet or .csv.")],
    split: Annotated[str, typer.Option(help="Split to predict.")] = "test",
    data: DataOption = None,
) -> None:
    """Write the click probability of every row of a split, in its order."""
    from distembed.ranks import process_group
    from distembed.training.inference import load_training_state, predict_split
    from distembed.training.resume import config_of_run, dataset_for

    loaded = config_of_run(run)
    dataset = dataset_for(run, loaded, data)
    with process_group("auto") as processes:
        training_state = load_training_state(
            run, dataset, loaded.model, loaded.embedding, loaded.train, loaded.plan, processes
        )
        num_rows = predict_split(training_state, dataset, split, output, processes)
        if processes.is_first:
            say(f"{output}: {num_rows:,} predictions")


@app.command("materialise", epilog="Example: `distembed materialise runs/first --output vectors --table C3`")
def materialise_command(
    run: RunFolderArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for TABLE.parquet, made if need be.")],
    table: Annotated[list[str] | None, typer.Option(help="Table to write; all unless given. May be repeated.")] = None,
    ids: Annotated[
        Path | None, typer.Option(help="Parquet file with a column `id`: write these, of one table. Else all ids.")
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace files that are there.")] = False,
    data: DataOption = None,
) -> None:
    """Write the composed vectors of a run's tables, one a row, for serving."""
    from distembed.data.dataset.manifest import Manifest
    from distembed.embedding import build_tables
    from distembed.training.materialise import materialise_run
    from distembed.training.resume import config_of_run, dataset_for

    loaded = config_of_run(run)
    schema = Manifest.load(dataset_for(run, loaded, data)).schema
    tables = build_tables(schema.categorical, loaded.embedding, loaded.train.seed)
    for written in materialise_run(run, tables, output, table or [], ids, overwrite, loaded.train.checkpoint_dir):
        rows_per_second = written.num_rows / written.seconds
        say(f"{written.path}: {written.num_rows:,} vectors, {rows_per_second:,.0f} rows/s")


def _settings(config: "Config", plan: Path | None, previous_plan: "SavedPlan | None") -> Any:
    from distembed.data.dataset.manifest import Manifest, id_fingerprint
    from distembed.data.prepare.vocabulary import reserved_ids
    from distembed.describe import describe, kept_full
    from distembed.embedding import assignment_checksums
    from distembed.graph.prepare.value_ids import require_same_ids
    from distembed.planning.saved_plan import read_saved_plan
    from distembed.sse.config import build_sse, graph_fingerprints
    from distembed.training.trainer import RunSettings

    dataset = config.data.require_path()
    manifest = Manifest.load(dataset)
    num_embeddings = {feature.name: feature.num_embeddings for feature in manifest.schema.categorical}
    sse = build_sse(config.sse, num_embeddings, reserved_ids(manifest))
    for table, rule in sse.items():
        if rule.graph is not None:
            require_same_ids(rule.graph, dataset, manifest, table)
    description = describe(config)
    schemes = [table["scheme"] for table in description["tables"]]
    return RunSettings(
        dataset=dataset,
        splits=(config.data.train, config.data.validation, config.data.test),
        model=config.model,
        embedding=config.embedding,
        train=config.train,
        plan=config.plan,
        sse=sse,
        config_yaml=config.to_yaml(),
        info={
            "seed": config.train.seed,
            "batch_size": config.train.batch_size,
            "id_fingerprint": id_fingerprint(dataset, manifest),
            "graphs": graph_fingerprints(sse),
            "assignments": assignment_checksums(config.embedding),
            "kept_full": kept_full(description),
            "schemes": {scheme: schemes.count(scheme) for scheme in dict.fromkeys(schemes)},
            **{key: description[key] for key in ("parameters", "embedding_parameters", "embedding_bytes")},
        },
        saved_plan=None if plan is None else read_saved_plan(plan),
        previous_plan=previous_plan,
    )


def _default_run_dir(config: Path) -> Path:
    return Path("runs") / f"{config.stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def _agree_on_run_dir(path: Path, processes: "Ranks") -> Path:
    """Rank 0's folder on every rank: the clock that names it may differ."""
    import torch.distributed as dist

    agreed = [str(path.absolute())]
    dist.broadcast_object_list(agreed, src=0, device=processes.device)
    return Path(agreed[0])
