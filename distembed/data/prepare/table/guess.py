"""Guesses a schema from the first rows of a table, and writes it as YAML with what was seen of each column.

What is guessed is a beginning, which a user reads and mends: the label by its name and its values, the time by its
name and form, weights by their name; then, of each column, whether it is numbers or values that get ids. Numbers with
fractions are dense; whole ones are where there are many, unless their name says that they are ids. Columns that say
nothing, with one value or another one for each row, are left out, as comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from distembed.data.prepare.table.inputs import TableInput
from distembed.data.prepare.table.sample import (
    MISSING_TEXTS,
    ColumnProfile,
    Sample,
    fits,
    profiles,
    read_sample,
)
from distembed.data.table.raw_columns import BOOLEAN, LIST, TEXT, TIME
from distembed.data.table.schema import TableSchema
from distembed.data.table.schema_files import load_schema, shipped_schemas
from distembed.errors import UserError
from distembed.yaml_text import parse_yaml

_LABELS = ("label", "click", "clicked", "is_click", "y", "target", "converted", "conversion", "purchase", "rating")
_WEIGHTS = ("weight", "sample_weight", "row_weight", "importance")
_TIME_NAME = re.compile(r"(^|_|\b)(time|timestamp|date|datetime|hour|day|ts|at)($|_|\b)", re.IGNORECASE)
_ID_NAME = re.compile(r"(^|_)(id|ids|code|key|hash|ip|zip|type|category|class|user|item|c[0-9]+)$|Id$", re.IGNORECASE)
_HEXADECIMAL = re.compile(r"[0-9a-f]{8}")
_COMPACT_HOUR = re.compile(r"[0-9]{2}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])([01][0-9]|2[0-3])")
_COMPACT_DAY = re.compile(r"(19|20)[0-9]{2}(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])")
_ISO = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}.*)?")
_SECONDS, _MILLISECONDS = (1e8, 4.2e9), (1e11, 4.2e12)
"""Numbers of seconds and milliseconds since 1970 that are taken for times: 1973 to 2103."""
_FEW_WHOLE_NUMBERS = 100
_SEPARATORS = ("|", ";", ",", " ")
_LOOKED_AT = 2000
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_WORDS_OF_YAML = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


@dataclass(frozen=True)
class _Guess:
    """A line of the schema.

    Attributes:
        section: Section that the line is in: label, weight, time, dense, categorical, or "left out".
        name: Name of the column.
        settings: What the schema says of it, but for its name.
        seen: What was seen of it.
    """

    section: str
    name: str
    settings: dict[str, object]
    seen: str


def guess_schema(source: TableInput, num_rows: int) -> str:
    """Returns a schema in YAML, with comments that say what was seen.

    Args:
        source: The input whose first rows are looked at.
        num_rows: About how many rows are looked at.

    Raises:
        UserError: The input cannot be read, or has no rows, or no column that a model could be trained on.
    """
    sample = read_sample(source, num_rows)
    missing = ["", *_missing_texts(sample.table)]
    columns = profiles(sample.table, missing)
    guesses = list(_guesses(columns))
    if not any(guess.section in ("dense", "categorical") for guess in guesses):
        raise UserError(
            f"{source.place} has no column that says anything: each has one value, or another in every row."
        )
    text = "\n".join([*_opening(source, sample), *_sections(guesses), *_closing(guesses, sample, missing), ""])
    TableSchema.from_json(parse_yaml(text, "the guessed schema"), "the guessed schema")  # it reads back
    return text


def _guesses(columns: Sequence[ColumnProfile]) -> Iterator[_Guess]:
    """Yields what each column is taken for; there is one label, one weight and one time."""
    label = _label(columns)
    time = next((column for column in columns if column is not label and _time_format(column)), None)
    weights = (column for column in columns if column.name.lower() in _WEIGHTS and column.numbers is not None)
    weight = next((each for each in weights if each.numbers is not None and not (each.numbers < 0).any()), None)
    for column in columns:
        seen = _seen(column)
        if column is label:
            yield _Guess("label", column.name, _label_settings(column), seen)
        elif column is time:
            format = _time_format(column)
            yield _Guess("time", column.name, {} if format == "auto" else {"format": format}, seen)
        elif column is weight:
            yield _Guess("weight", column.name, {}, seen)
        elif reason := _why_useless(column):
            yield _Guess("left out", column.name, {}, f"{reason}; {seen}")
        else:
            yield _feature(column, seen)


def _label(columns: Sequence[ColumnProfile]) -> ColumnProfile | None:
    """Returns the column that is most likely the label: by its name, else the first one of 0 and 1."""
    named = {column.name.lower(): column for column in columns if _is_binary(column) or column.numbers is not None}
    found = next((named[name] for name in _LABELS if name in named), None)
    return found or next((column for column in columns if _is_binary(column) and not column.missing_share), None)


def _is_binary(column: ColumnProfile) -> bool:
    """Returns whether a column has two values, 0 and 1 or false and true."""
    if column.kind == BOOLEAN:
        return len(column.distinct) == 2
    return len(column.distinct) == 2 and {text.lower() for text in column.texts} in ({"0", "1"}, {"false", "true"})


def _label_settings(column: ColumnProfile) -> dict[str, object]:
    if _is_binary(column) or column.numbers is None:
        return {}
    return {"kind": "number"}


def _time_format(column: ColumnProfile) -> str | None:
    """Returns the format of a column of times, by its name and its values; None where it is none."""
    if column.kind == TIME:
        return "auto"
    if not _TIME_NAME.search(column.name) or not len(column.distinct):
        return None
    texts = column.texts[:_LOOKED_AT]
    if all(map(_ISO.fullmatch, texts)):
        return "auto"
    for pattern, format in ((_COMPACT_DAY, "%Y%m%d"), (_COMPACT_HOUR, "%y%m%d%H")):
        if all(map(pattern.fullmatch, texts)):
            return format
    if column.numbers is None:
        return None
    lowest, highest = float(column.numbers.min()), float(column.numbers.max())
    ranges = {"seconds": _SECONDS, "milliseconds": _MILLISECONDS}
    return next((name for name, (least, most) in ranges.items() if least <= lowest and highest <= most), None)


def _why_useless(column: ColumnProfile) -> str | None:
    """Returns why a model can learn nothing of a column; None where it may."""
    if column.kind == "other":
        return "its values are neither single ones nor lists"
    if not len(column.values):
        return "it has no values"
    if column.kind != LIST and len(column.distinct) == 1 and not column.missing_share:
        return "it has one value"
    is_number = column.numbers is not None and not _ID_NAME.search(column.name)
    if len(column.distinct) == column.num_rows > 1 and not is_number:
        return "every row has a value of its own"
    return None


def _feature(column: ColumnProfile, seen: str) -> _Guess:
    """Returns what a column is as input of a model."""
    if column.kind == LIST:
        kind = {"kind": "integer"} if pa.types.is_integer(column.values.type.value_type) else {}
        return _Guess("categorical", column.name, {**kind, "is_list": True}, seen)
    if column.kind == TEXT and (separator := _separator(column)):
        return _Guess("categorical", column.name, {"separator": separator}, seen)
    texts = column.texts[:_LOOKED_AT]
    if column.kind == TEXT and all(map(_HEXADECIMAL.fullmatch, texts)) and any(map(re.compile("[a-f]").search, texts)):
        return _Guess("categorical", column.name, {"kind": "hexadecimal"}, seen)
    if column.numbers is None or column.kind == BOOLEAN:
        return _Guess("categorical", column.name, {}, seen)
    if column.is_whole and (_ID_NAME.search(column.name) or len(column.distinct) <= _FEW_WHOLE_NUMBERS):
        return _Guess("categorical", column.name, {"kind": "integer"}, seen)
    lowest, highest = float(column.numbers.min()), float(column.numbers.max())
    transform = "log" if lowest >= -3 and highest > 100 else "standardize"
    middle = float(np.median(column.numbers))
    return _Guess(
        "dense", column.name, {"transform": transform}, f"{lowest:g} to {highest:g}, middle {middle:g}; {seen}"
    )


def _separator(column: ColumnProfile) -> str | None:
    """Returns what separates the values of lists in a column of texts; None where it seems to hold single values."""
    texts = column.distinct[:_LOOKED_AT]
    for separator in _SEPARATORS:
        pieces = pc.split_pattern(texts, separator)
        several = pc.greater(pc.list_value_length(pieces), 1)
        num_pieces = len(pc.unique(pieces.flatten()))
        # a list's values come again in others, which words of names and titles hardly do
        if pc.sum(several).as_py() >= max(2, 0.2 * len(texts)) and num_pieces < 0.7 * len(texts):
            return separator
    return None


def _missing_texts(table: pa.Table) -> list[str]:
    """Returns the texts that commonly stand for a missing value, and are some column's values."""
    texts = [
        column.cast(pa.string())
        for column in table.columns
        if pa.types.is_string(column.type) and len(column.unique()) > 1
    ]
    found = [pc.is_in(pa.array(MISSING_TEXTS), value_set=column.unique()) for column in texts]
    return [text for place, text in enumerate(MISSING_TEXTS) if any(each[place].as_py() for each in found)]


