"""A small dataset whose every column says which row it is, and a reader of it."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from distembed.data import CategoricalFeature, Schema, create_manifest
from distembed.data.reader import Batch, BatchOrder, BatchReader, Decoding

SCHEMA = Schema(
    label="clicked",
    dense=("x", "y"),
    categorical=(
        CategoricalFeature("row", 10_000),
        CategoricalFeature("tags", 50, multi_hot=True, mean_ids_per_row=2.0),
        CategoricalFeature("bucket", 7),
    ),
)
SINGLE = Schema("clicked", ("x", "y"), (SCHEMA.categorical[0], SCHEMA.categorical[2]))


def tags_of(row: int) -> list[int] | None:
    """Returns a row's list of 0 to 4 ids; every eleventh row has none."""
    return None if row % 11 == 0 else [(row * 7 + i) % 50 for i in range(row % 5)]


def make_dataset(folder: Path, num_rows: int, *, schema: Schema = SCHEMA, files: int = 2, group_rows: int = 13) -> Path:
    folder.mkdir(exist_ok=True)
    rows = np.arange(num_rows)
    table = pa.table(
        {
            "x": pa.array(rows * 0.5, pa.float64()),
            "row": pa.array(rows, pa.int32()),
            "tags": pa.array([tags_of(row) for row in rows.tolist()], pa.list_(pa.int64())),
            "unused": pa.array(["text"] * num_rows),
            "clicked": pa.array(rows % 3 == 0),
            "bucket": pa.array(rows % 7, pa.uint8()),
            "y": pa.array(rows - 5, pa.int64()),
        }
    )
    names = []
    for index, part in enumerate(np.array_split(rows, files)):
        names.append(f"part{index}.parquet")
        start = int(part[0]) if len(part) else 0
        pq.write_table(table.slice(start, len(part)), folder / names[-1], row_group_size=group_rows)
    create_manifest(folder, schema, {"all": names})
    return folder


def open_reader(
    folder: Path,
    batch_size: int = 10,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    decode_threads: int = 0,
    skip_unreadable: int = 0,
    **settings: int,
) -> BatchReader:
    decoding = Decoding(decode_threads, skip_unreadable)
    return BatchReader(folder, "all", BatchOrder(batch_size, shuffle, seed, drop_last), decoding=decoding, **settings)


def rows_of(batch: Batch) -> list[int]:
    """Returns the rows of a batch, after a check that every column says the same."""
    rows = batch["sparse_features"]["row"].values().tolist()
    assert batch["labels"].tolist() == [float(row % 3 == 0) for row in rows]
    assert batch["dense_features"].tolist() == [[row * 0.5, row - 5.0] for row in rows]
    assert batch["sparse_features"]["bucket"].values().tolist() == [row % 7 for row in rows]
    assert batch["sparse_features"].stride() == len(rows)
    assert batch["sparse_features"].values().dtype == torch.int64
    if "tags" in batch["sparse_features"].keys():  # noqa: SIM118 (a method of TorchRec's)
        tags = batch["sparse_features"]["tags"].to_dense()
        assert [ids.tolist() for ids in tags] == [tags_of(row) or [] for row in rows]
    return rows


def take(batches: Iterator[Batch], count: int) -> list[list[int]]:
    return [rows_of(batch) for batch in itertools.islice(batches, count)]
