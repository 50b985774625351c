"""The parser of tables against one that reads value after value, and the laws that it holds."""

import math
import random
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from distembed.base.errors import UserError
from distembed.data.table import numbers
from distembed.data.table.numbers import has_missing_text
from distembed.data.table.parser import TableParser
from distembed.data.table.raw_columns import VALUE_TYPES
from distembed.data.table.schema import TableSchema
from tests.data.table import reference

SCHEMA = TableSchema.from_json(
    {
        "label": {"column": "click"},
        "weight": {"column": "w"},
        "time": {"column": "at"},
        "dense": {
            "price": {"transform": "log"},
            "age": {"missing": "keep"},
            "raw": {"column": "price"},
            "gaps": {"beside": "recent", "separator": " ", "gap_to": "age", "transform": "log", "missing": "keep"},
            "stars": {"beside": "genres", "separator": "|"},
        },
        "categorical": {
            "site": {},
            "number": {"kind": "integer"},
            "hash": {"kind": "hexadecimal"},
            "price_bin": {"column": "price", "kind": "log_bins"},
            "age_bin": {"column": "age", "kind": "quantile_bins"},
            "genres": {"separator": "|"},
            "recent": {"column": "numbers", "kind": "integer", "separator": " ", "max_length": 2},
            "site_x_number": {"cross": ["site", "number", "genres_text"]},
        },
    },
    "the test",
)

POOLS: dict[str, tuple[list[str | None], list[str]]] = {
    "click": (["0", "1", "1.0", "TRUE", "false"], ["2", "", "x", "-1", "nan", "10"]),
    "w": (["0", "1", "2.5", "1e3", ".5", "1e0000000001"], ["-1", "", "inf", "1,5", "1e39"]),
    "at": (
        ["0", "1413849600", "2014-10-21", "2014-10-21T01:02:03", "2014-10-21 01:02:03.9+01:00"],
        ["soon", "", "2014-13-01"],
    ),
    "price": (
        [None, "0", "-3", "17", "1e6", "2", "3.5", "+4", "true", "FALSE"],
        ["free", "0x1f", "1_0", "infinity", "1e999"],
    ),
    "age": ([None, "20", "30.5", "99"], ["old", "--1", "1e39"]),
    "site": ([None, "a", "b", "sité", "a|b", "a\\", "NA"], ["\u2028"]),
    "number": (
        [None, "0", "-7", "7.0", "007", "1e3", "True", "9223372036854775807"],
        ["9223372036854775808", "7.5", "x", "1e16", "-"],
    ),
    "hash": ([None, "0a", "A", "ffffffff", "0000000a"], ["123456789", "xyz", "-1", "0x1", " 1", "1_0", "é", "٣"]),
    "genres": ([None, "a", "a|b", "b||c", "|", "x|a|b|c"], ["|||"]),
    "numbers": ([None, "1", "1 2", "3 2 1", " "], ["1 x", "1.5"]),
    "gaps": ([None, "1", "1 2", "3 2 1", " ", "18 99.5 20", "1  7"], ["1 x", "1e39", "1 2 3 4"]),
    "stars": ([None, "4.5", "4|5", "|", "1|2|3|4", "|1"], ["|||", "a|b"]),
    "genres_text": ([None, "a", "a|b"], ["\\|"]),
}


def drawn_rows(num_rows: int, seed: int, odd: float = 0.02) -> list[dict[str, str | None]]:
    rng = random.Random(seed)
    rows = [{name: reference.draw(rng, *pool, odd) or None for name, pool in POOLS.items()} for _ in range(num_rows)]
    for row in rows:
        for name, beside, separator in (("gaps", "numbers", " "), ("stars", "genres", "|")):
            if rng.random() >= 5 * odd:  # else the drawn list, which is as long by chance alone
                numbers = [rng.choice(["", "7", "40.5"]) for _ in (row[beside] or "").split(separator)]
                row[name] = None if row[beside] is None else separator.join(numbers) or None
    return rows


def table(rows: list[dict[str, str | None]]) -> pa.Table:
    return pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in POOLS})


@pytest.mark.parametrize("num_rows, odd", [(0, 0.0), (1, 0.0), (1, 1.0), (517, 0.0), (517, 0.05), (64, 0.7)])
def test_blocks_are_those_of_a_plain_parser(num_rows: int, odd: float) -> None:
    rows, parser = drawn_rows(num_rows, seed=num_rows, odd=odd), TableParser(SCHEMA)
    block = parser.parse(table(rows))
    wanted = [reference.parse(row, SCHEMA) for row in rows]
    assert block.num_lines == num_rows
    assert [(row.line, row.reason) for row in block.rejected] == [
        (line, reason) for line, reason in enumerate(wanted) if isinstance(reason, str)
    ]
    kept = [row for row in wanted if not isinstance(row, str)]
    found = reference.rows_of(parser, block)
    assert block.num_rows == len(found) == len(kept)
    for one, other in zip(found, kept, strict=True):
        assert set(one) == set(other)
        assert all(reference.same(one[name], other[name]) for name in other), (one, other)


