"""Rows of a table parsed one value at a time in plain Python: what the fast code is compared with."""

import contextlib
import datetime
import decimal
import math
import random
import re
from collections.abc import Mapping
from typing import Any

from distembed.data.table.blocks import ParsedBlock
from distembed.data.table.columns import CategoricalColumn
from distembed.data.table.parser import TableParser
from distembed.data.table.schema import TableSchema

Row = Mapping[str, str | None]
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?")
_TIME = re.compile(r"[0-9]{4}(-[0-9]{2}){2}[ T][0-9]{2}(:[0-9]{2}){2}(\.[0-9]+)?(Z| UTC|[+-][0-9]{2}:?[0-9]{2})?")
_HEX = re.compile(r"[0-9a-fA-F]{1,8}")


EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class Malformed(Exception):
    """A value that is none of its kind."""


def number(text: str | None) -> float:
    """Returns a finite number in 32 bits, or NaN for a missing value."""
    if text is None:
        return math.nan
    if text.lower() in ("true", "false"):
        return float(text.lower() == "true")
    if not _NUMBER.fullmatch(text) or abs(float(text)) >= 2.0**128 * (1 - 2**-25):
        raise Malformed
    return float(text)


def time(text: str | None, layout: str) -> int:
    if text is None:
        raise Malformed
    if "%" in layout:
        try:
            parsed = datetime.datetime.strptime(text, layout)
        except ValueError as error:
            raise Malformed from error
        return int(parsed.replace(tzinfo=datetime.UTC).timestamp())
    if _NUMBER.fullmatch(text):
        seconds = math.floor(float(text) / (1000 if layout == "milliseconds" else 1))
        try:
            EPOCH + datetime.timedelta(seconds=seconds)
        except OverflowError as error:
            raise Malformed from error
        return seconds
    try:
        parsed = datetime.datetime.fromisoformat(text)
    except ValueError as error:
        raise Malformed from error
    if layout != "auto":
        raise Malformed
    return math.floor((parsed if parsed.tzinfo else parsed.replace(tzinfo=datetime.UTC)).timestamp())


def own_text(text: str) -> str:
    """Returns the one text of a value that is written as this text."""
    if text.lower() in ("true", "false") and text in (text.lower(), text.upper(), text.title()):
        return text.lower()
    if _JSON_NUMBER.fullmatch(text) and not re.fullmatch("-?[0-9]+[eE][0-9]+", text):
        exact = decimal.Decimal(text)
        return str(int(exact)) if exact == int(exact) else f"{exact:f}".rstrip("0")
    if _TIME.fullmatch(text):
        with contextlib.suppress(ValueError):
            parsed = datetime.datetime.fromisoformat(text.replace(" UTC", "Z"))
            parsed = parsed.astimezone(datetime.UTC) if parsed.tzinfo else parsed
            written = parsed.strftime("%Y-%m-%d %H:%M:%S") + parsed.strftime(".%f").rstrip("0").rstrip(".")
            return written.removesuffix(" 00:00:00")
    return text


def key(text: str, kind: str) -> str | int:
    """Returns the value that has an id: a text, or a number."""
    if kind == "string":
        return own_text(text)
    text = own_text(text) if kind == "hexadecimal" else text
    if kind == "log_bins":
        value = number(text)
        return math.floor(math.log(value) ** 2 if value > 2 else value)
    pattern, base = (_HEX, 16) if kind == "hexadecimal" else (_INTEGER, 10)
    if kind == "integer" and not _INTEGER.fullmatch(text):
        value = number(text)
        if value != math.floor(value) or abs(value) >= 2**53:
            raise Malformed
        return int(value)
    if not pattern.fullmatch(text):
        raise Malformed
    value = int(text, base)
    if not -(2**63) <= value < 2**63:
        raise Malformed
    return value


def categorical(row: Row, name: str, column: CategoricalColumn) -> Any:
    """Returns a value, None where it is missing, or a list."""
    if column.cross is not None:
        values = [row[each] for each in column.cross]
        texts = [own_text(value) for value in values if value is not None]
        escaped = [text.replace("\\", "\\\\").replace("|", "\\|") for text in texts]
        return "|".join(escaped) if len(escaped) == len(values) else None
    text = row[column.column or name]
    if column.separator is not None:
        pieces = [piece for piece in (text or "").split(column.separator) if piece]
        found = [key(piece, column.kind) for piece in pieces]
        return found if column.max_length is None else found[-column.max_length :]
    return None if text is None else key(text, column.kind)


def number_list(row: Row, name: str, schema: TableSchema) -> list[float]:
    """Returns a number for each value that a row's list has, nothing of them before they are kept."""
    dense = schema.dense[name]
    beside = schema.categorical[str(dense.beside)]
    text = row[beside.column or str(dense.beside)]
    values = [] if text is None else text.split(beside.separator)
    own = row[dense.column or name]
    found = [] if own is None else [number(piece or None) for piece in own.split(dense.separator)]
    end = 0.0 if dense.gap_to is None else number(row[dense.gap_to])
    if all(math.isnan(each) for each in found):
        found = [math.nan] * len(values)
    if len(found) != len(values):
        raise Malformed
    if dense.gap_to is not None:
        found = [end - each for each in found]
    if any(abs(each) > 3.4028235677973366e38 for each in found):
        raise Malformed
    if dense.transform == "log":
        found = [each if math.isnan(each) else math.log1p(max(each, 0)) for each in found]
    kept = [each for each, value in zip(found, values, strict=True) if value]
    return kept if beside.max_length is None else kept[-beside.max_length :]


