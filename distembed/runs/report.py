"""``distembed report``: one self-contained HTML file with the plots and the comparison of runs.

Nothing in it is fetched: figures are SVG inside of the page, so that the file can be mailed, and read in ten years. It
follows the reader's light or dark scheme. Runs that are still going on, or were killed, are shown as far as they came.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from distembed.errors import UserError
from distembed.files import write_text
from distembed.runs import plots
from distembed.runs.pages import colour, figure, page, section, swatch
from distembed.runs.record import RunRecord, RunSummary, unique_names

if TYPE_CHECKING:
    from rich.console import Console

UNKNOWN = "–"


@dataclass(frozen=True)
class Column:
    """A column of the comparison.

    Attributes:
        heading: above it.
        text: of a run's cell.
        best: the number by which the best run of several is marked, lower being better; None to mark none.
        in_terminal: whether the narrower table in a terminal has it too.
    """

    heading: str
    text: Callable[[RunSummary], str]
    best: Callable[[RunSummary], float] | None = None
    in_terminal: bool = True


COLUMNS = (
    Column("tables", lambda run: describe_schemes(run), in_terminal=False),
    Column("parameters", lambda run: _format(run.parameters, ",.0f")),
    Column("embedding MB", lambda run: _format(run.embedding_bytes / 1e6, ",.1f"), in_terminal=False),
    Column("AUC", lambda run: _format(run.auc, ".4f"), lambda run: -run.auc),
    Column("logloss", lambda run: _format(run.logloss, ".4f"), lambda run: run.logloss),
    Column(
        "normalised entropy",
        lambda run: _format(run.normalized_entropy, ".4f"),
        lambda run: run.normalized_entropy,
        in_terminal=False,
    ),
    Column("calibration", lambda run: _format(run.calibration, ".3f"), in_terminal=False),
    Column("samples/s", lambda run: _format(run.samples_per_second, ",.0f")),
    Column("status", lambda run: describe_status(run)),
)


def write_report(runs: Sequence[Path], output: Path) -> list[RunSummary]:
    """Writes the HTML file, whole or not at all.

    Args:
        runs: run folders, in the order in which to show them.
        output: the file; a folder for it is made where there is none.

    Returns:
        One summary a run, in the same order.

    Raises:
        UserError: where one is no run folder, the same is given twice, or ``output`` cannot be a file.
    """
    if not runs:
        raise UserError("report needs one run folder or more; give folders that `distembed train` made.")
    resolved = [run.resolve() for run in runs]
    twice = [str(run) for run, path in zip(runs, resolved, strict=True) if resolved.count(path) > 1]
    if twice:
        raise UserError(f"the same run is given more than once: {', '.join(twice)}.")
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; give the name of an HTML file.")
    records = [RunRecord.read(run) for run in runs]
    named = dict(zip(unique_names(records), records, strict=True))
    summaries = [RunSummary.of(record, name) for name, record in named.items()]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, render_page(named, summaries))
    return summaries


def print_comparison(summaries: Sequence[RunSummary], console: "Console") -> None:
    """Prints the comparison as a table of one run a line."""
    from rich.table import Table

    columns = [column for column in COLUMNS if column.in_terminal]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    for column in columns:
        table.add_column(column.heading, justify="left" if column.heading == "status" else "right")
    for run in summaries:
        table.add_row(run.name, *(column.text(run) for column in columns))
    console.print(table, markup=False, highlight=False)


def render_page(named: dict[str, RunRecord], summaries: Sequence[RunSummary]) -> str:
    """The page's HTML."""
    sections = [
        section("Comparison" if len(named) > 1 else "Result", _comparison(summaries)),
        section("Curves", _legend(summaries) + _figures(named, summaries)),
        section("Runs", "".join(_run_details(run, name) for name, run in named.items())),
    ]
    return page(f"distembed: {', '.join(named)}", "".join(sections), _STYLE)


