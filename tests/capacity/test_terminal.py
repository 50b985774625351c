"""Laws of a plan in a terminal: its numbers are those of the plan, in any width, and what is left out is said."""

import dataclasses
import io
import re

import pytest
from rich.console import Console

from distembed.optim.table_storage import TableStorage
from distembed.planning.networks import NetworkEstimate
from distembed.planning.other_placements import Alternative
from distembed.planning.storage import SentBytes, StepTime
from distembed.reports.plan.assessment import Assessment
from distembed.reports.plan.remedies import Remedies
from distembed.reports.plan.report import CapacityReport
from distembed.reports.plan.tables import memory_by_rank, time_by_rank
from distembed.reports.plan.terminal import print_capacity_report
from tests.capacity.plan_values import (
    GIB,
    MIB,
    milliseconds,
    overfull,
    plan_assessment,
    times,
    used_bytes,
    with_device,
    with_rank,
    with_ranks_alike,
    with_table,
    without_plan,
)

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


def test_items_are_all_of_the_memory_and_of_the_time_each_once() -> None:
    """On more ranks than there are kinds of either, all with numbers of their own."""
    found = plan_assessment(4, 8, host_memory=True)
    for rank in found.ranks:
        rank = dataclasses.replace(rank, memory={**rank.memory, "sse_graphs": used_bytes(rank) % GIB})
        found = with_rank(found, rank.rank, memory=rank.memory)
        assert rank.total_bytes == sum(rank.memory.values())
    for quantity, totals in (
        (memory_by_rank(found), [rank.total_bytes for rank in found.ranks]),
        (time_by_rank(found), [sum(vars(rank.times).values()) for rank in found.ranks]),
    ):
        for rank, total in zip(found.ranks, totals, strict=True):
            assert sum(item.amount(rank) for item in quantity.items) == pytest.approx(total, rel=1e-12)
            assert quantity.total(rank) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 16])
@pytest.mark.parametrize("host_memory", [False, True])
def test_each_rank_has_a_line_with_its_numbers(num_ranks: int, host_memory: bool) -> None:
    found = plan_assessment(1, num_ranks, host_memory=host_memory)
    text = printed(found)
    for rank, line in zip(found.ranks, lines_under(text, "memory by rank")[:num_ranks], strict=True):
        memory = rank.memory
        expected = [memory["table_weights"], memory["table_optimizer_state"]]
        expected += [memory["table_cache"]] if host_memory else []
        expected += [memory["network_weights"] + memory["network_optimizer_state"], memory["gradients"]]
        expected += [memory["inputs"] + memory["outputs"], memory["lookups"], memory["activations"]]
        expected += [memory["allocator"], rank.total_bytes]
        expected += [rank.storage.host] if host_memory else []
        assert line.split()[0] == str(rank.rank)
        assert [" ".join(size) for size in SIZE.findall(line)] == list(map(two_digits, expected))
    for rank, line in zip(found.ranks, lines_under(text, "time by rank")[:num_ranks], strict=True):
        sent = [two_digits(rank.sent.total)] if num_ranks > 1 else []
        assert line.split() == [str(rank.rank), *times(rank), *" ".join(sent).split()]


@pytest.mark.parametrize(
    ("num_ranks", "num_kinds", "first_cells"),
    [
        (1, 1, ["0"]),
        (32, 1, ["0-31 (32)"]),
        (1024, 1, ["0-1023 (1,024)"]),
        (4, 2, ["0, 2 (2)", "1, 3 (2)"]),
        (1024, 2, ["0, 2, 4 and 509 more (512)", "1, 3, 5 and 509 more (512)"]),
        (1024, 1000, []),
    ],
)
def test_ranks_that_are_alike_are_one_line(num_ranks: int, num_kinds: int, first_cells: list[str]) -> None:
    text = printed(with_ranks_alike(plan_assessment(num_ranks, 1), num_kinds))
    for title in ("memory by rank", "time by rank"):
        lines = lines_under(text, title)
        assert [line.strip()[: len(cell) + 1] for line, cell in zip(lines, first_cells, strict=False)] == [
            f"{cell} " for cell in first_cells
        ]
        num_lines = next(i for i, line in enumerate([*lines, "x"]) if not re.match(r" *\d", line))
        assert num_lines == (len(first_cells) or 16)
    assert ("are left out" in text) == (not first_cells)


