"""Progress of a run: a live bar in a terminal, plain lines elsewhere, nothing on ranks other than 0."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class TrainingProgress:
    """A context manager that shows how far a run is.

    Args:
        console: Where to show it; None for nowhere.
        num_steps: Number of steps of the run.
    """

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

    def show(self, step: int, shown: str, steps_per_second: float) -> None:
        """Shows a line of training metrics.

        Args:
            step: Number of steps done.
            shown: The line to show.
            steps_per_second: Speed of the latest steps, to estimate how long the rest takes.
        """
        if self._bar is not None:
            self._bar.update(self._task, shown=shown)
        else:
            left = (self._num_steps - step) / steps_per_second if steps_per_second else 0.0
            self.say(f"step {step}/{self._num_steps}  {shown}  {left:,.0f} s left")
