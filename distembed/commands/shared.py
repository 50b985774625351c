"""What the commands share: the two consoles, and the types of arguments that several of them take."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

# a table that goes into a file or a pipe should not be wrapped to 80 columns
console = Console(width=None if sys.stdout.isatty() else 140)
errors = Console(stderr=True)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's: `train.epochs=2`."),
]


def say(text: str) -> None:
    """Prints a line as it is, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def note(text: str | None) -> None:
    """Prints a remark, if there is one, beside the output, which may be read by a program."""
    if text is not None:
        errors.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)
