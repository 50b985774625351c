"""The files that ``distembed plan`` is asked to write, and what can be known of them before anything is planned."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distembed.errors import UserError
from distembed.outputs import require_file

REPORT_SUFFIXES = (".html", ".png", ".svg")
"""How the name of a report may end: a page, or the chart alone."""


@dataclass(frozen=True)
class PlanFiles:
    """Files to write; None for those that were not asked for.

    Attributes:
        output: File of the plan, for ``distembed train --plan``.
        compress: File of the config, compressed as little as the cluster asks for.
        report: File of the page or chart of the plan; one that distembed made is replaced.
        overwrite: Whether any file that is there is replaced.
    """

    output: Path | None = None
    compress: Path | None = None
    report: Path | None = None
    overwrite: bool = False

    def requested(self) -> Iterator[tuple[str, Path]]:
        """Yields the option and the file of each that was asked for."""
        for option in ("output", "compress", "report"):
            file = getattr(self, option)
            if file is not None:
                yield f"--{option}", file

    def require_writable(self) -> None:
        """Finds out what can be known before there is anything to write.

        Raises:
            UserError: A file is a folder, or is there and is not to be replaced, or two options name the same one.
            RunError: No file can be made in a folder.
        """
        option_by_file: dict[Path, str] = {}
        for option, file in self.requested():
            other = option_by_file.setdefault(file.absolute(), option)
            if other != option:
                raise UserError(f"{other} and {option} both name {file}; name two files.")
            require_file(option, file, self.overwrite, may_replace_own=option == "--report")
        if self.report is not None:
            require_known_suffix(self.report)


def require_known_suffix(file: Path) -> None:
    """Refuses a file that no report can be written to.

    Raises:
        UserError: The file has another suffix, or is a folder.
    """
    if file.suffix.lower() not in REPORT_SUFFIXES:
        found = f"ends in {file.suffix!r}" if file.suffix else "has no suffix"
        raise UserError(f"{file} {found}; a plan can be written as one of: {', '.join(REPORT_SUFFIXES)}.")
    if os.path.isdir(file):
        raise UserError(f"{file} is a folder; name a file.")
