"""``distembed predict --input``: raw rows of any kind of file are scored as the prepared ones, line for line."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.commands import cli
from tests.in_process import in_this_process as command
from tests.serving.arrow_rows import draw_rows
from tests.serving.conftest import NUM_LINES, NUM_ROWS
from tests.small_runs import distembed


def predictions(path: Path, column: str = "prediction") -> np.ndarray:
    table = pq.read_table(path) if path.suffix == ".parquet" else pyarrow.csv.read_csv(path)
    return table[column].to_numpy(zero_copy_only=False)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_raw_rows_are_scored_to_the_bit_as_prepared_ones(criteo: Path, tmp_path: Path, ranks: int) -> None:
    expected = predictions(criteo / "expected.parquet")
    output = tmp_path / "raw.parquet"
    done = distembed(
        *("predict", criteo / "run", "--input", criteo / "many.tsv", "--key", "label", "--output", output), ranks=ranks
    )
    assert f"{output}: {NUM_LINES:,} predictions\n" in done.stdout
    assert np.array_equal(predictions(output), expected)
    labels = [line[:1] for line in (criteo / "many.tsv").read_text().splitlines()]
    assert predictions(output, "label").tolist() == labels
    assert pq.read_schema(output).names == ["label", "prediction"]


def test_rows_without_labels_and_in_other_order_have_the_same_predictions(criteo: Path, tmp_path: Path) -> None:
    expected = predictions(criteo / "expected.parquet")
    lines = (criteo / "many.tsv").read_text().splitlines()
    order = np.random.default_rng(0).permutation(NUM_LINES)
    bare = "".join(lines[i].partition("\t")[2] + "\n" for i in order)
    with gzip.open(tmp_path / "bare.tsv.gz", "wt") as file:
        file.write(bare)
    command("predict", criteo / "run", "--input", tmp_path / "bare.tsv.gz", "--output", tmp_path / "bare.parquet")
    np.testing.assert_allclose(predictions(tmp_path / "bare.parquet"), expected[order], rtol=1e-6)


def test_malformed_rows_have_null_predictions_and_are_counted(criteo: Path, tmp_path: Path) -> None:
    lines = (criteo / "many.tsv").read_text().splitlines()[:60]
    command("predict", criteo / "run", "--input", _written(tmp_path / "few.tsv", lines), "-o", tmp_path / "few.csv")
    expected = predictions(tmp_path / "few.csv")
    assert len(expected) == 60 and not np.isnan(expected).any()
    broken = [*lines]
    broken[0] = "1\t2"
    broken[7] = lines[7].replace("\t", "\tx", 1)
    broken[59] = lines[59] + "g"
    raw = _written(tmp_path / "broken.tsv", broken)
    arguments = ("predict", criteo / "run", "--input", raw, "--key", "C26", "-o")
    refused = command(*arguments, tmp_path / "no.csv", code=2)
    assert "3 of 60 rows are malformed (columns 1, dense 1, id 1)" in refused.stderr
    assert f"{raw}:60: id" in refused.stderr and not (tmp_path / "no.csv").exists()
    done = command(*arguments, tmp_path / "broken.parquet", "--max-rejected", "0.05")
    assert "60 predictions, of which 3 are null for malformed rows (columns 1, dense 1, id 1)" in done.stdout
    found = predictions(tmp_path / "broken.parquet")
    assert np.flatnonzero(np.isnan(found)).tolist() == [0, 7, 59]
    good = np.setdiff1d(np.arange(60), [0, 7, 59])
    np.testing.assert_allclose(found[good], expected[good], rtol=1e-6)
    keys = pq.read_table(tmp_path / "broken.parquet")["C26"].to_pylist()
    assert keys[0] is None and keys[1:] == [line.rpartition("\t")[2] or None for line in broken[1:]]


def _written(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def as_csv(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows as CSV, but for their lists, which CSV has none of."""
    pyarrow.csv.write_csv(pa.Table.from_pylist(rows).drop(["places"]), path)


