"""The options of ``distembed compress``, and the run that it has written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from distembed.base.errors import UserError
from distembed.base.names import one_of
from distembed.partitions.kmeans import require_balance
from distembed.serving.convert.table_codes import SCHEMES, CodeShape, Scheme
from distembed.serving.convert.table_sizes import Option
from distembed.serving.convert.tables import FitError

CodeOption: TypeAlias = Option[CodeShape | None]
"""A table in codes of a shape; None for the table as it is."""
SchemeChoice = Scheme | Literal["auto"]
DataTypeChoice = Literal["fp32", "fp16"]
DATA_TYPES: dict[DataTypeChoice, int] = {"fp32": 4, "fp16": 2}
"""The bytes of a number of a codebook, by its type."""
_MIN_COUNT = 4
_NOT_RECORDED = ("overwrite", "device")  # the device is recorded as found


@dataclass(frozen=True)
class CodeOptions:
    """How small a run becomes, and by which codes; one of the first three fields is given.

    Attributes:
        budget_bytes: The most bytes of all tables together, with their codes.
        bits_per_id: The bits of the codes of an id.
        max_loss: The most that the task's headline metric loses on the validation split.
        scheme: The scheme of all tables; ``auto`` chooses for each table.
        min_count: Ids whose count in training is lower share their codes; None for 4. With ``features``, whose codes
            rare ids have too, it is not given.
        seed: The seed of the first centroids.
        overwrite: Whether to replace a run of codes.
        data_type: The type of the centroids' numbers; None for the type of the run's tables.
        balance: The most ids of a code, in multiples of the mean; None for no bound. Rare ids are one.
        features: A file of features by the name of a table: its codes are made of them, and all other tables stay.
        device: The device that computes codes, or ``auto``.
    """

    budget_bytes: int | None = None
    bits_per_id: int | None = None
    max_loss: float | None = None
    scheme: SchemeChoice = "auto"
    min_count: int | None = None
    seed: int = 0
    overwrite: bool = False
    data_type: DataTypeChoice | None = None
    balance: float | None = None
    features: Mapping[str, Path] = field(default_factory=dict)
    device: str = "auto"

    def __post_init__(self) -> None:
        given = [value for value in (self.budget_bytes, self.bits_per_id, self.max_loss) if value is not None]
        if len(given) != 1:
            raise UserError(
                f"{len(given)} of --budget, --bits-per-id and --max-loss are given; give one of them, such as "
                "--budget 1MB."
            )
        one_of("--scheme", self.scheme, ("auto", *SCHEMES))
        if self.data_type is not None:
            one_of("--data-type", self.data_type, DATA_TYPES)
        one_of("--device", self.device, ("auto", "cpu", "cuda"))
        require_balance("--balance", self.balance)
        if self.features and self.bits_per_id is None:
            raise UserError(
                "--features makes codes that no budget or loss can be told of before a run is trained with them; give "
                "--bits-per-id, such as 16."
            )
        if self.features and self.min_count is not None:
            raise UserError(
                f"--min-count is {self.min_count}, but --features makes codes of the features of all ids, rare ones "
                "included; leave --min-count out."
            )
        for option, value in (("--min-count", self.min_count), ("--seed", self.seed)):
            if value is not None and value < 0:
                raise UserError(f"{option} is {value}; give 0 or more.")
        if self.max_loss is not None and not 0 <= self.max_loss < float("inf"):
            raise UserError(f"--max-loss is {self.max_loss}; give a loss of the metric of 0 or more, such as 0.001.")
        if self.bits_per_id is not None and not 1 <= self.bits_per_id <= 256:
            raise UserError(f"--bits-per-id is {self.bits_per_id}; give 1 to 256, such as 6 for 64 vectors a table.")

    @property
    def least_count(self) -> int:
        """The least count of an id with codes of its own."""
        return _MIN_COUNT if self.min_count is None else self.min_count

    def record(self) -> dict[str, Any]:
        """Returns the given options that decide the codes, in plain values."""
        values = dataclasses.asdict(self)
        values["min_count"] = None if self.features else self.least_count
        values["features"] = {table: str(path) for table, path in self.features.items()} or None
        return {name: value for name, value in values.items() if value is not None and name not in _NOT_RECORDED}


@dataclass(frozen=True)
class MetricChange:
    """The headline metric of a run and of the coded run, on a split."""

    split: str
    name: str
    before: float
    after: float


@dataclass(frozen=True)
class CodedRun:
    """A run of codes that was written.

    Attributes:
        errors: The distance of each table from the full one, and its bytes.
        shapes: The shape of each coded table's codes, by name.
        kept: Why each of the other tables is as it was, by name.
        without_states: Names of tables whose optimizer states begin at 0.
        metric: The validation metric; None without ``max_loss``.
    """

    errors: Sequence[FitError]
    shapes: Mapping[str, CodeShape]
    kept: Mapping[str, str]
    without_states: Sequence[str]
    metric: MetricChange | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the run in plain values; a table's ``codes`` are its shape, or None where it is as it was."""
        shapes = {name: str(shape) for name, shape in self.shapes.items()}
        tables = [
            error.to_json() | {"codes": shapes.get(error.table), "kept": self.kept.get(error.table)}
            for error in self.errors
        ]
        metric = None if self.metric is None else dataclasses.asdict(self.metric)
        return {
            "bytes": self.table_bytes,
            "serving_compression": self.serving_compression,
            "metric": metric,
            "tables": tables,
        }

    @property
    def table_bytes(self) -> int:
        return sum(error.compositional_bytes for error in self.errors)

    @property
    def serving_compression(self) -> float:
        """The bytes of full tables over the bytes of these."""
        return sum(error.full_bytes for error in self.errors) / self.table_bytes

    def codes_of(self, table: str) -> str:
        """Returns the shape of a table's codes, or why it has none, for the terminal."""
        return str(self.shapes[table]) if table in self.shapes else f"kept: {self.kept[table]}"