PAIRS = TableSchema.from_json(
    {
        "label": {"column": "click_0"},
        "weight": {"column": "w_0"},
        "time": {"column": "at_0"},
        "dense": {f"age_{n}": {} for n in range(2)} | {f"log_{n}": {"column": f"price_{n}"} for n in range(2)},
        "categorical": {
            f"{name}_{n}": {"column": f"{column}_{n}", **settings}
            for n in range(2)
            for name, column, settings in (
                ("site", "site", {}),
                ("number", "number", {"kind": "integer"}),
                ("hash", "hash", {"kind": "hexadecimal"}),
                ("bin", "price", {"kind": "log_bins"}),
                ("quantile", "age", {"kind": "quantile_bins"}),
                ("genres", "genres", {"separator": "|"}),
                ("recent", "numbers", {"kind": "integer", "separator": " "}),
            )
        }
        | {"cross": {"cross": ["site_0", "number_0"]}, "other_cross": {"cross": ["hash_1", "number_1"]}},
    },
    "the test",
)
"""Two columns of each kind: of a block of few rows they are parsed as one."""


@pytest.mark.parametrize("num_rows", [1, 2, 1024, 1025])
def test_the_verdict_and_the_key_of_a_value_do_not_depend_on_other_values(num_rows: int) -> None:
    """A malformed value, a missing value and the value 0 are told apart in any order of the rows."""
    rng, parser = random.Random(num_rows), TableParser(PAIRS)
    rejected = 0
    for _ in range(15 if num_rows < 4 else 1):
        odd = rng.choice([0.01, 0.1])
        rows = [{f"{name}_{n}": _drawn(rng, name, odd) for name in POOLS for n in range(2)} for _ in range(num_rows)]
        wanted = [reference.parse(row, PAIRS) for row in rows]
        for order in (list(range(num_rows)), rng.sample(range(num_rows), num_rows)):
            columns = {name: pa.array([rows[place][name] for place in order], pa.string()) for name in rows[0]}
            block = parser.parse(pa.table(columns))
            found = iter(reference.rows_of(parser, block))
            verdicts = {row.line: row.reason for row in block.rejected}
            for line, place in enumerate(order):
                one, other = verdicts.get(line) or next(found), wanted[place]
                if isinstance(one, str) or isinstance(other, str):
                    assert one == other, rows[place]
                else:
                    assert all(reference.same(one[name], other[name]) for name in other), rows[place]
            rejected += len(verdicts)
    assert rejected


