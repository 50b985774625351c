"""What may be wrong with files of interactions, and what is made of odd ones."""

import gzip
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import RunError, UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare import dataset_warnings, describe_dataset
from distembed.data.prepare.interactions import (
    InteractionColumns,
    InteractionFiles,
    Preparation,
    RatingOptions,
    SequenceOptions,
    prepare_ratings,
    prepare_sequences,
    tables,
)
from distembed.data.prepare.options import SPLIT_NAMES
from tests.data.interactions.test_interactions import read
from tests.data.reference import folder_bytes

HEADER = "user,item,rating,time\n"
HALVES = RatingOptions(split="time:1/2,1/2", max_rejected=1)
TIMED = InteractionColumns(rating="rating", time="time")


def prepared(tmp_path: Path, text: str, options: RatingOptions = HALVES) -> Manifest:
    (tmp_path / "rows.csv").write_bytes(text.encode("latin-1"))
    return prepare_ratings(InteractionFiles([tmp_path / "rows.csv"]), Preparation(tmp_path / "out"), TIMED, options)


def both(tmp_path: Path, manifest: Manifest) -> list[dict[str, Any]]:
    return [row for split in manifest.splits for row in read(tmp_path / "out", split)]


def test_malformed_rows_are_listed_with_line_and_reason(tmp_path: Path) -> None:
    rows = [
        "a,x,1,1",
        ",x,1,2",
        "a,,1,3",
        "a,y,nan,4",
        "a,y,1e999,5",
        "a,y,five,6",
        "a,y,,7",
        "a,y,2,noon",
        "a,y,2",
        "a,y,2,3,4",
        "a,\xff,2,3",
        "",
        "b,x,2.5,9",
    ]
    manifest = prepared(tmp_path, HEADER + "\n".join(rows))
    assert sorted((row["user"], row["item"], row["rating"]) for row in both(tmp_path, manifest)) == [
        ("a", "x", 1.0),
        ("b", "x", 2.5),
    ]
    reasons = ["user", "item", *["rating"] * 4, "time", "columns", "columns", "text"]
    assert manifest.rejected.by_reason == Counter(reasons)
    listed = [line.split("\t") for line in (tmp_path / "out" / "rejected.tsv").read_text("latin-1").splitlines()[1:]]
    assert listed == [
        ["rows.csv", str(number), reason, rows[number - 2]] for number, reason in enumerate(reasons, start=3)
    ]
    assert manifest.sources[0].num_rows == 12 and manifest.sources[0].num_rejected == 10
    assert "10 of 12 rows were rejected" in "\n".join(describe_dataset(manifest, tmp_path / "out"))


@pytest.mark.parametrize(
    ("text", "said", "options"),
    [
        ("", "has no rows", HALVES),
        (HEADER, "has no rows", HALVES),
        ("user,thing,rating,time\na,b,1,1\n", "has no column 'item'", HALVES),
        ("user,item,item,rating,time\na,b,b,1,1\n", "several columns named 'item'", HALVES),
        (HEADER + "a,b,1\n", r"no row .* well-formed: 1 of 1 rows are malformed \(columns 1\)", HALVES),
        (HEADER + "a,\0b\xff,1,1\n", r"malformed \(text 1\)", HALVES),
        (HEADER + "a,b,x,1\n", "no row of the input is well-formed", HALVES),
        (HEADER + "a,b,1,1\n", "training part has no rows", HALVES),
        (
            HEADER + "a,x,1,1\na,y,x,2\n",
            r"1 of 2 rows are malformed \(rating 1\).*A row is a user \(user\)",
            RatingOptions(),
        ),
        (
            HEADER + "a,x,2,20\na,x,3,30\n",
            "1 interactions .* user 'a' and item 'x'",
            RatingOptions(duplicates="error"),
        ),
    ],
)
def test_files_that_cannot_be_prepared_are_said_in_a_sentence(
    tmp_path: Path, text: str, said: str, options: RatingOptions
) -> None:
    with pytest.raises(UserError, match=said):
        prepared(tmp_path, text, options)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RatingOptions(split="0.8,0.1,0.1"), "'last-one', 'last-two'"),
        (lambda: RatingOptions(split="time:0.8,0.1"), "add up to 1"),
        (lambda: RatingOptions(split="random:1"), "two or three"),
        (lambda: RatingOptions(k_core=0), "k_core"),
        (lambda: RatingOptions(min_rating=float("nan")), "finite"),
        (lambda: RatingOptions(duplicates="newest"), "duplicates"),
        (lambda: RatingOptions(seed=-1), "seed"),
        (lambda: SequenceOptions(split="random:0.8,0.1,0.1"), "order of time"),
        (lambda: SequenceOptions(max_length=0), "max_length"),
        (lambda: SequenceOptions(windows="some"), "windows"),
        (lambda: InteractionColumns(user="a", item="a"), "two roles"),
        (lambda: InteractionColumns(user="who", categorical=("user",)), "rename"),
        (lambda: InteractionColumns(categorical=("a/b",)), "no file"),
        (lambda: Preparation("out", memory_limit_bytes=1), "64 MiB"),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


