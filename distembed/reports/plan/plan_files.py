"""The files that ``distembed plan`` is asked to write; checked before planning, and without torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distembed.base.errors import UserError
from distembed.base.files import require_file

REPORT_SUFFIXES = (".html", ".png", ".svg")  # a page, or the chart alone


@dataclass(frozen=True)
class PlanFiles:
    """The files that the user asks for, else None."""

    output: Path | None = None  # the plan, for `distembed train --plan`
    compress: Path | None = None  # the config, compressed as little as the cluster asks for
    report: Path | None = None  # page or chart of the plan; one that distembed made is replaced
    overwrite: bool = False  # whether any file that is there is replaced

    def requested(self) -> Iterator[tuple[str, Path]]:
        """Yields option and path of each requested file."""
        for option in ("output", "compress", "report"):
            if (file := getattr(self, option)) is not None:
                yield f"--{option}", file

    def require_writable(self) -> None:
        """Raises a ``UserError`` for a file that cannot be written, and for two options with one file."""
        option_by_file: dict[Path, str] = {}
        for option, file in self.requested():
            first_option = option_by_file.setdefault(file.absolute(), option)
            if first_option != option:
                raise UserError(f"{first_option} and {option} both name {file}; name two files.")
            require_file(option, file, self.overwrite, may_replace_own=option == "--report")
        if self.report is not None:
            require_known_suffix(self.report)


def require_known_suffix(file: Path) -> None:
    """Raises a ``UserError`` for a suffix other than :data:`REPORT_SUFFIXES`, and for a folder."""
    if file.suffix.lower() not in REPORT_SUFFIXES:
        fault = f"ends in {file.suffix!r}" if file.suffix else "has no suffix"
        raise UserError(f"{file} {fault}; a plan can be written as one of: {', '.join(REPORT_SUFFIXES)}.")
    if os.path.isdir(file):
        raise UserError(f"{file} is a folder; name a file.")
