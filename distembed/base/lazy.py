"""Imports that wait until they are needed: torch takes 2 s to load and TorchRec 3 s more, and few commands need both.

A package whose public names are in heavy modules imports them for type checkers; other callers import at first use::

    if TYPE_CHECKING:
        from distembed.partitions.base import Partition

    __all__ = ["Partition"]
    __getattr__ = imports_on_demand(__name__)

A :class:`NameTable` imports its values. Modules that compute with tensors, and are needed without tensors too, take
:data:`torch` from here.
"""

import ast
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from distembed.base.errors import UserError

if TYPE_CHECKING:
    import torch as torch

T = TypeVar("T")


def imports_on_demand(package: str) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package (PEP 562) whose names are imported when they are first asked for.

    The names are read from the imports under ``if TYPE_CHECKING:`` in the file of the package of this ``__name__``.
    """
    homes = _imports_for_type_checkers(package)

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


def _imports_for_type_checkers(package: str) -> dict[str, str]:
    """Returns, for each name that a package imports under ``if TYPE_CHECKING:``, the name's module."""
    spec = sys.modules[package].__spec__
    assert spec is not None
    loader: Any = spec.loader
    blocks = [node for node in ast.parse(loader.get_source(package)).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names if node.module is not None}


def imported(value: T | str) -> T:
    """Imports and returns the object that a text ``"module:name"`` names; returns any other value as it is."""
    return pkgutil.resolve_name(value) if isinstance(value, str) else value


_plugins: list[str] = []
"""The stack of plugins whose import has begun and not ended: each was imported by the one before it."""


@contextmanager
def registering(plugin: str) -> Iterator[None]:
    """Names the plugin that is imported in the block: name tables record it as the owner of the names that it adds."""
    _plugins.append(plugin)
    try:
        yield
    finally:
        _plugins.remove(plugin)


class NameTable(MutableMapping[str, T]):
    """A dictionary whose values, given by their places ``"module:name"``, are imported at the first lookup.

    ``PARTITIONS["mine"] = Mine`` adds a value, and so does ``PARTITIONS["mine"] = "my_package.my_module:Mine"``.

    Attributes:
        added: The plugin that added or replaced each name since; None outside of plugins.
        added_by_files: For each name that was added outside of plugins, the real paths of the Python files whose top
            level was running: the script, and modules that were being imported.
    """

    def __init__(self, values: Mapping[str, T | str]) -> None:
        self._values = dict(values)
        self.added: dict[str, str | None] = {}
        self.added_by_files: dict[str, set[str]] = {}

    def __getitem__(self, name: str) -> T:
        value = self._values[name] = imported(self._values[name])
        return value

    def __setitem__(self, name: str, value: T | str) -> None:
        """Adds a value and records who added it: the plugin being imported, or else the files that are running.

        A UserError refuses a plugin that replaces a value of distembed, of another plugin, or of a script.
        """
        plugin = _plugins[-1] if _plugins else None
        if plugin is not None and name in self._values and self._values[name] not in (value, imported(value)):
            owner = self.added.get(name, "distembed")
            if owner != plugin:
                raise UserError(
                    f"the name {name!r} is registered already, by {owner or 'this process'}; give it another name"
                )
        self._values[name] = value
        self.added[name] = plugin
        if plugin is None:
            running = {frame.f_code for frame, _ in traceback.walk_stack(sys._getframe())}
            top_levels = {code.co_filename for code in running if code.co_name == "<module>"}
            self.added_by_files[name] = {os.path.realpath(file) for file in top_levels}

    def __delitem__(self, name: str) -> None:
        del self._values[name]
        self.added.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _ModuleOnDemand(ModuleType):
    """A module that is imported when an attribute is first used, and then keeps the attribute."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:
    torch = _ModuleOnDemand("torch")
    """torch, which is loaded at the first use of an attribute."""
