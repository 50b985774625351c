"""A report as a page of HTML: verdict, remedies, and charts with tables of memory, of time and of the tables."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from distembed.reports.pages import figure, page, render_svg, section, swatch
from distembed.reports.plan import chart, texts
from distembed.reports.plan.by_rank import LineT, PlanColumn, RankQuantity, memory_by_rank, of_first, time_by_rank
from distembed.reports.plan.report import CapacityReport


def render_capacity_page(report: CapacityReport) -> str:
    """Returns the page's HTML, which fetches nothing."""
    assessment, where = report.assessment, texts.cluster_text(report.assessment.cluster)
    kind = "fits" if assessment.fits else "short"
    quantities = (memory_by_rank(assessment), time_by_rank(assessment)) if assessment.ranks else None
    lines = [*texts.shortage_lines(assessment), *texts.host_lines(assessment)]
    lines += texts.step_lines(assessment, *quantities) if quantities else []
    lines += [*report.lines, *(f"fits with {argument}" for argument in report.remedies.arguments)]
    sections = [f'<p class="{kind}">{escape(texts.verdict(assessment))}</p>\n{_paragraphs(lines)}']
    sections += map(_rank_section, quantities or [])
    if not quantities:
        drawn = render_svg(lambda drawing: chart.draw_demand(assessment, drawing.add_subplot()), (9, 2))
        needed = figure("Needed and left", f"On all ranks of {where} together.", drawn)
        sections.append(section("Memory", _legend(chart.DEMAND_COLOURS) + needed))
    # where the tables lie, with what other placements would cost
    tables = _table(texts.table_columns(assessment), assessment.tables, texts.is_in_host_memory)
    has_alternatives = any(own.alternatives for own in assessment.tables)
    sections.append(section("Tables", tables + _paragraphs([texts.ALTERNATIVES_LEGEND] * has_alternatives)))
    if report.notes:
        sections.append(section("Notes", _paragraphs(report.notes)))
    return page(f"distembed: plan for {where}", "".join(sections), _STYLE)


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>\n" for line in lines)


def _legend(colours: Mapping[str, str]) -> str:
    shown = "".join(f"<span>{swatch(colour)}{escape(name)}</span>" for name, colour in colours.items())
    return f'<p class="legend">{shown}</p>\n'


def _rank_section(quantity: RankQuantity) -> str:
    """Returns the bars of all ranks, and their numbers in a table: a line for ranks that are alike."""
    items = {item.name.replace(" ", "-"): item for item in quantity.items}

    def with_tooltip(match: re.Match[str]) -> str:
        rank, item = quantity.ranks[int(match[1])], items[match[2]]
        title = f"rank {rank.rank}: {item.name} {quantity.text(item.amount(rank))}{quantity.unit}"
        return f"{match[0]}<title>{escape(title)}</title>"

    drawn = render_svg(lambda drawing: chart.draw_ranks(quantity, drawing.add_subplot()), (9, 4))
    drawn = re.sub(rf'<g id="{quantity.name}-(\d+)-([^"]+)">', with_tooltip, drawn)
    legend = _legend({item.name: chart.ITEM_COLOURS[item.name] for item in quantity.bar_items})
    groups, left_out = quantity.shown_groups(chart.MAX_BARS)
    columns = [*quantity.columns(), *map(of_first, quantity.remarks)]
    table = _table(columns, groups, lambda group: not quantity.has_room(group[0]))
    table += _paragraphs([left_out] if left_out else [])
    return section(quantity.name.capitalize(), legend + figure(quantity.heading, quantity.caption, drawn) + table)


def _table(columns: Sequence[PlanColumn[LineT]], rows: Sequence[LineT], is_marked: Callable[[LineT], bool]) -> str:
    """Returns a table; the lines of marked rows are coloured."""

    def line(tag: str, cells: Iterable[str], scope: str = "") -> str:
        kinds = ("" if column.is_number else ' class="text"' for column in columns)
        return "".join(f"<{tag}{scope}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, cells, strict=True))

    headings = line("th", (column.heading for column in columns), ' scope="col"')
    body = ""
    for row in rows:
        mark = ' class="marked"' if is_marked(row) else ""
        body += f"<tr{mark}>{line('td', (column.text(row) for column in columns))}</tr>\n"
    return f'<div class="wide"><table class="plan">\n<tr>{headings}</tr>\n{body}</table></div>\n'


_STYLE = f"""
.fits, .short {{ font-size: 1.15rem; font-weight: 600; }}
.fits {{ color: {chart.GREEN}; }}
.short {{ color: {chart.RED}; }}
p {{ margin: .35rem 0; overflow-wrap: anywhere; }}
figure {{ margin-bottom: 1.5rem; }}
table.plan .text {{ text-align: left; }}
table.plan td.text:last-child, table.plan td.text:nth-last-child(2) {{ white-space: pre-line; min-width: 12rem; }}
table.plan .marked {{ color: {chart.RED}; font-weight: 600; }}
"""
