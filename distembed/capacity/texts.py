"""What is said of a plan: columns of its tables and sentences below them, out of the values of ``plan --json``.

The terminal (:mod:`distembed.capacity.terminal`) and the page (:mod:`distembed.capacity.page`) show the same texts.
They are plain: what shows them escapes them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distembed.units import format_bytes

_MOST_NAMES = 12
_LONG_REASON = 300  # characters


@dataclass(frozen=True)
class MemoryItem:
    """Something that takes memory on a device.

    Attributes:
        name: for the reader.
        keys: of ``ranks[...]["memory"]`` that it is the sum of.
        is_rare: whether there is nothing to say of it where no rank has any.
    """

    name: str
    keys: tuple[str, ...]
    is_rare: bool = False

    def bytes_on(self, rank: Mapping[str, Any]) -> int:
        """Bytes on one of ``values["ranks"]``."""
        return sum(int(rank["memory"][key]) for key in self.keys)


MEMORY_ITEMS = (
    MemoryItem("tables", ("table_weights",)),
    MemoryItem("optimizer", ("table_optimizer_state",)),
    MemoryItem("cache", ("table_cache",), is_rare=True),
    MemoryItem("SSE graphs", ("sse_graphs",), is_rare=True),
    MemoryItem("networks", ("network_weights", "network_optimizer_state")),
    MemoryItem("gradients", ("gradients",)),
    MemoryItem("step buffers", ("inputs", "outputs")),
    MemoryItem("lookups", ("lookups",)),
    MemoryItem("activations", ("activations",)),
    MemoryItem("allocator", ("allocator",)),
)
"""They add up to a rank's total."""


@dataclass(frozen=True)
class Column:
    """A column of a table that is shown.

    Attributes:
        heading: above it.
        text: of one of ``values["tables"]`` or ``values["ranks"]``.
        is_number: whether it stands to the right.
    """

    heading: str
    text: Callable[[Mapping[str, Any]], str]
    is_number: bool = True


def items_of(values: Mapping[str, Any]) -> list[MemoryItem]:
    """The items that are shown, in the order in which they are stacked."""
    return [item for item in MEMORY_ITEMS if not item.is_rare or any(map(item.bytes_on, values["ranks"]))]


def table_columns(values: Mapping[str, Any]) -> list[Column]:
    """Of the table by table: sizes alone where there is no plan, host memory only where some table lies there."""
    columns = [
        Column("table", lambda table: str(table["name"]), is_number=False),
        Column("scheme", lambda table: str(table["scheme"]), is_number=False),
        Column("rows", lambda table: " + ".join(f"{rows:,}" for rows in table["rows"])),
    ]
    if not values["ranks"]:
        return [*columns, Column("memory, one copy", lambda table: format_bytes(table["bytes_of_one_copy"]))]
    columns += [
        Column("placed", _placed, is_number=False),
        Column("ranks", lambda table: _ranks_of(table, world_size(values)), is_number=False),
        Column("memory, all ranks", lambda table: format_bytes(table["bytes_on_all_ranks"])),
    ]
    if any(map(in_host_memory, values["tables"])):
        columns.append(Column("host memory", lambda table: _or_none(table["host_bytes"])))
        columns.append(Column("cache", lambda table: _or_none(table["cache_bytes"])))
    return [*columns, Column("why", lambda table: str(table["why"]), is_number=False)]


def step_columns(values: Mapping[str, Any]) -> list[Column]:
    """Of the table by rank, beside those of :func:`items_of`; host memory only where some table lies there."""
    columns = [
        Column("ms a step", lambda rank: _milliseconds(rank["milliseconds"]["total"])),
        Column("sent a step", lambda rank: format_bytes(sum(rank["sent_bytes"].values()))),
    ]
    if any(map(host_bytes_on, values["ranks"])):
        columns.insert(0, Column("host memory", lambda rank: _or_none(host_bytes_on(rank))))
    return columns


