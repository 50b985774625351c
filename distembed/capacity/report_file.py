"""A report as a file, by its suffix: a page (``.html``), or the chart alone (``.png``, ``.svg``)."""

from collections.abc import Callable
from pathlib import Path

from distembed.capacity.chart import render_chart
from distembed.capacity.page import render_capacity_page
from distembed.capacity.plan_files import require_known_suffix
from distembed.capacity.report import CapacityReport
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
