"""Avazu's, MovieLens' and Criteo's rows by their shipped schemas, held against a plain script."""

import csv
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.data.prepare import ResourceLimits
from distembed.data.prepare.table import TableOptions, prepare_table
from distembed.data.table.schema import TableSchema
from distembed.data.table.schema_files import load_schema
from tests.data.table.test_prepare_table import expected, require_equal, written

Row = dict[str, str | None]
AVAZU_HEXADECIMAL = (
    *("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category"),
    *("device_id", "device_ip", "device_model"),
)
AVAZU_INTEGER = ("C1", "banner_pos", "device_type", "device_conn_type", *(f"C{i}" for i in range(14, 22)))
GENRES = ("Action", "Film-Noir", "Children's", 'the "others"', "Sci, Fi", "動画")
ONE_THREAD = ResourceLimits(threads=1)


def avazu(rng: random.Random, number: int) -> Row:
    """Returns a click, of which the hour is such as 14102107, in no order."""
    row: Row = {"id": str(10**18 + number), "click": rng.choice("01")}
    row["hour"] = f"1410{rng.randrange(21, 31)}{rng.randrange(24):02d}"
    row |= {name: rng.choice([None, *[f"{rng.randrange(40) * 97:08x}"] * 19]) for name in AVAZU_HEXADECIMAL}
    return row | {name: str(rng.choice([-1, 0, 1002, 1005, 2**40])) for name in AVAZU_INTEGER}


def movielens(rng: random.Random, number: int) -> Row:
    """Returns a rating with the title and genres of its film: quotes, commas, lists, missing values."""
    movie = rng.randrange(60)
    return {
        "userId": str(rng.randrange(1, 30)),
        "movieId": None if rng.random() < 0.02 else str(movie),
        "rating": rng.choice(["0.5", "3.5", "4.0", "5.0"]),
        "timestamp": str(rng.randrange(10**9, 10**9 + 500)),
        "title": f'Film "{movie}", The',
        "genres": "|".join(random.Random(movie).sample(GENRES, movie % 4)) or None,
    }


def criteo(rng: random.Random, number: int) -> Row:
    """Returns Criteo's columns, of a table with a header."""
    row: Row = {"label": rng.choice("01")}
    row |= {f"I{i}": rng.choice([None, *[str(rng.randrange(-2, 10**6))] * 4]) for i in range(1, 14)}
    return row | {f"C{i}": rng.choice([None, *[f"{rng.randrange(50) * 10**7:08x}"] * 9]) for i in range(1, 27)}


def write(rows: list[Row], path: Path) -> None:
    if path.suffix == ".parquet":
        types = pa.schema([(name, pa.string()) for name in rows[0]])
        pq.write_table(pa.Table.from_pylist(rows, types), path, row_group_size=300)
        return
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([list(rows[0]), *(row.values() for row in rows)])


@pytest.mark.parametrize(
    ("make", "file"),
    [
        *[(avazu, "rows.csv"), (movielens, "rows.csv"), (criteo, "rows.parquet")],
        pytest.param(avazu, "rows.parquet", marks=pytest.mark.slow),
        pytest.param(movielens, "rows.parquet", marks=pytest.mark.slow),
        pytest.param(criteo, "rows.csv", marks=pytest.mark.slow),
    ],
)
def test_shipped_schemas_give_what_a_plain_script_gives(
    make: Callable[[random.Random, int], Row], file: str, tmp_path: Path
) -> None:
    rng, schema = random.Random(5), load_schema(make.__name__)
    if make is criteo:  # as published it has no header
        schema = TableSchema.from_json({**schema.to_json(), "text": {}, "parser": "table"}, "the test")
    rows = [make(rng, number) for number in range(201)]
    write(rows, tmp_path / file)
    prepare_table([tmp_path / file], tmp_path / "dataset", schema, limits=ONE_THREAD)
    require_equal(written(tmp_path / "dataset", schema), expected(rows, schema, (0.8, 0.9)))


def test_the_schema_is_that_of_the_dataset_whose_ids_are_applied(tmp_path: Path) -> None:
    for name, seed in (("days.csv", 5), ("next.csv", 6)):
        rng = random.Random(seed)
        write([avazu(rng, number) for number in range(151)], tmp_path / name)
    prepare_table([tmp_path / "days.csv"], tmp_path / "days", "avazu", limits=ONE_THREAD)
    known = TableOptions(vocabulary=tmp_path / "days", split="test")
    told = prepare_table([tmp_path / "next.csv"], tmp_path / "told", "avazu", known, ONE_THREAD)
    taken = prepare_table([tmp_path / "next.csv"], tmp_path / "taken", options=known, limits=ONE_THREAD)
    assert taken == told and taken.splits["test"].num_rows == 151
    with pytest.raises(UserError, match=r"schema \(--schema\) is missing"):
        prepare_table([tmp_path / "next.csv"], tmp_path / "other")
