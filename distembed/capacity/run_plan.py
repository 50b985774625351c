"""What ``distembed plan`` does once its options are read: plan, print, and only then write the files asked for.

What can be known of a file is checked before anything is planned. What was planned is printed before a file is written,
so that a full disk loses nothing of it.
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from distembed.capacity.as_json import report_as_json
from distembed.capacity.compression import compress_config
from distembed.capacity.report import CapacityReport, report_capacity
from distembed.capacity.terminal import print_capacity_report
from distembed.config import Config
from distembed.errors import InsufficientMemory, RunError, UserError
from distembed.files import write_text
from distembed.planning.cluster import Cluster


@dataclass(frozen=True)
class PlanFiles:
    """Files to write; None for those that were not asked for.

    Attributes:
        output: File of the plan, for ``distembed train --plan``.
        compress: File of the config, compressed as little as the cluster asks for.
        report: File of the page or chart of the plan; one that is there is replaced.
    """

    output: Path | None = None
    compress: Path | None = None
    report: Path | None = None

    def requested(self) -> Iterator[tuple[str, Path]]:
        """Yields the option and the file of each that was asked for."""
        for option in ("output", "compress", "report"):
            file = getattr(self, option)
            if file is not None:
                yield f"--{option}", file

    def require_writable(self) -> None:
        """Finds out what can be known before there is anything to write.

        Raises:
            UserError: A file is a folder, or is there and is no report, or two options name the same one.
            RunError: No file can be made in a folder.
        """
        if self.report is not None:
            from distembed.capacity.report_file import require_known_suffix

            require_known_suffix(self.report)
        option_by_file: dict[Path, str] = {}
        for option, file in self.requested():
            other = option_by_file.setdefault(file.absolute(), option)
            if other != option:
                raise UserError(f"{other} and {option} both name {file}; name two files.")
            _require_writable(option, file, may_replace=option == "--report")


def run_plan(
    config: Config,
    cluster: Cluster,
    files: PlanFiles,
    *,
    memory_is_given: bool,
    as_json: bool,
    console: Console,
    errors: Console,
) -> bool:
    """Plans, prints and writes; returns whether the config fits.

    Args:
        config: Config to plan.
        cluster: Cluster to plan for.
        files: Files to write.
        memory_is_given: Whether ``--memory`` says what a device has, so that no other device would have more.
        as_json: Whether JSON is printed, in place of tables.
        console: Console that tables are printed to.
        errors: Console that says which files are not written.

    Raises:
        UserError: A file cannot be asked for, or the settings cannot be planned at all.
        RunError: A file cannot be written; the plan is printed by then.
    """
    files.require_writable()
    reason = "the config does not fit"
    if files.compress is not None:
        try:
            config = compress_config(config, cluster)
        except InsufficientMemory as error:
            reason = str(error)  # then the config is planned as it is
    report = report_capacity(config, cluster, memory_is_given)
    if as_json:
        print(_json_text(report), flush=True)
    else:
        print_capacity_report(report, console)
    fits = report.assessment.fits
    unwritten = [f"{option} {file}" for option, file in files.requested() if option != "--report" and not fits]
    if unwritten:
        text = f"not written: {', '.join(unwritten)}, since {reason}"
        errors.print(text, markup=False, highlight=False, soft_wrap=True)
    _write(files, config, report)
    return fits


def _require_writable(option: str, file: Path, may_replace: bool) -> None:
    """Refuses a file that could not be written; the errors are those of :meth:`PlanFiles.require_writable`."""
    if file.is_dir():
        raise UserError(f"{option} {file} is a folder; name a file.")
    if file.exists() and not may_replace:
        raise UserError(f"{option} {file} exists already; name a new file.")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise UserError(f"{option} {file} cannot be written: {folder} is a file and no folder; name another one.")
    try:
        # permissions alone are not enough: a file system may be read-only, or none for files
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(
            f"{option} {file} cannot be written: no file can be made in {folder} ({error}); choose another folder."
        ) from error


def _write(files: PlanFiles, config: Config, report: CapacityReport) -> None:
    """Writes the files; of a config that does not fit the report alone."""
    fits = report.assessment.fits
    if files.compress is not None and fits:
        write_text(files.compress, config.to_yaml(), make_folder=True)
    if files.output is not None and fits:
        write_text(files.output, _json_text(report) + "\n", make_folder=True)
    if files.report is not None:
        from distembed.capacity.report_file import write_capacity_report  # matplotlib takes a second to load

        write_capacity_report(report, files.report)


def _json_text(report: CapacityReport) -> str:
    """Returns the text that ``--json`` prints and ``--output`` holds."""
    return json.dumps(report_as_json(report), indent=2)
