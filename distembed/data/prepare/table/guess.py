"""Guesses a schema from the first rows of a table, and writes it as YAML with comments on each column.

The guess is a beginning, which a user reads and mends. The label is found by its name and values, the time by its name
or form, weights by their name. Numbers with fractions are dense; whole numbers are dense where there are many, unless
their name says that they are ids. Columns with one value, with another value in each row, or with the name of an
outcome are left out, as comments.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.base.validation import parse_yaml
from distembed.data.prepare.table.inputs import PARQUET, InputBytes, TableInput
from distembed.data.prepare.table.source import text_layout
from distembed.data.prepare.table.text_rows import opened_parquet
from distembed.data.table.columns import TextFormat, TimeColumn
from distembed.data.table.numbers import number_values, time_values, values_as_numbers
from distembed.data.table.raw_columns import (
    BOOLEAN,
    INTEGER,
    LIST,
    NUMBER,
    TEXT,
    TIME,
    TableColumns,
    one_array,
    plain_array,
    type_kind,
)
from distembed.data.table.schema import TableSchema
from distembed.data.table.schema_files import load_schema, shipped_schemas

MISSING_TEXTS = ("NA", "N/A", "#N/A", "<NA>", "NaN", "nan", "NULL", "null", "None", "\\N", "?", "-")
"""Texts that commonly stand for a missing value."""
_FIRST_BYTES = 1 << 20  # of a text, which are read to learn its dialect
_MOST_BYTES = 64 << 20
_BATCH_ROWS = 8192
_FIELD_SEPARATORS = "\t,;|: "
_LEAST_SHARE = 0.9  # of the first lines, which a dialect has to read as rows


@dataclass(frozen=True)
class _Sample:
    """The first rows of an input."""

    name: str
    table: pa.Table  # with all columns
    text: TextFormat = field(default_factory=TextFormat)
    separator: str | None = None  # of fields; None for Parquet and JSON lines


@dataclass(frozen=True)
class ColumnProfile:
    """Facts about one column."""

    name: str
    kind: str  # of its type (raw_columns.py)
    rows: pa.Array  # a value for each row, texts or typed, null where it is missing
    distinct: pa.Array  # the most frequent first; empty for lists
    numbers: NDArray[np.float64] | None  # the values that are not missing, where all are finite numbers

    @classmethod
    def of(cls, name: str, column: pa.ChunkedArray, missing: Sequence[str]) -> ColumnProfile:
        """Profiles a column; the texts in ``missing`` are nulls, and lists and other types get no distinct values."""
        kind = type_kind(column.type) or TEXT
        rows = plain_array(one_array(column))
        is_missing = rows.is_null(nan_is_null=pa.types.is_floating(rows.type))
        if kind == TEXT:
            is_missing = pc.or_(is_missing, pc.is_in(rows, value_set=pa.array(missing, rows.type)))
        rows = rows if kind == "other" else pc.if_else(is_missing, pa.scalar(None, rows.type), rows)
        if kind in ("other", LIST):
            return cls(name, kind, rows, rows[:0], None)
        values = rows.drop_null()
        counts = values.value_counts()
        distinct = counts.field("values").take(pc.sort_indices(counts.field("counts"), sort_keys=[("", "descending")]))
        numbers, wrong = number_values(values) if kind != TIME and len(values) else (None, np.ones(1, bool))
        return cls(name, kind, rows, distinct, None if wrong.any() else numbers)

    @property
    def missing_share(self) -> float:
        return float(self.rows.null_count / max(1, len(self.rows)))


def read_sample(inputs: Sequence[TableInput], num_rows: int) -> _Sample:
    """Reads about ``num_rows`` rows of the first input that has rows."""
    for source in inputs:
        if source.format == PARQUET:
            with opened_parquet(source.place) as file:
                table = file.schema_arrow.empty_table()
                for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
                    table = pa.concat_tables([table, pa.Table.from_batches([batch], file.schema_arrow)])
                    if table.num_rows >= num_rows:
                        break
            sample = _Sample(source.raw.name, table)
        else:
            sample = _read_text(source, num_rows)
        names = sample.table.column_names
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"{source.place} has several columns named {repeated[0]!r}; rename them.")
        if sample.table.num_rows:
            return sample
    raise UserError(
        f"{inputs[0].place} has no rows to guess a schema from; name a file that has some, on lines that end in \\n."
    )


def _read_text(source: TableInput, num_rows: int) -> _Sample:
    lines = b""
    for chunk in InputBytes(source.place).pieces():
        lines += chunk
        if lines.count(b"\n") > num_rows or len(lines) > _MOST_BYTES:
            lines = lines[: lines.rfind(b"\n") + 1] or lines
            break
    if not lines.strip():
        return _Sample(source.raw.name, pa.table({}))
    first = lines[:_FIRST_BYTES]
    text = _text_format(source, first)
    layout = text_layout(source, first, text)
    table = layout.block(lines[layout.first_row_byte :]).rows(layout.columns).table
    return _Sample(source.raw.name, table, text, layout.dialect.separator if layout.dialect is not None else None)


def _text_format(source: TableInput, first: bytes) -> TextFormat:
    """Returns the text format by which most of the first lines are rows; refuses other encodings and separators."""
    default_layout = text_layout(source, first, TextFormat(header=False))
    if default_layout.dialect is None:
        return TextFormat()
    lines = first[default_layout.first_row_byte : first.rfind(b"\n") + 1] or first[default_layout.first_row_byte :]
    decoded = lines.decode(errors="replace").splitlines()
    encoding = "UTF-16LE" if lines[1:2] == b"\0" else "UTF-16BE" if lines[:1] == b"\0" else "WINDOWS-1252"
    if encoding != "WINDOWS-1252" or sum("\ufffd" in line for line in decoded) > 0.01 * len(decoded):
        raise UserError(
            f"{source.place} is not text in UTF-8, but perhaps in {encoding}{' (Latin-1)' * (encoding[0] == 'W')}: "
            f"convert it, such as with `iconv -f {encoding} -t UTF-8`"
        )
    best_share, chosen, best_rows = _LEAST_SHARE, TextFormat(header=False), None
    for separator in dict.fromkeys((default_layout.dialect.separator, *_FIELD_SEPARATORS)):
        text = TextFormat(header=False, separator=None if separator == default_layout.dialect.separator else separator)
        dialects = [text, replace(text, newlines_in_values=True), replace(text, quote=None)]
        # marks around fields are more than lines
        for text in dialects[: 1 if b'"' not in lines else 3 if lines.count(b'"') < len(decoded) else 2]:
            layout = text_layout(source, first, text)
            rows = layout.block(lines).rows(layout.columns)
            if len(layout.columns) > 1 and rows.table.num_rows > best_share * rows.num_lines:
                best_share, chosen, best_rows = rows.table.num_rows / rows.num_lines, text, rows
    num_with_separator = sum(any(mark in line for mark in _FIELD_SEPARATORS) for line in decoded)
    if best_rows is None and num_with_separator > len(decoded) / 2:
        raise UserError(
            f"no separator, of tab , ; | : and blank, gives most lines of {source.place} as many fields as the first "
            f"one has, {decoded[0][:80]!r}: remove lines above the names, and convert other separators, such as with "
            "`tr -s ' '` for several blanks or `sed 's/::/\\t/g'`"
        )
    best_rows = best_rows or default_layout.block(lines).rows(default_layout.columns)
    return replace(chosen, header=not len(best_rows.lines) or best_rows.lines[0] > 0 or _is_header(best_rows.table))


def _is_header(table: pa.Table) -> bool:
    """Returns whether the first row has names: a text above a column of numbers, or only texts that do not recur."""
    names, rows = [str(column[0].as_py() or "") for column in table.columns], table.slice(1)
    if names == [str(number) for number in range(len(names))]:  # as pandas names columns without names
        return True
    is_number = [not number_values(pa.array([name]))[1][0] for name in names]
    for name, named_number, column in zip(names, is_number, rows.columns, strict=True):
        values = column.filter(pc.invert(pc.is_in(column, value_set=pa.array([None, *MISSING_TEXTS], pa.string()))))
        # nearly all: files that were put together have several headers
        wrong = number_values(one_array(values))[1]
        if name not in ("", *MISSING_TEXTS) and not named_number and len(wrong) > 0 and wrong.mean() <= 0.1:
            return True
    recurs = any(name and name in column.unique().to_pylist() for name, column in zip(names, rows.columns, strict=True))
    return not (recurs or any(is_number) or names.count("") > 1)


_LABELS = ("label", "click", "clicked", "is_click", "y", "target", "converted", "conversion", "purchase", "rating")
_OUTCOME = re.compile(
    r"((is|has|did|label)_?)?(click|conver(t|sion)|attribution|purchase|buy|bought|like|dislike|hate|follow|share|"
    r"comment|forward|install|download|subscribe|rating)(e?d)?(_?(label|flag))?|(label|target|y)_?[0-9]*",
    re.IGNORECASE,
)
_SECOND_OUTCOME = (
    "its name is an outcome's, which is not known before the label; to predict both, name both under `labels:` in the "
    "place of `label:`"
)
_FEW_OUTCOMES = 20  # an outcome's name is believed up to so many values: averages and sums of the past have more
_WEIGHTS = ("weight", "sample_weight", "row_weight", "importance")
_TIME_NAME = re.compile(r"(^|_|\b)(hour|day|ts|at)($|_|\b)|(^|_|\b)(date)?time|(time|date|datum|stamp)($|_|\b)", re.I)
_ID_NAME = re.compile(
    r"(?i:(^|_|\b)(id|ids|u?uid|code|key|hash|ip|zip|type|category|class|user|item|c[0-9]+)$)|Id$|ID$|"
    r"(?i:(user|item|movie|product|session|site|ad|doc|news|cat)ids?$)"
)
_TIME_FORMATS = (
    *("%Y%m%d", "%y%m%d%H", "%Y%m%d%H", "%Y%m%d%H%M%S", "seconds", "milliseconds"),
    *("%Y/%m/%d", "%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S", "%m/%d/%Y", "%m/%d/%Y %I:%M:%S %p", "%m %d, %Y"),
    *("%d/%m/%Y", "%d.%m.%Y", "%d.%m.%Y %H:%M", "%d.%m.%Y %H:%M:%S"),
)
_TIMES = (1e8, 4.2e9)  # seconds since 1970 that are taken for times: 1973 to 2103
_FEW_WHOLE_NUMBERS = 100
_SEPARATORS = ("|", ";", ",", " ")
_LOOKED_AT = 2000


class _Guess(NamedTuple):
    """A line of the schema in one of its sections, or "left out", with a comment."""

    section: str
    name: str
    settings: dict[str, Any]
    why: str = ""


def guess_schema(inputs: Sequence[TableInput], num_rows: int) -> str:
    """Returns a schema in YAML, with comments that say why, guessed from the first ``num_rows`` rows or so."""
    sample = read_sample(inputs, num_rows)
    texts = [column.unique() for column in sample.table.columns if pa.types.is_string(column.type)]
    distinct_texts = {text for values in texts if len(values) > 1 for text in values.to_pylist()}
    missing = ["", *(text for text in MISSING_TEXTS if text in distinct_texts)]
    columns = [ColumnProfile.of(name, sample.table[name], missing) for name in sample.table.column_names]
    guesses = [
        guess._replace(why=_comment(column, guess.why))
        for column, guess in zip(columns, _guesses(columns), strict=True)
    ]
    if not any(guess.section in ("dense", "categorical") for guess in guesses):
        raise UserError(
            f"{sample.name} has no column that says anything: each has one value, or another in every row, or is an "
            "outcome like the label."
        )
    text = "\n".join([*_lines(sample, guesses, missing), ""])
    TableSchema.from_json(parse_yaml(text, "the guessed schema"), "the guessed schema")  # it reads back
    return text


def _guesses(columns: Sequence[ColumnProfile]) -> Iterator[_Guess]:
    """Yields the guessed role of each column, at most one label, weight and time among them.

    Label: a name of _LABELS, else a binary column with an outcome's name, else any binary column.
    """
    complete = [column for column in columns if column.missing_share <= 0.01]  # rows without these values are malformed
    binary = [column for column in complete if _is_binary(column)]
    by_name = {column.name.lower(): column for column in complete if column in binary or column.numbers is not None}
    labels = [by_name[name] for name in _LABELS if name in by_name]
    labels += [column for column in binary if _OUTCOME.fullmatch(column.name)] + binary
    label = labels[0] if labels else None
    formats = {column.name: format for column in columns if (format := _time_format(column))}
    times = [column for column in complete if column is not label and column.name in formats]
    time = max(times, key=lambda column: len(column.distinct), default=None)
    numbers = [(column, column.numbers.min()) for column in complete if column.numbers is not None]
    weight = next((column for column, least in numbers if column.name.lower() in _WEIGHTS and least >= 0), None)
    for column in columns:
        name, format = column.name, formats.get(column.name)
        if column is label:
            two = {} if _is_binary(column) or column.numbers is None else {"at_least": float(column.numbers.max())}
            yield _Guess("label", name, two if len(column.distinct) == 2 else {"kind": "number"})
        elif column is time:
            yield _Guess("time", name, {} if format == "auto" else {"format": format})
        elif column is weight:
            yield _Guess("weight", name, {})
        elif reason := _why_useless(column):
            yield _Guess("left out", name, {}, reason)
        elif label is not None and column.kind != LIST and _OUTCOME.fullmatch(name) and _has_few_values(column):
            yield _Guess("left out", name, {}, _SECOND_OUTCOME)
        elif format:
            yield _Guess("left out", name, {}, "it is a time, of which the schema has one")
        else:
            yield _feature(column)


def _is_binary(column: ColumnProfile) -> bool:
    return len(column.distinct) == 2 and column.kind != TIME and set(values_as_numbers(column.distinct)[0]) == {0, 1}


def _time_format(column: ColumnProfile) -> str | None:
    """Returns the first format by which all values are times of 1973 to 2103; None without.

    A column with the name of something else has a time only where its texts have a clock, as ``2026-01-03 04:00``.
    """
    if column.kind == TIME:
        return "auto"
    values = column.distinct[:_LOOKED_AT]
    if column.kind == BOOLEAN or not len(values):
        return None
    is_named = _TIME_NAME.search(column.name) or column.name.isdecimal()
    if not is_named and (column.numbers is not None or ":" not in str(values[0])):
        return None
    for format in (*(["auto"] if column.numbers is None else []), *_TIME_FORMATS):
        seconds, wrong = time_values(values, TimeColumn(column.name, format))
        if not wrong.any() and _TIMES[0] <= seconds.min() and seconds.max() <= _TIMES[1]:
            return format
    return None


def _why_useless(column: ColumnProfile) -> str | None:
    """Returns why a model can learn nothing of a column; None where it may."""
    num_rows, num_distinct = len(column.rows), len(column.distinct)
    if column.kind == "other":
        return "its values are neither single ones nor lists"
    if column.rows.null_count == num_rows:
        return "it has no values"
    if not column.name:
        return "it has no name"
    if column.kind == LIST:
        entries = pc.list_flatten(column.rows)
        numbers = number_values(entries)[0] if type_kind(entries.type) == NUMBER else np.zeros(0)
        return "its lists are of numbers with fractions, which get no ids" if (numbers % 1 > 0).any() else None
    if num_distinct == 1 and not column.missing_share:
        return "it has one value"
    is_id = column.numbers is None or _ID_NAME.search(column.name)
    if num_distinct == num_rows > 1 and is_id and not _separator(column):
        return "every row has a value of its own"
    return None


def _has_few_values(column: ColumnProfile) -> bool:
    return _is_binary(column) or (column.numbers is not None and len(column.distinct) <= _FEW_OUTCOMES)


def _feature(column: ColumnProfile) -> _Guess:
    """Returns the role of a column that is an input of a model."""
    name, texts = column.name, column.distinct
    if column.kind == LIST:
        entries = pc.list_flatten(column.rows)
        kind, why = _kind_of_integers(entries) if type_kind(entries.type) in (INTEGER, NUMBER) else ({}, "")
        return _Guess("categorical", name, {**kind, "is_list": True}, why)
    if separator := _separator(column):
        return _Guess("categorical", name, {"separator": separator})
    sample = texts[:_LOOKED_AT]
    if column.kind == TEXT and pc.all(pc.match_substring_regex(sample, "^[0-9a-f]{8}$")).as_py():
        if pc.any(pc.match_substring_regex(sample, "[a-f]")).as_py():
            return _Guess("categorical", name, {"kind": "hexadecimal"})
    if column.numbers is None or column.kind == BOOLEAN:
        return _Guess("categorical", name, {})
    lowest, middle, highest = (float(quantile) for quantile in np.quantile(column.numbers, (0, 0.5, 1)))
    kind, why = _kind_of_integers(texts)
    is_id = bool(_ID_NAME.search(name)) or len(texts) <= _FEW_WHOLE_NUMBERS or bool(why)
    # of a column without a name: counts are mostly far below their largest, ids are not, and are never missing
    is_id = is_id or (name.isdecimal() and lowest >= 0 and highest < 20 * middle and not column.missing_share)
    if is_id and (column.numbers == np.floor(column.numbers)).all():
        return _Guess("categorical", name, kind, why)
    transform = "log" if lowest >= -3 and highest > 100 else "standardize"
    return _Guess("dense", name, {"transform": transform}, f"{lowest:g} to {highest:g}, middle {middle:g}")


def _kind_of_integers(values: pa.Array) -> tuple[dict[str, Any], str]:
    """Returns the kind of ids that are whole numbers, and why it is not ``integer``."""
    if np.nanmax(np.abs(number_values(values)[0]), initial=0) >= 2**63:
        return {"kind": "string"}, "as texts, since integers end at 2^63"
    if type_kind(values.type) == TEXT and pc.any(pc.match_substring_regex(values, "^0[0-9]")).as_py():
        return {"kind": "string"}, "as texts, since they begin with zeros"
    return {"kind": "integer"}, ""


def _separator(column: ColumnProfile) -> str | None:
    """Returns the separator of lists in a column of texts; None where it seems to hold single values."""
    texts = column.distinct[:_LOOKED_AT]
    for separator in _SEPARATORS if column.kind == TEXT else ():
        entries = pc.split_pattern(texts, separator)
        several = pc.greater(pc.list_value_length(entries), 1)
        num_entries = len(pc.unique(entries.flatten()))
        # a list's values come again in others, which words of names and titles hardly do
        if pc.sum(several).as_py() >= max(2, 0.2 * len(texts)) and num_entries < 0.7 * len(texts):
            return separator
    return None


def _lines(sample: _Sample, guesses: Sequence[_Guess], missing: Sequence[str]) -> Iterator[str]:
    first = f"the first {sample.table.num_rows:,} rows of {_shortened(sample.name)}"
    yield f"# Guessed from {first}: read it, and mend what is wrong."
    for name in shipped_schemas():
        schema, columns = load_schema(name), sample.table.column_names
        schema_columns = TableColumns(schema).names if sample.text.header else schema.text.columns or []
        is_fit = set(schema_columns) <= set(columns) if sample.text.header else len(schema_columns) == len(columns)
        has_separator = sample.text.header or sample.separator == schema.text.separator
        if schema.text.header == sample.text.header and is_fit and has_separator:
            yield f"# Its columns are those of the shipped schema {name}, which may do: `--schema {name}`."
    for section in ("label", "weight", "time", "dense", "categorical", "left out"):
        chosen = [guess for guess in guesses if guess.section == section]
        is_feature = section in ("dense", "categorical")
        if section == "label" and not chosen:
            yield "# label: {column: ...}  # no column looks like one: name it, if there is one"
        if is_feature and chosen:
            yield f"{section}:"
        for _, name, settings, comment in chosen:
            if section == "left out":
                yield f"# {_yaml([name])} is left out: {comment}"
            else:
                shown = {name: settings} if is_feature else {section: {"column": name, **settings}}
                yield f"{'  ' * is_feature}{_yaml(shown)}  # {comment}"
    by_time = "time:" * any(guess.section == "time" for guess in guesses)
    yield f"split: {by_time}0.8,0.1,0.1  # shares of training, validation and test"
    yield "min_count: 2  # values seen less often in training share one id"
    text, defaults = dataclasses.asdict(sample.text) | {"missing_values": missing}, dataclasses.asdict(TextFormat())
    if changed := {name: value for name, value in text.items() if value != defaults[name]}:
        yield _yaml({"text": changed})


def _comment(column: ColumnProfile, why: str) -> str:
    remarks = [why] if why else []
    remarks += [f"{column.missing_share:.1%} missing"] if column.missing_share else []
    remarks += [f"{len(column.distinct):,} distinct"] if column.kind not in (LIST, "other") else []
    values = column.distinct[:3].cast(pa.string()) if len(column.distinct) else column.rows.drop_null()[:3]
    shown = [_shortened(str(value)) for value in values.to_pylist()]
    return "; ".join([*remarks, *([f"such as {', '.join(shown)}"] if shown else [])])


def _shortened(text: str) -> str:
    shown = json.dumps(text, ensure_ascii=False)[1:-1] if not text.isprintable() else text
    return shown if len(shown) <= 30 else f"{shown[:30]}..."


def _yaml(value: dict[str, Any] | list[str]) -> str:
    """Returns YAML on one line, without the outer brackets."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"), sort_keys=False)
    return str(text).strip()[1:-1]
