"""Schemas guessed from a table's first rows: they read back, say what was seen, and prepare the table."""

import gzip
import io
import random
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.base.validation import parse_yaml
from distembed.data.prepare.table import TableOptions, prepare_table
from distembed.data.prepare.table.guess import guess_schema
from distembed.data.prepare.table.inputs import find_inputs
from distembed.data.table.schema import TableSchema
from distembed.data.table.schema_files import load_schema, shipped_schemas
from tests.data import reference as criteo_reference
from tests.data.table.test_prepare_table import FORMS, drawn_rows

AVAZU = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,app_category,device_id,device_ip,"
    "device_model,device_type,device_conn_type,C14,C15,C16,C17,C18,C19,C20,C21"
)


def avazu(num_rows: int) -> bytes:
    rng = random.Random(0)
    lines = [AVAZU]
    for number in range(num_rows):
        hashes = [f"{rng.randrange(30) * 2654435761 % 2**32:08x}" for _ in range(9)]
        rest = [rng.randrange(3) for _ in range(2)] + [rng.randrange(-1, 200) for _ in range(8)]
        hour = f"1410{21 + number * 9 // num_rows}{rng.randrange(24):02d}"
        row = [10**19 + number, rng.randrange(2), hour, 1005, rng.randrange(2), *hashes, *rest]
        lines.append(",".join(map(str, row)))
    return ("\n".join(lines) + "\n").encode()


def guessed(content: bytes, name: str, folder: Path) -> tuple[TableSchema, str]:
    (folder / name).write_bytes(content)
    text = guess_schema(find_inputs([folder / name]), 1000)
    return TableSchema.from_json(parse_yaml(text, "the test"), "the test"), text


def test_columns_of_clicks_are_told_apart(tmp_path: Path) -> None:
    schema, text = guessed(gzip.compress(avazu(300)), "train.csv.gz", tmp_path)
    assert "--schema avazu" in text and "# id is left out: every row has a value of its own" in text
    assert schema.label is not None and schema.label.column == "click"
    assert schema.time is not None and (schema.time.column, schema.time.format) == ("hour", "%y%m%d%H")
    shipped = load_schema("avazu").categorical
    assert {name: each.kind for name, each in schema.categorical.items()} == {
        name: each.kind
        for name, each in shipped.items()
        if name != "C1"  # which has one value here
    }
    assert schema.split == "time:0.8,0.1,0.1" and not schema.dense


@pytest.mark.parametrize("form", ["rows.csv", "rows.tsv.zst", "rows.jsonl", "rows.parquet"])
def test_a_guessed_schema_prepares_its_table(form: str, tmp_path: Path) -> None:
    schema, text = guessed(FORMS[form](drawn_rows(300, seed=0)), form, tmp_path)
    assert schema.label is not None and (schema.label.column, schema.label.kind) == ("rating", "number")
    assert schema.weight is not None and schema.weight.column == "weight"
    assert schema.time is not None and schema.time.column == "at"
    assert list(schema.dense) == ["price"] or set(schema.dense) == {"age", "price"}
    assert schema.categorical["genres"].holds_lists
    assert "missing" in text and "# unused is left out: it has one value" in text
    manifest = prepare_table([tmp_path / form], tmp_path / "made", schema)
    assert manifest.rejected.num_rows == 0


def test_criteo_is_known_without_a_header(tmp_path: Path) -> None:
    schema, text = guessed(criteo_reference.content(200, seed=0), "train.txt", tmp_path)
    assert "--schema criteo" in text
    assert not schema.text.header and schema.label is not None and schema.label.column == "1"
    assert {schema.categorical[str(place)].kind for place in range(15, 41)} == {"hexadecimal"}
    manifest = prepare_table([tmp_path / "train.txt"], tmp_path / "made", schema, TableOptions(hash_size=50))
    assert manifest.rejected.num_rows == 0


def test_odd_names_and_texts_for_missing_values_read_back(tmp_path: Path) -> None:
    names = ["y", "a b", "#", "null", "x: {", "時間"]
    rows = [
        "\t".join(["01"[n % 2], "NA" if n % 3 else "v", f"k{n % 5}", str(n / 7), "\\N", f"{n % 4}'"]) for n in range(90)
    ]
    schema, _ = guessed("\n".join(["\t".join(names), *rows]).encode(), "rows.tsv", tmp_path)
    assert set(schema.categorical) | set(schema.dense) == {"a b", "#", "null", "時間"}
    assert schema.label is not None and schema.label.column == "y"
    assert schema.text.missing_values == ["", "NA"]


