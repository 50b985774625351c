"""The commands ``train``, ``evaluate``, ``materialise``, ``convert`` and ``compress``: runs and their tables."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from distembed.base.errors import UserError
from distembed.commands.shared import ConfigArgument, OverridesArgument, console, note, say

if TYPE_CHECKING:
    from distembed.serving.convert.code_options import DataTypeChoice, SchemeChoice

app = typer.Typer()

RunFolderArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that `distembed train` made.")]
DataOption = Annotated[
    str | None, typer.Option("--data", help="Where the dataset is now, or another one whose ids mean the same.")
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="[best|newest|STEP]",
        help="Which checkpoint to use; unless given, the best where the run keeps it (train.keep_best), else the "
        "newest.",
    ),
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
    init_from: Annotated[
        str | None,
        typer.Option(
            "--init-from",
            metavar="RUN",
            help="Begin with the weights and optimizer states of this run, or of one of its checkpoints; its dataset's "
            "vocabulary may have grown since. The same as train.init_from.",
        ),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(
            "--follow",
            metavar="SOURCE",
            help="Train on raw rows as they arrive: a folder or URL in which files appear, or kafka://HOST:PORT/TOPIC. "
            "The same as data.stream.source.",
        ),
    ] = None,
    until_idle: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="With --follow: end after so long without rows (data.stream.until_idle)."),
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(metavar="N", help="With --follow: end after so many rows (data.stream.max_rows).")
    ] = None,
) -> None:
    """Train a model, evaluate it on the test split, and keep all that is needed to repeat it."""
    from distembed.training.config import load_config
    from distembed.training.start import RunOptions, find_start_alone

    options = RunOptions(run_dir, config.stem, resume, resume_or_start, plan)
    settings = {
        "train.init_from": init_from,
        "data.stream.source": follow,
        "data.stream.until_idle": until_idle,
        "data.stream.max_rows": max_rows,
    }
    given = [f"{name}={json.dumps(value)}" for name, value in settings.items() if value is not None]
    loaded = load_config(config, [*(overrides or []), *given])
    start = find_start_alone(loaded, options, say)
    from distembed.base.ranks import process_group
    from distembed.training.run import train_run

    with process_group(loaded.train.device) as ranks:
        finished = train_run(loaded, options, ranks, console, say, start)
        if ranks.is_first:
            if finished.described is not None:
                say(finished.described)
            say(f"run {finished.folder}")


@app.command("evaluate", epilog="Example: `distembed evaluate runs/first --split validation`")
def evaluate_command(
    run: RunFolderArgument,
    split: Annotated[str, typer.Option(help="Split to evaluate on.")] = "test",
    data: DataOption = None,
    by: Annotated[
        str | None, typer.Option(metavar="[day|hour]", help="Evaluate each day's rows apart, or each hour's, in UTC.")
    ] = None,
    checkpoint: CheckpointOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Evaluate a run's best or newest checkpoint by its task's metrics: logloss and AUC, RMSE, or NDCG."""
    from distembed.base.files import finite
    from distembed.training.trained_run import find_trained_run, period_kind

    trained = find_trained_run(run, data, split, checkpoint)
    kind = None if by is None else period_kind(by, trained)
    from distembed.training.inference import describe_metrics, evaluate_by_period, evaluate_split, open_run

    with open_run(trained) as loaded:
        if kind is None:
            metrics = evaluate_split(loaded.state, loaded.dataset, split, loaded.ranks)
        else:
            metrics = evaluate_by_period(loaded.state, loaded.dataset, split, loaded.ranks, kind)
        if loaded.ranks.is_first and as_json:
            print(json.dumps(finite(metrics), indent=2))
        elif loaded.ranks.is_first and kind is None:
            print(describe_metrics(loaded.state, metrics))
        elif loaded.ranks.is_first:
            for period, of_period in metrics.items():
                print(f"{period}  {loaded.state.task.describe(of_period)}")


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
    checkpoint: CheckpointOption = None,
) -> None:
    """Write the composed vectors of a run's tables, one a row, for serving."""
    from distembed.base.files import require_folder
    from distembed.training.trained_run import find_trained_run, id_column

    require_folder("--output", output)
    trained = find_trained_run(run, data, checkpoint=checkpoint)
    if ids is not None:
        id_column(ids)
    from distembed.training.materialise import materialise_run

    for table_written in materialise_run(
        run, trained.config, trained.manifest.schema, output, table or [], ids, overwrite, checkpoint
    ):
        rows_per_second = table_written.num_rows / table_written.seconds
        say(f"{table_written.path}: {table_written.num_rows:,} vectors, {rows_per_second:,.0f} rows/s")


