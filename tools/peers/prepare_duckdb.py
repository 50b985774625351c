"""Prepares Criteo rows by duckdb, as a peer of ``distembed prepare`` (``tools/bench_prepare.py``).

It does the work of ``prepare_pyarrow.py``, but writes the rows of a file in any order, which is faster in duckdb.
"""

import argparse
from pathlib import Path

import duckdb

DENSE = [f"I{i}" for i in range(1, 14)]
CATEGORICAL = [f"C{i}" for i in range(1, 27)]


def main() -> None:
    """Reads the file, replaces keys by ids, and writes three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", type=Path, help=".csv with a header, or .tsv without")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    options.output.mkdir()
    is_csv = options.input.suffix == ".csv"
    database = duckdb.connect()
    database.execute("set threads = 2")
    types = {"label": "TINYINT"} | dict.fromkeys(DENSE, "BIGINT") | dict.fromkeys(CATEGORICAL, "VARCHAR")
    listed = ", ".join(f"'{name}': '{kind}'" for name, kind in types.items())
    separator, quote = (",", '"') if is_csv else ("\t", "")
    database.execute(
        f"create table raw as select * from read_csv('{options.input}', delim = '{separator}', header = {is_csv}, "
        f"quote = '{quote}', escape = '{quote}', auto_detect = false, columns = {{{listed}}})"
    )
    num_rows = database.execute("select count(*) from raw").fetchone()[0]
    bounds = [0, num_rows * 8 // 10, num_rows * 9 // 10, num_rows]
    for name in CATEGORICAL:
        database.execute(
            f"create table ids_{name} as select {name} as key, "
            f"(row_number() over (order by count(*) desc, {name}) + 1)::INTEGER as id "
            f"from raw where rowid < {bounds[1]} and {name} is not null group by {name} having count(*) >= 2"
        )
    dense = ", ".join(f"ln(1 + greatest(coalesce(raw.{name}, 0), 0))::FLOAT as {name}" for name in DENSE)
    ids = ", ".join(
        f"case when raw.{name} is null then 0 else coalesce(ids_{name}.id, 1) end::INTEGER as {name}"
        for name in CATEGORICAL
    )
    joins = " ".join(f"left join ids_{name} on raw.{name} = ids_{name}.key" for name in CATEGORICAL)
    database.execute("set preserve_insertion_order = false")
    for split, start, stop in zip(["train", "validation", "test"], bounds[:-1], bounds[1:], strict=True):
        database.execute(
            f"copy (select raw.label, {dense}, {ids} from (select *, rowid as place from raw) as raw {joins} "
            f"where raw.place >= {start} and raw.place < {stop}) "
            f"to '{options.output / split}.parquet' (format parquet, compression zstd, row_group_size 131072)"
        )


if __name__ == "__main__":
    main()
