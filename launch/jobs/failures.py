"""Why a job has failed: the traceback of the rank that failed first."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What a rank prints when another one has died.
_IS_CONSEQUENCE = re.compile(
    r"^(DistBackendError|DistNetworkError|DistStoreError|Rendezvous\w*|SignalException)\b"
    r"|Connection (closed|reset) by peer|Broken pipe|\bnccl\w*Error\b"
)


@dataclass(frozen=True)
class Failure:
    """The error of a rank.

    Attributes:
        where: File that holds the error; its folder is that of the node's logs.
        message: Type and text of the error.
        traceback: Python's traceback; "" where there is none.
        time: When the error was noted, in seconds since 1970.
        exit_code: The exit code with which the rank has ended of it; 1 where it is not noted.
    """

    where: Path
    message: str
    traceback: str
    time: float
    exit_code: int = 1


def first_failure(logs: Path, since: float = 0.0) -> Failure | None:
    """Returns the error that a rank has noted first in the last start of a job; None where no rank has noted one.

    One that only follows from the death of another rank comes after all others: clocks of machines differ.

    Args:
        logs: Folder of all nodes' logs; see :func:`launch.apps.node_script.log_dir`.
        since: Seconds since 1970; errors that were noted before are left out.
    """
    files = (file for node in sorted(logs.rglob("node-*")) for file in _error_files(node))
    found = [failure for file in files if (failure := _read(file)) and failure.time >= since]
    return min(found, key=lambda one: (bool(_IS_CONSEQUENCE.search(one.message)), one.time), default=None)


def _error_files(node: Path) -> Iterator[Path]:
    """Yields the error files of a node's last start; the launcher keeps those of all, RUN/attempt_N/RANK/error.json."""
    yield from node.glob("error.json")
    starts = [folder for folder in node.iterdir() if folder.is_dir()]
    if starts:
        attempts = max(starts, key=lambda folder: folder.stat().st_mtime).glob("attempt_*")
        last = max(attempts, key=lambda folder: int(folder.name.removeprefix("attempt_")), default=None)
        yield from last.rglob("error.json") if last else ()


def _read(file: Path) -> Failure | None:
    """Reads the error that a rank or torch has written; None where the file is damaged."""
    try:
        noted: Any = json.loads(file.read_text())["message"]
        if isinstance(noted, str):
            return Failure(file, noted, "", file.stat().st_mtime)
        extra = noted.get("extraInfo", {})
        seconds = float(extra["time_ns"]) / 1e9 if "time_ns" in extra else float(extra.get("timestamp", 0))
        code = int(extra.get("exit_code", 1))
        return Failure(file, str(noted["message"]), str(extra.get("py_callstack", "")), seconds, code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
