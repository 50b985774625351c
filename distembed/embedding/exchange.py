"""The numbers in which composed vectors, and the gradients of these, are sent from rank to rank.

Two settings round them. ``embedding.output_dtype`` has lookups give vectors of half precision: these are sent as they
are, and so are their gradients. ``train.quantized_comms`` leaves lookups in float32 and has TorchRec's codecs round
sent numbers, each way by itself. The codecs take float32, so that only one of the two may be set.
"""

from dataclasses import dataclass
from typing import Literal

import pydantic.dataclasses

from distembed.base.names import STRICT

OutputDtype = Literal["fp32", "fp16", "bf16"]
CommPrecision = Literal["fp32", "fp16", "bf16", "int8"]
INT8_NUMBERS = 32
"""Numbers that FBGEMM rounds to int8 together: each rank gets a multiple of it."""
_INT8_BYTES = INT8_NUMBERS + 8  # with their scale and their bias, in float32
_ITEMSIZE = {"fp32": 4, "fp16": 2, "bf16": 2}


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class QuantizedCommsConfig:
    """The precisions in which TorchRec's codecs send vectors (its ``QCommsConfig``); ``fp32`` leaves them.

    Precisions are ``fp32``, ``fp16``, ``bf16`` and ``int8``; the last has a scale for each 32 numbers and goes with
    tables that are not summed up over ranks (``table_wise``, ``column_wise``, ``data_parallel``).

    Attributes:
        forward_precision: Precision of the vectors.
        backward_precision: Precision of their gradients.
    """

    forward_precision: CommPrecision = "fp32"
    backward_precision: CommPrecision = "fp32"

    @property
    def is_used(self) -> bool:
        """Whether anything is rounded."""
        return (self.forward_precision, self.backward_precision) != ("fp32", "fp32")


@dataclass(frozen=True)
class VectorExchange:
    """How composed vectors and their gradients are sent between ranks.

    Attributes:
        output_dtype: Dtype to which lookups round composed vectors.
        comms: Precisions in which codecs send them.
    """

    output_dtype: OutputDtype = "fp32"
    comms: QuantizedCommsConfig = QuantizedCommsConfig()

    @property
    def output_itemsize(self) -> int:
        """Bytes of a number of the vectors that lookups give, and of the gradients that come back to them."""
        return _ITEMSIZE[self.output_dtype]

    @property
    def has_int8(self) -> bool:
        """Whether numbers are sent in int8, in either direction."""
        return "int8" in (self.comms.forward_precision, self.comms.backward_precision)

    def vector_bytes(self, num_numbers: float) -> float:
        """Returns the bytes in which so many numbers of vectors are sent."""
        return self._sent_bytes(num_numbers, self.comms.forward_precision)

    def gradient_bytes(self, num_numbers: float) -> float:
        """Returns the bytes in which so many numbers of gradients are sent."""
        return self._sent_bytes(num_numbers, self.comms.backward_precision)

    def _sent_bytes(self, num_numbers: float, precision: CommPrecision) -> float:
        if not self.comms.is_used:
            return num_numbers * self.output_itemsize
        if precision == "int8":
            return num_numbers * _INT8_BYTES / INT8_NUMBERS
        return num_numbers * _ITEMSIZE[precision]

    def as_json(self) -> dict[str, str]:
        """Returns the settings in plain values."""
        return {
            "output_dtype": self.output_dtype,
            "forward_precision": self.comms.forward_precision,
            "backward_precision": self.comms.backward_precision,
        }
