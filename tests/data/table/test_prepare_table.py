"""Tables of any form to datasets: the same rows give the same dataset, whatever the files, and Criteo's is its own."""

import bz2
import csv
import gzip
import io
import json
import lzma
import math
import os
import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import distembed.data.prepare.pipeline as pipeline
from distembed.base.errors import UserError
from distembed.data import Manifest
from distembed.data.prepare import CriteoOptions, ResourceLimits, prepare_criteo
from distembed.data.prepare.table import TableOptions, prepare_table
from distembed.data.prepare.table.inputs import find_inputs
from distembed.data.prepare.table.source import TableSource
from distembed.data.table.schema import TableSchema
from distembed.data.table.schema_files import load_schema, schema_of_manifest
from tests.data import reference as criteo_reference
from tests.data.reference import folder_bytes
from tests.data.table import reference

ONE_THREAD = ResourceLimits(memory_limit_bytes=1 << 30, threads=1)
SCHEMA = TableSchema.from_json(
    {
        "label": {"column": "rating", "at_least": 4},
        "weight": {"column": "weight"},
        "time": {"column": "at", "format": "%Y-%m-%d %H:%M:%S"},
        "dense": {
            "age": {"transform": "log", "missing": "keep"},
            "price": {"missing": "keep"},
            "stars": {"beside": "genres", "separator": "|", "gap_to": "age"},
        },
        "categorical": {
            "title": {"min_count": 1},
            "user": {"kind": "integer"},
            "device": {"kind": "hexadecimal"},
            "genres": {"separator": "|", "max_length": 3},
            "title_x_user": {"cross": ["title", "user"], "min_count": 1},
        },
        "split": "time:0.6,0.2,0.2",
        "min_count": 2,
    },
    "the test",
)
COLUMNS = ["rating", "weight", "at", "age", "price", "title", "user", "device", "genres", "unused", "stars"]
NULLABLE = {"age", "price", "title", "user", "device", "genres"}


def drawn_rows(num_rows: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows with quotes, separators, blanks and letters of other scripts in their texts."""
    rng = random.Random(seed)
    titles = ["Heat", 'The "Rock"', "Jumanji, Part 2", " padded ", "Amélie", "王", "a\tb", "x|y", "back\\slash"]
    genres = ["Action", "Sci-Fi", "Kids", "Film Noir", "é"]
    rows = []
    for number in range(num_rows):
        row: dict[str, Any] = {
            "rating": rng.choice([1.0, 3.5, 4.0, 5.0]),
            "weight": rng.choice([0.5, 1.0, 2.0]),
            "at": f"2024-01-{rng.randrange(1, 29):02d} {rng.randrange(24):02d}:00:{number % 60:02d}",
            "age": rng.randrange(100),
            "price": rng.choice([0.25, 17.5, -3.0]),
            "title": rng.choice(titles),
            "user": rng.randrange(-20, 40),
            "device": f"{rng.randrange(16):08x}",
            "genres": [rng.choice(genres) for _ in range(rng.randrange(5))],
            "unused": "nothing",
        }
        row = {name: None if name in NULLABLE and rng.random() < 0.1 else value for name, value in row.items()}
        row["stars"] = None if rng.random() < 0.1 else [rng.choice([1.5, 3.0]) for _ in row["genres"] or []]
        rows.append(row)
    return rows


def fields(row: dict[str, Any]) -> list[str]:
    """Returns a row's values as texts; lists are joined."""
    values = [row[name] for name in COLUMNS]
    return ["" if v is None else "|".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]


def delimited(rows: Sequence[dict[str, Any]], separator: str, line_end: str = "\n") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator, lineterminator=line_end)
    writer.writerow(COLUMNS)
    writer.writerows(fields(row) for row in rows)
    return text.getvalue().encode()


def json_lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=bool(number % 2)) + "\n" for number, row in enumerate(rows)).encode()


def parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=70)
    return sink.getvalue()


FORMS = {
    "rows.csv": lambda rows: delimited(rows, ","),
    "rows.CSV.gz": lambda rows: gzip.compress(delimited(rows, ",", "\r\n")),
    "rows.tsv.zst": lambda rows: pa.compress(b"\xef\xbb\xbf" + delimited(rows, "\t"), "zstd", asbytes=True),
    "rows": lambda rows: delimited(rows, ",").removesuffix(b"\n"),
    "rows.jsonl": json_lines,
    "rows.ndjson.gz": lambda rows: gzip.compress(json_lines(rows)),
    "rows.parquet": parquet,
}


