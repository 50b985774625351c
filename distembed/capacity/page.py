"""A report as a page of HTML: verdict, remedies, chart, and a table of the tables and of the ranks."""

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape

from distembed.capacity.assessment import AssessedRank, Assessment
from distembed.capacity.chart import GREEN, MAX_BARS, RED, draw_demand, draw_ranks, legend_colours, needs_close_up
from distembed.capacity.report import CapacityReport
from distembed.capacity.texts import (
    LineT,
    MemoryItem,
    PlanColumn,
    cluster_text,
    host_lines,
    is_in_host_memory,
    shortage_lines,
    shown_items,
    shown_ranks,
    step_columns,
    step_lines,
    table_columns,
    verdict,
)
from distembed.runs.pages import figure, page, render_svg, section, swatch
from distembed.units import format_bytes


def render_capacity_page(report: CapacityReport) -> str:
    """Returns the page's HTML, which fetches nothing."""
    assessment = report.assessment
    kind = "fits" if assessment.fits else "short"
    lines = [*shortage_lines(assessment), *host_lines(assessment), *step_lines(assessment)]
    remedies = [f"fits with {argument}" for argument in report.remedies.arguments]
    heading = "Memory by rank" if assessment.ranks else "Memory"
    sections = [
        f'<p class="{kind}">{escape(verdict(assessment))}</p>\n{_paragraphs([*lines, *remedies])}',
        section(heading, _legend(assessment) + _figures(assessment)),
        section("Tables", _table(table_columns(assessment), assessment.tables, is_in_host_memory)),
    ]
    if assessment.ranks:
        sections.append(section("Ranks", _rank_table(assessment)))
    if report.notes:
        sections.append(section("Notes", _paragraphs(report.notes)))
    return page(f"distembed: plan for {cluster_text(assessment.cluster)}", "".join(sections), _STYLE)


def _paragraphs(lines: Iterable[str]) -> str:
    """Returns a paragraph for each line."""
    return "".join(f"<p>{escape(line)}</p>\n" for line in lines)


def _legend(assessment: Assessment) -> str:
    """Returns the colours of the figures with what is drawn in them."""
    colours = legend_colours(assessment)
    shown = "".join(f"<span>{swatch(colour)}{escape(name)}</span>" for name, colour in colours.items())
    return f'<p class="legend">{shown}</p>\n'


def _figures(assessment: Assessment) -> str:
    """Returns the chart, once more in a close-up where its bars are low."""
    if not assessment.ranks:
        drawn = render_svg(lambda drawing: draw_demand(assessment, drawing.add_subplot()), (9, 2))
        return figure("Needed and left", f"On all ranks of {cluster_text(assessment.cluster)} together.", drawn)
    whole = render_svg(lambda drawing: draw_ranks(assessment, drawing.add_subplot()), (9, 4))
    figures = figure("All of it", "The dashed line is the device's capacity.", _with_tooltips(whole, assessment))
    if needs_close_up(assessment):
        close = render_svg(lambda drawing: draw_ranks(assessment, drawing.add_subplot(), close_up=True), (9, 4))
        caption = "What is used, without the allocator's reserve."
        figures += figure("Close-up", caption, _with_tooltips(close, assessment))
    return figures


def _with_tooltips(svg: str, assessment: Assessment) -> str:
    """Returns the SVG with bars that show their bytes to a pointer."""
    items = {item.name: item for item in shown_items(assessment)}

    def add_title(match: re.Match[str]) -> str:
        rank, item = assessment.ranks[int(match[2])], items[match[3].replace("-", " ")]
        title = f"rank {rank.rank}: {item.name} {format_bytes(item.bytes_on(rank))}"
        return f"{match[0]}<title>{escape(title)}</title>"

    return re.sub(r'<g id="(all|close-up)-rank-(\d+)-([^"]+)">', add_title, svg)


def _rank_table(assessment: Assessment) -> str:
    """Returns the table by rank; of ranks that have no bar of their own an excerpt."""
    ranks, left_out = shown_ranks(assessment, MAX_BARS)
    total_heading = f"total, of {format_bytes(assessment.cluster.rank_bytes)}"
    columns = [PlanColumn[AssessedRank]("rank", lambda rank: str(rank.rank))]
    columns += [PlanColumn(item.name, _size_text(item)) for item in shown_items(assessment)]
    columns.append(PlanColumn(total_heading, lambda rank: format_bytes(rank.total_bytes)))
    columns.append(PlanColumn("fullest moment", lambda rank: rank.memory.step.moment, is_number=False))
    columns += step_columns(assessment)
    table = _table(columns, ranks, lambda rank: rank.total_bytes > rank.capacity_bytes)
    return table + _paragraphs([left_out] if left_out else [])


def _size_text(item: MemoryItem) -> Callable[[AssessedRank], str]:
    """Returns the function that writes an item's bytes on a rank."""
    return lambda rank: format_bytes(item.bytes_on(rank))


def _table(columns: Sequence[PlanColumn[LineT]], rows: Sequence[LineT], is_marked: Callable[[LineT], bool]) -> str:
    """Returns a table; the lines of marked rows are coloured."""

    def line(tag: str, texts: Iterable[str], kind: str = "") -> str:
        cells = zip(columns, texts, strict=True)
        shown = "".join(f"<{tag}{_class('' if c.is_number else 'text')}>{escape(text)}</{tag}>" for c, text in cells)
        return f"<tr{_class(kind)}>{shown}</tr>\n"

    headings = line("th", (column.heading for column in columns))
    body = "".join(line("td", (c.text(row) for c in columns), "marked" if is_marked(row) else "") for row in rows)
    return f'<div class="wide"><table class="plan">\n{headings}{body}</table></div>\n'


def _class(name: str) -> str:
    """Returns the attribute that gives a tag a class; nothing without a name."""
    return f' class="{name}"' if name else ""


_STYLE = f"""
.fits, .short {{ font-size: 1.15rem; font-weight: 600; }}
.fits {{ color: {GREEN}; }}
.short {{ color: {RED}; }}
p {{ margin: .35rem 0; overflow-wrap: anywhere; }}
figure {{ margin-bottom: 1.5rem; }}
table.plan .text {{ text-align: left; }}
table.plan td.text:last-child {{ white-space: normal; min-width: 12rem; }}
table.plan .marked {{ color: {RED}; font-weight: 600; }}
"""