def _drawn(rng: random.Random, name: str, odd: float) -> str | None:
    """Returns a value of a column: a 0 or a missing one in every third row, and sometimes a malformed one."""
    right, wrong = POOLS[name]
    zeros = ["0"] if name in ("click", "w", "at") else ["0", None]
    return reference.draw(rng, [*right, *zeros * (1 + len(right) // 4)], wrong, odd)


def test_a_block_has_the_rows_of_its_pieces() -> None:
    whole, parser = table(drawn_rows(300, seed=1, odd=0.03)), TableParser(SCHEMA)
    pieces = [parser.parse(whole.slice(start, length)) for start, length in ((0, 1), (1, 0), (1, 150), (151, 149))]
    found = [str(row) for piece in pieces for row in reference.rows_of(parser, piece)]
    assert found == [str(row) for row in reference.rows_of(parser, parser.parse(whole))]


def test_typed_columns_are_as_their_texts() -> None:
    typed_and_texts = {
        "click": (pa.array([True, False, True]), ["1", "0", "1"]),
        "w": (pa.array([1, 2, 0], pa.uint8()), ["1", "2", "0"]),
        "at": (pa.array([0, 86400, 7], pa.timestamp("s", "Europe/Paris")), ["0", "86400", "7"]),
        "price": (pa.array([1.5, None, float("nan")]), ["1.5", None, None]),
        "age": (pa.array([20, 30, None], pa.int16()), ["20", "30", None]),
        "site": (pa.array(["a", None, "a"], pa.large_string()).dictionary_encode(), ["a", None, "a"]),
        "number": (pa.array([7.0, None, -1.0]), ["7", None, "-1"]),
        "hash": (pa.array([10, 12345678, None]), ["10", "12345678", None]),
        "genres": (pa.array([["a", None, "b"], None, []], pa.large_list(pa.string())), ["a|b", None, ""]),
        "numbers": (pa.array([[1, 2, 3], [], None], pa.list_(pa.int32())), ["1 2 3", None, None]),
        "gaps": (pa.array([[1, 2, None], [], None], pa.large_list(pa.int64())), ["1 2 ", None, None]),
        "stars": (pa.array([[4.5, 7.0, None], None, []], pa.list_(pa.float64())), ["4.5|", None, None]),
        "genres_text": (pa.array([b"x", None, b"y"]), ["x", None, "y"]),
    }
    parser = TableParser(SCHEMA)
    typed, texts = (pa.table({name: each[place] for name, each in typed_and_texts.items()}) for place in (0, 1))
    assert str(reference.rows_of(parser, parser.parse(typed))) == str(reference.rows_of(parser, parser.parse(texts)))


def test_lists_of_nothing_but_missing_values_have_missing_numbers() -> None:
    dense = {"stars": {"beside": "seen", "missing": "keep"}}
    parser = TableParser(TableSchema.from_json({"dense": dense, "categorical": {"seen": {"is_list": True}}}, "it"))
    seen, nothing = [["a", "b"], ["c"]], pa.ListArray.from_arrays(pa.array([0, 2, 3], pa.int32()), pa.nulls(3))
    assert np.isnan(parser.parse(pa.table({"seen": seen, "stars": nothing})).numbers[0]).tolist() == [True] * 3
    assert parser.parse(pa.table({"seen": nothing, "stars": [[1.0, 2.0], None]})).numbers[0].tolist() == []


def test_gaps_are_computed_in_64_bits() -> None:
    dense = {"gaps": {"column": "times", "beside": "seen", "separator": " ", "gap_to": "at"}}
    parser = TableParser(TableSchema.from_json({"dense": dense, "categorical": {"seen": {"separator": " "}}}, "it"))
    rows = pa.table({"seen": ["a b c"], "times": ["1700000000 1700000001.5 1700000002"], "at": [1_700_000_003]})
    assert parser.parse(rows).numbers[0].tolist() == [3.0, 1.5, 1.0]


def test_times_since_the_first_are_computed_in_64_bits() -> None:
    """A row is malformed where a time is missing, is no number, or is before the preceding one."""
    lists = {"beside": "seen", "separator": " "}
    dense = {"times": {**lists, "since_first": True}, "logs": {**lists, "column": "times", "transform": "log"}}
    dense["logs"]["since_first"] = True
    parser = TableParser(TableSchema.from_json({"dense": dense, "categorical": {"seen": {"separator": " "}}}, "it"))
    good = ["1700000000 1700000000 1700000033.5", "-7 -5.5 1e3", "0 0 0"]
    wrong = ["3 2 4", "1 2", "1 2 3 4", "1 2 noon", "1  3", "1 2 nan", "", None, "1 2 1e999"]
    times = [*good, *wrong, None, ""]
    rows = pa.table({"seen": [*["a b c"] * len(times[:-2]), None, "", None], "times": [*times, "1 2"]})
    block = parser.parse(rows)
    assert [(row.line, row.reason, row.column) for row in block.rejected] == [
        (line, "times", "times") for line in [*range(len(good), len(times) - 2), len(times)]
    ]
    expected = [0, 0, 33.5, 0, 1.5, 1007, 0, 0, 0]
    assert block.numbers[0].tolist() == expected
    np.testing.assert_allclose(block.numbers[1], np.log1p(expected), rtol=1e-6)
    seconds = pa.array([[5, 90_000], [], None], pa.list_(pa.int64()))
    for type_ in ("date32[day]", "timestamp[ms]", "timestamp[ns]"):
        unit = {"date32[day]": 86_400, "timestamp[ms]": 1e-3, "timestamp[ns]": 1e-9}[type_]
        own = pa.int32() if type_.startswith("date") else pa.int64()
        typed = seconds.cast(pa.list_(own)).cast(pa.list_(pa.type_for_alias(type_)))
        dates = parser.parse(pa.table({"seen": ["a b", None, None], "times": typed}))
        np.testing.assert_allclose(dates.numbers[0], [0, 89_995 * unit], rtol=1e-6)


DECIMALS = [Decimal(number) for number in (0, -3, 10, 2**53 + 1, 2**63 - 1, 2**63)]
TYPED = (
    *(pa.array([0, 1, 10, -3, 12345678, 123456789, 2**53 + 1, -(2**63)]), pa.array([2**63, 2**64 - 1, 7], pa.uint64())),
    *(pa.array([True, False]), pa.array([0.5, 1, 3], pa.float32())),
    pa.array([0.0, -0.0, 1.0, 10.0, 2.5, 1e10, 1e15, 2.0**53 - 1, 2.0**53, 2.0**53 + 2, 1e39, 1e300, 1e-7, 5e-324]),
    pa.array([math.inf, -math.inf]),
    *(pa.array(DECIMALS, type_) for type_ in (pa.decimal128(38, 0), pa.decimal256(50, 2))),
)


@pytest.mark.parametrize("missing", [[""], ["-3", "0", "true"]])
@pytest.mark.parametrize(
    "settings", [{"kind": kind} for kind in VALUE_TYPES] + [{"is_list": True}, {"cross": ["v", "w"]}, {}]
)
def test_a_typed_value_has_the_verdict_and_the_key_of_its_text(settings: dict[str, Any], missing: list[str]) -> None:
    """Typed or as a text, alone or with others."""
    values: dict[str, Any] = {"categorical": {"c": {"column": "v", **settings}}} if settings else {"dense": {"v": {}}}
    values["categorical"] = values.get("categorical", {}) | {"w": {}}
    if "cross" in settings:
        del values["categorical"]["c"]["column"]
    parser = TableParser(TableSchema.from_json(values | {"text": {"missing_values": missing}}, "the test"))
    for typed in TYPED:
        alone = range(len(typed)) if missing == [""] else ()
        for column in (typed, *(typed.slice(place, 1) for place in alone)):
            texts = pa.concat_arrays([column.cast(pa.string()), pa.array(["x"])])
            one, other = (parser.parse(pa.table({"v": each, "w": ["a"] * len(each)})) for each in (column, texts))
            verdicts = [
                [(row.line, row.reason) for row in block.rejected if row.line < len(column)] for block in (one, other)
            ]
            assert verdicts[0] == verdicts[1], column
            found, wanted = ([str(row) for row in reference.rows_of(parser, block)] for block in (one, other))
            assert found == wanted[: len(found)], column


@pytest.mark.parametrize(
    "layout, texts, seconds",
    [
        ("%y%m%d%H", ["14102100", "14102123"], [1413849600, 1413849600 + 23 * 3600]),
        ("milliseconds", ["1500", "-1", "0.5"], [1, -1, 0]),
        ("seconds", ["1.9", "-0.5", "1e3"], [1, -1, 1000]),
    ],
)
def test_times_have_formats(layout: str, texts: list[str], seconds: list[int]) -> None:
    values = {"time": {"column": "t", "format": layout}, "categorical": {"c": {"column": "t"}}}
    parser = TableParser(TableSchema.from_json(values, "the test"))
    block = parser.parse(pa.table({"t": [*texts, "x", None]}))
    assert block.numbers[0].tolist() == seconds
    assert [row.reason for row in block.rejected] == ["time", "time"]


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.string()])
@pytest.mark.parametrize("layout", ["auto", "seconds", "milliseconds"])
def test_numbers_beyond_the_year_9999_are_no_times(layout: str, kind: pa.DataType) -> None:
    unit = 1000 if layout == "milliseconds" else 1
    begin, end = (
        reference.EPOCH.replace(year=year, month=month, day=day) for year, month, day in ((1, 1, 1), (9999, 12, 31))
    )
    first = (begin - reference.EPOCH) // timedelta(seconds=1)
    last = (end - reference.EPOCH) // timedelta(seconds=1) + 86399
    # the last one would be the day 1410-10-10 at 01:01, if it were no number
    wrong = [(last + 1) * unit, first * unit - unit, 1414454400000 * unit, 1410101010101 * unit]
    numbers = pa.array([first * unit, 0, last * unit, *wrong])
    values = {"time": {"column": "t", "format": layout}, "categorical": {"c": {"column": "t"}}}
    block = TableParser(TableSchema.from_json(values, "the test")).parse(pa.table({"t": numbers.cast(kind)}))
    assert block.numbers[0].tolist() == [first, 0, last]
    assert [(row.line, row.reason) for row in block.rejected] == [(line, "time") for line in (3, 4, 5, 6)]


@pytest.mark.parametrize("layout", ["%Y-%m-%d", "%d.%m.%Y %H"])
def test_days_that_a_month_does_not_have_are_no_times(layout: str) -> None:
    days = [date(year, month, day) for year in (2015, 2016) for month in range(1, 13) for day in range(1, 29)]
    right = [f"{day:{layout}}" for day in days]
    wrong = [f"{date(2015, 1, day):{layout}}".replace("-01-", "-02-").replace(".01.", ".02.") for day in (29, 30, 31)]
    values = {"time": {"column": "t", "format": layout}, "categorical": {"c": {"column": "t"}}}
    parser = TableParser(TableSchema.from_json(values, "the test"))
    block = parser.parse(pa.table({"t": [*right, *wrong]}))
    assert [(row.line, row.reason) for row in block.rejected] == [(len(right) + place, "time") for place in range(3)]
    assert block.numbers[0].tolist() == [(day - date(1970, 1, 1)).days * 86400 for day in days]


def test_rows_to_predict_need_no_label() -> None:
    rows = table(drawn_rows(50, seed=3, odd=0.0))
    parser = TableParser(SCHEMA, needs_label=False)
    block = parser.parse(rows.drop_columns(["click", "w", "at"]))
    assert [column.name for column in parser.layout.numbers] == ["price", "age", "raw", "age_bin", "gaps", "stars"]
    assert block.num_rows == 50
    complete = TableParser(SCHEMA)
    for row, whole in zip(
        reference.rows_of(parser, block), reference.rows_of(complete, complete.parse(rows)), strict=True
    ):
        assert str(row) == str({name: whole[name] for name in row})


@pytest.mark.parametrize("missing", [[], ["", "NA"], ["NA", "-3"], ["true", "2.5"], ["inf", "nan"], ["1e+15"]])
def test_missing_texts_are_those_of_typed_values(missing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    typed = [pa.array([-3, 0, None]), pa.array([2.5, 1e15, math.inf, math.nan]), pa.array([True, False])]
    for column in (*typed, pa.array(["-3", "NA", "", None])):
        wanted = [text in missing for text in column.cast(pa.string()).to_pylist()]
        assert has_missing_text(column, pa.array(missing, pa.string())).tolist() == wanted
    if not set(missing) - {"", "NA"}:
        monkeypatch.setattr(numbers, "pc", None)  # no text of theirs is looked at
        assert not any(has_missing_text(column, pa.array(missing, pa.string())).any() for column in typed)


def test_missing_values_are_those_that_the_schema_says() -> None:
    values = {"dense": {"n": {}}, "categorical": {"c": {}}, "text": {"missing_values": ["NA", "-1"]}}
    parser = TableParser(TableSchema.from_json(values, "the test"))
    block = parser.parse(pa.table({"n": ["-1", "NA", "3", ""], "c": ["NA", "", "-1", "x"]}))
    assert str(block.numbers[0].tolist()) == "[nan, nan, 3.0]"
    assert [(row.line, row.reason) for row in block.rejected] == [(3, "dense")]
    assert reference.rows_of(parser, block)[1]["c"] == ""


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t: t.drop_columns(["site", "price"]), ["'price', 'site'", "no column"]),
        (lambda t: t.rename_columns({"site": "sites"}), ["no column 'site'", "Did you mean 'sites'"]),
        (lambda t: t.append_column("site", t["site"]), ["several columns named 'site'"]),
        (lambda t: t.set_column(5, "site", pa.array([["a"]] * len(t))), ["'site'", "is_list: true"]),
        (lambda t: t.set_column(3, "price", pa.array([{"a": 1}] * len(t))), ["'price'", "struct"]),
    ],
)
def test_tables_of_other_columns_are_refused(change, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        TableParser(SCHEMA).parse(change(table(drawn_rows(3, seed=0))))
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("kind, entries", [("hexadecimal", [date(2014, 1, 1)]), ("integer", [date(2014, 1, 1)])])
def test_lists_of_entries_of_another_kind_are_refused(kind: str, entries: list[Any]) -> None:
    schema = TableSchema.from_json({"categorical": {"c": {"kind": kind, "is_list": True}}}, "the test")
    with pytest.raises(UserError, match="the schema takes lists of text or"):
        TableParser(schema).parse(pa.table({"c": [entries, []]}))


def test_a_shared_vocabulary_is_of_its_owners_settings() -> None:
    schema = TableSchema.from_json(
        {
            "categorical": {
                "seen": {"kind": "integer", "is_list": True, "vocabulary": "item"},
                "item": {"kind": "integer", "min_count": 3, "hash_size": 100, "hash_seed": 5},
            }
        },
        "the test",
    )
    seen, item = TableParser(schema).layout.ids
    assert (seen.vocabulary, item.vocabulary) == ("item", None)
    assert (seen.min_count, seen.hash_size, seen.hash_seed) == (3, 100, 5) == (item.min_count, item.hash_size, 5)
    assert TableSchema.from_json(schema.to_json(), "the test") == schema