def _seen(column: ColumnProfile) -> str:
    """Returns what was seen of a column, in words."""
    parts = [f"{column.missing_share:.1%} missing"] if column.missing_share else []
    parts += [f"{len(column.distinct):,} distinct"] if column.kind not in (LIST, "other") else []
    examples = ", ".join(_shortened(each) for each in column.examples)
    return "; ".join([*parts, *([f"such as {examples}"] if examples else [])])


def _shortened(text: str) -> str:
    """Returns a value as a comment shows it."""
    shown = json.dumps(text, ensure_ascii=False)[1:-1] if not text.isprintable() else text
    return shown if len(shown) <= 30 else f"{shown[:30]}..."


def _opening(source: TableInput, sample: Sample) -> Iterator[str]:
    first = f"the first {sample.table.num_rows:,} rows of {_shortened(source.raw.name)}"
    yield f"# Guessed from {first}: read it, and mend what is wrong."
    if sample.num_bad:
        yield f"# {sample.num_bad:,} lines among them are no rows of this table."
    for name in shipped_schemas():
        if fits(load_schema(name), sample):
            yield f"# Its columns are those of the shipped schema {name}, which may do: `--schema {name}`."


def _sections(guesses: Sequence[_Guess]) -> Iterator[str]:
    """Yields the lines of the columns."""
    for section in ("label", "weight", "time"):
        for guess in guesses:
            if guess.section == section:
                yield f"{section}: {_settings({'column': guess.name, **guess.settings})}  # {guess.seen}"
    if not any(guess.section == "label" for guess in guesses):
        yield "# label: {column: ...}  # no column looks like one: name it, if there is one"
    for section in ("dense", "categorical"):
        chosen = [guess for guess in guesses if guess.section == section]
        if chosen:
            yield f"{section}:"
        for guess in chosen:
            yield f"  {_name(guess.name)}: {_settings(guess.settings)}  # {guess.seen}"
    for guess in guesses:
        if guess.section == "left out":
            yield f"# {_name(guess.name)} is left out: {guess.seen}"


def _closing(guesses: Sequence[_Guess], sample: Sample, missing: Sequence[str]) -> Iterator[str]:
    has_time = any(guess.section == "time" for guess in guesses)
    yield f"split: {'time:' if has_time else ''}0.8,0.1,0.1  # shares of training, validation and test"
    yield "min_count: 2  # values seen less often in training share one id"
    text: dict[str, object] = {} if sample.text.header else {"header": False}
    text |= {"separator": sample.separator} if sample.separator not in (None, ",", "\t") else {}
    text |= {"missing_values": list(missing)} if len(missing) > 1 else {}
    if text:
        yield f"text: {_settings(text)}"


def _settings(values: dict[str, object]) -> str:
    """Returns settings on one line of YAML."""
    return "{" + ", ".join(f"{name}: {_value(value)}" for name, value in values.items()) + "}"


def _value(value: object) -> str:
    return _name(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _name(text: str) -> str:
    """Returns a text as YAML has it: as it is where it is a plain word."""
    is_plain = _PLAIN_NAME.fullmatch(text) and text.lower() not in _WORDS_OF_YAML
    return text if is_plain else json.dumps(text)
