"""The ``distembed`` command.

Exit codes: 0 done, 1 failed, 2 wrong input, 3 a plan that does not fit, 75 interrupted: go on with --resume. What a
user can mend is said in a sentence, without a traceback. Heavy imports happen within the commands: ``--help`` is fast
and ``doctor`` works on a broken install.
"""

import errno
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from distembed.commands.error_file import record_error
from distembed.errors import Interrupted, RunError, UserError
from distembed.units import parse_bytes
from launch.commands import add_commands

if TYPE_CHECKING:
    from logging import LogRecord

    from distembed.config import Config
    from distembed.planning.saved_plan import SavedPlan
    from distembed.ranks import Ranks

app = typer.Typer(
    name="distembed",
    help="Train click-through models with compressed, sharded embedding tables.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
prepare_app = typer.Typer(
    no_args_is_help=True, help="Turn raw files into a dataset. Example: `distembed prepare criteo`."
)
app.add_typer(prepare_app, name="prepare")

# a table that goes into a file or a pipe should not be wrapped to 80 columns
console = Console(width=None if sys.stdout.isatty() else 140)
errors = Console(stderr=True)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's: `train.epochs=2`."),
]

INTERRUPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run that `distembed train` made.")]
DataOption = Annotated[
    str | None, typer.Option("--data", help="Where the dataset is now, or another one whose ids mean the same.")
]


@app.callback()
def _before_any_command() -> None:
    _hush_libraries()


@prepare_app.command(
    "criteo",
    epilog="Example: `distembed prepare criteo day_0.gz day_1.gz --output criteo --split days`",
)
def prepare_criteo(
    inputs: Annotated[
        list[Path], typer.Argument(metavar="INPUT...", help="TSV files, plain or .gz, or folders of them.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make; it appears whole or not at all.")],
    min_count: Annotated[int, typer.Option(min=1, help="Ids seen less often in training are out of vocabulary.")] = 2,
    hash_size: Annotated[
        int | None, typer.Option(min=2, help="Hash ids into so many instead of building a vocabulary.")
    ] = None,
    hash_seed: Annotated[int, typer.Option(min=0, help="Seed of the hash.")] = 0,
    split: Annotated[
        str, typer.Option(help="`days`, or shares of training, validation and test, in time order.")
    ] = "0.8,0.1,0.1",
    max_rejected: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of malformed rows that is too many.")
    ] = 0.01,
    memory_limit: Annotated[str, typer.Option(help="Memory to stay within, such as 2GB.")] = "2GB",
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; the number of cores unless given.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is there.")] = False,
) -> None:
    """Turn raw Criteo rows (label, 13 integers, 26 hex ids, tab-separated) into a Parquet dataset with a manifest."""
    from distembed.commands.prepare_progress import prepare_progress
    from distembed.data.prepare.criteo import prepare_criteo as prepare

    with prepare_progress(console) as progress:
        manifest = prepare(
            inputs,
            output,
            min_count=min_count,
            hash_size=hash_size,
            hash_seed=hash_seed,
            split=split,
            max_rejected=max_rejected,
            memory_limit_bytes=parse_bytes("--memory-limit", memory_limit),
            overwrite=overwrite,
            threads=threads,
            progress=progress,
        )
    for name, part in manifest.splits.items():
        rate = "none" if part.label_rate is None else f"{part.label_rate:.4f}"
        say(f"{name}: {part.num_rows:,} rows, label rate {rate}")
    say(f"dataset {output}")


