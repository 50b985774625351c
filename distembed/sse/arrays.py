"""Arrays that are numpy's on the CPU, where small operations cost half of torch's, and torch's on a GPU.

What is computed on both keeps to what they share: operators, comparisons, ``take``, assignment, and the functions here.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Any
"""A numpy array or a tensor, of one dimension where nothing else is said."""


def on_device(values: NDArray[Any], device: torch.device) -> Array:
    """The array itself on the CPU, a copy on a GPU."""
    return values if device.type == "cpu" else torch.from_numpy(values).to(device, non_blocking=True)


def array_of(tensor: Tensor) -> Array:
    """The same memory as an array of its device's kind."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def where(condition: Array, first: Array, second: Array) -> Array:
    """``first`` where the condition holds, else ``second``."""
    return (torch if isinstance(condition, Tensor) else np).where(condition, first, second)


def as_int64(values: Array) -> Array:
    """Integers of another width as int64."""
    return values.long() if isinstance(values, Tensor) else values.astype(np.int64, copy=False)


def as_float64(values: Array) -> Array:
    """Integers as float64."""
    return values.double() if isinstance(values, Tensor) else values.astype(np.float64)


def assign(target: Array, places: Array, values: Array) -> None:
    """``target[places] = values``, in the target's type."""
    target[places] = values.to(target.dtype) if isinstance(target, Tensor) else values


def count_each(numbers: Array, counted: Array, length: int) -> Array:
    """How often each number below ``length`` stands where ``counted`` holds."""
    if isinstance(counted, Tensor):
        return counted.new_zeros(length, dtype=torch.long).index_add_(0, numbers, counted.long())
    return np.bincount(numbers[counted], minlength=length)
