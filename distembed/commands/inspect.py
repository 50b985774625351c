"""The commands ``distembed describe``, ``report`` and ``doctor``: what a config, a run or this machine has."""

import json
from pathlib import Path
from typing import Annotated

import typer

from distembed.commands.shared import ConfigArgument, OverridesArgument, console, say

app = typer.Typer()


@app.command(
    "describe", epilog="Example: `distembed describe configs/criteo_kaggle.yaml embedding.default.collisions=8 --json`"
)
def describe_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show every embedding table and dense layer of a config, with parameters and bytes, without making them."""
    from distembed.config import load_config
    from distembed.describe import describe, print_description

    description = describe(load_config(config, overrides or []))
    if as_json:
        print(json.dumps(description.as_json(), indent=2))
    else:
        print_description(description, console)


@app.command("report", epilog="Example: `distembed report runs/full runs/quotient_remainder --output report.html`")
def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs to show and compare.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="HTML file to write; a report that is there is replaced.")
    ] = Path("report.html"),
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT whatever it is.")] = False,
) -> None:
    """Write one self-contained HTML file with plots and a comparison of runs."""
    from distembed.runs.report import print_comparison, write_run_report

    print_comparison(write_run_report(runs, output, overwrite), console)
    say(f"report {output}")


@app.command("doctor", epilog="Example: `distembed doctor`")
def doctor_command() -> None:
    """Check versions, devices and the pinned trio, and show the command that mends what does not work."""
    from distembed.doctor import run_doctor

    raise typer.Exit(run_doctor(console))
