"""The report of a sweep's runs: a page in the sweep's folder, and the comparison in the terminal."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from distembed.reports.report import print_comparison, write_run_report
from distembed.reports.run_groups import best_first
from distembed.training.run_folder.folder import holds_run
from distembed.training.run_folder.record import RunRecord, RunSummary
from distembed.training.sweeps.sweep import SWEEP_REPORT, Sweep

if TYPE_CHECKING:
    from rich.console import Console


def report_sweep(sweep: Sweep, console: "Console", say: Callable[[str], None]) -> None:
    """Writes the report of all runs that have begun, and prints their comparison, the best first.

    Raises:
        RunError: The report cannot be written.
    """
    begun = {run.name: run for run in sweep.runs if holds_run(run.folder)}
    if not begun:
        return
    ordered = best_first([RunSummary.from_record(RunRecord.read(run.folder), name) for name, run in begun.items()])
    # any run of a recipe stands for all of it
    baseline = next((run.name for run in begun.values() if sweep.baseline in (run.name, run.recipe)), None)
    output = sweep.folder / SWEEP_REPORT
    summaries = write_run_report([run.path for run in ordered], output, baseline=baseline)
    print_comparison(summaries, console, baseline)
    say(f"report {output}")
