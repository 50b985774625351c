"""The commands ``configs``, ``describe``, ``report``, ``check`` and ``doctor``: configs, runs and this machine."""

import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from distembed.base.errors import UserError
from distembed.base.files import CONFIGS
from distembed.base.units import enumerate_lines, format_bytes
from distembed.commands.shared import ConfigArgument, JsonOption, OverridesArgument, console, say

app = typer.Typer()


@app.command("configs", epilog="Example: `distembed configs --output configs`")
def configs_command(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to make, with a copy of all of them.")
    ] = None,
) -> None:
    """List the configs of runs that are installed with distembed, or copy them into a new folder."""
    # the files of papers/ are no configs of runs: `distembed reproduce --list` lists them
    files = [file for file in sorted(CONFIGS.rglob("*.yaml")) if not file.is_relative_to(CONFIGS / "papers")]
    if output is not None:
        from distembed.data.prepare.staging import staged_folder

        if os.path.lexists(output):
            raise UserError(f"--output {output} exists; give the path of a new folder.")
        with staged_folder(output, overwrite=False, kind="folder of configs") as folder:
            for file in files:
                copy = folder / file.relative_to(CONFIGS)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
        say(f"configs {output}")
        return
    for file in files:
        first, *_ = file.read_text(encoding="utf-8").splitlines()
        say(f"{file.relative_to(CONFIGS)}  {first}" if first.startswith("#") else str(file.relative_to(CONFIGS)))


@app.command(
    "describe", epilog="Example: `distembed describe configs/criteo_kaggle.yaml embedding.default.collisions=8 --json`"
)
def describe_command(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    as_json: JsonOption = False,
) -> None:
    """Show every embedding table and dense layer of a config, with parameters and bytes, without making them."""
    from distembed.training.config import load_config
    from distembed.training.describe import describe, print_description
    from distembed.training.initial_run import begun_config

    description = describe(begun_config(load_config(config, overrides or [])))
    if as_json:
        print(json.dumps(description.as_json(), indent=2))
    else:
        print_description(description, console)


@app.command("report", epilog="Example: `distembed report runs/full runs/quotient_remainder --output report.html`")
def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs to show and compare, or of sweeps.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="HTML file to write; a report that is there is replaced.")
    ] = Path("report.html"),
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Run that other runs are compared with, together with runs that differ in the seed."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace OUTPUT, even if another program made it.")] = False,
) -> None:
    """Write one self-contained HTML file with plots and a comparison of runs, and of means over seeds."""
    from distembed.reports.report import print_comparison, write_run_report
    from distembed.training.sweeps.sweep import given_runs

    print_comparison(write_run_report(given_runs(runs), output, overwrite, baseline), console, baseline)
    say(f"report {output}")


@app.command("check", epilog="Example: `distembed check runs/first`")
def check_command(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A run, a checkpoint or a dataset (URLs will do), or a graph.")
    ],
) -> None:
    """Hold every byte of a run's checkpoints, a checkpoint, a dataset or a graph against its checksum."""
    from distembed.training.check import check

    problems: list[str] = []
    for checked in check(path):
        verification = checked.found
        state = f"damaged in {len(verification.problems)} place(s)" if verification.problems else "whole"
        size = format_bytes(verification.num_bytes)
        say(f"{checked.kind} {checked.path}: {state}, {verification.num_files:,} files, {size}")
        problems += verification.problems
    if problems:
        raise UserError(f"{path} is damaged:{enumerate_lines(problems, most=100)}")


@app.command("doctor", epilog="Example: `distembed doctor --fix`")
def doctor_command(
    fix: Annotated[
        bool, typer.Option("--fix", help="Run the commands of pip that mend faults: TorchRec, FBGEMM, TorchX.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands of --fix and run none.")] = False,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        typer.Option(help="Device to install FBGEMM for; that of the installed FBGEMM, or of this machine."),
    ] = None,
) -> None:
    """Check versions, devices and the pinned trio, and show or run the commands that mend faults."""
    from distembed.reports.doctor import run_doctor, run_fix

    if fix or dry_run:
        raise typer.Exit(run_fix(console, device, dry_run=dry_run))
    raise typer.Exit(run_doctor(console, device))