@app.command(
    "convert",
    epilog="Example: `distembed convert runs/full embedding.default.partition=quotient_remainder --output start`, then "
    "`distembed train config.yaml --init-from start`",
)
def convert_command(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A run, or a checkpoint of a stock TorchRec model, with --config.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write, a run of no steps.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the run's, or the config's."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file of the run that begins with it; the run's own unless given.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OURS=THEIRS", help="Module of this model and its name in the stock model; may be repeated."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Fit compressed tables to full ones, or write them out as full ones: a start for `distembed train --init-from`."""
    from distembed.serving.convert.run_start import convert

    errors = convert(source, config, overrides or [], output, name or [])
    if as_json:
        print(json.dumps([error.to_json() for error in errors], indent=2))
        return
    from distembed.serving.convert.run_start import error_table

    console.print(error_table(errors))
    say(f"run {output}")
    if not (source / "run.json").exists():
        note("optimizer states of a stock checkpoint are left out: the first steps are as large as at a start.")


@app.command(
    "compress",
    epilog="Example: `distembed compress runs/full runs/codes --budget 100kB`; "
    "by quality: `distembed compress runs/full runs/codes --max-loss 0.001`",
)
def compress_command(
    run: RunFolderArgument,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write, a run of no steps.")],
    to: Annotated[str, typer.Option("--to", metavar="[codes]", help="What the tables become.")] = "codes",
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most bytes of all tables with their codes, such as 1MB.")
    ] = None,
    bits_per_id: Annotated[
        int | None, typer.Option("--bits-per-id", metavar="N", help="Bits of an id's codes: 6 for 64 vectors a table.")
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(
            "--max-loss", metavar="LOSS", help="Most that the headline metric loses on the validation split: 0.001."
        ),
    ] = None,
    scheme: Annotated[
        str,
        typer.Option(
            metavar="[auto|one|product|residual]",
            help="One vector an id, a vector for each part of it, or sums; auto chooses for each table.",
        ),
    ] = "auto",
    min_count: Annotated[
        int | None,
        typer.Option("--min-count", help="Ids that occur less often share their codes; 4 unless given."),
    ] = None,
    data_type: Annotated[
        str | None,
        typer.Option("--data-type", metavar="[fp32|fp16]", help="Type of centroids; unless given, the tables'."),
    ] = None,
    features: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE=FILE",
            help="Make codes of this table alone, of vectors or texts of its values: .parquet, .csv or .npz; may be "
            "repeated.",
        ),
    ] = None,
    balance: Annotated[
        float | None,
        typer.Option(metavar="B", help="Give no code of a part to more than B times the mean number of ids: 2."),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="[auto|cpu|cuda]", help="Device that computes codes; auto is CUDA where it is.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the first centroids of k-means.")] = 0,
    data: DataOption = None,
    checkpoint: CheckpointOption = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it is a run of codes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Store a trained run's tables as codes of a few vectors, without training: to serve, or to train with them."""
    from distembed.base.names import one_of, pair
    from distembed.base.units import format_bytes, parse_bytes
    from distembed.training.trained_run import find_trained_run

    one_of("--to", to, ("codes",))
    budget_bytes = None if budget is None else parse_bytes("--budget", budget)
    from distembed.serving.convert.code_options import CodeOptions
    from distembed.serving.convert.code_run import compress_to_codes

    files: dict[str, str] = {}
    for text in features or []:
        table, file = pair("--features", text, "TABLE=FILE", "item=items.parquet")
        if table in files:
            raise UserError(
                f"--features {table} is given twice, as {files[table]} and {file}; join the files into one."
            )
        files[table] = file
    # CodeOptions checks the choices
    chosen, numbers = cast("SchemeChoice", scheme), cast("DataTypeChoice | None", data_type)
    options = CodeOptions(
        budget_bytes,
        bits_per_id,
        max_loss,
        chosen,
        min_count,
        seed,
        overwrite,
        numbers,
        balance=balance,
        features={name: Path(file) for name, file in files.items()},
        device=device,
    )
    trained = find_trained_run(run, data, checkpoint=checkpoint)
    coded = compress_to_codes(trained, output, options, note)
    if as_json:
        print(json.dumps(coded.to_json(), indent=2))
        return
    from distembed.serving.convert.run_start import error_table

    if coded.without_states:
        tables = ", ".join(coded.without_states)
        note(f"the optimizer states of {tables} begin at 0: training that goes on needs a low learning rate at first.")
    console.print(error_table(coded.errors, coded.codes_of))
    ratio = f"{coded.serving_compression:.1f}x less to serve than full ones"
    say(f"tables: {format_bytes(coded.table_bytes)} with codes, {ratio}")
    if coded.metric is not None:
        metric = coded.metric
        say(f"{metric.split}: {metric.name} {metric.after:.6f}, before {metric.before:.6f}")
    say(f"run {output}")
