"""The look of the pages that commands write: the HTML around them, and figures as SVG that sits in it.

Nothing in a page is fetched, so that it can be mailed, and read in ten years. It follows the reader's light or dark
scheme: text and axes of figures take the page's own colour (``currentColor``) and font, their background is left out.
Nothing here touches matplotlib's global state: no pyplot, settings within a context.
"""

import io
import re
from collections.abc import Callable, Collection, Sequence
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from distembed.base.files import MADE_BY

COLOURS = ("#3f7fd9", "#e07b39", "#2a9d78", "#b565c4", "#c9a227", "#d1495b", "#4fa3ab", "#8d6e63")
"""Colours of compared runs and items, of middling lightness, so that they can be read on white as well as on black."""

_DASHES: tuple[tuple[int, ...], ...] = ((), (4, 2), (1, 1), (6, 1, 1, 1), (2, 2, 6, 2), (8, 3), (1, 3), (3, 1))
PAGE_COLOUR = "#010203"  # stands for currentColor, which matplotlib does not know
FIGURE_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "distembed",
    "font.family": "sans-serif",
    "font.size": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": PAGE_COLOUR,
    "axes.edgecolor": PAGE_COLOUR,
    "axes.labelcolor": PAGE_COLOUR,
    "xtick.color": PAGE_COLOUR,
    "ytick.color": PAGE_COLOUR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": PAGE_COLOUR,
    "grid.alpha": 0.12,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}
"""matplotlib's settings for every figure."""


def colour(index: int) -> str:
    """Returns the colour of run or item number ``index``; the colours repeat."""
    return COLOURS[index % len(COLOURS)]


def dashes(index: int) -> tuple[int, ...]:
    """Returns lengths of dashes and gaps in line widths, () for a solid line: each round of the colours has others."""
    return _DASHES[index // len(COLOURS) % len(_DASHES)]


def page(title: str, content: str, style: str = "") -> str:
    """Returns the HTML of a page, given its title as plain text, its content as HTML, and CSS that it alone needs."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        f'<meta name="generator" content="{escape(MADE_BY)}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_STYLE}{_NARROW}{style}</style>\n"
        f"</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>\n{content}"
        f"<footer>made by {escape(MADE_BY)}</footer>\n</main>\n</body>\n</html>\n"
    )


def section(heading: str, content: str) -> str:
    """Returns HTML under a heading of plain text."""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{content}</section>\n"


def figure(heading: str, caption: str, svg: str) -> str:
    """Returns an SVG of :func:`render_svg` under a heading and a caption of plain text, which a screen reader reads."""
    labelled_svg = svg.replace('role="img"', f'role="img" aria-label="{escape(f"{heading}: {caption}")}"', 1)
    return f"<figure><figcaption><b>{escape(heading)}</b> {escape(caption)}</figcaption>{labelled_svg}</figure>\n"


def breakable(text: str) -> str:
    """Returns the HTML of a plain text; a long one may be broken before a letter that follows ``_./=-``."""
    return escape(text) if len(text) < 12 else re.sub(r"(?<=[_./=-])(?=[^\W\d])", "<wbr>", escape(text))


def table(
    headings: Sequence[str],
    lines: Sequence[Sequence[str]],
    texts: Collection[int] = (),
    marked: Collection[int] = (),
) -> str:
    """Returns the HTML of a table that fits the window.

    A column of texts counts as two. A table of more than 10 columns shows each line as a block of cells with their
    headings on windows of up to 1,000 pixels, and a table of more than 18 on any window.

    Args:
        headings: Plain text of each column's heading.
        lines: HTML of each line's cells; the first cell names the line.
        texts: Numbers of the columns of texts, which are aligned to the left like the first.
        marked: Numbers of the lines that are coloured.
    """
    sizes = {8: "", 10: " small", 18: " small many"}
    size = next((size for most, size in sizes.items() if len(headings) + len(texts) <= most), " blocks")
    kinds = [' class="text"' if number in texts else "" for number in range(len(headings))]
    head = "".join(f'<th scope="col"{kind}>{breakable(name)}</th>' for kind, name in zip(kinds, headings, strict=True))
    body = ""
    for number, (name, *cells) in enumerate(lines):
        mark = ' class="marked"' if number in marked else ""
        columns = zip(headings[1:], kinds[1:], cells, strict=True)
        values = "".join(f'<td data-heading="{escape(heading)}"{kind}>{cell}</td>' for heading, kind, cell in columns)
        body += f'<tr{mark}><th scope="row">{name}</th>{values}</tr>\n'
    return f'<table class="data{size}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>\n'


def swatch(colour: str) -> str:
    """Returns a dot in a colour, which precedes a name in a legend."""
    return f'<i style="background:{colour}"></i>'


def line_swatch(index: int) -> str:
    """Returns a piece of the line of run number ``index`` in figures, which precedes its name."""
    pattern = " ".join(str(2 * length) for length in dashes(index))
    return (
        f'<svg class="line" viewBox="0 0 36 8" aria-hidden="true"><line x1="0" y1="4" x2="36" y2="4" '
        f'stroke="{colour(index)}" stroke-width="3" stroke-dasharray="{pattern or "none"}"/></svg>'
    )


def render_svg(draw: Callable[[Figure], None], inches: tuple[float, float]) -> str:
    """Returns the SVG, for a page, of a figure of this width and height that ``draw`` fills.

    It is empty where ``draw`` draws no bar, and no line with a finite point: an empty frame says nothing. Lines of
    z-order 1, like diagonals, do not count.
    """
    with matplotlib.rc_context(FIGURE_SETTINGS):
        drawn = Figure(figsize=inches, layout="constrained")
        draw(drawn)
        if not any(_has_content(axes) for axes in drawn.axes):
            return ""
        text = io.StringIO()
        FigureCanvasSVG(drawn).print_svg(text, metadata={"Date": None, "Creator": None})
    return _for_page(text.getvalue())


def _has_content(axes: Axes) -> bool:
    """Returns whether a line has a finite point, or a bar a height."""
    points = [line.get_xydata() for line in axes.lines if line.get_zorder() > 1]
    finite = any(np.isfinite(np.asarray(xy, dtype=float)).all(axis=1).any() for xy in points)
    return finite or any(isinstance(bar, Rectangle) and bar.get_height() for bar in axes.patches)


def _for_page(svg: str) -> str:
    """Returns an SVG file's text as it can stand in a page, with text and axes in the page's own colour."""
    svg = svg[svg.index("<svg") :]  # without the XML declaration, which cannot stand inside of HTML
    return svg.replace(PAGE_COLOUR, "currentColor").replace("<svg ", '<svg role="img" ', 1)


_BLOCKS = """
TABLE, TABLE tbody { display: block; }
TABLE thead { display: none; }
TABLE tr { display: grid; grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr)); padding: .4rem 0;
  border-bottom: 1px solid var(--line); }
