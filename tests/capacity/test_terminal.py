"""Laws of a plan in a terminal: its numbers are those of the plan, in any width, and what is left out is said."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from distembed.capacity.assessment import Assessment
from distembed.capacity.remedies import Remedies
from distembed.capacity.report import CapacityReport
from distembed.capacity.terminal import print_capacity_report
from distembed.capacity.texts import MEMORY_ITEMS
from distembed.planning.networks import NetworkEstimate
from distembed.planning.storage import TableStorage
from tests.capacity.plan_values import (
    GIB,
    MIB,
    memory_values,
    milliseconds,
    overfull,
    plan_assessment,
    sent_bytes,
    with_device,
    with_placement,
    with_rank,
    with_table,
    without_plan,
)

WIDTHS = (80, 100, 140, 160, 250)
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
SIZE = re.compile(r"([\d.]+) (B|KiB|MiB|GiB|TiB)\b")


def printed(found: Assessment | CapacityReport, width: int = 250) -> str:
    file = io.StringIO()
    report = found if isinstance(found, CapacityReport) else CapacityReport(found)
    print_capacity_report(report, Console(file=file, width=width))
    return file.getvalue()


def lines_under(text: str, title: str) -> list[str]:
    """Lines of a table, without its heading."""
    (start,) = (i for i, line in enumerate(text.splitlines()) if line.strip() == title)
    lines = text.splitlines()[start:]
    rule = next(i for i, line in enumerate(lines) if line.startswith("─"))
    return lines[rule + 1 : lines.index("") if "" in lines else None]


def sizes(text: str) -> list[float]:
    """Bytes of each size in a text."""
    return [float(number) * UNITS[unit] for number, unit in SIZE.findall(text)]


def two_digits(num_bytes: int) -> str:
    """As ``du`` writes it, by repeated division."""
    number, units = num_bytes / 1, list(UNITS)
    while number >= 1024 and units[1:]:
        number, units = number / 1024, units[1:]
    return f"{number:.2f} {units[0]}" if units[0] != "B" else f"{num_bytes} B"


def test_items_are_all_of_the_memory_each_once() -> None:
    """On more ranks than there are kinds of memory, all with numbers of their own."""
    for rank in plan_assessment(4, 8, host_memory=True).ranks:
        rank = dataclasses.replace(rank, memory=dataclasses.replace(rank.memory, graph_bytes=rank.memory.total % GIB))
        assert sum(item.bytes_on(rank) for item in MEMORY_ITEMS) == rank.total_bytes
        assert rank.total_bytes == sum(memory_values(rank).values())


@pytest.mark.parametrize("num_ranks", [1, 2, 16])
@pytest.mark.parametrize("host_memory", [False, True])
def test_each_rank_has_a_line_with_its_numbers(num_ranks: int, host_memory: bool) -> None:
    found = plan_assessment(1, num_ranks, host_memory=host_memory)
    lines = lines_under(printed(found), "memory by rank")[:num_ranks]
    for rank, line in zip(found.ranks, lines, strict=True):
        memory = memory_values(rank)
        expected = [memory["table_weights"] + memory["plain_tables"], memory["table_optimizer_state"]]
        expected += [memory["table_cache"]] if host_memory else []
        expected += [memory["network_weights"] + memory["network_optimizer_state"], memory["gradients"]]
        expected += [memory["inputs"] + memory["outputs"], memory["lookups"], memory["activations"]]
        expected += [memory["allocator"], rank.total_bytes]
        expected += [rank.storage.host] if host_memory else []
        expected += [sent_bytes(rank)]
        assert line.split()[0] == str(rank.rank)
        assert [" ".join(size) for size in SIZE.findall(line)] == list(map(two_digits, expected))
        assert f" {milliseconds(rank)} " in line


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("host_memory", [False, True])
def test_in_any_width_a_rank_s_items_add_up_and_nothing_is_cut(width: int, host_memory: bool) -> None:
    found = plan_assessment(2, 8, num_tables=26, host_memory=host_memory)
    text = printed(found, width)
    assert "…" not in text
    shown = lines_under(text, "memory by rank")[:16]
    assert max(map(len, shown)) <= width
    for rank, line in zip(found.ranks, shown, strict=True):
        total = two_digits(rank.total_bytes)
        assert line.split()[0] == str(rank.rank) and line.count(total) == 1
        # two digits of each item; a GiB's hundredth is the coarsest of them
        assert sum(sizes(line[: line.index(total)])) == pytest.approx(rank.total_bytes, abs=0.06 * GIB)
    tables = [line for line in lines_under(text, "tables") if line.startswith("C")]  # a reason may need two
    assert max(map(len, tables)) <= width
    for table, line in zip(found.tables, tables, strict=True):
        assert line.split()[0] == table.name
        for text in ("table_wise", two_digits(table.storage.total)):
            assert text in line


def said_below(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("why", "others", "left out"))]


def test_a_narrow_terminal_says_what_it_leaves_out() -> None:
    found = plan_assessment(1, 8)
    wide, narrow = printed(found, 250), printed(found, 80)
    assert not said_below(wide)
    (others,) = (line for line in narrow.splitlines() if line.startswith("others"))
    headings = narrow[narrow.index("memory by rank") : narrow.index("─", narrow.index("memory by rank"))]
    for item in MEMORY_ITEMS:
        if not item.is_rare:
            assert (item.name in others) != (item.name in headings), item.name
    assert "why (all tables): as TorchRec's planner finds fastest" in narrow
    assert "left out in this width: sent a step" in narrow


def test_reasons_are_told_of_their_tables() -> None:
    found = with_placement(plan_assessment(1, 2, num_tables=30), 3, reason="so says plan.tables")
    assert "so says plan.tables" in lines_under(printed(found, 250), "tables")[3]
    (first, second) = (line for line in printed(found, 80).splitlines() if line.startswith("why"))
    assert first.startswith("why (C1, C2, C3, C5, ") and "and 17 more): as TorchRec" in first
    assert second == "why (C4): so says plan.tables"


def test_of_many_ranks_the_fullest_and_the_emptiest_are_shown() -> None:
    found = plan_assessment(128, 8)
    by_total = sorted(found.ranks, key=lambda rank: -rank.total_bytes)
    text = printed(found)
    shown = [int(line.split()[0]) for line in lines_under(text, "memory by rank")[:16]]
    assert shown == [rank.rank for rank in by_total[:8] + by_total[-8:]]
    assert "1,008 ranks between them are left out" in text
    assert f"fullest: rank {by_total[0].rank}, {two_digits(by_total[0].total_bytes)} of 79.65 GiB" in text
    slowest = max(found.ranks, key=lambda rank: rank.times.total)
    assert f"slowest: rank {slowest.rank}, {milliseconds(slowest)} ms a step" in text


def test_where_it_fits_the_verdict_says_where() -> None:
    last = printed(dataclasses.replace(plan_assessment(1, 8), notes=("one [note]",))).splitlines()[-3:]
    assert "65,536 rows on all ranks" in last[0] and "3 batch(es)" in last[0] and "are estimates" in last[0]
    assert last[1:] == ["fits: 1 x 8 h100-80gb (79.65 GiB a rank)", "note: one [note]"]


def test_a_search_for_remedies_that_was_cut_short_is_noted() -> None:
    report = without_plan(plan_assessment())
    assert "note: " not in printed(report)
    cut_short = dataclasses.replace(report, remedies=Remedies(report.remedies.arguments, is_complete=False))
    assert "note: more remedies were not looked for" in printed(cut_short)


def test_without_a_plan_it_is_said_what_is_short() -> None:
    storages = TableStorage(GIB, 0, GIB), TableStorage(4 * GIB, 3 * GIB)
    found = plan_assessment(1, 2, num_tables=2)
    for index, storage in enumerate(storages):
        found = with_table(found, index, one_copy=storage)
    lines = printed(without_plan(found), 80).splitlines()
    assert lines[0] == "does not fit: 1 x 2 h100-80gb (79.65 GiB a rank)"
    # 5 + 3 + 1 GiB of all tables
    assert "take 9.00 GiB, the largest (C2) 7.00 GiB; 6.00 GiB are left for them on 2 rank(s)" in lines[1]
    # of 79.65 GiB 3 are left for tables
    beside = "activations 71.65 GiB, allocator 4.00 GiB, network weights 1.00 GiB; what a step looks up"
    assert f"beside on each: {beside}" in lines[1]
    assert lines[2:] == [
        "  the planner: no room for a shard proposal 1",
        "  fits with --nodes 2",
        "  fits with --gpu b200-180gb",
    ]


def test_where_networks_alone_are_too_much_tables_are_not_blamed() -> None:
    found = without_plan(plan_assessment(1, 2)).assessment
    network = NetworkEstimate(parameters=GIB, peak=90 * GIB)
    text = printed(dataclasses.replace(found, workload=dataclasses.replace(found.workload, network=network)))
    assert "without any tables each rank needs 95.00 GiB, 15.35 GiB more than it has: activations 90.00 GiB" in text
    assert "tables with their optimizer" not in text and "the planner" not in text


def test_of_a_long_reason_the_first_line_is_told() -> None:
    text = printed(without_plan(plan_assessment(1, 2), "no room \n" + "Possible solutions\n" * 40))
    assert "  the planner: no room\n" in text and "solutions" not in text


def test_ranks_on_a_cpu_share_its_memory() -> None:
    found = without_plan(plan_assessment(1, 4)).assessment
    found = with_device(found, name="cpu-64gb", kind="cpu", memory_bytes=64 * GIB)
    assert "does not fit: 1 x 4 cpu-64gb (16.00 GiB a rank)" in printed(found)


def test_a_rank_over_its_capacity_is_named_with_what_is_largest() -> None:
    found = overfull(plan_assessment(1, 4), 2, by=300 * MIB)
    text = printed(found)
    assert "does not fit: 1 x 4" in text
    assert "rank 2 needs 79.94 GiB of memory, 300.00 MiB more than the 79.65 GiB it has; most: activations" in text
    text = printed(overfull(found, 1, by=2 * GIB))
    assert "rank 1 needs 81.65 GiB of memory, 2.00 GiB more" in text and "(and 1 other rank(s)" in text


def test_host_memory_catches_the_eye() -> None:
    text = printed(plan_assessment(1, 2, host_memory=True))
    *fused, spilled = lines_under(text, "tables")[:4]
    assert "fused_uvm_caching" in spilled and "11.00 GiB" in spilled and "2.00 GiB" in spilled
    assert not any("uvm" in line for line in fused)
    assert "in host memory: C4: 11.00 GiB, with 2.00 GiB of cache on the devices" in text
    assert "host" not in printed(plan_assessment(1, 2))


def test_too_little_host_memory_is_named() -> None:
    found = plan_assessment(1, 2, host_memory=True)
    found = with_rank(found, 1, host_capacity_bytes=found.ranks[1].storage.host - GIB)
    assert not found.fits
    assert "rank 1 needs" in (text := printed(found))
    assert "of host memory, 1.00 GiB more than" in text


@pytest.mark.parametrize("name", ["[red]C1[/red]", "<script>", "[/]", "a" * 90])
@pytest.mark.parametrize("width", [80, 250])
def test_names_are_shown_as_they_are(name: str, width: int) -> None:
    found = dataclasses.replace(with_table(plan_assessment(1, 2, host_memory=True), -1, name=name), notes=(name,))
    text = printed(found, width)
    assert f"in host memory: {name}: " in text and f"note: {name}\n" in text
    lines = lines_under(text, "tables")
    last = next(i for i, line in enumerate(lines) if line.startswith("C3")) + 1
    cells = [line.split(" ")[0] for line in lines[last:]]
    assert "".join(cells).startswith(name), "a long one is folded, and not cut"
    assert max(map(len, lines[:last])) <= width
    lacking = without_plan(with_table(found, -1, one_copy=TableStorage(9 * GIB)))
    assert f"the largest ({name}) 9.00 GiB" in printed(lacking, width)