@pytest.mark.parametrize(("width", "host_memory"), [(80, False), (80, True), (100, True), (250, True)])
def test_in_any_width_nothing_is_cut_and_no_line_of_a_table_is_wider(width: int, host_memory: bool) -> None:
    found = plan_assessment(2, 8, num_tables=26, host_memory=host_memory)
    text = printed(found, width)
    assert "…" not in text
    is_narrow = width == 80 and host_memory
    assert ("too narrow for all columns" in text) == is_narrow
    for title in ("tables", "memory by rank", "time by rank"):
        lines = lines_under(text, title)
        lines = lines[: next((i for i, line in enumerate(lines) if line.startswith("why")), None)]
        assert max(map(len, lines)) <= width
        if title == "memory by rank":
            shown = sorted(word for line in lines for word in re.findall(r"\d+\.\d\d", line))
            items = [] if is_narrow else memory_by_rank(found).items
            amounts = [own.amount(rank) for rank in found.ranks for own in items]
            amounts += [amount for rank in found.ranks for amount in (rank.total_bytes, rank.storage.host)]
            amounts = list(filter(None, amounts))
            assert shown == sorted(two_digits(int(amount)).split()[0] for amount in amounts)


def test_reasons_are_told_of_their_tables() -> None:
    found = with_table(plan_assessment(1, 2, num_tables=30), 3, why="so says plan.tables")
    (first, second) = (line for line in printed(found, 80).splitlines() if line.startswith("why"))
    assert first.startswith("why (C1, C2, C3, C5, ") and "and 17 more): as TorchRec" in first
    assert second == "why (C4): so says plan.tables"
    assert "why (all tables): as TorchRec's planner finds fastest" in printed(plan_assessment(1, 8))


def test_of_many_ranks_those_with_most_and_with_least_are_shown() -> None:
    found = plan_assessment(128, 8)
    text = printed(found)
    by_total = sorted(found.ranks, key=lambda rank: -rank.total_bytes)
    by_time = sorted(found.ranks, key=lambda rank: -rank.times.total)
    for title, ranks in (("memory by rank", by_total), ("time by rank", by_time)):
        shown = [int(line.split()[0]) for line in lines_under(text, title)[:16]]
        assert shown == [rank.rank for rank in ranks[:8] + ranks[-8:]]
    assert "the fullest and the emptiest; 1,008 ranks between them are left out" in text
    assert "the slowest and the fastest; 1,008 ranks between them are left out" in text
    assert f"fullest: rank {by_total[0].rank}, {two_digits(by_total[0].total_bytes)} of 79.65 GiB" in text
    assert f"slowest: rank {by_time[0].rank}, {milliseconds(by_time[0].times.total)} ms a step" in text


def test_it_is_said_what_the_slowest_is_made_of_and_how_long_the_others_wait() -> None:
    found = with_ranks_alike(plan_assessment(1, 4), 2)
    slow = StepTime(lookup=2.0, exchange=6.0, networks=0.0, all_reduce=0.5, starts=1.5)
    fast = StepTime(lookup=2.0, exchange=1.0, networks=0.0, all_reduce=0.5, starts=1.5)
    for rank in range(4):
        found = with_rank(found, rank, times=slow if rank == 1 else fast)
    sent = SentBytes(ids=MIB, vectors=2 * MIB, gradients=3 * MIB)
    found = with_rank(found, 1, sent=sent)
    (line,) = (line for line in printed(found).splitlines() if line.startswith("slowest"))
    assert line == (
        "slowest: rank 1, 10.00 ms a step, 60% of it exchange (exchange 6.000, lookup 2.000, starts 1.500, "
        "all-reduce 0.500); it sends 6.00 MiB (gradients 3.00 MiB, vectors 2.00 MiB, ids 1.00 MiB); "
        "the others wait 5.000 ms on average"
    )
    for alike in (plan_assessment(1, 1), with_ranks_alike(plan_assessment(1, 8), 1)):
        assert "the others wait" not in printed(alike)