def test_files_and_splits_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(HEADER + "a,x,1,1\n")
    one, two, preparation = tmp_path / "a.csv", tmp_path / "b.csv", Preparation(tmp_path / "out")
    by_files = RatingOptions(split="files")
    for files, options, said in [
        (InteractionFiles([one]), by_files, "name files for the test"),
        (InteractionFiles([one], test=[two]), RatingOptions(), "and no split"),
        (InteractionFiles([one], validation=[two]), by_files, "name files for the test"),
        (InteractionFiles([one], test=[one]), by_files, "is named twice"),
        (InteractionFiles([tmp_path / "out"]), RatingOptions(), "does not exist"),
    ]:
        with pytest.raises(UserError, match=said):
            prepare_ratings(files, preparation, TIMED, options)
    with pytest.raises(UserError, match="needs ratings"):
        prepare_ratings(InteractionFiles([one]), preparation, InteractionColumns(), RatingOptions(min_rating=4))


@pytest.mark.parametrize(("duplicates", "kept"), [("first", [1.0]), ("last", [3.0]), ("keep", [1.0, 2.0, 3.0])])
def test_duplicates_are_kept_by_time(tmp_path: Path, duplicates: str, kept: list[float]) -> None:
    text = HEADER + "a,x,2,20\na,x,3,30\na,x,1,10\nb,x,5,5\nb,y,5,40\n"
    manifest = prepared(tmp_path, text, RatingOptions(split="time:1/2,1/2", duplicates=duplicates))
    assert sorted(row["rating"] for row in both(tmp_path, manifest) if row["user"] == "a") == kept
    left_out = 3 - len(kept)
    assert manifest.preparation["left_out"] == ({"duplicates": left_out} if left_out else {})


def test_min_rating_and_core_leave_out(tmp_path: Path) -> None:
    rows = [(user, item, 5, 0) for user in "abc" for item in "xyz"] + [
        ("a", "w", 5, 0),
        ("d", "x", 5, 0),
        ("b", "q", 3, 0),
    ]
    text = HEADER + "".join(f"{u},{i},{r},{t}\n" for u, i, r, t in rows)
    manifest = prepared(tmp_path, text, RatingOptions(split="random:1/2,1/2", min_rating=4, k_core=3))
    assert {(row["user"], row["item"]) for row in both(tmp_path, manifest)} == {(u, i) for u in "abc" for i in "xyz"}
    assert manifest.preparation["left_out"] == {"below_rating": 1, "outside_core": 2}
    with pytest.raises(UserError, match="no interaction is left"):
        prepare_ratings(
            InteractionFiles([tmp_path / "rows.csv"]), Preparation(tmp_path / "o"), TIMED, RatingOptions(k_core=9)
        )


