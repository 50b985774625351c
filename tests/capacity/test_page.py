"""Laws of a plan's page and chart: bars as high as the values, all of it escaped, nothing fetched, whole files only."""

import dataclasses
import io
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from distembed.base.errors import RunError, UserError
from distembed.base.units import format_bytes
from distembed.planning.other_placements import Alternative
from distembed.reports.plan.assessment import Assessment
from distembed.reports.plan.by_rank import RankQuantity, memory_by_rank, time_by_rank
from distembed.reports.plan.chart import draw_demand, draw_ranks
from distembed.reports.plan.plan_files import write_capacity_report
from distembed.reports.plan.remedies import Remedies
from distembed.reports.plan.report import CapacityReport
from tests.capacity.plan_values import (
    GIB,
    MIB,
    milliseconds,
    mostly_free,
    overfull,
    plan_assessment,
    times,
    used_bytes,
    with_device,
    with_ranks_alike,
    with_table,
    without_plan,
)

SVG = "{http://www.w3.org/2000/svg}"
ITEMS = {  # from the bottom
    "tables": ("table_weights",),
    "optimizer": ("table_optimizer_state",),
    "cache": ("table_cache",),
    "networks": ("network_weights", "network_optimizer_state"),
    "gradients": ("gradients",),
    "step-buffers": ("inputs", "outputs"),
    "lookups": ("lookups",),
    "activations": ("activations",),
    "allocator": ("allocator",),
}
TIMES = {  # from the bottom
    "lookup": "lookup",
    "exchange": "exchange",
    "all-reduce": "all_reduce",
    "networks": "networks",
    "starts": "starts",
    "waiting-for-cores": "waiting",
}


