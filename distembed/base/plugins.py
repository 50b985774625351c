"""Plugins: a user's modules and files, which are imported before a config that uses their names is validated.

A config names them under ``plugins``; installed packages name theirs by entry points of the group
``distembed.base.plugins``. A file is imported from the path that the config records and from nowhere else. Importing a
plugin runs it with the rights of the user. A run is therefore refused unless it names modules and absolute paths
outside of its own folder: a run that was copied from somebody else brings no code along.
"""

import importlib
import importlib.util
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.base.lazy import registering

ENTRY_POINTS = "distembed.base.plugins"
"""The group of entry points by which installed packages name their plugins."""

_imported: set[str] = set()
_being_imported: list[str] = []


def is_file(plugin: str) -> bool:
    """Returns whether a plugin is the path of a file, and not the name of a module."""
    return plugin.endswith(".py") or os.sep in plugin


def with_absolute_files(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the values of a config with absolute paths of plugins that are files, relative ones from ``folder``."""
    plugins = values.get("plugins")
    if not isinstance(plugins, list):
        return values

    def absolute(plugin: Any) -> Any:
        return os.path.abspath(folder / plugin) if isinstance(plugin, str) and is_file(plugin) else plugin

    return {**values, "plugins": list(map(absolute, plugins))}


def refuse_code_in_run(values: Mapping[str, Any], config: Path, run: Path) -> None:
    """Refuses plugins that may have come along with the folder ``run``: files and modules in it, and relative paths.

    ``config`` is the folder's config file, for the error, and ``values`` its content. Nothing is imported.
    """
    folder = os.path.realpath(run)
    for plugin in _names(values.get("plugins")):
        paths = [plugin] if is_file(plugin) else _module_places(plugin)
        inside = any(Path(os.path.realpath(path)).is_relative_to(folder) for path in paths)
        if inside or (is_file(plugin) and not os.path.isabs(plugin)):
            raise UserError(
                f"{config}: plugins names {plugin}, which may have come along with the run, and opening somebody "
                "else's would execute it. Read the file, move it out of the run's folder, and name its absolute path."
            )


def _module_places(name: str) -> list[str]:
    """Returns the files and folders whose code importing a module, and its packages, would run; imports nothing."""
    top, *inner = name.split(".")
    paths: list[str] = []
    try:
        spec = importlib.util.find_spec(top)
        while spec is not None:
            # the folder of a file too: compiled code next to a link is executed in place of the linked file
            paths += [spec.origin, os.path.dirname(spec.origin)] if spec.has_location and spec.origin else []
            folders = list(spec.submodule_search_locations or ())
            if not inner:
                return paths + folders  # a package's modules are imported from them
            # find_spec() of a dotted name would import its packages
            spec = PathFinder.find_spec(inner.pop(0), folders)
    except (ImportError, ValueError):  # ValueErrors are names that no module can have, and modules without a spec
        pass
    return paths


def plugin_files(plugins: Sequence[str]) -> set[str]:
    """Returns the real paths of the files of imported plugins, of a config and of installed packages."""
    files = {os.path.realpath(plugin) for plugin in plugins if is_file(plugin)}
    names = [plugin for plugin in plugins if not is_file(plugin)] + [point.module for point in _entry_points()]
    origins = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    return files | {os.path.realpath(origin) for origin in origins if origin is not None}


def require_none_being_imported() -> None:
    """Refuses to start a command while a plugin is being imported, as by a plugin whose top level calls main()."""
    if _being_imported:
        raise UserError(
            f"the plugin {_being_imported[-1]} calls main() while it is imported; have it do so under "
            "`if __name__ == '__main__':` alone."
        )


def import_plugins(plugins: Any, source: str) -> None:
    """Imports the plugins of installed packages and of a config, each once in a process.

    ``plugins`` is a value of the config ``source``; wrong values are left to the validation.
    """
    for point in _entry_points():
        package = point.dist.name if point.dist is not None else "a package"
        _import_once(point.value, point.load, f"the installed package {package} (entry point {point.name})")
    for plugin in _names(plugins):
        if is_file(plugin):
            _import_file(plugin, source)
        else:
            _import_once(plugin, partial(_import_module, plugin), source)


def _names(plugins: Any) -> list[str]:
    """Returns the modules and files of a config's ``plugins``, without values that its validation refuses."""
    listed = plugins if isinstance(plugins, list) else []
    return [plugin for plugin in listed if isinstance(plugin, str) and plugin and "\0" not in plugin]


@cache
def _entry_points() -> Sequence[EntryPoint]:
    """Returns the entry points of installed packages, which takes milliseconds to find."""
    return list(entry_points(group=ENTRY_POINTS))


def _import_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the plugin is there, and imports something that is not
        raise UserError(
            f"there is no module {name!r} here: install its package, add its folder to PYTHONPATH on every machine, or "
            "name its file"
        ) from None


def _import_file(path: str, source: str) -> None:
    """Imports a file under a name made of its path, unless it is the script that this process runs.

    Its folder is appended to ``sys.path``, for modules next to it.
    """
    file = os.path.realpath(path)
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and os.path.realpath(script) == file:
        return

    def load() -> None:
        if not os.path.isfile(file):
            raise UserError(
                "there is no such file: put it back, or name its new place there. Plugins are not copied into runs"
            )
        # a name that no module has, and the same in every process
        name = f"distembed_plugin_{zlib.crc32(file.encode()):08x}_{Path(file).stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        if os.path.dirname(file) not in sys.path:
            sys.path.append(os.path.dirname(file))  # modules next to it; last, so that they hide none
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise

    _import_once(file, load, source, shown=path)


def _import_once(plugin: str, load: Callable[[], Any], source: str, shown: str | None = None) -> None:
    """Calls ``load`` unless the plugin was imported, or is being imported by an outer call.

    Errors become a UserError that names ``source``, the plugin as ``shown``, and the file and line.
    """
    if plugin in _imported or plugin in _being_imported:
        return
    _being_imported.append(plugin)
    try:
        with registering(plugin):
            load()
    except Exception as error:
        fault = f"{source}: the plugin {shown or plugin} cannot be imported: {_explained(error, plugin)}."
        raise UserError(fault) from error
    finally:
        _being_imported.remove(plugin)
    _imported.add(plugin)


def _explained(error: Exception, plugin: str) -> str:
    """Returns an error's text after the file and line where it arose: the last line in the plugin's own file.

    Without one it is the last line outside of distembed and the standard library.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    text = " ".join(str(error).split()).rstrip(".")
    if not isinstance(error, UserError):
        text = f"{type(error).__name__}: {text}"
    package = Path(__file__).parents[1]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not Path(frame.filename).is_relative_to(package)
    ]
    stdlib = os.path.dirname(importlib.__file__)
    frames = [frame for frame in frames if os.path.dirname(frame.filename) != stdlib]
    plugin_frames = [frame for frame in frames if os.path.realpath(frame.filename) == plugin] or frames
    return f"{plugin_frames[-1].filename}, line {plugin_frames[-1].lineno}: {text}" if plugin_frames else text
