"""What replaces what when TorchRec quantises a model.

::

    quantize_inference_model(model, quantization_mapping=QUANTIZATION_MAPPING)
    quantize_embeddings(
        model, torch.qint8, inplace=True,
        additional_qconfig_spec_keys=list(MODULE_MAPPING), additional_mapping=MODULE_MAPPING,
    )
"""

import torch
from torch import nn
from torchrec.inference.modules import DEFAULT_QUANT_MAPPING

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingCollection
from distembed.serving.quantization.bag_collection import QuantizedCompositionalEmbeddingBagCollection
from distembed.serving.quantization.collection import QuantizedCompositionalEmbeddingCollection

MODULE_MAPPING: dict[type[nn.Module], type[nn.Module]] = {
    CompositionalEmbeddingBagCollection: QuantizedCompositionalEmbeddingBagCollection,
    CompositionalEmbeddingCollection: QuantizedCompositionalEmbeddingCollection,
}
"""The quantised class of each compositional collection, for ``quantize_embeddings``."""

QUANTIZATION_MAPPING: dict[str, type[nn.Module]] = DEFAULT_QUANT_MAPPING | {
    torch.typename(float_class): quantized_class for float_class, quantized_class in MODULE_MAPPING.items()
}
"""The quantised class of each collection, TorchRec's own too, by type name, for ``quantize_inference_model``."""
