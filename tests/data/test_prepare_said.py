"""What ``distembed prepare criteo`` says: which rows were lost and why, and what a model cannot learn from."""

from collections import Counter
from pathlib import Path

import pytest

from distembed.base.errors import UserError
from distembed.commands import cli
from distembed.commands.shared import console, errors
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import CriteoOptions, prepare_criteo
from tests.data import reference

ROWS = reference.content(400, 1)
LINE = ROWS.split(b"\n")[0]


def prepare(*arguments: object) -> str:
    """Runs the command within this process, and returns what it prints."""
    with console.capture() as said, errors.capture() as noted:
        cli.app(["prepare", "criteo", *map(str, arguments)], standalone_mode=False)
    return noted.get() + said.get()


def test_lost_rows_are_counted_with_their_reasons_and_place(tmp_path: Path) -> None:
    content = reference.content(400, 1, malformed=0.05)
    (tmp_path / "rows.tsv").write_bytes(content)
    said = prepare(tmp_path / "rows.tsv", "-o", tmp_path / "out", "--max-rejected", "0.1", "--hash-size", 9)
    reasons = Counter(row for row in map(reference.parse, reference.lines_of(content)) if isinstance(row, str))
    listed = ", ".join(f"{name} {reasons[name]}" for name in ("columns", "label", "dense", "id"))
    place, lost = tmp_path / "out" / "rejected.tsv", reasons.total()
    assert f"{lost} of 400 rows were rejected, being malformed ({listed}): they are listed in {place}" in said
    assert len(place.read_bytes().split(b"\n")) == 1 + lost + 1


def test_that_no_row_was_lost_is_said_too(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(ROWS)
    said = prepare(tmp_path / "rows.tsv", "-o", tmp_path / "out")
    assert "none of 400 rows were rejected" in said and "note:" not in said
    assert "train: 320 rows, label rate 0.5" in said and f"dataset {tmp_path / 'out'}" in said


def rows_with(label: bytes | None = None, columns: dict[int, bytes] | None = None) -> bytes:
    """Returns the rows with another label, and with other values in some columns."""
    rows = [line.split(b"\t") for line in reference.lines_of(ROWS)]
    for row in rows:
        row[0] = row[0] if label is None else label
        for column, value in (columns or {}).items():
            row[column] = value
    return b"".join(b"\t".join(row) + b"\n" for row in rows)


@pytest.mark.parametrize("label", [0, 1])
def test_one_label_alone_is_noted(tmp_path: Path, label: int) -> None:
    (tmp_path / "rows.tsv").write_bytes(rows_with(b"%d" % label))
    said = prepare(tmp_path / "rows.tsv", "-o", tmp_path / "out", "--hash-size", 9)
    assert f"note: every label is {label}" in said


def test_a_split_with_one_label_or_none_is_noted(tmp_path: Path) -> None:
    lines = [label + LINE[1:] for label in (b"0", b"1")]
    for name, content in (("rows", [*lines * 4, lines[0], lines[1]]), ("two", lines)):
        (tmp_path / f"{name}.tsv").write_bytes(b"\n".join([*content, b""]))
    said = prepare(tmp_path / "rows.tsv", "-o", tmp_path / "rows", "--hash-size", 9)
    assert "every label of validation is 0" in said and "every label of test is 1" in said
    assert "no rows are in validation" in prepare(tmp_path / "two.tsv", "-o", tmp_path / "two", "--hash-size", 9)


def test_vocabularies_that_hold_nothing_are_noted(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(rows_with(columns={14: b"", 39: b""}))
    said = prepare(tmp_path / "rows.tsv", "-o", tmp_path / "out")
    assert "vocabularies without ids, since no training row has a value: C1, C26" in said and "seen fewer" not in said
    said = prepare(tmp_path / "rows.tsv", "-o", tmp_path / "rare", "--min-count", 1000)
    assert "every value was seen fewer than 1000 times in training: C2, C3," in said
    manifest = Manifest.load(tmp_path / "rare")
    assert all(entry.num_ids == 0 for entry in manifest.vocabularies.values())


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--hash-size", 2**62 + 1, "2 to 4611686018427387904"),
        ("--hash-size", 1, "2 to 4611686018427387904"),
        ("--min-count", 0, "1 to 9223372036854775807"),
        ("--hash-seed", -1, "0 to 18446744073709551615"),
        ("--split", "0.8,0.1,0.2", "three shares that add up to 1"),
        ("--split", "1.1,-0.2,0.1", "three shares that add up to 1"),
        ("--split", "days!", "three shares that add up to 1"),
        ("--split", "1/0,1,1", "three shares that add up to 1"),
        ("--split", "0,0.5,0.5", "three shares that add up to 1"),
        ("--split", "time:0.8,0.1,0.1", "neither a time nor such a column"),
        ("--split", "column:C1", "neither a time nor such a column"),
        ("--missing", "drop", "zero"),
        ("--threads", 0, "1 to 1024"),
        ("--memory-limit", "1KB", "320MiB or more"),
        ("--min-count", 10**30, "1 to 9223372036854775807"),
        ("--hash-seed", 2**64, "0 to 18446744073709551615"),
        ("--split", "1e999999999,1,1", "three shares that add up to 1"),
        ("--split", "0.5,0.5", "three shares that add up to 1"),
        ("--max-rejected", "nan", "between 0 and 1"),
        ("--max-rejected", 7, "between 0 and 1"),
        ("--threads", 10**9, "1 to 1024"),
    ],
)
def test_an_impossible_option_is_named_with_what_is_allowed(
    tmp_path: Path, option: str, value: object, said: str
) -> None:
    (tmp_path / "rows.tsv").write_bytes(ROWS)
    with pytest.raises(UserError) as caught:
        prepare(tmp_path / "rows.tsv", "-o", tmp_path / "out", option, value)
    assert option in str(caught.value) and str(value) in str(caught.value) and said in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.tsv"]


def test_more_memory_and_threads_than_there_are_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(ROWS)
    prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "out", CriteoOptions(hash_size=9))
    prepare(
        tmp_path / "rows.tsv", "-o", tmp_path / "huge", "--memory-limit", "1e30GB", "--threads", 1024, "--hash-size", 9
    )
    assert reference.folder_bytes(tmp_path / "out") == reference.folder_bytes(tmp_path / "huge")
