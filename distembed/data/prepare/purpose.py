"""What the work of a preparation is for: a command goes on with it where all of this is the same."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from distembed import __version__
from distembed.data.prepare.base import Base
from distembed.data.prepare.blocks import RawInput, RowSource
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.options import PrepareOptions
from distembed.errors import UserError


def work_purpose(
    source: RowSource, options: PrepareOptions, limits: ResourceLimits, part_bytes: int, base: Base | None
) -> dict[str, Any] | None:
    """Returns all that the tasks of a preparation and their results depend on.

    Args:
        source: The inputs, and how their rows are parsed.
        options: What the dataset's bytes depend on besides.
        limits: Memory and threads, by which blocks are cut.
        part_bytes: About how many bytes of a plain input are a part.
        base: Dataset whose ids are applied, if there is one.

    Returns:
        A value that JSON can hold; None where an input can be read once only.

    Raises:
        UserError: Such an input is to be read by several processes.
    """
    once = [each for each in source.inputs if each.num_bytes is None]
    if once and limits.processes * limits.num_nodes > 1:
        raise UserError(
            f"processes (--processes, --node) are {limits.processes * limits.num_nodes}, and {once[0].place} has no "
            "known size, as pipes have none, so that they cannot share it: leave the option out, or name a file"
        )
    if once:
        return None
    return {
        "version": __version__,
        "inputs": [asdict(each) | {"version": _version(each)} for each in source.inputs],
        "layout": repr(source.layout),
        "options": repr(options),
        "base": None if base is None else base.to_json(),
        "block_bytes": limits.block_bytes,
        "part_bytes": part_bytes,
    }


def _version(described: RawInput) -> str:
    """Returns what changes when an input does."""
    try:
        return described.version or str(os.stat(described.place).st_mtime_ns)
    except OSError:
        return ""  # a server that does not say
