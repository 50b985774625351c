"""The options of ``distembed plan --model``, read without torch: functions of the user's modules, and a step.

An error within a function is reported in a sentence, with the line of the user's file, as any wrong input is.
"""

import contextlib
import importlib
import inspect
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError, one_line
from distembed.base.names import nearest, one_of
from distembed.optim.kinds import dense_names, sparse_names

_MOST_IDS = 2**31  # a number of ids that no row has


@dataclass(frozen=True)
class NamedFunction:
    """A function of a user's own module."""

    option: str
    name: str  # how it is named, `package.module:function`
    function: Callable[..., Any]

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Calls the function with stdout sent to stderr; its errors become a ``UserError`` that names the option."""
        try:
            inspect.signature(self.function).bind(*arguments, **options)
        except ValueError:
            pass  # a function of C, which has no signature
        except TypeError as error:
            how = "without arguments" if not arguments else "with the number of rows alone"
            raise UserError(f"{self.option} {self.name} is called {how}, and cannot be: {error}.") from error
        return _run(f"{self.option} {self.name}", self.function, *arguments, **options)

    def takes(self, parameter: str) -> bool:
        """Returns whether the function has a parameter of a name."""
        try:
            return parameter in inspect.signature(self.function).parameters
        except ValueError:
            return False


def find_function(option: str, name: str) -> NamedFunction:
    """Imports MODULE of ``MODULE:FUNCTION``, also from the current folder, and returns its function.

    Raises a ``UserError`` for a malformed name, a module that is missing or fails, and an attribute that is missing or
    cannot be called.
    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not all(part.isidentifier() for part in [*module_name.split("."), *attribute.split(".")]):
        raise UserError(f"{option} is {name!r}; give MODULE:FUNCTION, such as my_package.models:make_model.")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = _run(f"{option}: importing {module_name!r}", importlib.import_module, module_name)
    except UserError as error:
        missing = getattr(error.__cause__, "name", None)
        if isinstance(error.__cause__, ModuleNotFoundError) and f"{module_name}.".startswith(f"{missing}."):
            raise UserError(
                f"{option} names the module {module_name!r}, and there is no {missing!r}: run it in the folder that "
                "holds the module, or install it."
            ) from error.__cause__
        raise
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            guess = nearest(attribute, names)
            hint = f"; did you mean {guess!r}?" if guess else ""
            raise UserError(f"{option}: the module {module_name!r} has no {attribute!r}{hint}.")
        found = getattr(found, part)
    # a module of torch can be called, and makes no model
    if not callable(found) or ("torch" in sys.modules and isinstance(found, sys.modules["torch"].nn.Module)):
        raise UserError(f"{option} {name} is a {type(found).__name__} and no function; name one that makes it.")
    return NamedFunction(option, name, found)


def _run(action: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Calls a user's function, with stdout sent to stderr; errors and exits become a ``UserError`` with the line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function(*arguments, **options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        # the innermost frame outside Python, installed packages and distembed: the user's own line
        installed = (*sysconfig.get_paths().values(), str(Path(__file__).parents[2]), "<")
        stack = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in stack if not frame.filename.startswith(installed)]
        positions: list[tuple[str | None, int | None]] = [(frame.filename, frame.lineno) for frame in frames]
        if isinstance(error, SyntaxError):
            positions = [(error.filename, error.lineno)]
        position_text = f" ({positions[-1][0]}, line {positions[-1][1]})" if positions else ""
        raise UserError(f"{action} fails with {one_line(error)}{position_text}.") from error


@dataclass(frozen=True)
class OwnStep:
    """A training step of someone's own model; unknown optimizers are refused."""

    batch_size: int  # rows on all ranks
    # mean number of ids of a row, by feature, where the example batch has another or none
    ids_per_row: Mapping[str, float] = field(default_factory=dict)
    example: NamedFunction | None = None  # makes an example batch of so many rows
    bf16: bool = False  # whether the networks compute in bf16
    sparse_optimizer: str | None = None  # of tables that declare none; None for the one that FBGEMM takes
    dense_optimizer: str = "adam"  # name of the optimizer of the networks

    def __post_init__(self) -> None:
        if self.sparse_optimizer is not None:
            one_of("--sparse-optimizer", self.sparse_optimizer, sparse_names())
        one_of("--dense-optimizer", self.dense_optimizer, dense_names())


def parse_ids_per_row(text: str) -> dict[str, float]:
    """Returns the numbers of a text like ``item=1,words=12.5`` by feature; refuses repeated and impossible ones."""
    numbers: dict[str, float] = {}
    for entry in text.split(","):
        feature, _, number = entry.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not feature or not 0 < value < _MOST_IDS:
            raise UserError(f"--ids-per-row has {entry!r}; give FEATURE=NUMBER,... such as item=1,words=12.5.")
        if feature in numbers:
            raise UserError(f"--ids-per-row names {feature!r} twice; give one number.")
        numbers[feature] = value
    return numbers
