"""Options that the kinds of ``distembed prepare`` share, and their progress: live bars, or plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from distembed.base.units import parse_bytes
from distembed.commands.shared import note, say

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from distembed.data.dataset.manifest import Manifest
    from distembed.data.prepare import ProgressUpdate
    from distembed.data.prepare.options import ResourceLimits

OutputOption = Annotated[
    str,
    typer.Option("--output", "-o", help="Folder to make, which appears whole or not at all; or a URL, with --work."),
]


MaxRejectedOption = Annotated[float, typer.Option(help="Share of malformed rows, above which nothing is written.")]
_SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class WorkOptions:
    """Memory, threads and engine of a preparation."""

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
        """Returns the limits."""
        from distembed.data.prepare.options import LEAST_MEMORY_BYTES, ResourceLimits

        memory_limit_bytes = parse_bytes("--memory-limit", self.memory_limit, LEAST_MEMORY_BYTES)
        return ResourceLimits(memory_limit_bytes, self.threads, self.work, self.engine)


@dataclass(frozen=True)
class VocabularyOptions:
    """Whose ids are applied."""

    vocabulary: Annotated[
        str | None,
        typer.Option(
            help="Dataset (or its URL) or run whose ids, means, bins are applied; others are out of vocabulary."
        ),
    ] = None
    grow: Annotated[bool, typer.Option("--grow", help="Values that --vocabulary lacks get new ids after its own.")] = (
        False
    )


@contextmanager
def prepare_progress(console: Console) -> Iterator[Callable[["ProgressUpdate"], None]]:
    """Yields the function that a preparation calls with its progress; on leaving, the bars stay as they are."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]:,} rows, {task.fields[rate]:,.0f} rows/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        yield _Bar(bar)


def say_dataset(manifest: "Manifest", output: str) -> None:
    """Prints the contents of a prepared dataset, and notes signs of a mistake."""
    from distembed.data.prepare import dataset_warnings, describe_dataset

    for warning in dataset_warnings(manifest):
        note(warning)
    for line in describe_dataset(manifest, output):
        say(line)
    say(f"dataset {output}")


class _Bar:
    """Shows a bar for each stage, with the rows a second since the stage began."""

    def __init__(self, bar: "Progress") -> None:
        self._bar = bar
        self._tasks: dict[str, tuple["TaskID", float]] = {}

    def __call__(self, update: "ProgressUpdate") -> None:
        if update.stage not in self._tasks:
            self._tasks[update.stage] = (self._bar.add_task(update.stage, rows=0, rate=0.0), time.perf_counter())
        task, started = self._tasks[update.stage]
        self._bar.update(
            task,
            completed=update.bytes_done,
            total=update.bytes_total,
            rows=update.rows_done,
            rate=update.rows_done / max(1e-9, time.perf_counter() - started),
        )


class _Lines:
    """Prints a line when a stage begins, and every few seconds within it with the time that is left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._started = self._shown = 0.0

    def __call__(self, update: "ProgressUpdate") -> None:
        now = time.perf_counter()
        if update.stage != self._stage:
            self._stage, self._started, self._shown = update.stage, now, now
            self._say(f"prepare: {update.stage}")
        elif now - self._shown > _SECONDS_BETWEEN_LINES:
            self._shown = now
            seconds = now - self._started
            rows_text = f"{update.rows_done:,} rows, {update.rows_done / seconds:,.0f} rows/s"
            if update.bytes_total is None or not update.bytes_done:
                self._say(f"prepare: {update.stage}  {rows_text}")
                return
            seconds_left = seconds * (update.bytes_total / update.bytes_done - 1)
            share_done = update.bytes_done / max(1, update.bytes_total)
            self._say(f"prepare: {update.stage}  {share_done:.0%}  {rows_text}, {seconds_left:,.0f} s left")

    def _say(self, text: str) -> None:
        """Prints a line as it is, however long."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
