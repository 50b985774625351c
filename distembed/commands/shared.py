"""The consoles, arguments that several commands take, and functions that take many options as a few values.

typer and TorchX make a command line of a function's signature, one option for each parameter. Options that belong
together are a frozen dataclass, which a function takes as one parameter; :func:`flattened` shows its fields instead::

    @dataclass(frozen=True)
    class Size:
        width: int
        height: int = 1

    @flattened
    def draw(title: str, *, size: Size) -> None: ...

    draw("a", width=3)  # as if it were draw(title: str, *, width: int, height: int = 1)
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.console import Console

# A table that goes into a file or a pipe should not be wrapped to 80 columns. Jupyter and CI set FORCE_COLOR, by which
# rich takes a pipe for a terminal: it would draw each state of a progress bar on a line of its own.
console = Console() if sys.stdout.isatty() else Console(width=140, force_terminal=False)
errors = Console(stderr=True, force_terminal=None if sys.stderr.isatty() else False)

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace the file's: `train.epochs=2`."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
OverwriteOption = Annotated[bool, typer.Option(help="Replace OUTPUT if it is there.")]
Result = TypeVar("Result")


def say(text: str) -> None:
    """Prints a line as it is, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def note(text: str | None) -> None:
    """Prints a remark, if there is one, on stderr: a program may read the output."""
    if text is not None:
        errors.print(f"note: {text}", markup=False, highlight=False, soft_wrap=True)


def flattened(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns the function with the fields of its keyword-only dataclass parameters as keyword parameters of its own.

    No two of the parameters and the fields have one name.
    """
    signature = inspect.signature(function)
    groups = dataclass_parameters(function)

    @functools.wraps(function)
    def flat(*arguments: Any, **options: Any) -> Result:
        for name, group in groups.items():
            given_fields = {field.name for field in dataclasses.fields(group)} & options.keys()
            options[name] = group(**{field: options.pop(field) for field in given_fields})
        return function(*arguments, **options)

    parameters = [
        shown
        for name, parameter in signature.parameters.items()
        for shown in (_field_parameters(groups[name]) if name in groups else [parameter])
    ]
    vars(flat)["__signature__"] = signature.replace(parameters=parameters)
    flat.__annotations__ = {shown.name: shown.annotation for shown in parameters}
    return flat


def dataclass_parameters(function: Callable[..., object]) -> dict[str, Any]:
    """Returns the dataclasses that a function takes, by the names of its parameters."""
    annotations = {name: parameter.annotation for name, parameter in inspect.signature(function).parameters.items()}
    return {name: annotation for name, annotation in annotations.items() if dataclasses.is_dataclass(annotation)}


def _field_parameters(group: Any) -> list[inspect.Parameter]:
    """Returns a keyword-only parameter for each field of a dataclass."""
    annotations = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=annotations[field.name],
        )
        for field in dataclasses.fields(group)
    ]
