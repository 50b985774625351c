"""What is known of a table of raw rows: its columns, and what becomes of each in a dataset.

A schema is a YAML file (``distembed prepare schema`` guesses one)::

    label: {column: click}
    time: {column: hour, format: "%y%m%d%H"}
    dense:
      price: {transform: log}
    categorical:
      site: {kind: string, min_count: 5}
      genres: {kind: string, separator: "|"}
      site_x_device: {cross: [site, device]}
      price_bin: {column: price, kind: quantile_bins, num_bins: 32}
    split: time:0.8,0.1,0.1

Each name under ``dense`` and ``categorical`` is that of the dataset's column; ``column`` is that of the table, the same
unless given.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

import pydantic.dataclasses
from pydantic import Field

from distembed.names import STRICT

_Bins = Annotated[int, Field(ge=2, le=1_000_000)]
_MinCount = Annotated[int, Field(ge=1, le=2**63 - 1)]
_HashSize = Annotated[int, Field(ge=2, le=2**62)]
_Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TextFormat:
    """How text files are read; of Parquet and JSON lines, ``missing_values`` alone concerns them.

    Attributes:
        header: Whether the first line has the names of the columns.
        columns: Names of the columns in order, of files without a header; null names them by their numbers, from 1.
        separator: What separates fields; null for what the file's name says: a comma for .csv, a tab for .tsv.
        quote: The quotation mark; null where it is a letter like others.
        newlines_in_values: Whether a quoted value may have several lines; such a file is read by one process.
        missing_values: Texts that stand for a missing value, in every column.
    """

    header: bool = True
    columns: list[str] | None = None
    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    quote: Annotated[str, Field(min_length=1, max_length=1)] | None = '"'
    newlines_in_values: bool = False
    missing_values: list[str] = field(default_factory=lambda: [""])


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class LabelColumn:
    """The label.

    Attributes:
        column: The table's column.
        kind: ``binary``: 0 or 1, or true or false; ``number``: any finite number.
        at_least: The label is 1 where the number is this or more, else 0; null for the number itself.
        name: Name of the dataset's column.
    """

    column: str
    kind: Literal["binary", "number"] = "binary"
    at_least: float | None = None
    name: str = "label"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class WeightColumn:
    """The weight of a row in the loss and the metrics: a finite number, 0 or more; a missing one is malformed."""

    column: str
    name: str = "weight"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TimeColumn:
    """The time of a row.

    Attributes:
        column: The table's column.
        format: ``seconds`` or ``milliseconds`` since 1970; a strptime format such as ``%y%m%d%H``, in UTC; or ``auto``:
            numbers are seconds, texts ISO 8601, and Parquet's times what they are.
        name: Name of the dataset's column.
    """

    column: str
    format: str = "auto"
    name: str = "time"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DenseColumn:
    """A column of numbers.

    Attributes:
        column: The table's column; null for the dataset's name.
        transform: ``log``: log(1 + x), and 0 for negative numbers; ``standardize``: less the mean of the training rows
            and divided by their standard deviation; ``none``: the number itself, as soft one-hot encoding takes it.
        missing: ``zero``: missing values become 0 after the transform, as the mean does in ``standardize``; ``keep``:
            they are null in the dataset, where all dense columns then may have null.
    """

    column: str | None = None
    transform: Literal["log", "standardize", "none"] = "none"
    missing: Literal["zero", "keep"] = "zero"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class CategoricalColumn:
    """A column of values that get ids.

    Attributes:
        column: The table's column; null for the dataset's name.
        kind: ``string``; ``integer`` of 64 bits; ``hexadecimal`` of up to 8 digits; ``log_bins``: the square of the
            logarithm of a number above 2, rounded down, and lower numbers rounded down themselves; or
            ``quantile_bins``: bins of equally many training rows, as far as equal numbers allow.
        min_count: Values seen fewer times in the training rows share the out-of-vocabulary id; null for the schema's.
        hash_size: Size of the table that values are hashed into; null for the schema's.
        hash_seed: Seed of the hash.
        separator: What separates the values of a list; null for one value, or Parquet's or JSON's own lists.
        is_list: Whether rows have lists; true where a separator is given.
        max_length: Most values of a list, the last ones; null for all.
        cross: Names of two or more other columns of the table, whose values together are one value.
        num_bins: Number of bins of ``quantile_bins``.
    """

    column: str | None = None
    kind: Literal["string", "integer", "hexadecimal", "log_bins", "quantile_bins"] = "string"
    min_count: _MinCount | None = None
    hash_size: _HashSize | None = None
    hash_seed: _Seed = 0
    separator: Annotated[str, Field(min_length=1)] | None = None
    is_list: bool = False
    max_length: Annotated[int, Field(ge=1)] | None = None
    cross: Annotated[list[str], Field(min_length=2)] | None = None
    num_bins: _Bins = 32


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TableSchema:
    """The columns of a table, and what becomes of each.

    Attributes:
        label: The label; null where rows have none.
        weight: The rows' weights; null where all weigh 1.
        time: The rows' times; null where they have none.
        dense: Columns of numbers by the names that they have in the dataset.
        categorical: Columns of values that get ids, likewise.
        split: How rows are divided into training, validation and test; see
            :class:`distembed.data.prepare.split.SplitRule`.
        min_count: ``min_count`` of the columns that have none of their own.
        hash_size: ``hash_size`` of the columns that have none of their own; null builds vocabularies.
        text: How text files are read.
        parser: ``criteo`` reads Criteo's rows by a parser of their own, which is faster; ``table`` any rows.
    """

    label: LabelColumn | None = None
    weight: WeightColumn | None = None
    time: TimeColumn | None = None
    dense: dict[str, DenseColumn] = field(default_factory=dict)
    categorical: dict[str, CategoricalColumn] = field(default_factory=dict)
    split: str = "0.8,0.1,0.1"
    min_count: _MinCount = 2
    hash_size: _HashSize | None = None
    text: TextFormat = field(default_factory=TextFormat)
    parser: Literal["table", "criteo"] = "table"
