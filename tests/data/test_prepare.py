"""Preparing Criteo rows, against an independent computation that goes line by line."""

import gzip
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import (
    CriteoOptions,
    ProgressUpdate,
    ResourceLimits,
    dataset_warnings,
    prepare_criteo,
    write_parquet,
)
from distembed.data.prepare.table.criteo_rows import parse_regular
from distembed.data.prepare.table.source import TableSource
from distembed.data.prepare.table.text_rows import DelimitedBlock, Dialect
from distembed.data.reader import BatchOrder, BatchReader
from distembed.data.table.blocks import ParsedBlock
from tests.data import reference
from tests.data.table.reference import mutated

SPLITS = ("train", "validation", "test")
CATEGORICAL = [f"C{i}" for i in range(1, 27)]
DENSE = [f"I{i}" for i in range(1, 14)]
SOURCE = TableSource([], CriteoOptions().schema())
DIALECT = Dialect(("label", *DENSE, *CATEGORICAL), "\t", None, False, ("",))


def read_split(dataset: Path, manifest: Manifest, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns labels, dense values and ids of a split, in order."""
    tables = [pq.read_table(dataset / file.path) for file in manifest.splits[name].files]
    assert [table.num_rows for table in tables] == [file.num_rows for file in manifest.splits[name].files]
    labels = [table["label"].to_numpy() for table in tables]
    dense = [np.stack([table[column].to_numpy() for column in DENSE], 1) for table in tables]
    ids = [np.stack([table[column].to_numpy() for column in CATEGORICAL], 1) for table in tables]
    empty = [np.zeros(0), np.zeros((0, 13)), np.zeros((0, 26))]
    return tuple(np.concatenate([part, *parts]) for part, parts in zip(empty, (labels, dense, ids), strict=True))


def check_against_reference(
    dataset: Path, files: dict[str, bytes], bounds: list[int] | None, min_count: int
) -> list[reference.Row]:
    """Checks that every line is a row of exactly one split, in order, or a line of rejected.tsv."""
    parsed = [
        (name, number, line, reference.parse(line))
        for name, content in files.items()
        for number, line in enumerate(reference.lines_of(content), start=1)
    ]
    rows = [row for *_, row in parsed if isinstance(row, reference.Row)]
    bounds = bounds or [0, len(rows) * 8 // 10, len(rows) * 9 // 10, len(rows)]
    vocabulary = reference.vocabularies(rows[: bounds[1]], min_count)
    manifest = Manifest.load(dataset)
    assert list(manifest.splits) == list(SPLITS)
    for name, start, stop in zip(SPLITS, bounds[:-1], bounds[1:], strict=True):
        labels, dense, ids = read_split(dataset, manifest, name)
        expected = rows[start:stop]
        assert labels.tolist() == [row.label for row in expected]
        numbers = np.nan_to_num(np.array([r.dense for r in expected]).reshape(-1, 13))
        np.testing.assert_allclose(dense, numbers, rtol=3e-7, atol=0)
        assert ids.tolist() == [list(reference.ids(row, vocabulary)) for row in expected]
        split = manifest.splits[name]
        assert split.num_rows == stop - start
        if expected:
            assert split.label_rate == pytest.approx(labels.mean())
    rejected = [(name, number, row, line) for name, number, line, row in parsed if isinstance(row, str)]
    check_rejected(dataset, manifest, rejected)
    assert [feature.num_embeddings for feature in manifest.schema.categorical] == [len(v) + 2 for v in vocabulary]
    return rows


def check_rejected(dataset: Path, manifest: Manifest, expected: list[tuple[str, int, str, bytes]]) -> None:
    assert manifest.rejected.num_rows == len(expected)
    assert manifest.rejected.by_reason == dict(Counter(reason for _, _, reason, _ in expected))
    if not expected:
        assert not (dataset / "rejected.tsv").exists()
        return
    lines = (dataset / "rejected.tsv").read_bytes().split(b"\n")
    assert lines[0] == b"file\tline\treason\trow" and lines[-1] == b""
    wanted = [f"{name}\t{number}\t{why}\t".encode() + row.removesuffix(b"\r") for name, number, why, row in expected]
    assert lines[1:-1] == wanted


@pytest.mark.parametrize(("min_count", "newline"), [(1, b"\r\n"), (3, b"\n")])
def test_every_row_is_in_one_split_or_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, min_count: int, newline: bytes
) -> None:
    monkeypatch.setattr(ResourceLimits, "block_bytes", lambda limits, has_lists: 10_000)
    monkeypatch.setattr(write_parquet, "ROW_GROUP_ROWS", 64)
    files = {
        "day_2": reference.content(350, 1, malformed=0.05, newline=newline),
        "day_10": reference.content(250, 2, malformed=0.01, short=0.2, newline=newline).removesuffix(newline),
        "day_11": reference.content(150, 3, newline=newline),
    }
    for name, content in files.items():
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    prepare_criteo([tmp_path / "in"], tmp_path / "out", CriteoOptions(min_count, max_rejected=0.5))
    check_against_reference(tmp_path / "out", files, None, min_count)
    sources = Manifest.load(tmp_path / "out").sources
    assert [(s.name, s.bytes, s.num_rows) for s in sources] == [
        (name, len(content), len(reference.lines_of(content))) for name, content in files.items()
    ]


def parse_block(text: bytes) -> ParsedBlock:
    """Parses lines as a preparation does, in whichever way the block takes."""
    return SOURCE.parse(DelimitedBlock(text, DIALECT))


def check_block(text: bytes) -> ParsedBlock:
    """Returns the block of some lines, once each is found to be the row, or malformed by the reason, of the line."""
    block = parse_block(text)
    lines = reference.lines_of(text)
    expected = [reference.parse(line) for line in lines]
    rows = [row for row in expected if isinstance(row, reference.Row)]
    assert block.num_lines == len(lines)
    assert block.numbers[0].tolist() == [row.label for row in rows]
    for feature, column in enumerate(block.ids):
        keys = [int(column.keys[code]) if code else None for code in column.codes]
        assert keys == [row.keys[feature] for row in rows]
    for column, values in enumerate(block.numbers[1:]):
        np.testing.assert_allclose(values, [row.dense[column] for row in rows], rtol=3e-7)
    wrong = [
        (number, why, line.removesuffix(b"\r"))
        for number, (line, why) in enumerate(zip(lines, expected, strict=True))
        if isinstance(why, str)
    ]
    assert [(row.line, row.reason, row.text) for row in block.rejected] == wrong
    return block


@pytest.mark.parametrize(
    ("num_inputs", "seed"), [(40, 0), *(pytest.param(1000, seed, marks=pytest.mark.slow) for seed in range(1, 6))]
)
def test_mutated_rows_are_kept_or_rejected(num_inputs: int, seed: int) -> None:
    """So are others; some blocks are regular, and are parsed to the bit as beside a row that is not."""
    rng = random.Random(seed)
    num_regular = num_rejected = 0
    for number in range(num_inputs):
        text = reference.content(
            rng.choice([1, 5, 30]),
            seed * num_inputs + number,
            malformed=rng.choice([0, 0, 0.1]),
            short=rng.choice([0, 0, 0.1]),
            newline=rng.choice([b"\n", b"\r\n"]),
        )
        text = (mutated(text, rng) if rng.random() < 0.8 else text) or b"\n"
        num_rejected += len(check_block(text).rejected)
        regular = parse_regular(text)
        if regular is not None:
            num_regular += 1
            beside = parse_block(b"\n" + text)
            assert len(beside.rejected) == 1 and beside.num_rows == regular.num_rows
            assert all(map(np.array_equal, map(bits, beside.numbers), map(bits, regular.numbers)))
    assert min(num_regular, num_rejected) > num_inputs / 10


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint8)


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**4000, "000000000000000000012"])
def test_integers_of_64_bits_are_dense_values_and_others_malformed(value: int | str) -> None:
    number = int(value)
    fields = reference.content(1, 0).strip(b"\n").split(b"\t")
    fields[3] = str(value).encode()
    block = parse_block(b"\t".join(fields))
    if -(2**63) <= number < 2**63:
        assert block.num_rows == 1 and block.numbers[3][0] == pytest.approx(np.log1p(max(number, 0)))
    else:
        assert [row.reason for row in block.rejected] == ["dense"]


@pytest.mark.parametrize("days", [(1, 2, 10), (8,)])
def test_days(tmp_path: Path, days: tuple[int, ...]) -> None:
    """A file is a day; a single file is seven of them."""
    files = {f"day_{day}": reference.content(215 + day, day, malformed=0.01) for day in days}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    prepare_criteo([tmp_path / name for name in files], tmp_path / "out", CriteoOptions(split="days", max_rejected=0.1))
    good = [sum(isinstance(reference.parse(line), reference.Row) for line in c.splitlines()) for c in files.values()]
    total = sum(good)
    before = sum(good[:-1]) or total * 6 // 7
    check_against_reference(tmp_path / "out", files, [0, before, before + (total - before) // 2, total], 2)


def test_tables_of_more_than_2_to_the_31_rows_have_wide_ids(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(reference.content(50, 9))
    manifest = prepare_criteo([tmp_path / "a.tsv"], tmp_path / "a", CriteoOptions(hash_size=2**40))
    column = pq.read_table(tmp_path / "a" / manifest.splits["train"].files[0].path)["C7"].to_numpy()
    assert column.dtype == np.int64 and column.max() > 2**32 and column.max() < 2**40


@pytest.mark.parametrize("short", [0.0, 0.5])
def test_missing_integers_are_kept(tmp_path: Path, short: float) -> None:
    """They are null where the text is empty, in both ways of parsing; all else is as with zeros in their place."""
    text = reference.content(200, seed=3, short=short)
    (tmp_path / "a.tsv").write_bytes(text)
    kept = prepare_criteo([tmp_path / "a.tsv"], tmp_path / "kept", CriteoOptions(missing="keep", hash_size=50))
    zeros = prepare_criteo([tmp_path / "a.tsv"], tmp_path / "zeros", CriteoOptions(hash_size=50))
    assert kept.schema.missing_dense and kept.preparation["missing"] == "keep"
    assert not zeros.schema.missing_dense and "missing" not in zeros.preparation
    fields = [line.split(b"\t")[1:14] for line in reference.lines_of(text)]
    is_empty = np.array([[not field for field in row] for row in fields])
    seen = []
    for split in kept.splits:
        ours, theirs = (pq.read_table(tmp_path / name / split) for name in ("kept", "zeros"))
        nulls = np.stack([ours[name].is_null().to_numpy() for name in DENSE], 1)
        seen.append(nulls)
        for column in ours.column_names:
            filled = ours[column].fill_null(0) if column in DENSE else ours[column]
            assert filled.to_pylist() == theirs[column].to_pylist()
        (batch,) = BatchReader(tmp_path / "kept", split, BatchOrder(1000, False, 0, False))
        assert np.array_equal(batch["dense_features"].isnan().numpy(), nulls)
    assert is_empty.any() and np.array_equal(np.concatenate(seen), is_empty)


def test_another_kind_of_file_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResourceLimits, "block_bytes", lambda limits, has_lists: 10_000)
    (tmp_path / "a.csv").write_bytes(b"a,b,c\n" * 20_000)
    with pytest.raises(UserError, match="nothing more is read"):
        prepare_criteo([tmp_path / "a.csv"], tmp_path / "out", limits=ResourceLimits(threads=1))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no rows"),
        (b"\n", "malformed"),
        (reference.content(1, 1), "training part has no rows"),
        (
            reference.content(500, 3, malformed=0.05),
            r"(?s)of 500 rows are malformed(?=.*a\.tsv:)(?=.*columns)(?=.*label)(?=.*dense)(?=.*id).*max_rejected=0.01",
        ),
    ],
    ids=["nothing", "an empty line", "one row", "malformed rows"],
)
def test_too_few_rows_that_are_well_formed(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.tsv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare_criteo([tmp_path / "a.tsv"], tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tsv"]


def test_progress_goes_up_to_the_whole(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(reference.content(300, 1))
    updates: list[ProgressUpdate] = []
    prepare_criteo([tmp_path / "a.tsv"], tmp_path / "out", progress=updates.append)
    for stage in ("read", "vocabulary", "write"):
        of_stage = [update for update in updates if update.stage == stage]
        assert [u.bytes_done for u in of_stage] == sorted(u.bytes_done for u in of_stage)
        assert of_stage[-1].bytes_done == of_stage[-1].bytes_total and of_stage[-1].rows_done == 300


def test_real_rows(criteo_sample: Path, tmp_path: Path) -> None:
    """The first 3,000 real rows, against the independent computation; they are ordinary, and not warned of."""
    with gzip.open(criteo_sample) as file:
        content = b"".join(next(file) for _ in range(3000))
    (tmp_path / "real.tsv").write_bytes(content)
    notes: list[str] = []
    manifest = prepare_criteo([tmp_path / "real.tsv"], tmp_path / "out", note=notes.append)
    rows = check_against_reference(tmp_path / "out", {"real.tsv": content}, None, 2)
    assert len(rows) == 3000 and not notes and not list(dataset_warnings(manifest))
