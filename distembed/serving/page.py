"""What a notebook shows of a loaded model."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from distembed.base.units import format_bytes

_SHOWN = ("run", "step", "device", "precision")
_MOST_TABLES = 40


def described_as_html(found: Mapping[str, Any]) -> str:
    """Returns a heading, where the model is from, and a table of its embedding tables.

    Args:
        found: What :meth:`distembed.serving.loaded_model.LoadedModel.describe` returned.
    """
    tables = found["tables"]
    heading = f"{found['model']} for {found['task']}: {found['parameters']:,} parameters"
    facts = ", ".join(f"{name} {found[name]}" for name in _SHOWN)
    rows = [
        (
            t["name"],
            f"{t['num_embeddings']:,}",
            t["partitions"],
            t["composition"] or "",
            t["dim"],
            format_bytes(t["bytes"]),
        )
        for t in tables[:_MOST_TABLES]
    ]
    left_out = len(tables) - len(rows)
    more = f"<p>and {left_out} more tables</p>" if left_out > 0 else ""
    body = _row("th", ("table", "ids", "rows of id x", "composition", "dimension", "size")) + "".join(
        _row("td", row) for row in rows
    )
    return f"<p><b>{html.escape(heading)}</b><br>{html.escape(facts)}</p><table>{body}</table>{more}"


def _row(cell: str, values: Sequence[Any]) -> str:
    return "<tr>" + "".join(f"<{cell}>{html.escape(str(value))}</{cell}>" for value in values) + "</tr>"
