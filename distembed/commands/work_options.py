"""Options of preparations that may be large: memory, threads, processes and machines."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.errors import UserError
from distembed.units import parse_bytes

if TYPE_CHECKING:
    from distembed.data.prepare.limits import ResourceLimits

OutputOption = Annotated[
    str,
    typer.Option("--output", "-o", help="Folder to make, which appears whole or not at all; or a URL, with --work."),
]


@dataclass(frozen=True)
class WorkOptions:
    """What a preparation may use."""

    memory_limit: Annotated[
        str, typer.Option(help="Memory to stay within on this machine, everything included, such as 2GB.")
    ] = "2GB"
    threads: Annotated[int | None, typer.Option(help="Threads in all; the number of cores unless given.")] = None
    processes: Annotated[int, typer.Option(help="Processes on this machine.")] = 1
    node: Annotated[
        str,
        typer.Option(help="Number of this machine, from 0, and of all that run the same command, such as 0/4."),
    ] = "0/1"
    work: Annotated[
        Path | None, typer.Option(help="Folder for the work, where OUTPUT is a URL; of several machines, shared.")
    ] = None

    def limits(self) -> "ResourceLimits":
        """Returns what they allow.

        Raises:
            UserError: An option is not of its form, or out of its range.
        """
        from distembed.data.prepare.limits import LEAST_MEMORY_BYTES, ResourceLimits

        memory_limit_bytes = parse_bytes("--memory-limit", self.memory_limit, LEAST_MEMORY_BYTES)
        if not (numbers := re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", self.node, re.ASCII)):
            raise UserError(f"node (--node) is {self.node[:100]!r}: give the machine's number and that of all, as 0/4")
        return ResourceLimits(
            memory_limit_bytes,
            self.threads,
            self.processes,
            node=int(numbers[1]),
            num_nodes=int(numbers[2]),
            work=self.work,
        )
