"""Laws of a plan's page and chart: bars as high as the values, all of it escaped, nothing fetched, whole files only."""

import dataclasses
import io
import itertools
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from distembed.base.errors import UserError
from distembed.base.units import format_bytes
from distembed.planning.other_placements import Alternative
from distembed.reports.plan.assessment import Assessment
from distembed.reports.plan.page import draw_ranks, write_capacity_report
from distembed.reports.plan.remedies import Remedies
from distembed.reports.plan.report import CapacityReport
from distembed.reports.plan.tables import RankQuantity, memory_by_rank, time_by_rank
from tests.capacity.plan_values import (
    ALLOCATOR,
    GIB,
    MIB,
    mostly_free,
    overfull,
    plan_assessment,
    times,
    with_device,
    with_ranks_alike,
    with_table,
    without_plan,
)
from tests.html_page import Page

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
    "lookup": ("lookup",),
    "exchange": ("exchange",),
    "all-reduce": ("all_reduce",),
    "networks": ("networks",),
    "starts": ("starts",),
    "waiting-for-cores": ("waiting",),
}


def write(found: Assessment | CapacityReport, file: Path) -> None:
    write_capacity_report(found if isinstance(found, CapacityReport) else CapacityReport(found), file)


def page(found: Assessment | CapacityReport, folder: Path) -> Page:
    write(found, folder / "plan.html")
    return Page((folder / "plan.html").read_text(encoding="utf-8"))


def axes_of(quantity: RankQuantity) -> Any:
    axes = Figure().add_subplot()
    draw_ranks(quantity, axes)
    return axes


@pytest.mark.thorough
@pytest.mark.parametrize(("num_ranks", "is_nearly_empty"), [(1, False), (64, True), (1024, False)])
def test_bars_are_as_high_as_the_values_and_stand_on_each_other(num_ranks: int, is_nearly_empty: bool) -> None:
    found = overfull(plan_assessment(1, num_ranks, host_memory=True), 0, by=-GIB)
    if is_nearly_empty:
        found = dataclasses.replace(found, ranks=tuple(map(mostly_free, found.ranks)))
    room, unit = found.ranks[0].capacity_bytes - ALLOCATOR, MIB if is_nearly_empty else GIB
    memory = {item: keys for item, keys in ITEMS.items() if item != "allocator"}
    for quantity, scale, items in ((memory_by_rank(found), unit, memory), (time_by_rank(found), 1, TIMES)):
        axes, ranks = axes_of(quantity), [group[0] for group in quantity.shown_groups(64)[0]]
        assert len(axes.patches) == len(items) * len(ranks)
        bottom = np.zeros(len(ranks))
        for number, keys in enumerate(items.values()):
            own = axes.patches[number * len(ranks) : (number + 1) * len(ranks)]
            amounts = [sum({**rank.memory, **vars(rank.times)}[key] for key in keys) / scale for rank in ranks]
            assert [bar.get_x() + bar.get_width() / 2 for bar in own] == pytest.approx(range(len(ranks)))
            assert [bar.get_height() for bar in own] == pytest.approx(amounts)
            assert [bar.get_y() for bar in own] == pytest.approx(bottom)
            bottom += amounts
        assert bottom.max() < axes.get_ylim()[1], "no bar is cut off"
        assert [label.get_text() for label in axes.get_xticklabels()] == [str(rank.rank) for rank in ranks]
        if quantity.limit is None or is_nearly_empty:
            assert axes.get_ylim()[1] < 1.1 * bottom.max() and not axes.lines, "bars fill the height"
        else:
            (line,) = axes.lines
            assert list(line.get_ydata()) == pytest.approx([room / GIB] * 2)


def test_ranks_that_are_alike_share_a_bar() -> None:
    axes = axes_of(time_by_rank(with_ranks_alike(plan_assessment(128, 8), 3)))
    assert len(axes.patches) == 3 * len(TIMES)
    assert axes.get_xticklabels()[0].get_text().endswith("(342)")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_ranks", "kind", "suffix"),
    [
        (1024, "fits", ".png"),
        (1, "fits", ".svg"),
        (2, "over", ".html"),
        (2, "over", ".png"),
        *itertools.product([2], ["no plan"], [".html", ".svg", ".png"]),
        (1, "host", ".svg"),
    ],
)
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


def test_a_page_fetches_nothing_and_its_pictures_have_names_for_who_cannot_see_them(tmp_path: Path) -> None:
    shown = page(plan_assessment(1, 2), tmp_path)
    assert not {"script", "link", "img", "iframe"} & set(shown.seen)
    assert all(reference.startswith("#") for reference in shown.references)
    html = (tmp_path / "plan.html").read_text()
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    assert "#010203" not in html and "currentColor" in html, "texts of the chart have the page's colour"
    labels = re.findall(r'<svg role="img" aria-label="([^"]{20,})"', html)
    assert len(labels) == html.count("<svg ") > 0


@pytest.mark.thorough
@pytest.mark.parametrize("num_ranks", [1, 64, 1024])
def test_the_page_tells_the_values_of_tables_and_ranks(num_ranks: int, tmp_path: Path) -> None:
    found = plan_assessment(num_ranks, 1, host_memory=True)
    memory, time, tables = page(found, tmp_path).tables
    assert ", ".join(tables[0]) == "table, scheme, rows, placed, ranks, memory, all ranks, host memory, cache, why"
    for table, row in zip(found.tables, tables[1:], strict=True):
        placed = "table_wise" if table is not found.tables[-1] else "table_wise (fused_uvm_caching)"
        rows = f"{table.num_rows[0]:,} + 4"
        assert row[:5] == [table.name, "quotient_remainder", rows, placed, str(table.ranks[0])]
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
    for text in ("take 9.00 GiB", "fits with --nodes 2", "the planner: no room"):
        assert text in shown.text


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", [".html", ".svg", ".png"])
def test_the_same_values_give_the_same_bytes(suffix: str, tmp_path: Path) -> None:
    one, other = tmp_path / f"one{suffix}", tmp_path / f"other{suffix}"
    for file in (one, other):
        write(plan_assessment(), file)
    assert one.read_bytes() == other.read_bytes()
