"""The command ``distembed data stats``: what the rows of a dataset are like."""

import json
from pathlib import Path
from typing import Annotated

import typer

from distembed.base.files import write_text
from distembed.base.units import parse_bytes
from distembed.commands.shared import console, errors, say

app = typer.Typer()
data_app = typer.Typer(help="Look at a dataset's rows.", no_args_is_help=True)
app.add_typer(data_app, name="data")


@data_app.callback()
def _group() -> None:
    """Makes ``data`` a group of commands, of which there is one."""


@data_app.command("stats", epilog="Example: `distembed data stats criteo --output statistics.html`")
def stats_command(
    dataset: Annotated[str, typer.Argument(metavar="DATASET", help="Folder or URL of a dataset.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="HTML file with plots to write; one that is there is replaced."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    memory_limit: Annotated[str, typer.Option(help="Memory that counts of ids may take, such as 2GB.")] = "2GB",
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT whatever it is.")] = False,
) -> None:
    """Count a dataset's rows: labels over time, ids and their skew, numbers, missing, unseen and equal rows."""
    from rich.progress import Progress

    from distembed.base.outputs import require_file
    from distembed.reports.statistics import dataset_statistics
    from distembed.reports.statistics.page import render_page
    from distembed.reports.statistics.texts import print_statistics

    memory_bytes = parse_bytes("--memory-limit", memory_limit)
    if output is not None:
        require_file("--output", output, overwrite, may_replace_own=True)
    with Progress(console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("reading")
        found = dataset_statistics(
            dataset, memory_bytes, lambda done, total: bar.update(task, completed=done, total=total)
        )
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        print_statistics(found, console)
    if output is not None:
        write_text(output, render_page(found), make_folder=True)
        if not as_json:
            say(f"page {output}")
