"""The description of a fused lookup's tables: formula, partitions, and storage; the same on a CPU and on CUDA."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distembed.base.errors import UserError
from distembed.kernels import layout
from distembed.partitions.base import Digit

OPTIMIZERS = {"sgd": layout.SGD, "adagrad": layout.ADAGRAD, "row_wise_adagrad": layout.ROW_WISE_ADAGRAD}
"""The optimizers that the kernels have, by their names in ``distembed.optim.OPTIMIZERS``."""
MAX_ROWS = 2**31 - 1


def num_states(optimizer: str | None, num_columns: int) -> int:
    """Returns how many float32 states an optimizer of :data:`OPTIMIZERS` keeps of a row; 0 for SGD and for None."""
    return {"adagrad": num_columns, "row_wise_adagrad": 1}.get(optimizer or "", 0)


@dataclass(frozen=True)
class TablePart:
    """A partition of one feature's table, and the rows of it that are here."""

    digit: Digit  # how ids are mapped to rows
    first_row: int  # the first row that is here
    num_rows: int  # number of rows that are here
    weight_start: int = 0  # place of the first row in FBGEMM's storage of the partition; 0 for replicated weights
    state_start: int = 0  # place of its first state in the storage of states
    first_column: int = 0  # the first column that is here
    rounding_key: int = 0  # number of the partition, by which it is rounded at random unlike others


@dataclass(frozen=True)
class Storage:
    """The memory of a partition's rows and states in a step."""

    # FBGEMM's storage of all tables' rows; or, where every rank has the weights, each table's ``[rows, columns]``
    weights: Sequence[Tensor]
    optimizer: str | None = None  # a key of :data:`OPTIMIZERS`; None where gradients are returned instead
    states: Tensor | None = None  # the optimizer's states; None where it has none
    learning_rate: float = 0.0  # the learning rate of the forward pass
    eps: float = 0.0  # number that is added to denominators
    gradient_scale: int = 1  # factor of the gradients that are returned
    # gives the seed of a step by which updated float16 rows are rounded at random; None to round to the nearest
    rounding_seed: Callable[[], int] | None = None
    is_frozen: bool = False  # whether the rows are never updated and have no gradients

    @property
    def itemsize(self) -> int:
        """Bytes of a number of a row: 4, or 2 for float16."""
        return self.weights[0].element_size()

    def row_bytes(self, num_columns: int) -> int:
        """Returns the bytes from one row to the next: FBGEMM packs rows, replicated weights may have a wider stride."""
        return (num_columns if self.optimizer is not None else self.weights[0].stride(0)) * self.itemsize


@dataclass(frozen=True)
class Formula:
    """The formula of all tables of a fused lookup."""

    columns: Sequence[range]  # the columns of the composed vector that each partition takes part in
    is_product: bool  # whether vectors are multiplied; else each is added where its columns are
    pools: bool  # whether vectors are summed over bags; else each id has its own

    @property
    def width(self) -> int:
        """Number of columns of a composed vector."""
        return max(columns.stop for columns in self.columns)

    @property
    def needs_rows(self) -> bool:
        """Whether gradients of rows depend on other rows."""
        return self.is_product and len(self.columns) > 1

    @property
    def lanes(self) -> int:
        """Number of columns that kernels take at once."""
        return lanes_for(self.columns)


def lanes_for(columns: Sequence[range]) -> int:
    """Returns the number of columns that kernels take at once: the largest of 16, 8 and 4 that divides all ranges."""
    return next(
        n for n in (16, 8, 4) if not any(column_range.start % n or len(column_range) % n for column_range in columns)
    )


class Updates:
    """Counts the updates of tables, so that a backward pass knows whether rows have changed since its forward pass."""

    def __init__(self) -> None:
        self._number = 0

    def count(self) -> None:
        """Counts an update of FBGEMM's rows."""
        self._number += 1

    def so_far(self, storages: Sequence[Storage]) -> tuple[int, ...]:
        """Returns the number of updates of FBGEMM's rows, and torch's version of each replicated weight, as a tuple."""
        replicated_weights = [weight for storage in storages if storage.optimizer is None for weight in storage.weights]
        # torch counts no changes of tensors that were made for inference
        return (self._number, *[0 if weight.is_inference() else weight._version for weight in replicated_weights])

    def require(self, updates: tuple[int, ...], storages: Sequence[Storage]) -> None:
        """Raises a UserError if rows have changed since the forward pass noted ``updates``, by :meth:`so_far`."""
        if updates != self.so_far(storages):
            raise UserError(
                "A batch's gradients depend on rows that have been updated since it was looked up, as where a graph is "
                "retained and gone through twice, or an optimizer steps before the backward pass. Call backward once "
                "after each lookup and before the next step, or give the tables kernel='fbgemm', which keeps rows."
            )


INTEGERS = (torch.int64, torch.int32)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def checks_rows() -> bool:
    """Returns whether Triton's kernels raise where a row is outside of its table, with a wait in each step.

    ``DISTEMBED_CHECK_ROWS=1`` in the environment asks for it. Without it they skip the row. On a CPU rows are always
    checked. FBGEMM's lookups on CUDA raise where ``FBGEMM_TBE_BOUNDS_CHECK_MODE=0``, and else read row 0 and warn.
    """
    return os.environ.get("DISTEMBED_CHECK_ROWS", "0") not in ("", "0")


def as_operand(numbers: Tensor, device: torch.device, *dtypes: torch.dtype) -> Tensor:
    """Returns the tensor, or a contiguous copy; a TypeError for another dtype than ``dtypes``, or another device."""
    if numbers.dtype not in dtypes or numbers.device.type != device.type:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(
            f"an operator that reads {allowed} on {device.type} was given a tensor of shape {tuple(numbers.shape)} "
            f"and {numbers.dtype} on {numbers.device}; convert it first."
        )
    return numbers.contiguous()