def in_host_memory(table: Mapping[str, Any]) -> bool:
    """Whether one of ``values["tables"]`` lies in host memory, be it in part."""
    return int(table["host_bytes"]) > 0


def host_bytes_on(rank: Mapping[str, Any]) -> int:
    """Host memory of one of ``values["ranks"]``."""
    return sum(map(int, rank["host_memory"].values()))


def world_size(values: Mapping[str, Any]) -> int:
    """Ranks."""
    return int(values["nodes"]) * int(values["gpus"])


def rank_bytes(values: Mapping[str, Any]) -> int:
    """Memory of a rank; ranks on a CPU share their machine's."""
    if values["ranks"]:
        return int(values["ranks"][0]["capacity"])
    device = values["device"]
    return int(device["memory_bytes"]) // (int(values["gpus"]) if device["kind"] == "cpu" else 1)


def shown_ranks(values: Mapping[str, Any], most: int) -> tuple[list[Mapping[str, Any]], str]:
    """At most so many ranks, and what to say of those that are left out.

    All of them by their number; or the fullest and the emptiest, from the fullest to the emptiest.
    """
    ranks: list[Mapping[str, Any]] = list(values["ranks"])
    if len(ranks) <= most:
        return ranks, ""
    ranks.sort(key=lambda rank: -rank["total"])
    left_out = len(ranks) - most
    said = f"the fullest and the emptiest; {left_out:,} ranks between them are left out"
    return ranks[: most - most // 2] + ranks[-(most // 2) :], said


def verdict(values: Mapping[str, Any]) -> str:
    """``fits: 1 x 8 h100-80gb (79.65 GiB a rank)``."""
    memory = f"({format_bytes(rank_bytes(values))} a rank)"
    return f"{'fits' if values['fits'] else 'does not fit'}: {devices(values)} {memory}"


def devices(values: Mapping[str, Any]) -> str:
    """``1 x 8 h100-80gb``."""
    return f"{values['nodes']} x {values['gpus']} {values['device']['name']}"


def step_lines(values: Mapping[str, Any]) -> list[str]:
    """The fullest rank, the slowest rank, and what is estimated of a step; [] where there is no plan."""
    ranks = values["ranks"]
    if not ranks:
        return []
    fullest = max(ranks, key=lambda rank: rank["total"])
    slowest = max(ranks, key=lambda rank: rank["milliseconds"]["total"])
    parts = {name: took for name, took in slowest["milliseconds"].items() if name != "total"}
    took = ", ".join(f"{name.replace('_', '-')} {_milliseconds(part)}" for name, part in parts.items())
    return [
        f"fullest: rank {fullest['rank']}, {format_bytes(fullest['total'])} of {format_bytes(fullest['capacity'])}; "
        f"fullest moment of its step: {fullest['fullest_moment']}",
        f"slowest: rank {slowest['rank']}, {_milliseconds(slowest['milliseconds']['total'])} ms a step ({took})",
        f"a step has {values['batch_size']:,} rows on all ranks, and {values['pipeline_depth']} batch(es) are on a "
        "device at once; times are estimates, without what starting kernels takes",
    ]


def host_lines(values: Mapping[str, Any]) -> list[str]:
    """Which tables lie in host memory; [] where none does."""
    tables = list(filter(in_host_memory, values["tables"]))
    if not tables:
        return []
    in_host, cached = (sum(int(table[key]) for table in tables) for key in ("host_bytes", "cache_bytes"))
    names = _enumerate([table["name"] for table in tables])
    caches = f", with {format_bytes(cached)} of cache on the devices" if cached else ", with no cache on the devices"
    return [f"in host memory: {names}: {format_bytes(in_host)}{caches}"]


def why_lines(values: Mapping[str, Any]) -> list[str]:
    """A line for each reason for which tables are placed as they are."""
    names: dict[str, list[str]] = {}
    for table in values["tables"]:
        if table["why"]:
            names.setdefault(table["why"], []).append(table["name"])
    of_all = len(values["tables"])
    return [f"why ({'all tables' if len(own) == of_all else _enumerate(own)}): {why}" for why, own in names.items()]


def shortage_lines(values: Mapping[str, Any]) -> list[str]:
    """What is short, in bytes, and what the planner says; [] where the tables fit."""
    if values["fits"]:
        return []
    if sum(values["beside_tables"].values()) > rank_bytes(values):
        # then tables have no part in it, whatever the planner says
        return [_beside(values)]
    reason = str(values["planner_says"]).strip()
    if len(reason) > _LONG_REASON:
        reason = reason.splitlines()[0]
    planner = [f"the planner: {' '.join(reason.split())}"] if reason else []
    return [_needed(values), *_over(values), *planner]


def _beside(values: Mapping[str, Any]) -> str:
    beside = sum(values["beside_tables"].values())
    return (
        f"without any tables each rank needs {format_bytes(beside)}, {format_bytes(beside - rank_bytes(values))} more "
        f"than it has: {_beside_items(values)}"
    )


def _beside_items(values: Mapping[str, Any]) -> str:
    items = sorted(values["beside_tables"].items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {format_bytes(int(count))}" for name, count in items if count)


def _needed(values: Mapping[str, Any]) -> str:
    needed = sum(map(int, values["needed_by_tables"].values()))
    left, ranks = int(values["left_for_tables"]), world_size(values)
    largest = max(values["tables"], key=lambda table: table["bytes_of_one_copy"])
    host = values["host_capacity"] * ranks
    of_host = f", and {format_bytes(host)} of host memory" if host else ""
    return (
        f"tables with their optimizer take {format_bytes(needed)}, the largest ({largest['name']}) "
        f"{format_bytes(largest['bytes_of_one_copy'])}; {format_bytes(left)} are left for them on {ranks} rank(s)"
        f"{of_host}, beside on each: {_beside_items(values)}; what a step looks up and exchanges comes on top"
    )


def _over(values: Mapping[str, Any]) -> list[str]:
    ranks = values["ranks"]
    lines = []
    over = [rank for rank in ranks if rank["total"] > rank["capacity"]]
    if over:
        fullest = max(over, key=lambda rank: rank["total"] - rank["capacity"])
        items = sorted(items_of(values), key=lambda item: -item.bytes_on(fullest))[:3]
        largest = ", ".join(f"{item.name} {format_bytes(item.bytes_on(fullest))}" for item in items)
        lines.append(_over_line(over, fullest, fullest["total"], fullest["capacity"], "memory") + f"; most: {largest}")
    over = [rank for rank in ranks if host_bytes_on(rank) > rank["host_capacity"]]
    if over:
        fullest = max(over, key=lambda rank: host_bytes_on(rank) - rank["host_capacity"])
        lines.append(_over_line(over, fullest, host_bytes_on(fullest), fullest["host_capacity"], "host memory"))
    return lines


def _over_line(over: Sequence[Any], fullest: Mapping[str, Any], used: int, capacity: int, memory: str) -> str:
    others = f" (and {len(over) - 1:,} other rank(s) by less or as much)" if len(over) > 1 else ""
    return (
        f"rank {fullest['rank']} needs {format_bytes(used)} of {memory}, {format_bytes(used - capacity)} more than "
        f"the {format_bytes(capacity)} it has{others}"
    )


def _placed(table: Mapping[str, Any]) -> str:
    kernel = "" if table["compute_kernel"] == "fused" else f" ({table['compute_kernel']})"
    return f"{table['sharding_type']}{kernel}"


def _ranks_of(table: Mapping[str, Any], of_all: int) -> str:
    ranks = sorted(set(table["ranks"]))
    if not ranks:
        return "all"
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{len(ranks):,} of {of_all:,}"


def _milliseconds(milliseconds: float) -> str:
    return f"{milliseconds:,.{1 if milliseconds >= 100 else 2 if milliseconds >= 10 else 3}f}"


def _or_none(count: int) -> str:
    return format_bytes(count) if count else "-"


def _enumerate(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
