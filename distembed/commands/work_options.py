"""Options of preparations that may be large: memory, threads and the engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.base.units import parse_bytes

if TYPE_CHECKING:
    from distembed.data.prepare.options import ResourceLimits

OutputOption = Annotated[
    str,
    typer.Option("--output", "-o", help="Folder to make, which appears whole or not at all; or a URL, with --work."),
]


@dataclass(frozen=True)
class WorkOptions:
    """What a preparation may use."""

    memory_limit: Annotated[
        str, typer.Option(help="Memory to stay within, everything included, such as 2GB; on a cluster, of each task.")
    ] = "2GB"
    threads: Annotated[
        int | None, typer.Option(help="Threads; the number of cores unless given. On a cluster, of each task: 1.")
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            help="Who runs the tasks: `threads` here, or a `ray` or `spark` cluster, whose machines share the folders."
        ),
    ] = "threads"
    work: Annotated[
        Path | None, typer.Option(help="Folder for the work, where OUTPUT is a URL; of a cluster, shared.")
    ] = None

    def limits(self) -> "ResourceLimits":
        """Returns what they allow.

        Raises:
            UserError: An option is not of its form, or out of its range.
        """
        from distembed.data.prepare.options import LEAST_MEMORY_BYTES, ResourceLimits

        memory_limit_bytes = parse_bytes("--memory-limit", self.memory_limit, LEAST_MEMORY_BYTES)
        return ResourceLimits(memory_limit_bytes, self.threads, self.work, self.engine)
