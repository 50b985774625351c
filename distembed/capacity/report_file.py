"""A report as a file, by its suffix: a page (``.html``), or the chart alone (``.png``, ``.svg``)."""

from collections.abc import Callable
from pathlib import Path

from distembed.capacity.chart import render_chart
from distembed.capacity.page import render_capacity_page
from distembed.capacity.report import CapacityReport
from distembed.errors import UserError
from distembed.files import whole_file

_RENDERERS: dict[str, Callable[[CapacityReport], bytes]] = {
    ".html": lambda report: render_capacity_page(report).encode(),
    ".png": lambda report: render_chart(report.assessment, "png"),
    ".svg": lambda report: render_chart(report.assessment, "svg"),
}


def write_capacity_report(report: CapacityReport, file: Path) -> None:
    """Writes a report for a reader, whole or not at all.

    Raises:
        UserError: The file has another suffix, or is a folder.
        RunError: The file cannot be written.
    """
    require_known_suffix(file)
    content = _RENDERERS[file.suffix.lower()](report)
    with whole_file(file) as temporary:
        Path(temporary).write_bytes(content)


def require_known_suffix(file: Path) -> None:
    """Refuses a file that :func:`write_capacity_report` would not write, before there is a report.

    Raises:
        UserError: The file has another suffix, or is a folder.
    """
    if file.suffix.lower() not in _RENDERERS:
        found = f"ends in {file.suffix!r}" if file.suffix else "has no suffix"
        raise UserError(f"{file} {found}; a plan can be written as one of: {', '.join(_RENDERERS)}.")
    if file.is_dir():
        raise UserError(f"{file} is a folder; name a file.")