def test_attributes_may_be_missing(tmp_path: Path) -> None:
    text = "user,item,genre,price\na,x,fun,1.5\na,y,,\na,z,fun,2\na,w,sad,x\nb,x,,\n"
    (tmp_path / "rows.csv").write_text(text)
    columns = InteractionColumns(categorical=("genre",), dense=("price",))
    files = InteractionFiles([tmp_path / "rows.csv"])
    options = SequenceOptions(max_rejected=0.5, split="last-one")
    notes: list[str] = []
    manifest = prepare_sequences(files, Preparation(tmp_path / "out", note=notes.append), columns, options)
    assert manifest.rejected.by_reason == {"attribute": 1}
    assert read(tmp_path / "out", "train") == [
        {"user": "a", "item": ["x", "y"], "genre": ["fun", None], "price": [1.5, None]}
    ]
    assert read(tmp_path / "out", "test") == [
        {"user": "a", "item": ["x", "y", "z"], "genre": ["fun", None, "fun"], "price": [1.5, None, 2.0]}
    ]
    assert manifest.schema.missing_dense and manifest.schema.dense_sequences == ("price",)
    assert [feature.mean_ids_per_row for feature in manifest.schema.categorical] == [1.0, 2.0, 2.0]
    assert "1 users have a single item" in notes[0]
    assert not list(dataset_warnings(manifest))


def test_integers_and_dates_of_parquet(tmp_path: Path) -> None:
    times = pa.array(np.array(["2020-01-02", "2020-01-01", "2020-01-03", "2019-01-01"], "datetime64[s]"))
    pq.write_table(pa.table({"user": [1, 1, 1, 2], "item": [7, 8, 9, 7], "time": times}), tmp_path / "rows.parquet")
    files, columns = InteractionFiles([tmp_path / "rows.parquet"]), InteractionColumns(time="time", dense=("time",))
    prepare_sequences(files, Preparation(tmp_path / "out"), columns, SequenceOptions(split="last-one"))
    assert read(tmp_path / "out", "test") == [
        {"user": "1", "item": ["8", "7", "9"], "time": [0.0, 86_400.0, 172_800.0]}
    ]


def test_inputs_are_those_of_tables(tmp_path: Path) -> None:
    """Whole numbers of 64 bits keep their order as times, in JSON too."""
    rows = [{"user": "u", "item": f"i{n}", "time": 1_500_000_000_000_000_000 - n} for n in range(9)]
    lines = [f"u,i{n},{1_500_000_000_000_000_000 - n}" for n in range(9)]
    for part in (0, 1):
        (tmp_path / f"part-{part}.csv").write_text(
            "\n".join(["user,item,time", *lines[part * 4 : part * 4 + 4 + part]])
        )
    whole = "\n".join(["user,item,time", *lines])
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    fsspec.filesystem("memory").pipe("/rows.csv", whole.encode())
    os.mkfifo(tmp_path / "pipe")
    thread = threading.Thread(target=(tmp_path / "pipe").write_text, args=(whole.replace(",", "\t"),))
    thread.start()
    columns, options = InteractionColumns(time="time"), SequenceOptions(split="last-one")
    for name in ("part-*.csv", "rows.jsonl.gz", "rows.parquet", "memory://rows.csv", "pipe"):
        output = tmp_path / f"out {name[:3]} {len(name)}"
        source = name if "://" in name else tmp_path / name
        prepare_sequences(InteractionFiles([source]), Preparation(output), columns, options)
        assert read(output, "test") == [{"user": "u", "item": [f"i{n}" for n in reversed(range(9))]}]
    thread.join()


