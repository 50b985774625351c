"""A value has one key, whatever file or object it comes from, and each preparation gives it one id."""

import datetime
import decimal
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distembed.data.prepare.table.preparation import prepare_table
from distembed.data.table.schema import TableSchema
from distembed.data.table.values import given_column, value_texts

SCHEMA = TableSchema.from_json(
    {
        "label": {"column": "label"},
        "categorical": {"value": {"min_count": 1}, "both": {"cross": ["value", "other"], "min_count": 1}},
        "split": "none",
    },
    "the schema",
)
DAYS = st.dates(datetime.date(1970, 1, 1), datetime.date(2100, 1, 1))
TIMES = st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2100, 1, 1))
MIDNIGHTS = DAYS.map(lambda day: datetime.datetime.combine(day, datetime.time()))
TEXTS = st.one_of(
    st.sampled_from(["007", "+7", "12e3", ".5", "true", "NaN", "2026-02-30 00:00:00", "a b", "Zoë", "-", "1.", "0x1F"]),
    st.text(st.characters(codec="utf-8", exclude_characters='\r\n\t",\0', exclude_categories=("Cs",)), min_size=1),
)
VALUES: dict[str, tuple[st.SearchStrategy[Any], pa.DataType]] = {
    "bool": (st.booleans(), pa.bool_()),
    "int": (st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1)), pa.int64()),
    "float": (
        st.one_of(st.integers(-99, 99).map(float), st.floats(-1e9, 1e9), st.sampled_from([-0.0, 1e15, 2.5e-7])),
        pa.float64(),
    ),
    "decimal": (st.decimals(-999, 999, places=3), pa.decimal128(9, 3)),
    "day": (DAYS, pa.date32()),
    "time": (st.one_of(TIMES, MIDNIGHTS), pa.timestamp("us")),
    "text": (TEXTS, pa.string()),
}


def csv_text(value: Any) -> str:
    """Returns a value as pandas and spreadsheets write it in CSV."""
    return "" if value is None else str(value)


def json_value(value: Any) -> str:
    """Returns a value as JSON: a decimal as a number with all digits, a time as ISO 8601 in UTC."""
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.datetime):
        return json.dumps(value.isoformat() + "Z")
    return json.dumps(value.isoformat() if isinstance(value, datetime.date) else value)


Columns = dict[str, pa.Array]


def write_text(path: Path, columns: Columns, separator: str) -> None:
    rows = zip(*(column.to_pylist() for column in columns.values()), strict=True)
    lines = [separator.join(columns), *(separator.join(map(csv_text, row)) for row in rows), ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def write_json(path: Path, columns: Columns) -> None:
    rows = zip(*(column.to_pylist() for column in columns.values()), strict=True)
    objects = (
        ", ".join(f'"{name}": {json_value(value)}' for name, value in zip(columns, row, strict=True)) for row in rows
    )
    path.write_text("".join(f"{{{each}}}\n" for each in objects), encoding="utf-8")


def write_spark(folder: Path, columns: Columns) -> None:
    """Writes a folder as Spark does: an empty first part, int96 times, a mark of success."""
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    for part, table in enumerate((pa.table(columns)[:0], pa.table(columns))):
        path = folder / f"part-{part:05d}.parquet"
        pq.write_table(table, path, use_deprecated_int96_timestamps=True, compression="snappy")


WRITERS: dict[str, Callable[[Path, Columns], None]] = {
    "rows.csv": lambda path, columns: write_text(path, columns, ","),
    "rows.tsv": lambda path, columns: write_text(path, columns, "\t"),
    "rows.jsonl": write_json,
    "rows.parquet": lambda path, columns: pq.write_table(pa.table(columns), path, use_dictionary=False),
    "coded.parquet": lambda path, columns: pq.write_table(pa.table(columns), path, use_dictionary=True),
    "spark": write_spark,
}


@pytest.mark.thorough
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), num_rows=st.integers(1, 20))
def test_every_file_gives_the_same_ids(data: st.DataObject, num_rows: int) -> None:
    places = range(num_rows)
    columns = {"label": pa.array([i % 2 for i in places]), "other": pa.array(["ab"[i % 2] for i in places])}
    for kind, (values, type_) in VALUES.items():
        drawn = data.draw(st.lists(st.none() | values, min_size=num_rows, max_size=num_rows))
        columns[kind] = pa.array(drawn, type_)
    pairs = [("bool", "int"), ("float", "decimal"), ("day", "time"), ("text", "other")]
    crosses = {f"{one}_and_{other}": {"cross": [one, other]} for one, other in pairs}
    features = {name: {"min_count": 1, **own} for name, own in {**dict.fromkeys(VALUES, {}), **crosses}.items()}
    schema = TableSchema.from_json({"label": {"column": "label"}, "categorical": features, "split": "none"}, "it")
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for file, write in WRITERS.items():
            write(Path(name) / file, columns)
            prepare_table([Path(name) / file], Path(name) / "out", schema, overwrite=True)
            keys = {each: pq.read_table(Path(name) / "out" / f"vocabulary/{each}.parquet") for each in features}
            ids = pq.read_table(Path(name) / "out" / "train").to_pydict()
            found[file] = [ids, {each: table["key"].to_pylist() for each, table in keys.items()}]
    assert all(each == found["rows.csv"] for each in found.values()), found


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=25)
@given(data=st.data())
def test_objects_have_the_texts_of_files(kind: str, data: st.DataObject) -> None:
    """Python's values, pandas' and Arrow's columns, and JSON as the server reads it."""
    values, type_ = VALUES[kind]
    drawn = data.draw(st.lists(values, min_size=1, max_size=20))
    wanted = value_texts(pa.array([csv_text(value) for value in drawn], pa.string())).to_pylist()
    typed = pa.array(drawn, type_)
    given = {
        "Arrow": typed,
        "Python": given_column(drawn, "value")[0],
        "pandas": given_column(pd.Series(typed.to_pandas()), "value")[0],
        "mixed": given_column([*drawn, "text"], "value")[0][:-1],
    }
    if kind not in ("decimal", "day", "time"):
        given["JSON"] = given_column(json.loads(json.dumps(drawn)), "value")[0]
    for name, column in given.items():
        assert value_texts(column).to_pylist() == wanted, name


def test_the_text_of_a_text_is_itself() -> None:
    for text in ("10", "0.5", "true", "2026-01-01", "2026-01-01 12:30:00.25", "0", "-1.5", "007", "", "1e400"):
        assert value_texts(pa.array([text])).to_pylist() == [text]


@settings(max_examples=40)
@given(st.lists(TEXTS | st.floats().map(str) | st.decimals(allow_nan=False).map(str), max_size=200))
def test_texts_do_not_depend_on_the_texts_beside_them(texts: list[str]) -> None:
    alone = [value_texts(pa.array([text])).to_pylist()[0] for text in texts]
    assert value_texts(pa.array(texts, pa.string())).to_pylist() == alone
    assert value_texts(pa.array(alone, pa.string())).to_pylist() == alone
    sliced = pa.array(["1.0", *texts, "2.0"] * 2, pa.string())[1 : 1 + len(texts)]
    assert value_texts(sliced).to_pylist() == alone
