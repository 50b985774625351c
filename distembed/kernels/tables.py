"""The description of a fused lookup's tables: formula, partitions, and storage; the same on a CPU and on CUDA."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from distembed.base.errors import UserError
from distembed.kernels import layout
from distembed.partitions.base import Digit

OPTIMIZERS = {"sgd": layout.SGD, "adagrad": layout.ADAGRAD, "row_wise_adagrad": layout.ROW_WISE_ADAGRAD}
"""The optimizers that the kernels have, by their names in ``distembed.optim.OPTIMIZERS``."""
MAX_ROWS = 2**31 - 1


def num_states(optimizer: str | None, num_columns: int) -> int:
    """Returns how many states an optimizer of :data:`OPTIMIZERS` keeps of a row; 0 where there is none."""
    return {"adagrad": num_columns, "row_wise_adagrad": 1}.get(optimizer or "", 0)


@dataclass(frozen=True)
class Part:
    """A partition of one feature's table, and the rows of it that are here.

    Attributes:
        digit: How ids are mapped to rows.
        first_row: The first row that is here.
        num_rows: Number of rows that are here.
        weight_start: Place of the first row's first number in FBGEMM's storage of the partition; 0 for weights that
            every rank has.
        state_start: Place of its first state in that of states.
    """

    digit: Digit
    first_row: int
    num_rows: int
    weight_start: int = 0
    state_start: int = 0


@dataclass(frozen=True)
class Storage:
    """Where a partition's rows lie in a step.

    Attributes:
        weights: FBGEMM's storage of all tables' rows; or, where every rank has the weights, each table's ``[rows,
            columns]``.
        optimizer: A key of :data:`OPTIMIZERS`, which updates them; None where their gradients are returned.
        states: The optimizer's states; None where it has none.
        learning_rate: The learning rate, as it is in the forward pass.
        eps: Number that is added to denominators.
        gradient_scale: Factor of the gradients that are returned.
        rounding_seed: Gives the seed by which float16 rows are rounded at random when they are updated, on CUDA; they
            are rounded to the nearest number where it is None, and on a CPU.
        is_frozen: Whether the rows are never updated and have no gradients.
    """

    weights: Sequence[Tensor]
    optimizer: str | None = None
    states: Tensor | None = None
    learning_rate: float = 0.0
    eps: float = 0.0
    gradient_scale: int = 1
    rounding_seed: Callable[[], int] | None = None
    is_frozen: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a number of a row: 4, or 2 for float16."""
        return self.weights[0].element_size()

    def row_bytes(self, num_columns: int) -> int:
        """Returns the bytes from one row to the next."""
        return (num_columns if self.optimizer is not None else self.weights[0].stride(0)) * self.itemsize


@dataclass(frozen=True)
class Formula:
    """The formula of all tables of a fused lookup.

    Attributes:
        columns: The columns of the composed vector that each partition takes part in.
        is_product: Whether vectors are multiplied; else each is added where its columns are.
        pools: Whether vectors are summed over bags; else each id has its own.
    """

    columns: Sequence[range]
    is_product: bool
    pools: bool

    @property
    def width(self) -> int:
        """Number of columns of a composed vector."""
        return max(own.stop for own in self.columns)

    @property
    def needs_rows(self) -> bool:
        """Whether gradients of rows depend on other rows."""
        return self.is_product and len(self.columns) > 1

    @property
    def lanes(self) -> int:
        """How many columns kernels take at once."""
        return lanes_of(self.columns)


def lanes_of(columns: Sequence[range]) -> int:
    """Returns how many columns kernels take at once: 16, or 8 or 4 where a partition's do not come in so many."""
    return next(n for n in (16, 8, 4) if not any(own.start % n or len(own) % n for own in columns))


class Updates:
    """Counts the updates of tables, so that a backward pass knows whether rows have changed since its forward pass."""

    def __init__(self) -> None:
        self._number = 0

    def count(self) -> None:
        """Counts an update of FBGEMM's rows."""
        self._number += 1

    def so_far(self, storages: Sequence[Storage]) -> tuple[int, ...]:
        """Returns how often FBGEMM's rows have been updated, and each of the weights that are not FBGEMM's changed."""
        others = [weight for own in storages if own.optimizer is None for weight in own.weights]
        # torch counts no changes of tensors that were made for inference
        return (self._number, *[0 if weight.is_inference() else weight._version for weight in others])

    def require(self, updates: tuple[int, ...], storages: Sequence[Storage]) -> None:
        """Refuses a backward pass whose rows are others by now.

        Raises:
            UserError: There have been more since.
        """
        if updates != self.so_far(storages):
            raise UserError(
                "A batch's gradients depend on rows that have been updated since it was looked up, as where a graph is "
                "retained and gone through twice, or an optimizer steps before the backward pass. Call backward once "
                "after each lookup and before the next step, or give the tables kernel='fbgemm', which keeps rows."
            )
