"""Compositional collections for inference in TorchRec, with partitions in int8, int4 or half precision.

TorchRec's quantised collections hold the partitions, so that FBGEMM looks them up and TorchRec's sharders divide them.
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
