"""The work of ``distembed plan`` once its options are read: plan, print, and only then write the requested files.

The plan is printed before a file is written, so that a full disk loses nothing of it.
"""

import dataclasses
import json

from rich.console import Console

from distembed.base.errors import InsufficientMemory
from distembed.base.files import write_text
from distembed.planning.devices import Cluster
from distembed.reports.plan.compression import compress_config
from distembed.reports.plan.plan_files import PlanFiles
from distembed.reports.plan.plannable import ConfiguredModel, Plannable
from distembed.reports.plan.report import TrainingRun, report_as_json, report_capacity
from distembed.reports.plan.terminal import print_capacity_report


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
    """Plans, prints, and writes the requested files; returns whether the model fits.

    ``console`` None prints JSON. ``--output`` and ``--compress`` are not written where the model does not fit, and
    ``errors`` says so; ``--report`` is always written.
    """
    reason, config = "it does not fit", None
    if files.compress is not None:
        assert isinstance(plannable, ConfiguredModel)
        config = plannable.config
        try:
            config = compress_config(config, cluster)
        except InsufficientMemory as error:
            reason = str(error)  # then the config is planned as it is
        plannable = ConfiguredModel(config)
    report = report_capacity(plannable, cluster, memory_is_given, smallest)
    report = dataclasses.replace(report, training_run=training_run)
    fits, is_json = report.assessment.fits, console is None or files.output is not None
    text = json.dumps(report_as_json(report), indent=2) if is_json else ""
    if console is None:
        print(text, flush=True)
    else:
        print_capacity_report(report, console)
    unwritten = [f"{option} {file}" for option, file in files.requested() if option != "--report" and not fits]
    if unwritten:
        message = f"not written: {', '.join(unwritten)}, since {reason}"
        errors.print(message, markup=False, highlight=False, soft_wrap=True)
    if files.compress is not None and config is not None and fits:
        write_text(files.compress, config.to_yaml(), make_folder=True)
    if files.output is not None and fits:
        write_text(files.output, text + "\n", make_folder=True)
    if files.report is not None:
        from distembed.reports.plan.page import write_capacity_report  # matplotlib takes a second to load

        write_capacity_report(report, files.report)
    return fits