def as_json_lines(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def as_parquet(rows: list[dict[str, Any]], path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=17)


@pytest.mark.thorough
@pytest.mark.parametrize(("write", "name"), [(as_json_lines, "rows.jsonl"), (as_parquet, "rows.parquet")])
def test_files_of_any_kind_are_scored(
    table: Path, tmp_path: Path, write: Callable[[list[dict[str, Any]], Path], None], name: str
) -> None:
    expected = predictions(table / "expected.parquet")
    rows = draw_rows(NUM_ROWS)[-len(expected) :]
    write(rows, tmp_path / name)
    arguments = ("predict", table / "run", "--input", tmp_path / name, "--key", "unused", "--key", "site")
    command(*arguments, "--output", tmp_path / "found.parquet")
    assert np.array_equal(predictions(tmp_path / "found.parquet"), expected)
    found = pq.read_table(tmp_path / "found.parquet")
    assert found["unused"].to_pylist() == [row["unused"] for row in rows]
    assert found["site"].to_pylist() == [row["site"] for row in rows]


def test_no_rows_give_no_predictions(table: Path, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(draw_rows(3)).slice(0, 0), tmp_path / "none.parquet")
    arguments = ("predict", table / "run", "--input", tmp_path / "none.parquet", "--key", "site")
    done = command(*arguments, "--output", tmp_path / "found.parquet")
    found = pq.read_table(tmp_path / "found.parquet")
    assert "0 predictions" in done.stdout and found.num_rows == 0 and found.column_names == ["site", "prediction"]


def refused(*arguments: object) -> None:
    cli.app([str(each) for each in arguments], standalone_mode=False)


@pytest.mark.thorough
@pytest.mark.distributed
def test_what_can_not_be_scored_is_refused(table: Path, tmp_path: Path) -> None:
    as_parquet([{k: v for k, v in row.items() if k != "code"} for row in draw_rows(5)], tmp_path / "lacks.parquet")
    as_parquet(draw_rows(5), tmp_path / "rows.parquet")
    as_csv(draw_rows(5), tmp_path / "rows.csv")
    as_parquet([{**row, "prediction": 1} for row in draw_rows(5)], tmp_path / "taken.parquet")
    twice = pa.Table.from_pylist(draw_rows(5))
    pq.write_table(twice.append_column("unused", twice["unused"]), tmp_path / "twice.parquet")
    as_json_lines([{**row, "key": 1} for row in draw_rows(5)], tmp_path / "1.jsonl")
    as_json_lines([{**row, "key": "a"} for row in draw_rows(5)], tmp_path / "2.jsonl")
    output = tmp_path / "found.parquet"
    cases: list[tuple[tuple[object, ...], str]] = [
        (("--input", tmp_path / "lacks.parquet"), "no column 'code'"),
        (("--input", tmp_path / "rows.parquet", "--key", "sites"), "'sites'"),
        (("--input", tmp_path / "rows.csv"), "places"),
        (("--input", tmp_path / "nowhere.csv"), "nowhere.csv"),
        (("--input", tmp_path / "rows.parquet", "--split", "test"), "--input and --split are both given"),
        (("--key", "site"), "--key names columns of --input"),
        (("--input", tmp_path / "rows.parquet", "--max-rejected", "2"), "--max-rejected is 2"),
        (("--input", tmp_path / "taken.parquet", "--key", "prediction"), "--key is 'prediction', which a column of"),
        (
            ("--input", tmp_path / "1.jsonl", "--input", tmp_path / "2.jsonl", "--key", "key"),
            "--key 'key' has values of type int64, and later ones of type string",
        ),
        (("--input", tmp_path / "twice.parquet", "--key", "unused"), "several columns named 'unused'"),
    ]
    for arguments, said in cases:
        with pytest.raises(UserError, match=re.escape(said)):
            refused("predict", table / "run", *arguments, "--output", output)
        assert not output.exists(), arguments
    rows = tmp_path / "rows.parquet"
    with pytest.raises(UserError, match="is an input, which it would replace"):
        refused("predict", table / "run", "--input", tmp_path, "-o", rows, "--overwrite")
    assert pq.read_table(rows).num_rows == 5
    done = distembed("predict", table / "run", "--input", tmp_path / "lacks.parquet", "-o", output, ranks=2, code=2)
    assert "no column 'code'" in done.stderr and "Traceback" not in done.stderr
    arguments = ("--input", tmp_path / "rows.parquet", "--key", "places", "-o", tmp_path / "found.csv")
    with pytest.raises(UserError, match=".csv does not hold key columns"):
        refused("predict", table / "run", *arguments)
    assert not (tmp_path / "found.csv").exists()
