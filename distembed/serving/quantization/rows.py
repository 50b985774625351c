"""Rows of a weight in 8 or 4 bits: ``number = code * scale + offset``, with a scale and an offset for each row.

The codes of a row span its own range: offset is the smallest number and scale the range over the largest code, as
FBGEMM's row-wise quantisation has them. Two codes of 4 bits share a byte, the even column in the low half::

    int4, 4 columns      byte 0: column 1 | column 0      byte 1: column 3 | column 2

Trade-off: a row costs 8 bytes more for its scale and offset, so that rows of few numbers gain less. A number is wrong
by half a step at most, a 510th (int8) or a 30th (int4) of its row's range.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

Bits = Literal[8, 4]


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """A weight of few bits.

    Attributes:
        codes: The codes of each row: a byte a column, or half a byte, and then of an odd last one a whole byte.
        scale: The size of a step, of each row.
        offset: The number that code 0 stands for, of each row.
        num_columns: The number of columns of the weight.
        bits: The bits of a code.
    """

    codes: UInt8[Tensor, "rows bytes"]
    scale: Float[Tensor, " rows"]
    offset: Float[Tensor, " rows"]
    num_columns: int
    bits: Bits

    def take(self, rows: Int64[Tensor, " ids"]) -> Float[Tensor, "ids columns"]:
        """Returns rows of the weight, in float32."""
        codes = self.codes[rows]
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)[:, : self.num_columns]
        return torch.addcmul(self.offset[rows].unsqueeze(1), codes.float(), self.scale[rows].unsqueeze(1))


def quantize_rows(weight: Float[Tensor, "rows columns"], bits: Bits) -> QuantizedRows:
    """Returns a weight with codes of so many bits; a row of equal numbers is exact."""
    weight = weight.detach().float()
    largest_code = 2**bits - 1
    offset = weight.amin(dim=1)
    scale = (weight.amax(dim=1) - offset) / largest_code
    steps = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    codes = ((weight - offset.unsqueeze(1)) / steps).round_().clamp_(0, largest_code).to(torch.uint8)
    if bits == 4:
        padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
        codes = padded[:, ::2] | (padded[:, 1::2] << 4)
    return QuantizedRows(codes, scale, offset, weight.shape[1], bits)
