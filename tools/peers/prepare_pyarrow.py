"""Prepares Criteo rows by PyArrow and NumPy, as a peer of ``distembed prepare`` (``tools/bench_prepare.py``).

It writes training, validation and test files with all rows in memory: ids by frequency in the first 80% of the rows, 0
for missing values, 1 for values that occur once, and log(1 + x) of integers. It handles no malformed rows and no memory
limit, and writes no checksums.
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

DENSE = [f"I{i}" for i in range(1, 14)]
CATEGORICAL = [f"C{i}" for i in range(1, 27)]
THREADS = 2


def main() -> None:
    """Reads the file, replaces keys by ids, and writes three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", type=Path, help=".csv with a header, or .tsv without")
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    options.output.mkdir()
    pa.set_cpu_count(THREADS)
    table = read(options.input)
    train_rows, validation_end = len(table) * 8 // 10, len(table) * 9 // 10
    with ThreadPoolExecutor(THREADS) as pool:
        ids = list(pool.map(lambda name: column_ids(table[name], train_rows), CATEGORICAL))
        dense = list(pool.map(lambda name: log_transformed(table[name]), DENSE))
    columns = dict(zip(["label", *DENSE, *CATEGORICAL], [table["label"].cast(pa.int8()), *dense, *ids], strict=True))
    prepared = pa.table(columns)
    bounds = {"train": (0, train_rows), "validation": (train_rows, validation_end), "test": (validation_end, None)}
    for split, (start, stop) in bounds.items():
        rows = prepared.slice(start, None if stop is None else stop - start)
        pq.write_table(
            rows,
            options.output / f"{split}.parquet",
            compression="zstd",
            use_dictionary=False,
            use_byte_stream_split=[*DENSE, *CATEGORICAL],
            write_statistics=False,
            row_group_size=131_072,
        )


def read(path: Path) -> pa.Table:
    """Returns the table, with integers, and texts as dictionaries of each block."""
    is_csv = path.suffix == ".csv"
    names = ["label", *DENSE, *CATEGORICAL]
    types = dict.fromkeys(["label", *DENSE], pa.int64())
    types |= dict.fromkeys(CATEGORICAL, pa.dictionary(pa.int32(), pa.string()))
    return pcsv.read_csv(
        path,
        pcsv.ReadOptions(column_names=None if is_csv else names, block_size=8 << 20),
        pcsv.ParseOptions(delimiter="," if is_csv else "\t", quote_char='"' if is_csv else False),
        pcsv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    )


def column_ids(column: pa.ChunkedArray, train_rows: int) -> np.ndarray:
    """Returns the ids of a column of dictionaries."""
    combined = column.unify_dictionaries().combine_chunks()
    codes = combined.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    seen = codes[:train_rows]
    counts = np.bincount(seen[seen >= 0], minlength=len(combined.dictionary))
    kept = np.flatnonzero(counts >= 2)
    order = pc.sort_indices(
        pa.table({"count": counts[kept], "key": combined.dictionary.take(pa.array(kept))}),
        [("count", "descending"), ("key", "ascending")],
    ).to_numpy()
    table = np.ones(len(counts) + 1, np.int32)
    table[kept[order]] = np.arange(2, 2 + len(kept), dtype=np.int32)
    table[-1] = 0
    return table[codes]


def log_transformed(column: pa.ChunkedArray) -> np.ndarray:
    """Returns log(1 + x), 0 for missing and negative numbers."""
    values = column.combine_chunks().fill_null(0).to_numpy()
    return np.log1p(np.maximum(values, 0).astype(np.float32))


if __name__ == "__main__":
    main()