class Page(HTMLParser):
    """Tags, text, and the cells of each table of a page whose tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.tables: list[list[list[str]]] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("href", "xlink:href", "src")]
        if tag != "meta":
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("href", "xlink:href", "src")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


def write(found: Assessment | CapacityReport, file: Path) -> None:
    write_capacity_report(found if isinstance(found, CapacityReport) else CapacityReport(found), file)


def page(found: Assessment | CapacityReport, folder: Path) -> Page:
    write(found, folder / "plan.html")
    return Page((folder / "plan.html").read_text(encoding="utf-8"))


def axes_of(quantity: RankQuantity) -> Any:
    axes = Figure().add_subplot()
    draw_ranks(quantity, axes)
    return axes


def expected(found: Assessment, item: str) -> list[int]:
    return [sum(rank.memory[key] for key in ITEMS[item]) for rank in found.ranks]


def capacity_of(axes: Any) -> float:
    (line,) = axes.lines
    (height,) = set(line.get_ydata())
    return float(height)


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("is_nearly_empty", [False, True])
def test_bars_are_as_high_as_the_values_and_stand_on_each_other(num_ranks: int, is_nearly_empty: bool) -> None:
    found = overfull(plan_assessment(1, num_ranks, host_memory=True), 0, by=-GIB)
    if is_nearly_empty:
        found = dataclasses.replace(found, ranks=tuple(map(mostly_free, found.ranks)))
    axes, unit = axes_of(memory_by_rank(found)), MIB if is_nearly_empty else GIB
    bars = {bar.get_gid(): bar for bar in axes.patches}
    items = [item for item in ITEMS if not (is_nearly_empty and item == "allocator")]
    assert len(bars) == len(items) * num_ranks
    bottom = np.zeros(num_ranks)
    for item in items:
        own = [bars[f"memory-{rank}-{item}"] for rank in range(num_ranks)]
        assert [bar.get_x() + bar.get_width() / 2 for bar in own] == pytest.approx(range(num_ranks))
        assert [bar.get_height() * unit for bar in own] == pytest.approx(expected(found, item))
        assert [bar.get_y() * unit for bar in own] == pytest.approx(bottom, abs=1)
        bottom += expected(found, item)
    assert bottom == pytest.approx([used_bytes(rank) if is_nearly_empty else rank.total_bytes for rank in found.ranks])
    assert bottom.max() / unit < axes.get_ylim()[1], "no bar is cut off"
    if is_nearly_empty:
        assert axes.get_ylim()[1] < 1.1 * bottom.max() / unit and not axes.lines, "what is used fills the height"
    else:
        assert capacity_of(axes) * GIB == pytest.approx(found.ranks[0].capacity_bytes)


@pytest.mark.parametrize("num_ranks", [1, 2, 64])
def test_bars_of_time_are_as_high_as_the_milliseconds_and_stand_on_each_other(num_ranks: int) -> None:
    found = plan_assessment(1, num_ranks)
    axes = axes_of(time_by_rank(found))
    bars, bottom = {bar.get_gid(): bar for bar in axes.patches}, np.zeros(num_ranks)
    assert len(bars) == len(TIMES) * num_ranks
    for item, field in TIMES.items():
        own = [bars[f"time-{rank}-{item}"] for rank in range(num_ranks)]
        milliseconds = [getattr(rank.times, field) for rank in found.ranks]
        assert [bar.get_height() for bar in own] == pytest.approx(milliseconds)
        assert [bar.get_y() for bar in own] == pytest.approx(bottom)
        bottom += milliseconds
    assert bottom == pytest.approx([rank.times.total for rank in found.ranks])
    assert bottom.max() < axes.get_ylim()[1] < 1.1 * bottom.max()


def test_many_ranks_are_areas_from_most_to_least_that_stand_on_each_other() -> None:
    found = overfull(plan_assessment(128, 8), 77, by=9 * GIB)
    axes, order = axes_of(memory_by_rank(found)), np.argsort([-rank.total_bytes for rank in found.ranks])
    bottom = np.zeros(1024)
    for item, area in zip([item for item in ITEMS if item != "cache"], axes.patches, strict=True):
        top, edges, baseline = area.get_data()
        assert edges == pytest.approx(np.arange(1025))
        assert baseline * GIB == pytest.approx(bottom, abs=1)
        bottom += np.array(expected(found, item))[order]
        assert top * GIB == pytest.approx(bottom)
    assert bottom == pytest.approx(sorted((rank.total_bytes for rank in found.ranks), reverse=True))
    assert capacity_of(axes) < bottom.max() / GIB < axes.get_ylim()[1], "what is over the line is seen"


def test_many_ranks_that_are_alike_are_a_step_as_wide_as_they_are_many() -> None:
    found = with_ranks_alike(plan_assessment(128, 8), 3)
    kinds = sorted(((rank.times.total, 342 - (rank.rank > 0)) for rank in found.ranks[:3]), reverse=True)
    *_, last = axes_of(time_by_rank(found)).patches
    top, edges, _ = last.get_data()
    assert top == pytest.approx([total for total, _ in kinds])
    assert np.diff(edges) == pytest.approx([count for _, count in kinds])


def test_the_svg_has_a_bar_of_the_right_height_for_each_item_of_each_rank(tmp_path: Path) -> None:
    found = plan_assessment(1, 3)
    write(found, tmp_path / "plan.svg")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    heights = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("id", "").startswith("memory-"):
            (path,) = group.iter(f"{SVG}path")
            ys = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.get("d", ""))]
            heights[group.get("id")] = max(ys) - min(ys)
    wanted = {
        f"memory-{rank}-{item}": size
        for item in ITEMS
        for rank, size in enumerate(expected(found, item))
        if item != "cache"
    }
    assert heights.keys() == wanted.keys()
    scale = sum(wanted.values()) / sum(heights.values())
    for name, size in wanted.items():
        assert heights[name] * scale == pytest.approx(size, rel=1e-3), name


def test_what_is_needed_stands_beside_what_is_left() -> None:
    drawn: Any = Figure().add_subplot()
    draw_demand(without_plan(plan_assessment(1, 2)).assessment, drawn)
    widths = {bar.get_gid(): (bar.get_x(), bar.get_width()) for bar in drawn.patches}
    assert widths == {
        "needed-weights": (0, 5),
        "needed-optimizer_state": (5, 3),
        "needed-gradients": (8, 1),
        "left": (0, 6),
    }


@pytest.mark.parametrize(("num_ranks", "kind"), [(1, "fits"), (1024, "fits"), (2, "over"), (2, "no plan"), (1, "host")])
@pytest.mark.parametrize("suffix", [".html", ".svg", ".png"])
def test_every_plan_can_be_written_in_every_form(num_ranks: int, kind: str, suffix: str, tmp_path: Path) -> None:
    found = plan_assessment(num_ranks, 1, host_memory=kind == "host")
    found = overfull(found, 0, by=GIB) if kind == "over" else found
    report = without_plan(found) if kind == "no plan" else CapacityReport(found)
    file = tmp_path / "new" / f"plan{suffix}"
    write(report, file)
    content = file.read_bytes()
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert len(content) < 2**21
    if suffix == ".png":
        image = Image.open(io.BytesIO(content))
        image.load()
        assert image.format == "PNG" and image.width == 1500 and 400 <= image.height <= 1400
        assert len(image.convert("RGB").getcolors(2**24) or []) > 5, "there is something on it"
        return
    verdict = "fits: " if kind in ("fits", "host") else "does not fit: "
    assert f"{verdict}{num_ranks} x 1 h100-80gb (79.65 GiB a rank)" in content.decode()
    if suffix == ".svg":
        assert ElementTree.fromstring(content).tag == f"{SVG}svg"


def test_a_page_fetches_nothing(tmp_path: Path) -> None:
    shown = page(plan_assessment(1, 2), tmp_path)
    assert not {"script", "link", "img", "iframe"} & set(shown.seen)
    assert all(reference.startswith("#") for reference in shown.references)
    html = (tmp_path / "plan.html").read_text()
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    assert "#010203" not in html and "currentColor" in html, "texts of the chart have the page's colour"
    names = re.findall(r' id="((?:memory|time)-\d[^"]*)"', html)
    assert len(names) == len(set(names)) > 0


@pytest.mark.parametrize("num_ranks", [1, 2, 64, 1024])
def test_the_page_tells_the_values_of_tables_and_ranks(num_ranks: int, tmp_path: Path) -> None:
    found = plan_assessment(num_ranks, 1, host_memory=True)
    memory, time, tables = page(found, tmp_path).tables
    assert tables[0] == [
        "table",
        "scheme",
        "rows",
        "placed",
        "ranks",
        "memory, all ranks",
        "host memory",
        "cache",
        "why",
    ]
    for table, row in zip(found.tables, tables[1:], strict=True):
        placed = "table_wise" if table is not found.tables[-1] else "table_wise (fused_uvm_caching)"
        assert row[:5] == [
            table.name,
            "quotient_remainder",
            f"{table.num_rows[0]:,} + 4",
            placed,
            str(table.ranks[0]),
        ]
        assert row[5] == format_bytes(table.storage.total) and row[8] == table.why
    assert tables[-1][6:8] == ["11.00 GiB", "2.00 GiB"]
    by_total = sorted(found.ranks, key=lambda rank: -rank.total_bytes)
    for rank, row in zip(found.ranks if num_ranks <= 64 else by_total[:32] + by_total[-32:], memory[1:], strict=True):
        items = [sum(rank.memory[key] for key in keys) for keys in ITEMS.values()]
        sizes = map(format_bytes, [*items, rank.total_bytes, rank.storage.host])
        assert row == [str(rank.rank), *sizes, "output gradients"]
    by_time = sorted(found.ranks, key=lambda rank: -rank.times.total)
    for rank, row in zip(found.ranks if num_ranks <= 64 else by_time[:32] + by_time[-32:], time[1:], strict=True):
        assert row == [str(rank.rank), *times(rank), *[format_bytes(rank.sent.total)] * (num_ranks > 1)]


def test_the_page_tells_bound_and_other_placements_and_ranks_alike_once(tmp_path: Path) -> None:
    other = Alternative("row_wise", "fused", 4, 0.5, MIB, 0, fits=False)
    found = with_table(with_ranks_alike(plan_assessment(1, 4), 1), 0, alternatives=(other, other))
    found = dataclasses.replace(found, lower_bound_ms=found.ranks[0].times.total / 1.02, is_search_complete=False)
    shown = page(found, tmp_path)
    memory, time, tables = shown.tables
    assert [len(memory), memory[1][0]] == [len(time), time[1][0]] == [2, "0-3 (4)"]
    text = "row_wise in 4 shards +0.500 ms, +1.00 MiB, does not fit"
    assert tables[0][-1] == "instead" and [row[-1] for row in tables[1:3]] == [f"{text}\n{text}", "none"]
    for said in ("at most 2.0% above", "stopped early", "slowest: ranks 0-3 (4), ", "while all other tables stay"):
        assert said in shown.text


def test_a_page_without_a_plan_tells_sizes_and_remedies(tmp_path: Path) -> None:
    found = plan_assessment(1, 2)
    shown = page(without_plan(found), tmp_path)
    (tables,) = shown.tables
    assert [row[3] for row in tables[1:]] == [format_bytes(table.one_copy.total) for table in found.tables]
    for text in ("take 9.00 GiB", "fits with --nodes 2", "the planner: no room", "needed: 9.00 GiB", "left: 6.00 GiB"):
        assert text in shown.text


def test_of_a_plan_that_leaves_most_free_it_is_said_how_much(tmp_path: Path) -> None:
    found = plan_assessment(1, 2)
    assert "Memory in use" not in page(overfull(found, 0, by=1), tmp_path).text
    found = dataclasses.replace(found, ranks=tuple(map(mostly_free, found.ranks)))
    share = max(used_bytes(rank) / rank.capacity_bytes for rank in found.ranks)
    said = page(found, tmp_path).text
    assert f"at most {math.ceil(share * 1000) / 10}% of the device's 79.65 GiB; 4.00 GiB of the rest are kept" in said


def test_bars_tell_their_bytes_to_who_points_at_them(tmp_path: Path) -> None:
    found = plan_assessment(1, 2)
    write(found, tmp_path / "plan.html")
    titles = re.findall(r"<title>(rank .*?)</title>", (tmp_path / "plan.html").read_text())
    for rank in found.ranks:
        assert f"rank {rank.rank}: lookups {format_bytes(rank.memory['lookups'])}" in titles
        assert f"rank {rank.rank}: all-reduce {milliseconds(rank.times.all_reduce)} ms" in titles


def test_pictures_of_a_page_have_a_name_for_who_cannot_see_them(tmp_path: Path) -> None:
    for found in (CapacityReport(plan_assessment(1, 2)), without_plan(plan_assessment(1, 2))):
        write(found, tmp_path / "plan.html")
        html = (tmp_path / "plan.html").read_text()
        labels = re.findall(r'<svg role="img" aria-label="([^"]{20,})"', html)
        assert len(labels) == html.count("<svg ") > 0


@pytest.mark.parametrize("attack", ['<script>alert(1)</script>[red]"a"&</td></table><b>', "$x_1$ $"])
def test_texts_are_escaped(attack: str, tmp_path: Path) -> None:
    found = with_table(with_table(plan_assessment(1, 2), 0, name=attack), 0, why=attack)
    found = dataclasses.replace(with_device(found, name=attack), notes=(attack,))
    lacking = dataclasses.replace(without_plan(found, attack), remedies=Remedies((attack,)))
    for shown in (found, lacking):
        read = page(shown, tmp_path)
        assert "script" not in read.seen
        assert read.text.count(attack) >= 5, "title, heading, verdict, table, notes"
        write(shown, tmp_path / "plan.svg")
        texts = "".join(ElementTree.parse(tmp_path / "plan.svg").getroot().itertext())
        assert attack in texts
        write(shown, tmp_path / "plan.png")


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.html.gz"])
def test_other_suffixes_are_refused_with_those_there_are(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan.*suffix|ends in") as caught:
        write(plan_assessment(), tmp_path / name)
    assert (Path(name).suffix or "no suffix") in str(caught.value)
    assert all(suffix in str(caught.value) for suffix in (".html", ".png", ".svg"))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_refused_and_capitals_are_not(tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        write(plan_assessment(), tmp_path / "folder.html")
    write(plan_assessment(), tmp_path / "PLAN.HTML")
    assert Page((tmp_path / "PLAN.HTML").read_text()).tables


@pytest.mark.parametrize("suffix", [".html", ".svg", ".png"])
def test_a_failed_write_leaves_the_file_that_was_there(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"plan{suffix}"
    write(plan_assessment(), file)
    before = file.read_bytes()
    write(plan_assessment(), file)
    assert file.read_bytes() == before, "the same values give the same bytes"

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(RunError, match="no space left"):
        write(plan_assessment(seed=1), file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