def describe_schemes(run: RunSummary) -> str:
    """``20 quotient_remainder, 6 full``."""
    return ", ".join(f"{count} {scheme}" for scheme, count in run.schemes.items()) or UNKNOWN


def describe_status(run: RunSummary) -> str:
    """``finished``, or with the split that was evaluated so far: ``unfinished (validation)``."""
    is_provisional = run.status != "finished" and run.evaluated_on
    return f"{run.status} ({run.evaluated_on})" if is_provisional else run.status


def _comparison(summaries: Sequence[RunSummary]) -> str:
    headings = "".join(f"<th>{escape(column.heading)}</th>" for column in COLUMNS)
    rows = []
    for index, run in enumerate(summaries):
        cells = "".join(_cell(column, run, summaries) for column in COLUMNS)
        rows.append(f'<tr><th scope="row">{swatch(colour(index))}{escape(run.name)}</th>{cells}</tr>')
    return f'<div class="wide"><table><tr><th>run</th>{headings}</tr>{"".join(rows)}</table></div>\n'


def _cell(column: Column, run: RunSummary, summaries: Sequence[RunSummary]) -> str:
    text = escape(column.text(run))
    # scores on different splits are not compared
    comparable = len(summaries) > 1 and len({other.evaluated_on for other in summaries}) == 1
    is_best = column.best is not None and comparable and column.best(run) == _lowest(column.best, summaries)
    return f"<td>{f'<strong>{text}</strong>' if is_best else text}</td>"


def _lowest(value: Callable[[RunSummary], float], summaries: Sequence[RunSummary]) -> float:
    return min((found for run in summaries if not math.isnan(found := value(run))), default=math.nan)


def _legend(summaries: Sequence[RunSummary]) -> str:
    runs = "".join(f"<span>{swatch(colour(index))}{escape(run.name)}</span>" for index, run in enumerate(summaries))
    return f'<p class="legend">{runs}</p>\n'


def _figures(named: dict[str, RunRecord], summaries: Sequence[RunSummary]) -> str:
    figures = [
        ("Loss", "Training windows thin, evaluations marked. The first tenth may be cut off.", plots.loss_curve(named)),
        ("AUC", "Training windows thin, evaluations marked.", plots.auc_curve(named)),
        ("Throughput", "Training alone, evaluations not counted.", plots.throughput_curve(named)),
        (
            "Calibration",
            "Final evaluation; on the dashed line predictions are right.",
            plots.calibration_diagram(named),
        ),
    ]
    if len(summaries) > 1:
        caption = "Lower and further left is better."
        figures.append(("Parameters against logloss", caption, plots.parameters_against_logloss(summaries)))
    return f'<div class="figures">{"".join(figure(*each) for each in figures)}</div>\n'


def _run_details(run: RunRecord, name: str) -> str:
    versions = run.info.get("versions") or {}
    facts = {
        "folder": run.path,
        "status": f"{run.status} ({run.info['error']})" if run.info.get("error") else run.status,
        "started": run.info.get("started"),
        "finished": run.info.get("finished"),
        "seed": run.info.get("seed"),
        "ranks": run.info.get("world_size"),
        "batch size": run.info.get("batch_size"),
        "last step": run.train[-1].get("step") if run.train else None,
        "versions": ", ".join(f"{package} {version}" for package, version in versions.items()),
    }
    rows = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>"
        for key, value in facts.items()
        if value not in (None, "")
    )
    return f"<details><summary>{escape(name)}</summary><dl>{rows}</dl><pre>{escape(run.config_yaml)}</pre></details>\n"


def _format(value: float, spec: str) -> str:
    return UNKNOWN if math.isnan(value) else format(value, spec)


_STYLE = """
td:last-child, th:last-child { text-align: left; }
td:nth-child(2), tr:first-child th:nth-child(2) { text-align: left; white-space: normal; min-width: 10rem; }
"""
