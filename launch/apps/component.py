"""Components of TorchX whose arguments are the fields of values."""

import inspect
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Union, get_args

from docstring_parser import parse
from torchx import specs

from distembed.commands.parameters import dataclass_parameters, flattened


def component(function: Callable[..., specs.AppDef]) -> Callable[..., specs.AppDef]:
    """Returns the function as a component of TorchX, with the fields of its dataclasses as arguments.

    TorchX reads arguments from the signature and their descriptions from the docstring; of types it knows those of
    ``typing``.

    Args:
        function: A function that takes some of its arguments as dataclasses. The line of its docstring that describes
            such an argument gives way to the attributes in the docstring of the dataclass.
    """
    flat = flattened(function)
    signature = inspect.signature(flat)
    parameters = [one.replace(annotation=_torchx_type(one.annotation)) for one in signature.parameters.values()]
    vars(flat)["__signature__"] = signature.replace(parameters=parameters)
    text = inspect.getdoc(function) or ""
    for name, group in dataclass_parameters(function).items():
        text = text.replace(_entry(text, name), "\n".join(_field_entries(group)))
    flat.__doc__ = text
    return flat


def _torchx_type(annotation: Any) -> Any:
    """Returns ``Optional[X]`` for ``X | None``, which TorchX does not know."""
    return Union[get_args(annotation)] if isinstance(annotation, UnionType) else annotation  # noqa: UP007


def _entry(text: str, name: str) -> str:
    """Returns the line of a docstring that describes an argument."""
    return next(line for line in text.splitlines() if line.startswith(f"    {name}: "))


def _field_entries(group: type) -> Iterator[str]:
    """Yields lines that describe the attributes of a dataclass and of its bases as arguments of a function."""
    for owner in reversed(group.__mro__[:-1]):
        for field in parse(inspect.cleandoc(owner.__doc__ or "")).params:
            yield f"    {field.arg_name}: {field.description}"
