"""The weights of exported tables, stored in float32, float16 or 8 bits, and read in float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from distembed.serving.model_folder.manifest import Precision
from distembed.serving.quantization.rows import QuantizedRows, quantize_rows

_BYTES_OF_SCALE_AND_OFFSET = 8


class StoredWeight(nn.Module, ABC):
    """A weight whose rows are read."""

    @abstractmethod
    def take(self, rows: Int64[Tensor, "*shape"]) -> Float[Tensor, "*shape columns"]:
        """Returns rows of the weight, in float32."""

    @abstractmethod
    def between(self, first: int, stop: int) -> Float[Tensor, "rows columns"]:
        """Returns rows that follow each other, in float32; of a weight in float32 no copy is made."""


class FloatWeight(StoredWeight):
    """A weight in float32 or float16.

    Args:
        weight: The weight [rows, columns].
        dtype: The dtype in which it is stored.
    """

    def __init__(self, weight: Float[Tensor, "rows columns"], dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().to(dtype))

    def take(self, rows: Int64[Tensor, "*shape"]) -> Float[Tensor, "*shape columns"]:
        return nn.functional.embedding(rows, cast(Tensor, self.weight)).float()

    def between(self, first: int, stop: int) -> Float[Tensor, "rows columns"]:
        return cast(Tensor, self.weight)[first:stop].float()


class QuantizedWeight(StoredWeight):
    """A weight in 8 bits, as :mod:`distembed.serving.quantization.rows` has it.

    Args:
        weight: The weight [rows, columns].
    """

    def __init__(self, weight: Float[Tensor, "rows columns"]) -> None:
        super().__init__()
        rows = quantize_rows(weight, 8)
        self.register_buffer("codes", rows.codes)
        self.register_buffer("scale", rows.scale)
        self.register_buffer("offset", rows.offset)
        self._num_columns = weight.shape[1]

    def take(self, rows: Int64[Tensor, "*shape"]) -> Float[Tensor, "*shape columns"]:
        codes, scale, offset = (cast(Tensor, each) for each in (self.codes, self.scale, self.offset))
        taken = QuantizedRows(codes, scale, offset, self._num_columns, 8).take(rows.flatten())
        return taken.view(*rows.shape, self._num_columns)

    def between(self, first: int, stop: int) -> Float[Tensor, "rows columns"]:
        codes, scale, offset = (cast(Tensor, each)[first:stop] for each in (self.codes, self.scale, self.offset))
        return torch.addcmul(offset.unsqueeze(1), codes.float(), scale.unsqueeze(1))


def store_weight(weight: Float[Tensor, "rows columns"], precision: Precision) -> StoredWeight:
    """Returns a weight as it is stored in this precision."""
    if precision == "int8":
        return QuantizedWeight(weight)
    return FloatWeight(weight, torch.float16 if precision == "fp16" else torch.float32)


def stored_bytes(num_rows: int, num_columns: int, precision: Precision) -> int:
    """Returns the bytes that a weight takes in this precision."""
    if precision == "int8":
        return num_rows * (num_columns + _BYTES_OF_SCALE_AND_OFFSET)
    return num_rows * num_columns * (2 if precision == "fp16" else 4)
