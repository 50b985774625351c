"""The settings of a table's columns, and of its text files: the parts of a schema (``schema.py``)."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

import pydantic.dataclasses
from pydantic import Field, model_validator

from distembed.base.names import STRICT, nearest

BINS = ("log_bins", "quantile_bins")  # kinds of categorical columns that are numbers in the table
_SPECIAL_TIMES = ("auto", "seconds", "milliseconds")
MinCount = Annotated[int, Field(ge=1, le=2**63 - 1)]
HashSize = Annotated[int, Field(ge=2, le=2**62)]
_Letter = Annotated[str, Field(min_length=1, max_length=1)]
_Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TextFormat:
    """How text files are read; of Parquet and JSON lines, ``missing_values`` and ``columns`` alone concern them."""

    header: bool = True  # whether the first line has the names of the columns
    # In order, of files without a header; null: their numbers, from 1. Of JSON lines, keys that are columns though
    # no file has them in its first megabyte.
    columns: list[str] | None = None
    separator: _Letter | None = None  # of fields; null for that of the file's name: a comma of .csv, a tab of .tsv
    quote: _Letter | None = '"'  # the quotation mark; null where it is a letter like others
    newlines_in_values: bool = False  # whether a quoted value may have several lines; the file is read by one process
    missing_values: list[str] = field(default_factory=lambda: [""])  # texts for a missing value, in every column

    @model_validator(mode="after")
    def _require_marks(self) -> TextFormat:
        marks = {"separator": self.separator, "quote": self.quote}
        wrong = {name: mark for name, mark in marks.items() if mark and (mark in "\n\r\0" or not mark.isascii())}
        if wrong:
            listed = " and ".join(f"{name} is {mark!r}" for name, mark in wrong.items())
            raise ValueError(f"{listed}: give an ASCII character that ends no line, such as ',', '|' or \"\\t\"")
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class LabelValues:
    """How the values of a column of the table become a label."""

    column: str  # the table's
    kind: Literal["binary", "number"] = "binary"  # binary: 0 or 1, or true or false; number: any finite number
    at_least: Annotated[float, Field(allow_inf_nan=False)] | None = None  # 1 where the number is this or more, else 0

    @model_validator(mode="after")
    def _require_one_meaning(self) -> LabelValues:
        if self.kind == "number" and self.at_least is not None:
            raise ValueError("at_least makes a label of 0 and 1, which kind: number is not; leave one of them out")
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class LabelColumn(LabelValues):
    """The only label: ``column`` is the table's, ``name`` the dataset's, as of weight and time."""

    name: str = "label"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class WeightColumn:
    """The weight of a row in the loss and the metrics: a finite number, 0 or more; a missing one is malformed."""

    column: str
    name: str = "weight"


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TimeColumn:
    """The time of a row.

    The format is ``seconds`` or ``milliseconds`` since 1970, to the year 9999; one of strptime, as ``%y%m%d%H``, in
    UTC; or ``auto``: numbers are seconds, texts ISO 8601, and Parquet's times as they are.
    """

    column: str
    format: str = "auto"
    name: str = "time"

    @model_validator(mode="after")
    def _require_format(self) -> TimeColumn:
        if self.format not in _SPECIAL_TIMES and "%" not in self.format:
            guess = nearest(self.format, _SPECIAL_TIMES)
            hint = f" (did you mean {guess!r}?)" if guess else ""
            special = ", ".join(_SPECIAL_TIMES)
            raise ValueError(f"format is {self.format!r}{hint}; give {special}, or a format such as %Y-%m-%d %H:%M:%S")
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class DenseColumn:
    """A column of numbers; with ``beside``, of lists of numbers."""

    column: str | None = None  # the table's column; null for the dataset's name
    # log: log(1 + x), and 0 for negative numbers; standardize: less the mean of the training rows, and divided by their
    # standard deviation; none: the number itself, as soft one-hot encoding takes it
    transform: Literal["log", "standardize", "none"] = "none"
    # zero: missing values become 0 after the transform, as the mean does in standardize; keep: they are null in the
    # dataset, where all dense columns then may have null; with gap_to, keep alone: a gap of 0 is no time at all
    missing: Literal["zero", "keep"] = "zero"
    # A categorical column of lists: each of its values has a number in this column's lists, as each item of a history
    # has a time. A row without a number has missing ones for all values. Numbers of values that are left out, which are
    # missing or before the last max_length, are left out too.
    beside: str | None = None
    separator: Annotated[str, Field(min_length=1)] | None = None  # of lists of numbers in a text
    # A column of the table with one number a row, as its time: the gap, this number less the list's number, takes the
    # place of each number of the list before the transform. It is computed in 64 bits.
    gap_to: str | None = None
    # Whether the lists are times, ascending and none of them missing: the time since the list's first takes the place
    # of each before the transform. It is computed in 64 bits; dates count as seconds.
    since_first: bool = False

    @model_validator(mode="after")
    def _require_lists(self) -> DenseColumn:
        if self.beside is not None and self.transform == "standardize":
            raise ValueError("transform is 'standardize', which is of one number a row; give log or none beside a list")
        if self.gap_to is not None and self.missing == "zero":
            raise ValueError("missing is 'zero', and a gap of 0 is no time at all; give keep, or leave missing out")
        if self.since_first and self.gap_to is not None:
            raise ValueError("since_first and gap_to each take the place of the list's numbers; leave one of them out")
        for name in ("separator", "gap_to", "since_first"):
            if self.beside is None and getattr(self, name):
                raise ValueError(f"{name} is of lists of numbers; name their list column by beside, or leave it out")
        return self


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class CategoricalColumn:
    """A column of values that get ids; null stands for the schema's min_count and hash_size."""

    column: str | None = None  # the table's column; null for the dataset's name
    # integer: of 64 bits; hexadecimal: the digits of a number, at most 8; log_bins: the square of the
    # logarithm of a number above 2, rounded down, and lower numbers rounded down themselves; quantile_bins: bins of
    # equally many training rows, as far as equal numbers allow
    kind: Literal["string", "integer", "hexadecimal", "log_bins", "quantile_bins"] = "string"
    min_count: MinCount | None = None  # values seen fewer times in training share the out-of-vocabulary id
    hash_size: HashSize | None = None  # size of the table that values are hashed into
    hash_seed: _Seed = 0
    separator: Annotated[str, Field(min_length=1)] | None = (
        None  # of lists in a text; their missing values are left out
    )
    is_list: bool = False  # whether rows have lists; true where a separator is given
    max_length: Annotated[int, Field(ge=1)] | None = None  # most values of a list, the last ones; null for all
    # Other columns of the table, whose values, as they are written there, are one value together; it is missing where
    # one of them is.
    cross: Annotated[list[str], Field(min_length=2)] | None = None
    num_bins: Annotated[int, Field(ge=2, le=1_000_000)] = 32  # of quantile_bins
    # Another categorical column of the dataset, whose vocabulary or hash, and whose table in a model, this column
    # shares: a value has one id in both. The values of both are counted together.
    vocabulary: str | None = None

    @property
    def holds_lists(self) -> bool:
        return self.is_list or self.separator is not None

    @model_validator(mode="after")
    def _require_one_meaning(self) -> CategoricalColumn:
        cross, kind, is_bins, shared = self.cross or [], self.kind, self.kind in BINS, self.vocabulary
        settings = {"min_count": self.min_count, "hash_size": self.hash_size, "hash_seed": self.hash_seed or None}
        given_names = [name for name, value in settings.items() if value is not None]
        mistakes = {
            "column has no meaning beside cross, whose columns are the table's; leave one out": cross
            and self.column is not None,
            f"kind is {kind!r}, and the values of a cross are of kind string": cross and kind != "string",
            "a cross has one value a row; leave is_list and separator out": cross and self.holds_lists,
            f"cross has a column twice: {', '.join(cross)}; name each once": len(set(cross)) < len(cross),
            f"kind is {kind!r}, which is of one number a row; leave is_list and separator out": is_bins
            and self.holds_lists,
            f"kind is {kind!r}, whose bins are too few to be hashed; leave hash_size out": is_bins and self.hash_size,
            "kind is 'quantile_bins', of which all bins are kept; leave min_count out": kind == "quantile_bins"
            and self.min_count,
            f"kind is {kind!r}, whose bins are a column's own; leave vocabulary out": is_bins and shared is not None,
            f"{', '.join(given_names)}: the settings of vocabulary {shared!r} apply; leave them out": given_names
            and shared is not None,
            "max_length is of lists; give a separator or is_list: true too, or leave it out": self.max_length
            and not self.holds_lists,
        }
        if messages := [mistake for mistake, is_made in mistakes.items() if is_made]:
            raise ValueError("; ".join(messages))
        return self
