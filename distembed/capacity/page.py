"""A report as a page of HTML: verdict, remedies, and charts with tables of memory, of time and of the tables."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from distembed.capacity.assessment import Assessment
from distembed.capacity.by_rank import (
    LineT,
    PlanColumn,
    RankGroup,
    RankItem,
    RankQuantity,
    memory_by_rank,
    time_by_rank,
)
from distembed.capacity.chart import GREEN, MAX_BARS, RED, demand_colours, draw_demand, draw_ranks, item_colours
from distembed.capacity.report import CapacityReport
from distembed.capacity.texts import (
    ALTERNATIVES_LEGEND,
    cluster_text,
    host_lines,
    is_in_host_memory,
    shortage_lines,
    step_lines,
    table_columns,
    verdict,
)
from distembed.planning.planned_rank import PlannedRank
from distembed.runs.pages import figure, page, render_svg, section, swatch


def render_capacity_page(report: CapacityReport) -> str:
    """Returns the page's HTML, which fetches nothing."""
    assessment = report.assessment
    kind = "fits" if assessment.fits else "short"
    quantities = (memory_by_rank(assessment), time_by_rank(assessment)) if assessment.ranks else None
    lines = [*shortage_lines(assessment), *host_lines(assessment)]
    lines += step_lines(assessment, *quantities) if quantities else []
    lines += report.cost.lines if report.cost is not None else []
    lines += report.smallest.lines if report.smallest is not None else []
    lines += [f"fits with {argument}" for argument in report.remedies.arguments]
    sections = [f'<p class="{kind}">{escape(verdict(assessment))}</p>\n{_paragraphs(lines)}']
    sections += map(_rank_section, quantities) if quantities else [_demand_section(assessment)]
    sections.append(_table_section(assessment))
    if report.notes:
        sections.append(section("Notes", _paragraphs(report.notes)))
    return page(f"distembed: plan for {cluster_text(assessment.cluster)}", "".join(sections), _STYLE)


def _paragraphs(lines: Iterable[str]) -> str:
    """Returns a paragraph for each line."""
    return "".join(f"<p>{escape(line)}</p>\n" for line in lines)


def _legend(colours: Mapping[str, str]) -> str:
    """Returns the colours of a figure with what is drawn in them."""
    shown = "".join(f"<span>{swatch(colour)}{escape(name)}</span>" for name, colour in colours.items())
    return f'<p class="legend">{shown}</p>\n'


def _demand_section(assessment: Assessment) -> str:
    """Returns what is needed beside what is left, where there is no plan."""
    drawn = render_svg(lambda drawing: draw_demand(assessment, drawing.add_subplot()), (9, 2))
    caption = f"On all ranks of {cluster_text(assessment.cluster)} together."
    return section("Memory", _legend(demand_colours()) + figure("Needed and left", caption, drawn))


def _rank_section(quantity: RankQuantity) -> str:
    """Returns the bars of all ranks, and their numbers in a table."""
    drawn = render_svg(lambda drawing: draw_ranks(quantity, drawing.add_subplot()), (9, 4))
    bars = figure(quantity.heading, quantity.caption, _with_tooltips(drawn, quantity))
    return section(quantity.name.capitalize(), _legend(item_colours(quantity)) + bars + _rank_table(quantity))


def _with_tooltips(svg: str, quantity: RankQuantity) -> str:
    """Returns the SVG with bars that show their numbers to a pointer."""
    items = {item.name.replace(" ", "-"): item for item in quantity.items}

    def add_title(match: re.Match[str]) -> str:
        rank, item = quantity.ranks[int(match[1])], items[match[2]]
        title = f"rank {rank.rank}: {item.name} {quantity.text(item.amount(rank))}{quantity.unit}"
        return f"{match[0]}<title>{escape(title)}</title>"

    return re.sub(rf'<g id="{quantity.name}-(\d+)-([^"]+)">', add_title, svg)


def _rank_table(quantity: RankQuantity) -> str:
    """Returns the table by rank, a line for ranks that are alike; of too many lines an excerpt."""
    groups, left_out = quantity.shown_groups(MAX_BARS)

    def column(heading: str, text: Callable[[PlannedRank], str], is_number: bool = True) -> PlanColumn[RankGroup]:
        return PlanColumn(heading, lambda group: text(group.first), is_number)

    def item_text(item: RankItem) -> Callable[[PlannedRank], str]:
        return lambda rank: quantity.text(item.amount(rank))

    columns = [PlanColumn[RankGroup]("rank", lambda group: group.text, is_number=False)]
    columns += [column(item.name, item_text(item)) for item in quantity.items]
    columns.append(column(quantity.total_heading, lambda rank: quantity.text(quantity.total(rank))))
    beside = [*quantity.columns_beside, *quantity.remarks]
    columns += [column(own.heading, own.text, own.is_number) for own in beside]
    table = _table(columns, groups, lambda group: quantity.is_too_much(group.first))
    return table + _paragraphs([left_out] if left_out else [])


def _table_section(assessment: Assessment) -> str:
    """Returns the tables and where they lie, with what other placements would cost."""
    table = _table(table_columns(assessment), assessment.tables, is_in_host_memory)
    has_alternatives = any(own.alternatives for own in assessment.tables)
    return section("Tables", table + _paragraphs([ALTERNATIVES_LEGEND] * has_alternatives))


def _table(columns: Sequence[PlanColumn[LineT]], rows: Sequence[LineT], is_marked: Callable[[LineT], bool]) -> str:
    """Returns a table; the lines of marked rows are coloured."""

    def line(tag: str, texts: Iterable[str], scope: str = "") -> str:
        kinds = (_class("" if column.is_number else "text") for column in columns)
        cells = zip(kinds, texts, strict=True)
        return "".join(f"<{tag}{scope}{kind}>{escape(text)}</{tag}>" for kind, text in cells)

    headings = line("th", (column.heading for column in columns), ' scope="col"')
    body = "".join(
        f"<tr{_class('marked' if is_marked(row) else '')}>{line('td', (column.text(row) for column in columns))}</tr>\n"
        for row in rows
    )
    return f'<div class="wide"><table class="plan">\n<tr>{headings}</tr>\n{body}</table></div>\n'


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
table.plan td.text:last-child, table.plan td.text:nth-last-child(2) {{ white-space: pre-line; min-width: 12rem; }}
table.plan .marked {{ color: {RED}; font-weight: 600; }}
"""
