"""Memory-compressed, regularised embedding tables as first-class citizens of TorchRec."""

from typing import TYPE_CHECKING

from distembed.lazy import imports_on_demand

if TYPE_CHECKING:
    from distembed.serving.loaded_model import LoadedModel, load

__version__ = "0.1.0"
__all__ = ["LoadedModel", "load"]
__getattr__ = imports_on_demand(__name__)
