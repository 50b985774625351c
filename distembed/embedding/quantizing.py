"""Answers TorchRec's functions that quantise a model and pass over what they do not know, without a word.

``quantize_embeddings`` gives each module of a type that it was told a ``qconfig``, and every other one None. Other
callers of ``torch.ao.quantization`` may well leave embeddings alone, so that only its own call is refused.
"""

import sys
from typing import Any

from distembed.base.errors import UserError


class QuantizedByName:
    """A collection whose ``qconfig`` tells when TorchRec quantises its model and leaves it out."""

    @property
    def qconfig(self) -> Any:
        """What ``torch.ao.quantization`` wrote: dtypes of weights and outputs, or None.

        Raises:
            AttributeError: It has written nothing.
        """
        try:
            return self.__dict__["_qconfig"]
        except KeyError:
            raise AttributeError("qconfig") from None

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        if value is None and _is_quantizing_embeddings():
            raise UserError(
                f"TorchRec's functions that quantise know its own collections, and would leave {type(self).__name__} "
                "in its dtype. Give quantize_inference_model "
                "quantization_mapping=distembed.serving.quantization.QUANTIZATION_MAPPING, or quantize_embeddings "
                "additional_qconfig_spec_keys=list(distembed.serving.quantization.MODULE_MAPPING) and "
                "additional_mapping=distembed.serving.quantization.MODULE_MAPPING."
            )
        self.__dict__["_qconfig"] = value

    @qconfig.deleter
    def qconfig(self) -> None:
        del self.__dict__["_qconfig"]


def _is_quantizing_embeddings() -> bool:
    """Returns whether TorchRec's ``quantize_embeddings`` is among the callers."""
    inference = sys.modules.get("torchrec.inference.modules")
    if inference is None:
        return False
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is inference.quantize_embeddings.__code__:
            return True
    return False
