"""What the work of a preparation is for: a command goes on with it where all of this is the same.

A command that was killed at its very end finds its dataset there, which it is told.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from distembed import __version__
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.base import Base
from distembed.data.prepare.blocks import RawInput, RowSource
from distembed.data.prepare.destination import Destination
from distembed.data.prepare.limits import ResourceLimits
from distembed.data.prepare.options import PrepareOptions
from distembed.data.prepare.staging import OutputExists
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


@contextmanager
def explained_output(
    destination: Destination, source: RowSource, options: PrepareOptions, base: Base | None
) -> Iterator[None]:
    """Within the block, that an output exists already says too where it is what the block would make.

    Args:
        destination: The output.
        source: The inputs.
        options: What the dataset's bytes depend on besides.
        base: Dataset whose ids are applied, if there is one.

    Raises:
        OutputExists: The block raised it.
    """
    try:
        yield
    except OutputExists as error:
        if not _is_made_of(destination, source, options, base):
            raise
        raise OutputExists(
            f"{error}. It is complete, and was prepared by this version with the same options from inputs of the same "
            "names and sizes: if this command was interrupted before, nothing is left for it to do"
        ) from error


def _is_made_of(destination: Destination, source: RowSource, options: PrepareOptions, base: Base | None) -> bool:
    """Returns whether a dataset that is there says of its preparation what this one would be."""
    try:
        manifest = Manifest.load(str(destination))
    except UserError:
        return False
    known = {name: value for name, value in manifest.preparation.items() if name != "learnt"}
    wanted = {**options.recorded, **({} if base is None else {"base": base.to_json()})}
    return (
        manifest.tool_version == __version__
        and known == json.loads(json.dumps(wanted))
        and [(each.name, each.bytes) for each in manifest.sources]
        == [(each.name, each.num_bytes) for each in source.inputs]
    )