@prepare_app.command(
    "graph",
    epilog="Example: `distembed prepare graph edges.csv --output graphs/C3 --data criteo --table C3`; "
    "`distembed prepare graph films.csv --source film --attribute actor --num-embeddings 1683 --output graphs/film`",
)
def prepare_graph(
    inputs: Annotated[
        list[Path],
        typer.Argument(metavar="EDGES...", help="Parquet, CSV or TSV files (.gz too), or folders; with column names."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make; it appears whole or not at all.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="Prepared dataset: its vocabulary or hash gives the ids.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="The dataset's table whose ids are the nodes.")] = None,
    num_embeddings: Annotated[
        int | None, typer.Option(help="Instead of --data and --table: values are ids below this.")
    ] = None,
    source: Annotated[str, typer.Option(help="Column of an edge's one end.")] = "source",
    target: Annotated[str, typer.Option(help="Column of its other end.")] = "target",
    weight: Annotated[str | None, typer.Option(help="Column of its weight.")] = None,
    directed: Annotated[bool, typer.Option("--directed", help="The source is no neighbour of the target.")] = False,
    attribute: Annotated[
        str | None, typer.Option(help="Column of an attribute: ids of SOURCE that share a value are neighbours.")
    ] = None,
    max_shared: Annotated[int, typer.Option(help="Leave out values that more ids share.")] = 1000,
    count_shared: Annotated[
        bool, typer.Option("--count-shared", help="Weigh an edge by the number of values shared.")
    ] = False,
    unknown: Annotated[
        str, typer.Option(help="`error`, or `drop` rows with a value that the table has no id for.")
    ] = "error",
    memory_limit: Annotated[str, typer.Option(help="Memory to stay within, such as 2GB.")] = "2GB",
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is there.")] = False,
) -> None:
    """Turn edges, or shared attributes, into a graph over a table's ids, for SSE-Graph."""
    from distembed.commands.prepare_progress import prepare_progress
    from distembed.graph.prepare.prepare import describe_graph
    from distembed.graph.prepare.prepare import prepare_graph as prepare

    with prepare_progress(console) as progress:
        graph = prepare(
            inputs,
            output,
            data=data,
            table=table,
            num_embeddings=num_embeddings,
            source=source,
            target=target,
            weight=weight,
            directed=directed,
            attribute=attribute,
            max_shared=max_shared,
            count_shared=count_shared,
            unknown=unknown,
            memory_limit_bytes=parse_bytes("--memory-limit", memory_limit),
            overwrite=overwrite,
            progress=progress,
        )
    for line in describe_graph(graph):
        say(line)
    say(f"graph {output}")


@app.command(epilog="Example: `distembed synthesize criteo.tsv --rows 1000000 --seed 0`")
def synthesize(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="File to write; ending in .gz it is compressed.")],
    rows: Annotated[int, typer.Option(min=1, help="Number of rows.")] = 200_000,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same file.")] = 0,
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT if it is there.")] = False,
) -> None:
    """Make a file in Criteo's format: skewed ids, a planted signal of known Bayes logloss, a time order."""
    from distembed.data.prepare.synthesize import synthesize_criteo

    summary = synthesize_criteo(output, num_rows=rows, seed=seed, overwrite=overwrite)
    say(
        f"{output}: {rows:,} rows; the best possible logloss is {summary.bayes_logloss:.4f}, "
        f"AUC {summary.bayes_auc:.4f}"
    )


