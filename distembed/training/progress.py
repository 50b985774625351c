"""What a run prints: a live bar in a terminal, plain lines elsewhere, nothing on ranks other than 0."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TrainingProgress:
    """Shows steps of a run of ``num_steps``; use it as a context manager."""

    def __init__(self, console: Console | None, num_steps: int) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._num_steps = num_steps
        if console is not None and console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]train"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.completed}/{task.total} {task.fields[shown]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("train", total=num_steps, shown="")

    def __enter__(self) -> "TrainingProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._console is not None:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Moves the bar to ``step``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def show(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows a line of training metrics."""
        shown = (
            f"loss {values['loss']:.4f}  AUC {values['auc']:.4f}  {values['samples_per_second']:,.0f} samples/s  "
            f"lr {values['learning_rate']:.3g}"
        )
        if self._bar is not None:
            self._bar.update(self._task, shown=shown)
        else:
            rate = values["samples_per_second"] / max(1, values["batch_size"])
            left = (self._num_steps - step) / rate if rate else 0.0
            self.say(f"step {step}/{self._num_steps}  {shown}  {left:,.0f} s left")
