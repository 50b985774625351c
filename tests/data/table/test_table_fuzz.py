"""Mutated inputs of tables: every row is kept or rejected, and nothing ends otherwise than in a sentence."""

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from distembed.base.errors import UserError
from distembed.data.prepare.table.inputs import find_inputs
from distembed.data.prepare.table.source import TableSource
from distembed.data.prepare.table.text_rows import JsonBlock
from distembed.data.table.schema import TableSchema
from tests.data.table import reference
from tests.data.table.reference import mutated
from tests.data.table.test_prepare_table import FORMS, SCHEMA, delimited, drawn_rows, json_lines

FEW, MANY = 50, 1000
TEXT_FORMS = {
    "rows.csv": lambda rows: delimited(rows, ","),
    "rows.tsv": lambda rows: delimited(rows, "\t", "\r\n"),
    "rows.jsonl": json_lines,
}
WITH_NEWLINES = TableSchema.from_json({**SCHEMA.to_json(), "text": {"newlines_in_values": True}}, "the test")


def num_records(content: bytes, form: str, quoted_newlines: bool) -> int:
    """Returns the number of lines without the header, or of records where quoted values may have newlines."""
    if quoted_newlines:
        num_quotes = records = 0
        is_closed = content.count(b'"') % 2 == 0
        lines = content.split(b"\n")
        for number, line in enumerate(lines[:-1]):
            num_quotes += line.count(b'"')
            is_last = not is_closed and b'"' not in b"".join(lines[number + 1 :])
            records += num_quotes % 2 == 0 or is_last
        return max(0, records + (lines[-1] != b"") - 1)
    lines = content.split(b"\n")
    return max(0, len(lines) - (lines[-1] == b"") - (form != "rows.jsonl"))


def read(source: TableSource, part_bytes: int, block_bytes: int) -> tuple[int, int]:
    """Returns the numbers of lines and of rows kept, once it was found that the others are rejected."""
    lines = rows = 0
    for part in source.parts(part_bytes):
        for raw in source.open(part, block_bytes).raw_blocks():
            block = source.parse(raw)
            assert block.num_rows + len(block.rejected) == block.num_lines
            for number, column in zip(source.layout.numbers, block.numbers, strict=True):
                places = source.layout.feature_keys
                lengths = None if number.beside is None else block.ids[places[number.beside][0]].lengths
                assert len(column) == (block.num_rows if lengths is None else lengths.sum())
            assert len({row.line for row in block.rejected}) == len(block.rejected)
            assert all(row.reason in source.reasons for row in block.rejected)
            lines, rows = lines + block.num_lines, rows + block.num_rows
    return lines, rows


def check(content: bytes, form: str, schema: TableSchema, folder: Path, rng: random.Random) -> int:
    """Returns the number of rows that were kept, however the file is cut."""
    path = folder / form
    path.write_bytes(content)
    try:
        source = TableSource(find_inputs([path]), schema)
        whole = read(source, 1 << 29, 1 << 20)
        assert read(source, rng.randrange(500, 3000), rng.choice([200, 1000])) == whole
    except UserError as error:
        assert form in str(error), error
        return 0
    assert whole[0] == num_records(content, form, schema.text.newlines_in_values and form != "rows.jsonl"), content
    return whole[1]