def expected(
    rows: Sequence[dict[str, str | None]], schema: TableSchema, shares: Sequence[float] = (0.6, 0.8)
) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each split as a plain script makes them of texts."""
    parsed = []
    for texts in rows:
        one = reference.parse(texts, schema)
        assert isinstance(one, dict)
        for name in (name for name, dense in schema.dense.items() if dense.missing == "zero"):
            values = one[name] if isinstance(one[name], list) else [one[name]]
            filled = [0.0 if math.isnan(value) else value for value in values]
            one[name] = filled if isinstance(one[name], list) else filled[0]
        parsed.append(one)
    places = [row["time"] for row in parsed] if schema.time is not None else list(range(len(parsed)))
    cuts = [sorted(places)[int(len(places) * share)] for share in shares]
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "validation": [], "test": []}
    for row, place in zip(parsed, places, strict=True):
        splits["train" if place < cuts[0] else "validation" if place < cuts[1] else "test"].append(row)
    for name, column in schema.categorical.items():
        counts = Counter(
            value for row in splits["train"] for value in (row[name] if column.holds_lists else [row[name]])
        )
        del counts[None]
        kept = {value: count for value, count in counts.items() if count >= (column.min_count or schema.min_count)}
        for row in (row for split in splits.values() for row in split):
            found = row[name] if column.holds_lists else [row[name]]
            row[name] = [(kept[value], value) if value in kept else value is not None for value in found]
    return splits


def written(folder: Path, schema: TableSchema) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of each split of a dataset, each id as the vocabulary's count and value, if it has one."""
    manifest = Manifest.load(folder)
    names = {}
    for name, vocabulary in manifest.vocabularies.items():
        table = pq.read_table(folder / vocabulary.file).to_pylist()
        assert [row["id"] for row in table] == list(range(2, len(table) + 2))
        assert [row["count"] for row in table] == sorted((row["count"] for row in table), reverse=True)
        names[name] = {0: False, 1: True} | {row["id"]: (row["count"], row["key"]) for row in table}
    splits = {}
    for split in manifest.splits:
        rows = [row for file in sorted((folder / split).glob("*.parquet")) for row in pq.read_table(file).to_pylist()]
        for row in rows:
            for name in schema.categorical:
                row[name] = [names[name][each] for each in (row[name] if isinstance(row[name], list) else [row[name]])]
        splits[split] = rows
    return splits


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS)
def test_a_dataset_is_that_of_a_plain_script(form: str, tmp_path: Path) -> None:
    rows = drawn_rows(211, seed=0)
    (tmp_path / form).write_bytes(FORMS[form](rows))
    manifest = prepare_table([tmp_path / form], tmp_path / "made", SCHEMA, limits=ONE_THREAD)
    assert schema_of_manifest(Manifest.load(tmp_path / "made")) == SCHEMA
    assert manifest.rejected.num_rows == 0
    texts = [{name: text or None for name, text in zip(COLUMNS, fields(row), strict=True)} for row in rows]
    require_equal(written(tmp_path / "made", SCHEMA), expected(texts, SCHEMA))


def require_equal(found: dict[str, list[dict[str, Any]]], wanted: dict[str, list[dict[str, Any]]]) -> None:
    """Makes sure that the splits have the same rows in the same order."""
    assert {name: len(split) for name, split in found.items()} == {name: len(split) for name, split in wanted.items()}
    for name, split in wanted.items():
        for one, other in zip(found[name], split, strict=True):
            assert set(one) == set(other)
            for column, value in other.items():
                assert reference.same(float("nan") if one[column] is None else one[column], value), (column, one, other)


def data_files(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in folder_bytes(folder).items() if name.endswith(".parquet")}