def test_quoted_values_have_several_lines_where_that_is_said(tmp_path: Path) -> None:
    text = 'user,text,item,rating,time\nu,"a, b\nv,x,c,1,1",i,1,1\nu,5 wide,j,2,2\nu,"d\r\n""e""",k,3,3\n'
    with pytest.raises(UserError, match="--newlines-in-values"):
        prepared(tmp_path, text, replace(HALVES, max_rejected=0.5))
    columns = replace(TIMED, newlines_in_values=True)
    prepare_ratings(InteractionFiles([tmp_path / "rows.csv"]), Preparation(tmp_path / "out"), columns, HALVES)
    rows = both(tmp_path, Manifest.load(tmp_path / "out"))
    assert sorted((row["item"], row["rating"]) for row in rows) == [("i", 1), ("j", 2), ("k", 3)]


@pytest.mark.parametrize("late", ["2263-01-01", "2020-01-01T00:00:00.000000003"])
def test_times_of_parquet_to_the_nanosecond(tmp_path: Path, late: str) -> None:
    """Of times that nanoseconds of 64 bits do not hold, the order is that of microseconds."""
    unit = "us" if late.startswith("2263") else "ns"
    times = ["2020-01-01T00:00:00.000002", late, "2019-01-01", "2020-01-01T00:00:00.000000001"]
    times[3] = times[3] if unit == "ns" else "2020-01-01T00:00:00.000001"
    table = pa.table({"user": [1] * 4, "item": [2, 3, 0, 1], "time": pa.array(np.array(times, f"datetime64[{unit}]"))})
    pq.write_table(table, tmp_path / "rows.parquet")
    files, options = InteractionFiles([tmp_path / "rows.parquet"]), SequenceOptions(split="last-one")
    prepare_sequences(files, Preparation(tmp_path / "out"), InteractionColumns(time="time"), options)
    order = ["0", "1", "2", "3"] if unit == "us" else ["0", "1", "3", "2"]
    assert read(tmp_path / "out", "test") == [{"user": "1", "item": order}]


def test_recboles_headers_and_files_without_one(tmp_path: Path) -> None:
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\trating:float\nu\ti\t2\nv\tj\t3\n")
    (tmp_path / "a.csv").write_text("2,i,u\n3,j,v\n")
    named = InteractionColumns(user="user_id", item="item_id", rating="rating")
    numbered = InteractionColumns(user="3", item="2", rating="1", has_header=False)
    for number, (name, columns) in enumerate([("a.inter", named), ("a.csv", numbered)]):
        output = tmp_path / str(number)
        manifest = prepare_ratings(InteractionFiles([tmp_path / name]), Preparation(output), columns, HALVES)
        assert [row for split in manifest.splits for row in read(output, split)] == [
            {"rating": 2.0, "user": "u", "item": "i"},
            {"rating": 3.0, "user": "v", "item": "j"},
        ]
    for bad in ("4", "0", "who"):
        columns = InteractionColumns(user=bad, item="2", rating="1", has_header=False)
        with pytest.raises(UserError, match=f"no column '{bad}'.* It has '1', '2', '3'"):
            prepare_ratings(InteractionFiles([tmp_path / "a.csv"]), Preparation(tmp_path / "no"), columns, HALVES)