@pytest.mark.parametrize(
    ("lower_bound_ms", "said"),
    [
        (None, ""),
        (0.0, ""),
        (10.0, "bound: no plan that fits is faster"),
        (9.7, "takes less than 9.700 ms; this one is at most 3.1% above"),
        (9.99996, "takes less than 9.999 ms; this one is at most 0.1% above"),
        (8.0, "takes less than 8.000 ms; this one is at most 25% above"),
        (0.01, "takes less than 0.010 ms; this one is at most 99,900% above"),
    ],
)
@pytest.mark.parametrize("is_complete", [False, True])
def test_the_bound_holds_as_it_is_said(lower_bound_ms: float | None, said: str, is_complete: bool) -> None:
    found = with_rank(plan_assessment(1, 1), 0, times=StepTime(lookup=10.0, exchange=0.0, networks=0.0, all_reduce=0.0))
    found = dataclasses.replace(found, lower_bound_ms=lower_bound_ms, is_search_complete=is_complete)
    text = printed(found)
    assert (said in text) if said else ("bound" not in text)
    assert ("the search was stopped early" in text) == (not is_complete and lower_bound_ms != 10.0)
    assert "bound" not in printed(overfull(found, 0, by=1)), "nothing fits"


def test_other_placements_are_told_with_what_they_would_add() -> None:
    others = (
        Alternative("column_wise", "fused", 2, 0.125, -3 * MIB // 2, 12 * MIB, fits=True),
        Alternative("table_wise", "fused_uvm_caching", 1, -0.25, 0, 0, fits=False),
    )
    replicated = (Alternative("data_parallel", "dense", 0, 0.0001, GIB, 0, fits=True),)
    texts = [
        "column_wise in 2 shards +0.125 ms, -1.50 MiB, +12.00 MiB sent",
        "table_wise (fused_uvm_caching) -0.250 ms, +0 B, does not fit",
    ]
    found = with_table(plan_assessment(1, 2, num_tables=4), 2, sharding_type="data_parallel", compute_kernel="dense")
    for index, alternatives in enumerate((others, replicated, others, ())):
        found = with_table(found, index, alternatives=alternatives)
    text = printed(found)
    assert [line for line in text.splitlines() if line.startswith("instead")][:2] == [
        f"instead (C1, C3): {'; '.join(texts)}",
        "instead (C2): data_parallel +0 ms, +1.00 GiB",
    ]
    assert " data_parallel  " in text and "(dense)" not in text
    assert "instead: other placements of a table while all other tables stay" in text
    assert "instead" not in printed(plan_assessment(1, 2))


def test_other_placements_of_many_tables_are_not_all_told() -> None:
    found = plan_assessment(1, 2, num_tables=100)
    for index in range(100):
        other = Alternative("column_wise", "fused", 2, 1 + index / 100, 0, 0, fits=True)
        found = with_table(found, index, alternatives=(other,))
    text = printed(found, 80)
    assert "instead (C32): " in text and "instead (C33): " not in text
    assert "instead (68 more tables): --report and --json say it" in text


def test_of_very_many_tables_those_with_most_bytes_are_shown_and_it_is_said() -> None:
    found = plan_assessment(1, 2, num_tables=300)
    for index in range(300):
        found = with_table(found, index, storage=TableStorage(weights=(index * 7 % 300 + 1) * MIB))
    text = printed(found)
    largest = [own.name for own in found.tables if own.storage.total > 100 * MIB]
    assert [line.split()[0] for line in lines_under(text, "tables") if line.startswith("C")] == largest
    assert "the 200 tables with most bytes of 300; --json and --report have all" in text


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
    beside = "activations 71.65 GiB, allocator 4.00 GiB, network weights 1.00 GiB; a step's lookups"
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
    cells = [line.split(" ")[0] for line in lines[last:] if not line.startswith("why")]
    assert "".join(cells).startswith(name), "a long one is folded, and not cut"
    assert max(map(len, lines[:last])) <= width
    lacking = without_plan(with_table(found, -1, one_copy=TableStorage(9 * GIB)))
    assert f"the largest ({name}) 9.00 GiB" in printed(lacking, width)