def parse(row: Row, schema: TableSchema) -> dict[str, Any] | str:
    """Returns the values of a row by the dataset's columns, or why the row is malformed."""
    result: dict[str, Any] = {}
    reason = ""
    try:
        reason = "label"
        if schema.label is not None:
            label = number(row[schema.label.column])
            if schema.label.at_least is not None and not math.isnan(label):
                label = float(label >= schema.label.at_least)
            if math.isnan(label) or (schema.label.kind == "binary" and label not in (0, 1)):
                raise Malformed
            result[schema.label.name] = label
        reason = "weight"
        if schema.weight is not None:
            weight = number(row[schema.weight.column])
            if not weight >= 0:
                raise Malformed
            result[schema.weight.name] = weight
        reason = "time"
        if schema.time is not None:
            result[schema.time.name] = time(row[schema.time.column], schema.time.format)
        reason = "dense"
        for name, dense in schema.dense.items():
            if dense.beside is not None:
                continue
            value = number(row[dense.column or name])
            logarithm = dense.transform == "log" and not math.isnan(value)
            result[name] = math.log1p(max(value, 0)) if logarithm else value
        reason = "list"
        for name in schema.dense_sequences:
            result[name] = number_list(row, name, schema)
        reason = "id"
        for name, column in schema.categorical.items():
            if column.kind == "quantile_bins":
                result[name] = number(row[column.column or name])
            else:
                result[name] = categorical(row, name, column)
    except Malformed:
        return reason
    return result


def rows_of(parser: TableParser, block: ParsedBlock) -> list[dict[str, Any]]:
    """Returns the rows of a block as :func:`parse` has them."""
    columns: dict[str, list[Any]] = {}
    for number_column, values in zip(parser.layout.numbers, block.numbers, strict=True):
        assert values.dtype == number_column.dtype
        columns[number_column.name] = values.tolist()
        if number_column.beside is not None:
            lengths = block.ids[parser.layout.feature_keys[number_column.beside][0]].lengths
            assert lengths is not None and lengths.sum() == len(values)
            flat = iter(values.tolist())
            columns[number_column.name] = [[next(flat) for _ in range(length)] for length in lengths.tolist()]
    for key_column, ids in zip(parser.layout.ids, block.ids, strict=True):
        assert ids.keys.dtype == key_column.key_dtype
        assert len(set(ids.keys[1:].tolist())) == len(ids.keys) - 1
        assert set(ids.codes.tolist()) | {0} == set(range(len(ids.keys)))
        values = ids.keys.tolist() if ids.texts is None else ids.texts.to_pylist()
        found = [values[code] if code else None for code in ids.codes.tolist()]
        if ids.lengths is not None:
            flat = iter(found)
            found = [[next(flat) for _ in range(length)] for length in ids.lengths.tolist()]
        columns[key_column.name] = found
    assert {len(values) for values in columns.values()} <= {block.num_rows}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def same(first: Any, second: Any) -> bool:
    """Returns whether two values are the same, numbers as far as float32 goes; of lists, null is NaN."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return all(same(*pair) for pair in zip(first, second, strict=True))
    if isinstance(second, float):
        first = math.nan if first is None else first
        return (math.isnan(first) and math.isnan(second)) or math.isclose(first, second, rel_tol=1e-6)
    return type(first) is type(second) and first == second


def draw(rng: random.Random, pool: list[str | None], odd: list[str], share: float) -> str | None:
    """Returns a value of a pool, or with a probability an odd one."""
    return rng.choice(odd) if rng.random() < share else rng.choice(pool)


PIECES = [
    *(b"", b"\n", b"\r", b"\r\n", b"\0", b'"', b'""', b",", b"\t", b"|", b"\\", b"\xff", b"\xc3", b"\xef\xbb\xbf"),
    *(b"NaN", b"inf", b"-", b"1e999", b"0x1f", b"99999999999999999999", b"\xe2\x80\xa8", b"null", b"{}", b"[", b"'"),
    *(b'{"a":' * 40, b'"a\nb"', b"\n\n\n", b"   ", b"=1+1", b"x" * 300),
]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Returns the content with some bytes or lines changed, taken out, doubled, swapped or put in."""
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        kind, place = rng.randrange(7), rng.randrange(len(content) + 1)
        end = min(len(content), place + rng.choice([0, 1, 1, 3, 40]))
        lines = content.split(b"\n")
        line, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        if kind == 0:
            content = content[:place] + rng.choice(PIECES) + content[end:]
        elif kind == 1:
            content = content[:place] + rng.randbytes(end - place) + content[end:]
        elif kind == 2:
            content = content[:place] + content[end:]
        elif kind == 3:
            lines[line], lines[other] = lines[other], lines[line]
            content = b"\n".join(lines)
        elif kind == 4:
            content = b"\n".join([*lines[:line], lines[other], *lines[line:]])
        elif kind == 5:
            content = b"\n".join([*lines[:line], *lines[line + 1 :]])
        else:
            content = content[:place] if rng.random() < 0.1 else content + content[place:end]
    return content
