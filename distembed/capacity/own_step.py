"""The training step of someone's own model, as the options of ``distembed plan --model`` say it; without torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from distembed.capacity.model_functions import NamedFunction
from distembed.errors import UserError
from distembed.names import one_of
from distembed.optim.kinds import dense_names, sparse_names

_MOST_IDS = 2**31
"""A number of ids that no row has."""


@dataclass(frozen=True)
class OwnStep:
    """A training step of someone's own model.

    Raises:
        UserError: An optimizer is not known.
    """

    batch_size: int  # rows on all ranks
    # mean number of ids of a row, by feature, where the example batch has another or none
    ids_per_row: Mapping[str, float] = field(default_factory=dict)
    # function that makes an example batch of so many rows; None where the user gives no function
    example: NamedFunction | None = None
    bf16: bool = False  # whether the networks compute in bf16
    # name of the optimizer of tables that declare none; None for the one that FBGEMM takes
    sparse_optimizer: str | None = None
    dense_optimizer: str = "adam"  # name of the optimizer of the networks

    def __post_init__(self) -> None:
        if self.sparse_optimizer is not None:
            one_of("--sparse-optimizer", self.sparse_optimizer, sparse_names())
        one_of("--dense-optimizer", self.dense_optimizer, dense_names())


def parse_ids_per_row(text: str) -> dict[str, float]:
    """Returns the numbers of ``item=1,words=12.5``, by feature.

    Raises:
        UserError: The text has another form, a number is not above 0 or far too large, or a feature is named twice.
    """
    numbers: dict[str, float] = {}
    for part in text.split(","):
        feature, separator, number = part.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not separator or not feature or not 0 < value < _MOST_IDS:
            raise UserError(f"--ids-per-row has {part!r}; give FEATURE=NUMBER,... such as item=1,words=12.5.")
        if feature in numbers:
            raise UserError(f"--ids-per-row names {feature!r} twice; give one number.")
        numbers[feature] = value
    return numbers
