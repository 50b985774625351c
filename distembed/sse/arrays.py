"""Arrays that are numpy's on the CPU, where small operations cost half of torch's, and torch's on a GPU.

Shared code uses operators, comparisons, ``take``, assignment and the functions here, which both libraries have.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = Any
"""A numpy array or a tensor, of one dimension unless said otherwise."""


def on_device(values: NDArray[Any], device: torch.device) -> Array:
    """Returns the array itself on the CPU, a copy on a GPU, which the host waits for: for arrays copied once."""
    return values if device.type == "cpu" else torch.from_numpy(values).to(device)


def sent_to_device(values: NDArray[Any], device: torch.device) -> Array:
    """Copies an array to a GPU without a wait, through page-locked memory: for the arrays of every step."""
    if device.type != "cuda":
        return on_device(values, device)
    return torch.from_numpy(values).pin_memory().to(device, non_blocking=True)


def as_array(tensor: Tensor) -> Array:
    """Returns the tensor's memory as a numpy array on the CPU, the tensor itself on a GPU."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def where(condition: Array, first: Array, second: Array) -> Array:
    """Returns ``first`` where the condition holds, else ``second``."""
    return (torch if isinstance(condition, Tensor) else np).where(condition, first, second)


def as_int64(values: Array) -> Array:
    """Returns integers of any width as int64."""
    return values.long() if isinstance(values, Tensor) else values.astype(np.int64, copy=False)


def as_float64(values: Array) -> Array:
    """Returns integers as float64."""
    return values.double() if isinstance(values, Tensor) else values.astype(np.float64)


def assign(target: Array, indices: Array, values: Array) -> None:
    """Sets ``target[places]`` to the values, in the target's type."""
    target[indices] = values.to(target.dtype) if isinstance(target, Tensor) else values


def count_each(numbers: Array, counted: Array, length: int) -> Array:
    """Returns how often each number below ``length`` stands where ``counted`` holds, ``[length]``."""
    if isinstance(counted, Tensor):
        return counted.new_zeros(length, dtype=torch.long).index_add_(0, numbers, counted.long())
    return np.bincount(numbers[counted], minlength=length)
