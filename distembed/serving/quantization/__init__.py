"""Tables for inference with fewer bits: rows of int8 or int4 with a scale and an offset each, and half precision.

- ``rows.py`` quantises a weight row by row, and reads rows of it, in torch's own operations alone.
- ``lookups.py`` holds the partitions of a collection in TorchRec's quantised collections, which FBGEMM looks up.
- ``tables.py`` is the base of the quantised collections: ids to rows, looked up and composed in float32.
- ``bag_collection.py`` and ``collection.py`` are those collections, of bags and of sequences.
- ``mappings.py`` says what replaces what, for TorchRec's functions.

Exported programs read ``rows.py``, since they need torch alone. Collections take FBGEMM's lookups: those run on CUDA
too, TorchRec's own sharders divide them, and its tools for state dicts and tracing know them.
"""

from typing import TYPE_CHECKING

from distembed.base.lazy import imports_on_demand

if TYPE_CHECKING:
    from distembed.serving.quantization.bag_collection import QuantizedCompositionalEmbeddingBagCollection
    from distembed.serving.quantization.collection import QuantizedCompositionalEmbeddingCollection
    from distembed.serving.quantization.mappings import MODULE_MAPPING, QUANTIZATION_MAPPING

__all__ = [
    "MODULE_MAPPING",
    "QUANTIZATION_MAPPING",
    "QuantizedCompositionalEmbeddingBagCollection",
    "QuantizedCompositionalEmbeddingCollection",
]
__getattr__ = imports_on_demand(__name__)
