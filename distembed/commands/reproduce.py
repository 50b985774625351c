"""The command ``reproduce``: figures and tables of papers, trained again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from distembed.base.errors import UserError
from distembed.commands.shared import console, note, say

app = typer.Typer()


@app.command(
    "reproduce",
    epilog="Example: `distembed reproduce shi2020/figure4-operations --data raw --seeds 3`",
)
def reproduce_command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Figure or table, as --list names it.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each variant; more can be added later.")] = 3,
    data: Annotated[Path, typer.Option(help="Folder of the raw files; an error says where they are to be had.")] = Path(
        "data"
    ),
    run_dir: Annotated[
        Path, typer.Option("--run-dir", help="Folder for the prepared datasets and the runs of all figures.")
    ] = Path("runs/papers"),
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that train runs at the same time; they share the CPU's cores.")
    ] = 1,
    other: Annotated[
        str | None,
        typer.Option("--dataset", metavar="NAME", help="Another dataset of datasets.yaml, such as the full data."),
    ] = None,
    papers: Annotated[
        Path | None, typer.Option(help="Folder of papers; the project's own configs/papers unless given.")
    ] = None,
    any_data: Annotated[
        bool, typer.Option("--any-data", help="Take raw files with checksums that are not in datasets.yaml.")
    ] = False,
    list_all: Annotated[
        bool, typer.Option("--list", help="List all figures and tables; some have a reason why they are not run.")
    ] = False,
) -> None:
    """Train a figure or a table of a paper again: all its variants and seeds, then a table and a plot.

    Runs that have finished are kept: the same command resumes after any end.
    """
    from distembed.training.sweeps import papers as items

    folder = papers or items.PAPERS
    if list_all:
        for line in items.list_items(folder):
            say(f"{line.name}  {line.title if line.reason is None else f'not run here: {line.reason}'}")
        return
    if name is None:
        raise UserError("NAME is missing; `distembed reproduce --list` names all figures and tables.")
    from distembed.reports.papers import report_item
    from distembed.training.sweeps.sweep import Sweep, require_sweep_folder
    from distembed.training.sweeps.train import train_sweep  # without Optuna, no dataset is prepared

    item = items.load_item(name, folder)
    dataset = run_dir / "datasets" / (other or item.dataset)
    raw = items.load_dataset(other or item.dataset, folder)
    files = items.prepare_dataset(raw, item.outputs(), data, dataset, say, any_data)
    own = run_dir / (name if other is None else f"{name}-{other}")
    require_sweep_folder(own)
    runs = items.plan_item(item, folder / f"{name}.yaml", dataset, own, seeds)
    sweep = Sweep(Path(item.config), [], own, runs)
    say(f"{item.title}: {len(runs)} runs in {own}")
    try:
        with _bar(len(runs)) as show:
            outcomes = train_sweep(sweep, workers, say, show)
    except BaseException:
        try:
            report_item(item, runs, files, own, console)
        except Exception as failure:  # the error that ended the training says more
            note(f"the finished runs were not reported: {failure}")
        raise
    report_item(item, runs, files, own, console)
    sweep.require_all_finished(outcomes)


@contextmanager
def _bar(num_runs: int) -> Iterator[Callable[[int], None]]:
    """Yields the function that shows how many runs have ended: as a bar in a terminal, else not at all.

    The bar has no thread and leaves the streams as they are, since runs are trained in forked processes.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(
        *columns,
        console=console,
        auto_refresh=False,
        speed_estimate_period=float("inf"),  # runs take longer than the default of 30 s
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("runs", total=num_runs)

        def show(ended: int) -> None:
            bar.update(task, completed=ended)
            bar.refresh()

        yield show
