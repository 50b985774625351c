"""All results as Markdown. Loads no torch."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu import PARTS
from gpu.results import DONE, is_of, read

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], str]]


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}"


_OF_TABLES_ALONE: Columns = {
    "columns": lambda row: str(row["dim"]),
    "batch": lambda row: f"{row['batch_size']:,}",
    "tables": lambda row: row["contender"],
    "ms": lambda row: f"{row['milliseconds']:.3f}",
    "to TorchRec, hashed": lambda row: f"{row['ratio']:.2f}x",
    "MB moved": lambda row: f"{row['moved_bytes'] / 1e6:,.1f}",
    "of the bandwidth": lambda row: f"{row['share_of_bandwidth']:.1%}",
}
COLUMNS: dict[str, Columns] = {
    "embedding": _OF_TABLES_ALONE,
    "fused": _OF_TABLES_ALONE,
    "step": {
        "columns": lambda row: str(row["dim"]),
        "batch": lambda row: f"{row['batch_size']:,}",
        "model": lambda row: row["contender"],
        "ms": lambda row: f"{row['milliseconds']:.2f}",
        "samples/s": lambda row: f"{row['samples_per_second']:,.0f}",
        "samples/s to TorchRec, hashed": lambda row: f"{row['speed_ratio']:.2f}x",
    },
    "launches": {
        "step": lambda row: row["what"],
        "of": lambda row: row["contender"],
        "kernels": lambda row: f"{row['kernels']:.0f}",
        "copies": lambda row: f"{row['copies']:.0f}",
        "fills": lambda row: f"{row['fills']:.0f}",
        "waits": lambda row: f"{row['waits']:.1f}",
        "ms on the device": lambda row: f"{row['device_milliseconds']:.3f}",
        "operators called": lambda row: f"{row['operators']:.0f}",
    },
    "sse": {
        "batch": lambda row: f"{row['batch_size']:,}",
        "rule": lambda row: row["rule"],
        "p0": lambda row: str(row["p0"]),
        "ms": lambda row: f"{row['milliseconds']:.2f}",
        "to none": lambda row: f"{row['ratio']:.3f}x",
    },
    "memory": {
        "tables": lambda row: row["case"],
        "batch": lambda row: f"{row['batch_size']:,}",
        "planned MiB": lambda row: _mib(row["planned_bytes"]),
        "measured MiB": lambda row: _mib(row["measured_bytes"]),
        "planned / measured": lambda row: f"{row['planned_bytes'] / row['measured_bytes']:.2f}",
    },
    "checkpoint": {
        "columns": lambda row: str(row["dim"]),
        "MiB": lambda row: _mib(row["num_bytes"]),
        "saved in s": lambda row: f"{row['save_seconds']:.2f}",
        "loaded in s": lambda row: f"{row['load_seconds']:.2f}",
        "MB/s saved": lambda row: f"{row['num_bytes'] / row['save_seconds'] / 1e6:,.0f}",
    },
}
"""By part, the headings of its table and the function of each cell. The part ``tests`` has counts instead."""


def markdown(folder: Path, surroundings: Mapping[str, Any], dry: bool) -> str:
    """Returns the results of all parts measured on this device with these versions."""
    contents = {name: read(folder / f"{name}.json") for name in PARTS}
    contents = {name: content for name, content in contents.items() if is_of(content, surroundings)}
    lines = [*_heading(surroundings, dry), ""]
    sources = sorted({source for content in contents.values() for source in content["sources"]})
    if len(sources) > 1:
        lines += [f"Measured while the code changed: {', '.join(sources)} are digests of its sources.", ""]
    for name, part in PARTS.items():
        content = contents.get(name, {})
        lines += [f"### {part.title}", ""]
        if not content:
            lines += ["Not run.", ""]
            continue
        if content["status"] != DONE:
            lines += [f"**{content['status']}**: {_one_line(content.get('error', 'it was stopped'))}", ""]
        lines += _outcomes(content["rows"]) if name == "tests" else _table(COLUMNS[name], content["rows"])
        lines.append("")
    return "\n".join(lines)


def _heading(surroundings: Mapping[str, Any], dry: bool) -> list[str]:
    machine, versions = surroundings["machine"], surroundings["versions"]
    driver = f", driver {machine['driver']}, CUDA {machine['cuda']}" if "driver" in machine else ""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    said = ["A dry run: tiny sizes on a processor; its times are meaningless.", ""] if dry else []
    return [f"## {machine['device']}", "", *said, f"{machine['device']}{driver}; {packages}."]


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:500] if lines else "no reason is known"


def _outcomes(rows: Sequence[Row]) -> list[str]:
    counts = Counter(row["outcome"] for row in rows)
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none was run"
    failed = [f"- `{row['test']}`: {_one_line(row['reason'])}" for row in rows if row["outcome"] == "failed"]
    reasons = Counter(_one_line(row["reason"]) for row in rows if row["outcome"] == "skipped")
    skipped = [f"- {count} skipped: {reason}" for reason, count in reasons.items()]
    return [f"{said}.", *([""] if failed or skipped else []), *failed, *skipped]


def _table(columns: Columns, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return ["No rows."]
    cells = [[show(row) for show in columns.values()] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (list(columns), ["---"] * len(columns), *cells)]
