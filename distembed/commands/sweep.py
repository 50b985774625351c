"""The commands ``sweep`` and ``compress-search``: runs of several configs, to compare them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from distembed.base.errors import UserError
from distembed.commands.shared import ConfigArgument, JsonOption, OverridesArgument, console, note, say

if TYPE_CHECKING:
    from distembed.training.sweeps.sweep import PlannedRun

app = typer.Typer()

SettingsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE,VALUE...]...",
        help="Settings with the values that they take in turn: `train.seed=0,1,2`. One value holds for all runs.",
    ),
]


@app.command(
    "sweep",
    epilog="Example: `distembed sweep configs/criteo_sample.yaml data.path=criteo "
    "embedding.default.partition=naive,quotient_remainder train.seed=0,1,2 --workers 2 --run-dir runs/schemes`",
)
def sweep_command(
    config: ConfigArgument,
    settings: SettingsArgument = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that train runs at the same time; they share the CPU's cores.")
    ] = 1,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            help="Folder for the runs; runs/NAME-sweep-TIME unless given. One that a sweep has left is gone on with.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run, or runs that differ in the seed, that others are compared with."),
    ] = None,
    sampler: Annotated[
        Literal["grid", "random", "tpe"],
        typer.Option(
            help="Which combinations are trained: all; --trials of them, drawn at random; or --trials of them, each "
            "chosen by the results of earlier runs (Optuna's TPE)."
        ),
    ] = "grid",
    trials: Annotated[
        int | None, typer.Option(min=1, help="Number of runs of --sampler random or tpe; earlier runs count.")
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="End a run early once an evaluation is worse than the median of other runs at its step; see "
            "train.evaluate_every.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs and the state of each.")] = False,
) -> None:
    """Train a run for each combination of values, and compare them by the task's headline metric."""
    from distembed.training.run_folder.folder import default_run_folder
    from distembed.training.sweeps.sweep import Sweep, plan_sweep, require_sweep_folder

    folder = run_dir or default_run_folder(f"{config.stem}-sweep")
    require_sweep_folder(folder)
    runs = plan_sweep(config, settings or [], folder, sampler, trials)
    if dry_run:
        _list_runs(runs)
        return
    from distembed.reports.report import report_sweep
    from distembed.training.sweeps.train import train_sweep

    sweep = Sweep(config, settings or [], folder, runs, sampler, trials, prune, baseline)
    say(f"{trials or len(runs)} runs, {workers} at a time, in {folder}")
    try:
        outcomes = train_sweep(sweep, workers, say)
    finally:
        report_sweep(sweep, console, say)
    sweep.require_all_finished(outcomes)


def _list_runs(runs: "Sequence[PlannedRun]") -> None:
    for run in runs:
        say(f"{run.name}  {run.state}")
    counts = [(state, sum(run.state == state for run in runs)) for state in ("new", "resumed", "pruned", "finished")]
    say(f"{len(runs)} runs: {', '.join(f'{count} {state}' for state, count in counts if count)}")


@app.command(
    "compress-search",
    epilog="Example: `distembed compress-search configs/criteo_sample.yaml data.path=criteo --budget 2MB --output "
    "smaller`, then `distembed train smaller/config.yaml`",
)
def compress_search_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    budget: Annotated[
        str, typer.Option(metavar="SIZE", help="Most bytes of all tables in training, with optimizer states: 50MB.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Folder for the config, the curve and all runs. A search that was interrupted there is continued.",
        ),
    ],
    curve: Annotated[
        str,
        typer.Option(
            metavar="TIMES,...",
            help="Further points of the curve: how many times fewer bytes than full tables.",
        ),
    ] = "4,16,60",
    tries: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="KEY=VALUE,VALUE...",
            help="Settings common to all tables, separated by blanks: the search compares each combination of values "
            "with the config as given. Half precision with one optimizer state a row, at the config's dimension and at "
            "half of it, unless given; '' for none. May be repeated.",
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that train runs at the same time; they share the CPU's cores.")
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Choose the settings, and each table's scheme and size, within a budget by how much tables matter; train them."""
    from distembed.base.units import format_bytes, parse_bytes
    from distembed.serving.convert.size_search import SearchOptions, search_sizes

    budget_bytes = parse_bytes("--budget", budget)
    try:
        times = [float(number) for number in curve.split(",") if number.strip()]
    except ValueError:
        raise UserError(f"--curve is {curve!r}; give numbers such as 4,16,60, or '' for none.") from None
    options = SearchOptions(budget_bytes, output, times, workers, tries or None)
    result = search_sizes(config, overrides or [], options, note if as_json else say)
    if as_json:
        print(json.dumps(result.to_json(), indent=2))
        return
    console.print(result.table())
    chosen = result.chosen
    say(f"{output / 'config.yaml'}: the tables of {chosen.name}, {format_bytes(chosen.num_bytes)}")
