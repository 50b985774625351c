"""Prepares Criteo rows by polars, as a peer of ``distembed prepare`` (``tools/bench_prepare.py``).

It does the work of ``prepare_pyarrow.py``.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("POLARS_MAX_THREADS", "2")

import polars as pl  # noqa: E402  (polars reads the number of threads at import)

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
    schema = {"label": pl.Int8} | dict.fromkeys(DENSE, pl.Int64) | dict.fromkeys(CATEGORICAL, pl.String)
    rows = pl.read_csv(options.input, has_header=is_csv, separator="," if is_csv else "\t", schema=schema)
    train_rows = len(rows) * 8 // 10
    logs = [pl.col(name).fill_null(0).clip(lower_bound=0).cast(pl.Float32).log1p() for name in DENSE]
    prepared = rows.select("label", *logs).hstack([column_ids(rows[name], train_rows) for name in CATEGORICAL])
    validation_end = len(rows) * 9 // 10
    bounds = {"train": (0, train_rows), "validation": (train_rows, validation_end), "test": (validation_end, len(rows))}
    for split, (start, stop) in bounds.items():
        prepared.slice(start, stop - start).write_parquet(
            options.output / f"{split}.parquet", compression="zstd", statistics=False, row_group_size=131_072
        )


def column_ids(column: pl.Series, train_rows: int) -> pl.Series:
    """Returns the ids of a column of texts."""
    name = column.name
    frame = column.to_frame()
    vocabulary = (
        frame.head(train_rows)
        .drop_nulls()
        .group_by(name)
        .len()
        .filter(pl.col("len") >= 2)
        .sort(["len", name], descending=[True, False])
        .with_row_index("id", offset=2)
        .select(name, pl.col("id").cast(pl.Int32))
    )
    joined = frame.join(vocabulary, on=name, how="left", maintain_order="left")
    return joined.select(
        pl.when(pl.col(name).is_null()).then(0).otherwise(pl.col("id").fill_null(1)).cast(pl.Int32).alias(name)
    ).to_series()


if __name__ == "__main__":
    main()