def test_files_for_the_test_follow_those_that_train(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("user,item,time\nu,b,2\nu,a,1\nv,a,7\n")
    (tmp_path / "validation.csv").write_text("user,item,time\nu,c,9\nw,b,1\n")
    (tmp_path / "test.csv").write_text("user,item,time\nu,e,4\nu,d,3\nv,b,2\nw,e,5\n")
    files = InteractionFiles(*([tmp_path / f"{name}.csv"] for name in ("train", "validation", "test")))
    options, notes = SequenceOptions(split="files", windows="all", max_length=1), list[str]()
    preparation = Preparation(tmp_path / "out", note=notes.append)
    prepare_sequences(files, preparation, InteractionColumns(time="time"), options)
    rows = {name: [(row["user"], "".join(row["item"])) for row in read(tmp_path / "out", name)] for name in SPLIT_NAMES}
    assert rows == {
        "train": [("u", "ab")],
        "validation": [("u", "abc")],
        "test": [("u", "abcd"), ("u", "abcde"), ("v", "ab"), ("w", "be")],
    }
    assert ["1 users have no item to train on" in note for note in notes] == [True]


def test_many_whole_histories_are_noted(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("user,item\n" + "".join(f"u,{item}\n" for item in range(100)))
    notes: list[str] = []
    preparation = Preparation(tmp_path / "out", note=notes.append)
    options = SequenceOptions(split="time:1/2,1/2")
    prepare_sequences(InteractionFiles([tmp_path / "rows.csv"]), preparation, options=options)
    assert ["test has 50 rows with 3,775 items" in note for note in notes] == [True]


def test_lines_of_lists(tmp_path: Path) -> None:
    lines = ["u a b a c", "v a", "", "w", "  x\tb   c  ", '"q b c']
    options = SequenceOptions(format="lists", split="last-one", max_rejected=0.5, max_length=2)
    for name, content in [
        ("a.txt", "\n".join(lines).encode()),
        ("a.txt.gz", gzip.compress("\r\n".join(lines).encode())),
        ("a.txt.zst", pa.compress("\n".join(lines).encode(), "zstd", asbytes=True)),
    ]:
        (tmp_path / name).write_bytes(content)
        output = tmp_path / f"out-{name}"
        manifest = prepare_sequences(InteractionFiles([tmp_path / name]), Preparation(output), options=options)
        assert manifest.rejected.by_reason == {"user": 1, "items": 1}
        assert (output / "rejected.tsv").read_text().splitlines()[1:] == [f"{name}\t3\tuser\t", f"{name}\t4\titems\tw"]
        assert {row["user"]: row["item"] for row in read(output, "test")} == {
            "u": ["a", "b", "a", "c"],
            "x": ["b", "c"],
            '"q': ["b", "c"],
        }
        assert read(output, "train") == [{"user": "u", "item": ["a", "b", "a"]}]


@pytest.mark.slow
def test_many_interactions_are_refused_by_the_memory_that_they_take(tmp_path: Path) -> None:
    table = pa.table({"user": np.arange(1_300_000), "item": np.arange(1_300_000)})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match="allow more"):
        prepare_sequences(InteractionFiles([tmp_path / "rows.parquet"]), Preparation(tmp_path / "out", 64 << 20))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def test_interactions_beyond_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distembed.data.prepare.interactions.preparation._ROW_BYTES", 60_000)
    pq.write_table(pa.table({"user": np.arange(1300) // 4, "item": np.arange(1300)}), tmp_path / "rows.parquet")
    prepare_sequences(InteractionFiles([tmp_path / "rows.parquet"]), Preparation(tmp_path / "fits", 80 << 20))
    with pytest.raises(UserError, match="allow more"):
        prepare_sequences(InteractionFiles([tmp_path / "rows.parquet"]), Preparation(tmp_path / "out", 64 << 20))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fits", "rows.parquet"]


def test_bytes_depend_on_rows_alone_and_overwriting_is_asked_for(tmp_path: Path) -> None:
    text = HEADER + "".join(f"u{n % 7},i{n % 11},{n % 5},{n % 13}\n" for n in range(300))
    prepared(tmp_path, text)
    first = folder_bytes(tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        prepared(tmp_path, text)
    for overwrite in (False, True):
        preparation = Preparation(tmp_path / "again", 64 << 20, overwrite)
        prepare_ratings(InteractionFiles([tmp_path / "rows.csv"]), preparation, TIMED, HALVES)
        assert folder_bytes(tmp_path / "again") == first


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("boom"), OSError(28, "No space left on device")])
def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*ignored: object) -> None:
        raise error

    monkeypatch.setattr(tables, "write_file", fail)
    with pytest.raises(BaseException) as caught:
        prepared(tmp_path, HEADER + "a,x,1,1\nb,x,1,2\n")
    assert isinstance(caught.value, RunError) == isinstance(error, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
