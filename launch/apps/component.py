"""Components of TorchX whose arguments are the fields of values."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import UnionType
from typing import Any, Union, get_args

from docstring_parser import parse
from torchx import specs

from distembed.commands.shared import dataclass_parameters, flattened


def component(function: Callable[..., specs.AppDef]) -> Callable[..., specs.AppDef]:
    """Returns the function as a component of TorchX, with the fields of its dataclasses as arguments.

    TorchX reads arguments from the signature and their descriptions from the docstring; of types it knows those of
    ``typing``.

    Args:
        function: A function that takes some of its arguments as dataclasses. The line of its docstring that describes
            such an argument gives way to the attributes in the docstring of the dataclass.

    Raises:
        ValueError: The docstring does not describe such an argument on one line.
    """
    flat = flattened(function)
    signature = inspect.signature(flat)
    parameters = [one.replace(annotation=_torchx_type(one.annotation)) for one in signature.parameters.values()]
    vars(flat)["__signature__"] = signature.replace(parameters=parameters)
    lines = (inspect.getdoc(function) or "").splitlines()
    for name, group in dataclass_parameters(function).items():
        number = _entry_number(lines, name)
        lines[number : number + 1] = _field_entries(group)
    flat.__doc__ = "\n".join(lines)
    return flat


def _torchx_type(annotation: Any) -> Any:
    """Returns ``Optional[X]`` for ``X | None``, which TorchX does not know."""
    return Union[get_args(annotation)] if isinstance(annotation, UnionType) else annotation  # noqa: UP007


def _entry_number(lines: Sequence[str], name: str) -> int:
    """Returns the index of the line of a docstring that describes an argument.

    Raises:
        ValueError: There is no such line, or the description goes on in the next one, which would be left behind.
    """
    numbers = [number for number, line in enumerate(lines) if line.startswith(f"    {name}: ")]
    if len(numbers) != 1:
        raise ValueError(f"the docstring describes the argument {name!r} {len(numbers)} times; describe it once.")
    if any(line.startswith("     ") for line in lines[numbers[0] + 1 : numbers[0] + 2]):
        raise ValueError(f"the docstring describes the argument {name!r} on several lines; describe it on one.")
    return numbers[0]


def _field_entries(group: type) -> Iterator[str]:
    """Yields lines that describe the attributes of a dataclass and of its bases as arguments of a function."""
    for owner in reversed(group.__mro__[:-1]):
        for field in parse(inspect.cleandoc(owner.__doc__ or "")).params:
            yield f"    {field.arg_name}: {field.description}"