TABLE th, TABLE td { border: 0; padding: .1rem .5rem .1rem 0; text-align: left; overflow-wrap: anywhere; }
TABLE th { grid-column: 1 / -1; }
TABLE td.text { grid-column: span 2; }
TABLE td::before { content: attr(data-heading); display: block; color: var(--dim); font: 400 .75rem sans-serif; }
"""
"""The style of a table whose lines are blocks of cells with their headings."""

_STYLE = """
:root { color-scheme: light dark; --line: #8883; --dim: #888; }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; background: Canvas; color: CanvasText; }
main { max-width: 1240px; margin: 0 auto; padding: 2rem 1.25rem; }
h1 { font-size: 1.35rem; font-weight: 600; margin: 0 0 1.5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; font-weight: 600; margin: 2.25rem 0 .75rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; padding: .4rem .5rem; border-bottom: 1px solid var(--line); }
th { font-weight: 500; }
thead th { color: var(--dim); font-weight: 400; vertical-align: bottom; }
th.text, td.text { text-align: left; }
tbody th, td.text { overflow-wrap: anywhere; }
td.text { min-width: 6.5rem; }
td.text { white-space: pre-line; }
tr.marked { color: #d1495b; font-weight: 600; }
table.small { font-size: .8rem; }
table.small th, table.small td { padding: .4rem .35rem; }
table th:first-child { padding-left: 0; text-align: left; }
table + table { margin-top: 1.5rem; }
strong { font-weight: 650; }
i { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .5em; }
svg.line { width: 2.2em; height: .6em; margin-right: .5em; }
.legend span { margin-right: 1.5em; white-space: nowrap; }
.legend wbr { display: none; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 1.5rem 2rem; }
figure { margin: 0; }
figure svg { width: 100%; height: auto; font-family: inherit; }
figcaption { color: var(--dim); font-size: .85rem; }
figcaption b { color: CanvasText; font-weight: 600; margin-right: .4em; }
details { border-top: 1px solid var(--line); padding: .6rem 0; }
summary { cursor: pointer; font-weight: 500; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.25rem; font-size: .9rem; }
dt { color: var(--dim); }
dd { margin: 0; overflow-wrap: anywhere; }
pre { font: .8rem/1.45 ui-monospace, monospace; background: #8881; padding: .8rem 1rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }
footer { margin-top: 3rem; color: var(--dim); font-size: .8rem; }
"""

_NARROW = _BLOCKS.replace("TABLE", "table.blocks")
_NARROW += f"@media (max-width: 1000px) {{{_BLOCKS.replace('TABLE', 'table.many')}}}\n"