@pytest.mark.parametrize(("clock", "expected"), [(" {:02d}:30:00", "when"), ("", None)])
def test_texts_with_a_clock_are_times_under_any_name(clock: str, expected: str | None, tmp_path: Path) -> None:
    rows = [f"{n % 2},{n % 7},2026-01-{1 + n % 28:02d}" + clock.format(n % 24) for n in range(90)]
    schema, _ = guessed("\n".join(["click,item,when", *rows]).encode(), "rows.csv", tmp_path)
    assert (schema.time and schema.time.column) == expected


@pytest.mark.parametrize("content", [b"", b"a,b\n", b"a,b\n1,2\n"])
def test_what_says_nothing_is_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rows.csv has no"):
        guessed(content, "rows.csv", tmp_path)


def test_shipped_schemas_read_back() -> None:
    for name in shipped_schemas():
        schema = load_schema(name)
        assert TableSchema.from_json(schema.to_json(), "the test") == schema
    with pytest.raises(UserError, match="Did you mean 'criteo'"):
        load_schema("critio")


def test_columns_of_all_types_prepare_or_are_left_out(tmp_path: Path) -> None:
    table = pa.table(
        {
            "label": [0, 1, 1, 0],
            "text": ["x", "y"] * 2,
            "half": pa.array(np.array([1, np.nan, 2.5, 2], np.float16)),
            "number_where_known": [1, None, 2, 3],
            "days": [[datetime(2026, 1, 1)], None, [], [datetime(2026, 1, 1)]],
            "truths": [[True], [False], None, []],
            "fractions": [[0.5]] * 4,
            "decimals": [[Decimal("1.00")], [Decimal("2.50")], None, []],
            "object": [{"b": 1}] * 4,
            "uuid": pa.array([bytes(16), bytes(range(16)), bytes(16), None], pa.uuid()),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    schema, text = guessed(sink.getvalue(), "rows.parquet", tmp_path)
    assert {name: each.kind for name, each in schema.categorical.items()} == {
        "text": "string",
        "number_where_known": "integer",
        "days": "string",
        "truths": "string",
    }
    assert list(schema.dense) == ["half"]
    assert all(f"# {name} is left out" in text for name in ("fractions", "decimals", "object", "uuid"))
    assert prepare_table([tmp_path / "rows.parquet"], tmp_path / "made", schema).rejected.num_rows == 0


def test_outcomes_and_unsigned_ids_behind_semicolons_prepare(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = ["category;click;conversion;uid"]
    for _ in range(300):
        click, user = int(rng.random() < 0.3), 2**64 - rng.randrange(1, 30)
        lines.append(f"c{rng.randrange(4)};{click};{click * rng.randrange(2)};{user}")
    schema, text = guessed("\n".join([*lines, ""]).encode(), "rows.csv", tmp_path)
    assert schema.label is not None and schema.label.column == "click" and schema.text.separator == ";"
    assert "# conversion is left out: its name is an outcome's" in text and "name both under `labels:`" in text
    assert {name: each.kind for name, each in schema.categorical.items()} == {"category": "string", "uid": "string"}
    assert "since integers end at 2^63" in text
    assert prepare_table([tmp_path / "rows.csv"], tmp_path / "made", schema).rejected.num_rows == 0


def test_empty_parts_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "spark"
    folder.mkdir()
    table = pa.table({"label": [0, 1] * 50, "site": ["a", "b", "c", "d"] * 25})
    pq.write_table(table[:0], folder / "part-0.parquet")
    pq.write_table(table, folder / "part-1.parquet")
    (folder / "_SUCCESS").touch()
    text = guess_schema(find_inputs([folder]), 1000)
    schema = TableSchema.from_json(parse_yaml(text, "the test"), "the test")
    assert prepare_table([folder], tmp_path / "made", schema).rejected.num_rows == 0


@pytest.mark.parametrize(("encoding", "named"), [("utf-16-le", "UTF-16LE"), ("latin-1", "WINDOWS-1252")])
def test_other_encodings_are_refused_with_their_remedy(encoding: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"iconv -f {named}"):
        guessed(("label,café\n" + "1,é\n0,è\n" * 50).encode(encoding), "rows.csv", tmp_path)
