"""Memory-compressed, regularised embedding tables as first-class citizens of TorchRec."""

from typing import TYPE_CHECKING, Any

from distembed.base.lazy import imports_on_demand
from distembed.base.process import silenced_loggers
from distembed.base.version import __version__

if TYPE_CHECKING:
    from distembed.serving.loaded_model import LoadedModel, load

__all__ = ["LoadedModel", "__version__", "load"]
_import = imports_on_demand(__name__)


def __getattr__(name: str) -> Any:
    """Imports a public name when it is first asked for, without the lines that TorchRec logs on its import."""
    with silenced_loggers():
        return _import(name)