@app.command(epilog="Example: `distembed describe configs/criteo_kaggle.yaml embedding.default.collisions=8 --json`")
def describe(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show every embedding table and dense layer of a config, with parameters and bytes, without making them."""
    from distembed.config import load_config
    from distembed.describe import describe as describe_config
    from distembed.describe import print_description

    description = describe_config(load_config(config, overrides or []))
    if as_json:
        print(json.dumps(description, indent=2))
    else:
        print_description(description, console)


@app.command(epilog="Example: `distembed plan configs/criteo_kaggle.yaml --nodes 1 --gpus 8 --gpu h100-80gb`")
def plan(
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
    fit: Annotated[
        Path | None, typer.Option("--fit", help="New YAML file to write: the config, compressed as little as fits.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Plan a config for a cluster that need not be there: where tables go, and what each rank holds.

    Exit code 0 where it fits, 3 where it does not.
    """
    import dataclasses

    from distembed.capacity.output import PlanFiles, run_plan
    from distembed.config import load_config
    from distembed.planning.cluster import Cluster
    from distembed.planning.devices import find_device

    device = find_device(gpu)
    if memory is not None:
        device = dataclasses.replace(device, memory_bytes=parse_bytes("--memory", memory))
    of_host = 0 if host_memory is None else parse_bytes("--host-memory", host_memory)
    cluster = Cluster(device, nodes, gpus, of_host)
    files = PlanFiles(output, fit, report)
    loaded = load_config(config, overrides or [])
    given = memory is not None
    if not run_plan(loaded, cluster, files, memory_is_given=given, as_json=as_json, console=console, errors=errors):
        raise typer.Exit(3)


@app.command(
    epilog="Example: `distembed train configs/criteo_kaggle.yaml data.path=criteo --run-dir runs/first`; "
    "on two processes: `python -m torch.distributed.run --nproc-per-node 2 -m distembed train ...`"
)
def train(
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


@app.command(epilog="Example: `distembed evaluate runs/first --split validation`")
def evaluate(
    run: RunArgument,
    split: Annotated[str, typer.Option(help="Split to evaluate on.")] = "test",
    data: DataOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a line.")] = False,
) -> None:
    """Evaluate a run's newest checkpoint: logloss, AUC, normalised entropy, calibration, accuracy."""
    import dataclasses

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


@app.command(epilog="Example: `distembed predict runs/first --split test --output predictions.parquet`")
def predict(
    run: RunArgument,
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


@app.command(epilog="Example: `distembed materialise runs/first --output vectors --table C3`")
def materialise(
    run: RunArgument,
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


@app.command(epilog="Example: `distembed report runs/full runs/quotient_remainder --output report.html`")
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs to show and compare.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML file with plots and a comparison of runs."""
    from distembed.runs.report import print_comparison, write_report

    print_comparison(write_report(runs, output), console)
    say(f"report {output}")


@app.command(epilog="Example: `distembed doctor`")
def doctor() -> None:
    """Check versions, devices and the pinned trio, and show the command that mends what does not work."""
    from distembed.doctor.doctor import run_doctor

    raise typer.Exit(run_doctor(console))


def say(text: str) -> None:
    """Prints a line as it is, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


add_commands(app, say)


def _settings(config: "Config", plan: Path | None, previous_plan: "SavedPlan | None") -> Any:
    from distembed.data.dataset.manifest import Manifest, id_fingerprint
    from distembed.data.prepare.vocabulary import reserved_ids
    from distembed.describe import describe as describe_config
    from distembed.describe import kept_full
    from distembed.embedding import assignment_checksums
    from distembed.graph.prepare.ids import require_same_ids
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
    description = describe_config(config)
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


def _hush_libraries() -> None:
    """Keeps out of the output what TorchRec and torch say of each other and no user can act on."""
    import logging
    import warnings

    for name in ("torchrec", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().addFilter(_is_worth_saying)
    warnings.filterwarnings("ignore", module=r"torchrec\.|torch\.distributed")
    warnings.filterwarnings("ignore", message="Please use DTensor", category=FutureWarning)


def _is_worth_saying(record: "LogRecord") -> bool:
    # a table that every rank has needs none, and TorchRec says so to the root logger
    return not str(record.msg).startswith("Sharding spec not found")


def _share_the_processor() -> None:
    """Lets OpenMP's threads wait asleep, after a short spin; to be called before torch is loaded.

    By default they spin for milliseconds at every barrier. One other busy process on two cores then slowed training
    from 20,000 to 400 samples/s; with a short spin to 7,000. Alone, it costs a few percent.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def main() -> NoReturn:
    """Runs the command and ends the process with its exit code."""
    _share_the_processor()
    try:
        app(standalone_mode=True)
    except UserError as error:
        record_error(error)
        _end(2, f"[bold red]error:[/] {_escape(error)}")
    except Interrupted as error:
        _end(INTERRUPTED_EXIT_CODE, f"[bold yellow]interrupted:[/] {_escape(error)}")
    except RunError as error:
        record_error(error)
        _end(1, f"[bold red]failed:[/] {_escape(error)}")
    except SystemExit as ended:
        if ended.code == 130:  # typer's answer to Ctrl-C
            _end(INTERRUPTED_EXIT_CODE, "[bold yellow]interrupted[/]")
        _leave(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
            _end(2, f"[bold red]error:[/] {_escape(error)}")
        record_error(error)
        _end(1, f"[bold red]failed:[/] {_escape(error)}")
    except Exception as error:
        record_error(error)
        raise
    _leave(0)


def _escape(error: BaseException) -> str:
    from rich.markup import escape

    return escape("\n".join([str(error), *getattr(error, "__notes__", [])]))


def _end(code: int, message: str) -> NoReturn:
    rank = os.environ.get("RANK", "0")
    errors.print(message if rank == "0" else f"rank {rank}: {message}", highlight=False, soft_wrap=True)
    _leave(code)


def _leave(code: int) -> NoReturn:
    if "RANK" in os.environ:
        # One of several ranks: a gloo thread that is late with its last message asks for the interpreter after that has
        # ended, which aborts a process whose work is done and written. So the process ends before the interpreter does.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
