"""The command ``distembed convert``: a run with other tables, or a stock model, as what training begins with."""

import json
from pathlib import Path
from typing import Annotated

import typer

from distembed.commands.shared import console, note, say

app = typer.Typer()


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
        typer.Option(metavar="OURS=THEIRS", help="What the stock model calls a module of this model. May be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Fit compressed tables to full ones, or write them out as full ones: a start for `distembed train --init-from`."""
    from distembed.serving.convert.command import convert

    errors = convert(source, config, overrides or [], output, name or [])
    if as_json:
        print(json.dumps([error.to_json() for error in errors], indent=2))
        return
    from distembed.serving.convert.report import error_table

    console.print(error_table(errors))
    say(f"run {output}")
    if not (source / "run.json").exists():
        note("optimizer states of a stock checkpoint are left out: the first steps are as large as at a start.")