def fuzz(num_inputs: int, folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    kept = 0
    for number in range(num_inputs):
        form = rng.choice(list(TEXT_FORMS))
        content = TEXT_FORMS[form](drawn_rows(rng.choice([1, 5, 30]), seed=number))
        schema = WITH_NEWLINES if rng.random() < 0.2 else SCHEMA
        kept += check(mutated(content, rng), form, schema, folder, rng)
    assert kept > num_inputs  # most rows of most files are as they were


def test_mutated_rows_are_kept_or_rejected(tmp_path: Path) -> None:
    fuzz(FEW, tmp_path, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_many_mutated_rows_are_kept_or_rejected(seed: int, tmp_path: Path) -> None:
    fuzz(MANY, tmp_path, seed)


@pytest.mark.parametrize("form", ["rows.parquet", "rows.CSV.gz", "rows.tsv.zst"])
def test_damaged_files_end_in_a_sentence(form: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    content = FORMS[form](drawn_rows(40, seed=0))
    for _ in range(40):
        (tmp_path / form).write_bytes(mutated(content, rng))
        try:
            source = TableSource(find_inputs([tmp_path / form]), SCHEMA)
            read(source, 1 << 29, 1 << 20)
        except UserError as error:
            assert form in str(error), error


def test_values_are_those_of_pythons_own_readers(tmp_path: Path) -> None:
    rng = random.Random(2)
    pieces = ["a", " ", '"', ",", "é", "王", "|", "\\", "'", "1", "-", "#"]
    texts = [["".join(rng.choice(pieces) for _ in range(rng.randrange(6))) for _ in range(3)] for _ in range(400)]
    lines = io.StringIO(newline="")
    csv.writer(lines, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows([["a", "b", "c"], *texts[:200]])
    csv.writer(lines, lineterminator="\n").writerows(texts[200:])
    (tmp_path / "rows.csv").write_text(lines.getvalue())
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(dict(zip("abc", row, strict=True))) + "\n" for row in texts)
    )
    schema = TableSchema.from_json({"categorical": {name: {} for name in "abc"}, "split": "none"}, "the test")
    for name in ("rows.csv", "rows.jsonl"):
        source = TableSource(find_inputs([tmp_path / name]), schema)
        tables = [raw.rows("abc").table for raw in source.open(source.parts(1 << 20)[0], 1000).raw_blocks()]
        rows = pa.concat_tables(tables).to_pylist()
        assert [[row[name] or "" for name in "abc"] for row in rows] == texts


def test_a_damaged_footer_ends_no_process(tmp_path: Path) -> None:
    content = FORMS["rows.parquet"](drawn_rows(5, seed=0))
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for place in range(footer, len(content) - 8, 29):
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        (tmp_path / "rows.parquet").write_bytes(damaged)
        try:
            source = TableSource(find_inputs([tmp_path / "rows.parquet"]), SCHEMA)
            read(source, 1 << 29, 1 << 20)
        except UserError as error:
            assert "rows.parquet" in str(error), error


TOKENS = (
    *("null", "true", "false", "0", "-0", "10", "1.0", "-0.0", "2.5", "1e15", "1e39", "1e400", "NaN", "Infinity"),
    *("9007199254740993", "9223372036854775808", "12345678901234567890", "-9223372036854775809", "9" * 400),
    *('""', '"10"', '"1f"', '"true"', '"1e15"', '"a|b"', '"\\ud800"', '"\\u00e9"', "{}", "[]", "[[1]]", '["a", 1]'),
    *("[1]", "[1.5]", "[12345678901234567890]", "[NaN]", '["a|b"]', "[true, null]"),
)
BEFORE = ("null", "1.5", "1", "true", '"a"', "[1.5]", '["a"]', "NaN")
COLUMNS: dict[str, dict[str, Any]] = {
    "dense": {"dense": {"v": {}}},
    "label": {"label": {"column": "v", "kind": "number"}, "categorical": {"c": {}}},
    "time": {"time": {"column": "v"}, "categorical": {"c": {}}},
    **{kind: {"categorical": {"v": {"kind": kind}}} for kind in ("string", "integer", "hexadecimal", "log_bins")},
    "texts": {"categorical": {"v": {"separator": "|"}}},
    "integers": {"categorical": {"v": {"kind": "integer", "is_list": True}}},
}


@pytest.mark.thorough
@pytest.mark.parametrize("num_before", [1, pytest.param(len(BEFORE), marks=pytest.mark.slow)])
@pytest.mark.parametrize("values", COLUMNS.values(), ids=COLUMNS)
def test_a_value_does_not_depend_on_the_lines_before_it(values: dict[str, Any], num_before: int) -> None:
    source = TableSource([], TableSchema.from_json(values, "the test"))

    def answer(tokens: list[str]) -> str:
        """Returns the reason for which the last of some lines is refused, or its row."""
        text = "".join(f'{{"c": "x", "v": {token}}}\n' for token in tokens).encode()
        block = source.parse(JsonBlock(text, source.parser.columns))
        refused = {row.line: row.reason for row in block.rejected}
        row = refused.get(len(tokens) - 1) or str(reference.rows_of(source.parser, block)[-1])
        return row.replace(": -0.0", ": 0.0")  # equal numbers

    found = {token: answer([token]) for token in TOKENS}
    assert len(set(found.values())) > 3
    draw = random.Random(0)
    for token in TOKENS:
        assert answer([*TOKENS, token]) == found[token], token
        for before in draw.sample(BEFORE, num_before):
            assert answer([*[before] * 21, token]) == found[token], (before, token)
