"""Functions of a user's own modules, named ``package.module:function``: finding and calling them.

What goes wrong in them is said in a sentence, with the line of the user's file, as any wrong input is.
"""

import contextlib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from distembed.errors import UserError, one_line
from distembed.names import nearest


@dataclass(frozen=True)
class NamedFunction:
    """A function of a user's own module."""

    option: str
    name: str  # how it is named, `package.module:function`
    function: Callable[..., Any]

    def call(self, *arguments: Any, **named: Any) -> Any:
        """Returns what the function returns; what it prints goes to the error stream, as ``--json`` is alone.

        Raises:
            UserError: The function takes other arguments, or raises an error.
        """
        try:
            inspect.signature(self.function).bind(*arguments, **named)
        except ValueError:
            pass  # a function of C, which has no signature
        except TypeError as error:
            given = "without arguments" if not arguments else "with the number of rows alone"
            raise UserError(f"{self.option} {self.name} is called {given}, and cannot be: {error}.") from error
        return _run(f"{self.option} {self.name}", self.function, *arguments, **named)

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the function's parameters."""
        try:
            return frozenset(inspect.signature(self.function).parameters)
        except ValueError:
            return frozenset()


def find_function(option: str, name: str) -> NamedFunction:
    """Imports a module, from the current folder as well, and returns the function of it.

    Raises:
        UserError: The name has another form, the module is not there or fails, or it has no such function.
    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise UserError(f"{option} is {name!r}; give MODULE:FUNCTION, such as my_package.models:make_model.")
    module = _import(option, module_name)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{option}: the module {module_name!r} has no {attribute!r}{_hint(module, attribute)}.")
        found = getattr(found, part)
    if not callable(found) or _is_module_of_torch(found):
        raise UserError(f"{option} {name} is a {type(found).__name__} and no function; name one that makes it.")
    return NamedFunction(option, name, found)


def _import(option: str, module_name: str) -> ModuleType:
    """Imports a module as ``python -m`` would, with the current folder among the places that are looked in."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return _run(f"{option}: importing {module_name!r}", importlib.import_module, module_name)
    except UserError as error:
        missing = getattr(error.__cause__, "name", None)
        if isinstance(error.__cause__, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing}."):
            raise UserError(
                f"{option} names the module {module_name!r}, and there is no {missing!r}: run it in the folder that "
                "holds the module, or install it."
            ) from error.__cause__
        raise


def _run(what: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls a function of the user's; its errors, and a call of exit, are raised as a ``UserError``."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function(*arguments, **named)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what} fails with {one_line(error)}{_place(error)}.") from error


def _place(error: BaseException) -> str:
    """Returns the last line of the user's own that led to an error; empty where there is none."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    installed = tuple(sysconfig.get_paths().values())
    own = os.path.dirname(os.path.dirname(__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*installed, own, "<"))
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _hint(module: ModuleType, attribute: str) -> str:
    """Returns which function of a module may be meant."""
    own = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    guess = nearest(attribute, own)
    return f"; did you mean {guess!r}?" if guess else ""


def _is_module_of_torch(value: Any) -> bool:
    """Returns whether a value is a torch module, which can be called and makes no model."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)
