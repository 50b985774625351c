"""The file of one part: its rows, their surroundings, and the part's status. Loads no torch."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distembed.base.files import write_json

ROOT = Path(__file__).resolve().parents[2]
RUNNING, DONE, FAILED, NO_TIME = "running", "done", "failed", "out of time"


def read(path: Path) -> dict[str, Any]:
    """Returns the content of a part's file; an empty dictionary if there is no valid file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) and isinstance(content.get("rows"), list) else {}


def is_of(content: Mapping[str, Any], surroundings: Mapping[str, Any]) -> bool:
    """Returns whether a part was measured on this device, with these versions."""
    return content.get("surroundings") == surroundings


def code_digest() -> str:
    """Returns a digest of the measured sources, to tell results of different sources apart."""
    digest = hashlib.sha256()
    for folder in ("distembed", "tools"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


class Results:
    """A part's rows, written after each cell.

    Args:
        path: The part's file; its rows are kept if their surroundings are equal.
        surroundings: Device and versions, as read from JSON.
    """

    def __init__(self, path: Path, surroundings: Mapping[str, Any]) -> None:
        self.path = path
        before = read(path)
        self.rows: list[dict[str, Any]] = before["rows"] if is_of(before, surroundings) else []
        sources = {*before.get("sources", []), code_digest()} if self.rows else {code_digest()}
        self._content = {"status": RUNNING, "surroundings": surroundings, "sources": sorted(sources)}
        self._write()

    def lacks(self, **cell: object) -> bool:
        """Returns whether no row has these values, given by name."""
        return not any(all(row.get(key) == value for key, value in cell.items()) for row in self.rows)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Adds the rows of a cell, and writes the file."""
        self.rows += [dict(row) for row in rows]
        self._write()

    def finish(self) -> None:
        """Marks the part as done."""
        self._content["status"] = DONE
        self._write()

    def _write(self) -> None:
        write_json(self.path, {**self._content, "rows": self.rows})


def end(path: Path, surroundings: Mapping[str, Any], status: str, error: str) -> None:
    """Records the status of a part that failed or was stopped; its rows are kept."""
    content = read(path) or {"surroundings": surroundings, "sources": [], "rows": []}
    write_json(path, {**content, "status": status, "error": error})
