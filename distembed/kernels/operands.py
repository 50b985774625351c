"""The one check of every tensor whose memory an operator of FBGEMM or a kernel of ours reads as it lies.

These operators take an address and a number of elements: they see neither strides nor, some of them, the dtype. A
tensor with gaps between its elements is then read as if it had none, without an error (FBGEMM's
``block_bucketize_sparse_features`` sends ids to the wrong rank).
"""

import os

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def checks_rows() -> bool:
    """Returns whether Triton's kernels raise where a row is outside of its table, with a wait in each step.

    ``DISTEMBED_CHECK_ROWS=1`` in the environment asks for it. Without it they skip the row. On a CPU rows are always
    checked. FBGEMM's lookups on CUDA raise where ``FBGEMM_TBE_BOUNDS_CHECK_MODE=0``, and else read row 0 and warn.
    """
    return os.environ.get("DISTEMBED_CHECK_ROWS", "0") not in ("", "0")


def as_operand(numbers: Tensor, device: torch.device, *dtypes: torch.dtype) -> Tensor:
    """Returns a tensor whose elements lie side by side; a copy only where they do not.

    Raises:
        TypeError: The tensor has another dtype, or lies on a device of another kind.
    """
    if numbers.dtype not in dtypes or numbers.device.type != device.type:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(
            f"an operator that reads {allowed} on {device.type} was given a tensor of shape {tuple(numbers.shape)} "
            f"and {numbers.dtype} on {numbers.device}; convert it first."
        )
    return numbers.contiguous()