@pytest.mark.thorough
def test_parts_and_several_files_are_as_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = drawn_rows(150, seed=1)
    (tmp_path / "one.csv").write_bytes(delimited(rows, ","))
    prepare_table([tmp_path / "one.csv"], tmp_path / "whole", SCHEMA, limits=ONE_THREAD)
    monkeypatch.setattr(pipeline, "PART_BYTES", 1500)
    (tmp_path / "days").mkdir()
    for day, (start, stop) in enumerate([(0, 60), (60, 60), (60, 61), (61, 150)]):
        (tmp_path / "days" / f"day_{day}.csv").write_bytes(delimited(rows[start:stop], ","))
    (tmp_path / "days" / "_done").write_text("")
    for name, inputs in {"cut": ["one.csv"], "folder": ["days"], "pattern": ["days/day_*.csv"]}.items():
        manifest = prepare_table([tmp_path / each for each in inputs], tmp_path / name, SCHEMA, limits=ONE_THREAD)
        assert data_files(tmp_path / name) == data_files(tmp_path / "whole"), name
        assert sum(source.num_rows for source in manifest.sources) == len(rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "one.parquet", row_group_size=11)
    prepare_table([tmp_path / "one.parquet"], tmp_path / "groups", SCHEMA, limits=ONE_THREAD)
    assert data_files(tmp_path / "groups") == data_files(tmp_path / "whole")


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of the dataset of two equal files."""
    folder = tmp_path_factory.mktemp("twice")
    for name in ("one.csv", "other.csv"):
        (folder / name).write_bytes(FORMS["rows.csv"](drawn_rows(90, seed=2)))
    prepare_table([folder / "one.csv", folder / "other.csv"], folder / "made", SCHEMA, limits=ONE_THREAD)
    return data_files(folder / "made")


@pytest.mark.parametrize("form", ["rows.csv", "rows.CSV.gz", "rows.tsv.zst", "rows.jsonl"])
def test_a_pipe_is_read_as_a_file(form: str, twice: dict[str, bytes], tmp_path: Path) -> None:
    """Beside a file, and written byte after byte at first, as slow writers do."""
    content = FORMS[form](drawn_rows(90, seed=2))
    (tmp_path / form).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with open(tmp_path / "pipe", "wb", buffering=0) as file:
            for piece in [*(content[place : place + 1] for place in range(20)), content[20:]]:
                file.write(piece)

    writer = threading.Thread(target=write)
    writer.start()
    manifest = prepare_table([tmp_path / form, tmp_path / "pipe"], tmp_path / "piped", SCHEMA, limits=ONE_THREAD)
    writer.join()
    assert [source.name for source in manifest.sources] == [form, "pipe-2"]
    assert data_files(tmp_path / "piped") == twice


@pytest.mark.parametrize(("parser", "hash_size"), [("table", None), ("criteo", 1000)])
def test_criteo_by_its_schema_is_criteo(parser: str, hash_size: int | None, tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(criteo_reference.content(300, seed=5, short=0.05))
    options = CriteoOptions(hash_size=hash_size, min_count=3, missing="keep")
    prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "criteo", options, ONE_THREAD)
    values = load_schema("criteo").to_json() | {"parser": parser}
    prepare_table(
        [tmp_path / "rows.tsv"],
        tmp_path / "table",
        TableSchema.from_json(values, "the test"),
        TableOptions(hash_size=hash_size, min_count=3, missing="keep"),
        ONE_THREAD,
    )
    assert data_files(tmp_path / "table") == data_files(tmp_path / "criteo")
    assert len(data_files(tmp_path / "table")) >= 3


def test_malformed_lines_are_listed_by_their_numbers(tmp_path: Path) -> None:
    lines = delimited(drawn_rows(40, seed=3), ",").splitlines(keepends=True)
    lines[3] = b"1,2\n"
    lines[7] = b'5,1,2024-01-01 00:00:00,1,1,"open,1,0a,a,x,1\n'
    lines[9] = b"5,1,2024-01-01 00:00:00,1,1,\xff\xfe,1,0a,a,x,1\n"
    lines[20] = b"five,1,2024-01-01 00:00:00,1,1,a,1,0a,a,x,1\n"
    lines[21] = b"5,1,2024-01-01,1,1,a,1,0a,a,x,1\n"
    lines[22] = b"5,1,2024-01-01 00:00:00,1,1,a,1,0xa,a,x,1\r\n"
    lines[40] = b"5,-1,2024-01-01 00:00:00,1,1,a,1,0xa,a,x,1"
    (tmp_path / "rows.csv").write_bytes(b"".join(lines))
    manifest = prepare_table([tmp_path / "rows.csv"], tmp_path / "made", SCHEMA, TableOptions(max_rejected=0.5))
    listed = [line.split(b"\t", 3) for line in (tmp_path / "made/rejected.tsv").read_bytes().split(b"\n")[1:-1]]
    assert [(int(line), reason) for _, line, reason, _ in listed] == [
        (4, b"columns"),
        (8, b"columns"),
        (10, b"text"),
        (21, b"label"),
        (22, b"time"),
        (23, b"id"),
        (41, b"weight"),
    ]
    assert [text for *_, text in listed] == [lines[int(line) - 1].rstrip(b"\r\n") for _, line, _, _ in listed]
    assert manifest.sources[0].num_rows == 40 and manifest.rejected.num_rows == 7


def test_quotation_marks_of_a_header_are_no_values(tmp_path: Path) -> None:
    values = {"categorical": {"a": {}}, "text": {"newlines_in_values": True}}
    (tmp_path / "rows.csv").write_bytes(b'a,5" screen\n' + b'"x\ny",1\nz,2\n' * 50)
    source = TableSource(find_inputs([tmp_path / "rows.csv"]), TableSchema.from_json(values, "the test"))
    for block_bytes in (10, 100, 1 << 20):
        blocks = [source.parse(raw) for raw in source.open(source.parts(1 << 20)[0], block_bytes).raw_blocks()]
        assert sum(block.num_rows for block in blocks) == sum(block.num_lines for block in blocks) == 100


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("newlines_in_values", [False, True])
@pytest.mark.parametrize("lines", [[b"", b"x,1", b","], [b"x,1", b"", b"", b",", b""] * 20])
def test_empty_lines_are_no_rows_and_lines_of_missing_values_are(
    tmp_path: Path, lines: list[bytes], end: bytes, newlines_in_values: bool
) -> None:
    values = {"categorical": {"a": {}}, "text": {"newlines_in_values": newlines_in_values}}
    (tmp_path / "rows.csv").write_bytes(end.join([b"a,b", *lines, b""]))
    source = TableSource(find_inputs([tmp_path / "rows.csv"]), TableSchema.from_json(values, "the test"))
    (block,) = [source.parse(raw) for raw in source.open(source.parts(1 << 20)[0], 1 << 20).raw_blocks()]
    wanted = [(number, "columns", b"") for number, line in enumerate(lines) if not line]
    assert [(row.line, row.reason, row.text) for row in block.rejected] == wanted
    assert (block.num_lines, block.num_rows) == (len(lines), len(lines) - len(wanted))


def test_values_of_several_lines_are_read_where_the_schema_says_so(tmp_path: Path) -> None:
    schema = TableSchema.from_json(
        {
            "categorical": {"a": {"min_count": 1}, "b": {"min_count": 1}},
            "split": "none",
            "text": {"newlines_in_values": True},
        },
        "the test",
    )
    (tmp_path / "rows.csv").write_bytes(b'a,b\n"x\ny",1\n"p ""q""\n\n",2\nz,3\n"one field"\n')
    manifest = prepare_table([tmp_path / "rows.csv"], tmp_path / "made", schema, TableOptions(max_rejected=0.5))
    keys = pq.read_table(tmp_path / "made" / manifest.vocabularies["a"].file)["key"].to_pylist()
    assert sorted(keys) == ['p "q"\n\n', "x\ny", "z"]
    assert manifest.rejected.num_rows == 1


PACKED = gzip.compress(delimited(drawn_rows(9, seed=0), ","), mtime=0)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("rows.csv", b"", ["no rows"]),
        ("rows.csv", b"rating,weight,at\n", ["no column 'age'"]),
        (
            "rows.csv",
            b"Rating,weight,at,age,price,title,user,device,genre,stars\n",
            ["'genres' for", "Did you mean"][1:],
        ),
        ("rows.jsonl", b'{"rating": 1}\n', ["no column 'weight'"]),
        ("rows.jsonl", b'[{"rating": 1}]\n', ["no JSON object", "jq"]),
        ("rows.parquet", b"no parquet", ["named as a Parquet file"]),
        ("rows.parquet", b"PAR1 cut short", ["cannot be read as Parquet"]),
        ("rows.csv", b"PK\x03\x04", ["is a zip archive", "into a pipe"]),
        ("rows.txt", bz2.compress(b"x"), ["is a bzip2 file"]),
        ("rows.txt", lzma.compress(b"x"), ["is an xz file"]),
        ("rows.tsv", "é\t".encode("utf-16"), ["is text in UTF-16 or UTF-32", "iconv"]),
        ("rows.tsv.gz", gzip.compress("é\t".encode("utf-32"), mtime=0), ["is text in UTF-16 or UTF-32", "iconv"]),
        *(("rows.csv.gz", PACKED[:cut], []) for cut in (10, 40, -9, -4)),
        ("rows.csv.gz", PACKED[:30] + bytes([PACKED[30] ^ 255]) + PACKED[31:], ["damaged gzip"]),
        ("rows.csv.zst", pa.compress(b"x" * 5000, "zstd", asbytes=True)[:-3], ["damaged zstd"]),
    ],
)
def test_what_is_no_such_table_is_refused(name: str, content: bytes, words: list[str], tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        prepare_table([tmp_path / name], tmp_path / "made", SCHEMA, limits=ONE_THREAD)
    assert all(word in str(error.value) for word in (*words, name)), error.value
    assert not (tmp_path / "made").exists()


def test_columns_of_odd_names_have_vocabularies_of_their_own(tmp_path: Path) -> None:
    names = ["column-1", "x y", "a/b", "..", "Column-0", "z"]
    (tmp_path / "rows.csv").write_text("y," + ",".join(names) + "\n1," + ",".join(f"of {name}" for name in names))
    values = {"label": {"column": "y"}, "categorical": {name: {} for name in names}, "split": "none", "min_count": 1}
    manifest = prepare_table([tmp_path / "rows.csv"], tmp_path / "out", TableSchema.from_json(values, "the test"))
    for name in names:
        kept = pq.read_table(tmp_path / "out" / manifest.vocabularies[name].file)
        assert kept["key"].to_pylist() == [f"of {name}"]


@pytest.mark.parametrize("wrong", ['["a"]', "{}"])
def test_a_line_of_another_type_is_rejected_whatever_is_beside_it(wrong: str, tmp_path: Path) -> None:
    values = {"label": {"column": "y"}, "categorical": {"c": {"kind": "hexadecimal"}}, "split": "none", "min_count": 1}
    schema = TableSchema.from_json(values, "the test")
    good, bad = '{"y": 1, "c": "a"}\n', f'{{"y": 1, "c": {wrong}}}\n'
    for name, lines in {"first": bad * 30 + good, "last": good * 30 + bad, "mixed": bad + good + bad}.items():
        (tmp_path / f"{name}.jsonl").write_text(lines)
        options = TableOptions(max_rejected=1)
        manifest = prepare_table([tmp_path / f"{name}.jsonl"], tmp_path / name, schema, options, ONE_THREAD)
        assert manifest.rejected.num_rows == lines.count(bad)
        assert manifest.splits["train"].num_rows == lines.count(good)


def test_ids_are_applied_to_values_of_the_same_meaning(tmp_path: Path) -> None:
    values = {"dense": {"n": {"transform": "log"}}, "categorical": {"c": {}, "i": {"kind": "integer"}}, "split": "none"}
    (tmp_path / "rows.csv").write_text("n,c,i\n1,a,1\n2,b,2\n")
    prepare_table([tmp_path / "rows.csv"], tmp_path / "base", TableSchema.from_json(values, "the test"))
    options = TableOptions(vocabulary=tmp_path / "base", min_count=1, grow=True)
    for other, said in [
        ({"dense": {"n": {}}}, "dense.n.transform is 'none' and was 'log'"),
        ({"dense": {"n": {"transform": "log", "missing": "keep"}}}, "dense.n.missing is 'keep'"),
        ({"categorical": {"c": {}, "i": {"kind": "log_bins"}}}, "categorical.i.kind is 'log_bins'"),
        (
            {"categorical": {"c": {"cross": ["c", "i"]}, "i": {"kind": "integer"}}},
            "categorical.c is a cross of c and i",
        ),
    ]:
        with pytest.raises(UserError, match=f"--vocabulary.*{said}"):
            schema = TableSchema.from_json({**values, **other}, "the test")
            prepare_table([tmp_path / "rows.csv"], tmp_path / "made", schema, options)
    renamed = {**values, "dense": {"n": {"transform": "log", "column": "i"}}}
    prepare_table([tmp_path / "rows.csv"], tmp_path / "made", TableSchema.from_json(renamed, "the test"), options)


def test_lines_after_a_quotation_mark_that_is_never_closed_are_rejected(tmp_path: Path) -> None:
    values = {"categorical": {"a": {}}, "split": "none", "text": {"newlines_in_values": True}}
    schema = TableSchema.from_json(values, "the test")
    (tmp_path / "rows.csv").write_bytes(b'a,b\n"x\ny",1\nz,2\n"never,3\n' + b"w,4\n" * 500 + b"w,5")
    manifest = prepare_table([tmp_path / "rows.csv"], tmp_path / "made", schema, TableOptions(max_rejected=1))
    assert (manifest.splits["train"].num_rows, manifest.rejected.num_rows) == (2, 502)
    with pytest.raises(UserError, match="502 of 504 rows are malformed"):
        prepare_table([tmp_path / "rows.csv"], tmp_path / "other", schema)


def test_milliseconds_for_seconds_are_told(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"t": 1414454400000, "c": "a"}\n' * 3)
    values: dict[str, Any] = {"time": {"column": "t"}, "categorical": {"c": {}}, "split": "none", "min_count": 1}
    with pytest.raises(UserError, match="time.format is 'auto', .* since 1970 .* give `format: milliseconds`"):
        prepare_table([tmp_path / "rows.jsonl"], tmp_path / "out", TableSchema.from_json(values, "the test"))
    values["time"]["format"] = "milliseconds"
    prepare_table([tmp_path / "rows.jsonl"], tmp_path / "out", TableSchema.from_json(values, "the test"))
    assert pq.read_table(tmp_path / "out" / "train")["time"].to_pylist() == [1414454400] * 3


def test_a_key_that_a_file_lacks_is_missing_there(tmp_path: Path) -> None:
    values = {"dense": {"x": {}}, "categorical": {"c": {}, "l": {"separator": " "}}, "split": "none", "min_count": 1}
    schema = TableSchema.from_json(values, "the test")
    without, late = [{"c": "a"}] * 40, [{"c": "a", "x": 2, "l": "b c"}]
    files = {"one": without + late, "two": without, "three": late + without}
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = [tmp_path / f"{name}.jsonl" for name in ("two", "one", "three")]
    manifest = prepare_table(inputs, tmp_path / "out", schema, limits=ONE_THREAD)
    assert manifest.rejected.num_rows == 0
    rows = pq.read_table(tmp_path / "out" / "train").to_pylist()
    numbers = [row.get("x", 0) for name in ("two", "one", "three") for row in files[name]]
    assert [row["x"] for row in rows] == numbers
    assert [len(row["l"]) for row in rows] == [2 if number else 0 for number in numbers]


def test_a_key_that_no_first_megabyte_has_is_listed_or_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distembed.data.prepare.table.inputs.PIECE_BYTES", 1000)
    lines = [{"price": 1, "c": "a"}] * 100 + [{"price": 1, "c": "a", "late": 5}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    values: dict[str, Any] = {"dense": {"late": {}}, "categorical": {"c": {}}, "split": "none"}
    with pytest.raises(UserError, match="no column 'late'.* It has 'price', 'c'.* first megabyte .* columns: "):
        prepare_table([tmp_path / "rows.jsonl"], tmp_path / "out", TableSchema.from_json(values, "the test"))
    values["text"] = {"header": False, "columns": ["late"]}
    prepare_table([tmp_path / "rows.jsonl"], tmp_path / "out", TableSchema.from_json(values, "the test"))
    assert pq.read_table(tmp_path / "out" / "train")["late"].to_pylist() == [0] * 100 + [5]
    values["dense"] = {"prise": {}}
    with pytest.raises(UserError, match="no column 'prise'.* Did you mean 'price'"):
        prepare_table([tmp_path / "rows.jsonl"], tmp_path / "none", TableSchema.from_json(values, "the test"))
