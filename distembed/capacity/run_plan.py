"""What ``distembed plan`` does once its options are read: plan, print, and only then write the files asked for.

What was planned is printed before a file is written, so that a full disk loses nothing of it. What can be known of a
file is checked before that, in :mod:`~distembed.capacity.plan_files`.
"""

import dataclasses
import json

from rich.console import Console

from distembed.capacity.as_json import report_as_json
from distembed.capacity.compression import compress_config
from distembed.capacity.configured_model import ConfiguredModel
from distembed.capacity.plan_files import PlanFiles, write_capacity_report
from distembed.capacity.plannable import Plannable
from distembed.capacity.report import CapacityReport, report_capacity
from distembed.capacity.terminal import print_capacity_report
from distembed.capacity.training_cost import TrainingRun
from distembed.errors import InsufficientMemory
from distembed.files import write_text
from distembed.planning.cluster import Cluster


def run_plan(
    plannable: Plannable,
    cluster: Cluster,
    files: PlanFiles,
    *,
    memory_is_given: bool,
    smallest: bool,
    training_run: TrainingRun | None,
    console: Console | None,
    errors: Console,
) -> bool:
    """Plans, prints and writes; returns whether the model fits.

    Args:
        plannable: Model to plan, of a config where a compressed one is asked for.
        cluster: Cluster to plan for.
        files: Files to write, which were found to be writable.
        memory_is_given: Whether ``--memory`` says what a device has, so that no other device would have more.
        smallest: Whether the smallest cluster that fits is looked for, with at most as many ranks a node.
        training_run: Training run to cost, where one is asked for.
        console: Console that tables are printed to; JSON is printed in their place where it is None.
        errors: Console that says which files are not written.

    Raises:
        UserError: The settings cannot be planned at all.
        RunError: A file cannot be written; the plan is printed by then.
    """
    reason = "it does not fit"
    if files.compress is not None:
        assert isinstance(plannable, ConfiguredModel)
        try:
            plannable = ConfiguredModel(compress_config(plannable.config, cluster))
        except InsufficientMemory as error:
            reason = str(error)  # then the config is planned as it is
    report = report_capacity(plannable, cluster, memory_is_given, smallest)
    report = dataclasses.replace(report, training_run=training_run)
    if console is None:
        print(_json_text(report), flush=True)
    else:
        print_capacity_report(report, console)
    fits = report.assessment.fits
    unwritten = [f"{option} {file}" for option, file in files.requested() if option != "--report" and not fits]
    if unwritten:
        text = f"not written: {', '.join(unwritten)}, since {reason}"
        errors.print(text, markup=False, highlight=False, soft_wrap=True)
    _write(files, plannable, report)
    return fits


def _write(files: PlanFiles, plannable: Plannable, report: CapacityReport) -> None:
    """Writes the files; of a model that does not fit the report alone."""
    fits = report.assessment.fits
    if files.compress is not None and fits:
        assert isinstance(plannable, ConfiguredModel)
        write_text(files.compress, plannable.config.to_yaml(), make_folder=True)
    if files.output is not None and fits:
        write_text(files.output, _json_text(report) + "\n", make_folder=True)
    if files.report is not None:
        write_capacity_report(report, files.report)


def _json_text(report: CapacityReport) -> str:
    """Returns the text that ``--json`` prints and ``--output`` holds."""
    return json.dumps(report_as_json(report), indent=2)
