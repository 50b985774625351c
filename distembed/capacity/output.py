"""What ``distembed plan`` does once its options are read: plan, print, and only then write the files asked for.

What can be known of a file is checked before anything is planned. What was planned is printed before a file is written,
so that a full disk loses nothing of it.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from distembed.capacity.assessment import Assessment, assess_capacity
from distembed.capacity.compression import compress_config
from distembed.capacity.remedies import UNFINISHED, find_remedies
from distembed.capacity.terminal import print_plan
from distembed.config import Config
from distembed.errors import DoesNotFit, RunError, UserError
from distembed.files import whole_file
from distembed.planning.cluster import Cluster


@dataclass(frozen=True)
class PlanFiles:
    """Files to write; None for those that were not asked for.

    Attributes:
        output: the plan, for ``distembed train --plan``.
        fit: the config, compressed as little as fits.
        report: page or chart of the plan; one that is there is replaced.
    """

    output: Path | None = None
    fit: Path | None = None
    report: Path | None = None

    def asked_for(self) -> Iterator[tuple[str, Path]]:
        """Option and file."""
        for option in ("output", "fit", "report"):
            file = getattr(self, option)
            if file is not None:
                yield f"--{option}", file

    def require_writable(self) -> None:
        """Finds out what can be known before there is anything to write.

        Raises:
            UserError: for a folder, a file that is there and is no report, or one name given twice.
            RunError: where no file can be made.
        """
        if self.report is not None:
            from distembed.capacity.page import require_suffix

            require_suffix(self.report)
        seen: dict[Path, str] = {}
        for option, file in self.asked_for():
            other = seen.setdefault(file.absolute(), option)
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
    """Plans, prints and writes; returns whether it fits.

    Args:
        config: to plan.
        cluster: to plan for.
        files: to write.
        memory_is_given: whether ``--memory`` says what a device has, so that no other device would have more.
        as_json: whether JSON is printed, in place of tables.
        console: that tables are printed to.
        errors: that is told of what is not written.

    Raises:
        UserError: for files that cannot be asked for, and settings that cannot be planned at all.
        RunError: where a file cannot be written, once the plan is printed.
    """
    files.require_writable()
    why_not = "the config does not fit"
    if files.fit is not None:
        try:
            config = compress_config(config, cluster)
        except DoesNotFit as error:
            why_not = str(error)  # then the config is planned as it is
    found = assess_capacity(config, cluster)
    values = _values(config, cluster, found, memory_is_given)
    if as_json:
        print(json.dumps(values, indent=2), flush=True)
    else:
        print_plan(values, console)
    unwritten = [f"{option} {file}" for option, file in files.asked_for() if option != "--report" and not found.fits]
    if unwritten:
        text = f"not written: {', '.join(unwritten)}, since {why_not}"
        errors.print(text, markup=False, highlight=False, soft_wrap=True)
    _write(files, config, values)
    return found.fits


def _values(config: Config, cluster: Cluster, found: Assessment, memory_is_given: bool) -> dict[str, Any]:
    """The values of ``distembed plan --json``: what :meth:`Assessment.as_json` says, and remedies."""
    values = {**found.as_json(), "remedies": list[str]()}
    if not found.fits:
        values["remedies"] = remedies = find_remedies(config, cluster, memory_is_given, found)
        values["notes"] += [] if remedies.is_complete else [UNFINISHED]
    return values


def _require_writable(option: str, file: Path, may_replace: bool) -> None:
    if file.is_dir():
        raise UserError(f"{option} {file} is a folder; name a file.")
    if file.exists() and not may_replace:
        raise UserError(f"{option} {file} exists already; name a new file.")
    folder = next(parent for parent in file.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise UserError(f"{option} {file} cannot be written: {folder} is a file and no folder; name another one.")
    try:
        # permissions alone do not tell: a file system may be read-only, or none for files
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RunError(
            f"{option} {file} cannot be written: no file can be made in {folder} ({error}); choose another folder."
        ) from error


def _write(files: PlanFiles, config: Config, values: Mapping[str, Any]) -> None:
    """Writes what there is to write: of what does not fit the report alone."""
    if files.fit is not None and values["fits"]:
        _write_text(files.fit, config.to_yaml())
    if files.output is not None and values["fits"]:
        _write_text(files.output, json.dumps(values, indent=2) + "\n")
    if files.report is not None:
        from distembed.capacity.page import write_report

        write_report(values, files.report)


def _write_text(file: Path, text: str) -> None:
    with whole_file(file) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")
