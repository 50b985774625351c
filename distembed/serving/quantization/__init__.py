"""Compositional collections for inference in TorchRec, with partitions in int8, int4 or half precision.

``lookups.py`` holds the partitions in TorchRec's quantised collections, which FBGEMM looks up, also on CUDA; TorchRec's
sharders divide them. ``collections.py`` maps ids to rows and composes the looked-up rows in float32.
"""

from typing import TYPE_CHECKING

from distembed.base.lazy import imports_on_demand

if TYPE_CHECKING:
    from distembed.serving.quantization.collections import (
        MODULE_MAPPING,
        QUANTIZATION_MAPPING,
        QuantizedCompositionalEmbeddingBagCollection,
        QuantizedCompositionalEmbeddingCollection,
    )

__all__ = [
    "MODULE_MAPPING",
    "QUANTIZATION_MAPPING",
    "QuantizedCompositionalEmbeddingBagCollection",
    "QuantizedCompositionalEmbeddingCollection",
]
__getattr__ = imports_on_demand(__name__)
