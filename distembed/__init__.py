"""Memory-compressed, regularised embedding tables as first-class citizens of TorchRec."""

__version__ = "0.1.0"
