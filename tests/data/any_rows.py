"""Rows of any columns as Python values: a source of them, and their preparation computed one row at a time."""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distembed.data.dataset.manifest import Manifest
from distembed.data.hashing import text_keys
from distembed.data.prepare.ingest import InputPart, RawInput
from distembed.data.table.blocks import (
    BlockLayout,
    IdColumn,
    KeyColumn,
    NumberColumn,
    ParsedBlock,
    RejectedRow,
    code_dtype,
)

Row = dict[str, Any]
"""A value by column; None, or NaN of numbers, is a missing one."""

INT8, INT64, FLOAT32 = np.dtype(np.int8), np.dtype(np.int64), np.dtype(np.float32)


@dataclass
class PythonRows:
    """Inputs that are lists of rows; a text in place of a row is a malformed one."""

    layout: BlockLayout
    rows: Sequence[Sequence[Row | str]]
    block_rows: int = 7
    part_rows: int | None = None
    inputs: list[RawInput] = field(init=False)
    reasons: tuple[str, ...] = ("odd",)
    wanted: str = "A row is a dictionary."
    hints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = [RawInput(f"in{number}", f"place/in{number}", len(each)) for number, each in enumerate(self.rows)]

    def parts(self, part_bytes: int) -> list[InputPart]:
        if self.part_rows is None:
            return [InputPart(number) for number in range(len(self.rows))]
        return [
            InputPart(number, start, min(start + self.part_rows, len(rows)))
            for number, rows in enumerate(self.rows)
            for start in range(0, max(1, len(rows)), self.part_rows)
        ]

    def checksum(self, source: int) -> str:
        return hashlib.sha256(repr(self.rows[source]).encode()).hexdigest()

    def open(self, part: InputPart, block_bytes: int) -> "_OpenRows":
        return _OpenRows(self, part)

    def parse(self, raw: list[Row | str]) -> ParsedBlock:
        rows = [row for row in raw if not isinstance(row, str)]
        numbers = tuple(_numbers(column, [row[column.name] for row in rows]) for column in self.layout.numbers)
        ids = tuple(_ids(column, [row[column.name] for row in rows]) for column in self.layout.ids)
        rejected = [RejectedRow(line, "odd", row.encode()) for line, row in enumerate(raw) if isinstance(row, str)]
        return ParsedBlock(len(raw), len(rows), numbers, ids, tuple(rejected))


class _OpenRows:
    header_lines = 0

    def __init__(self, source: PythonRows, part: InputPart) -> None:
        self._source, self._part = source, part
        self.bytes_read = 0
        self.sha256 = source.checksum(part.source) if part.is_whole else None

    def raw_blocks(self) -> Generator[list[Row | str], None, None]:
        rows = self._source.rows[self._part.source][self._part.start : self._part.stop]
        for start in range(0, len(rows), self._source.block_rows):
            block = rows[start : start + self._source.block_rows]
            self.bytes_read += len(block)
            yield list(block)

    def notes(self) -> list[str]:
        return []


def _numbers(column: NumberColumn, values: list[Any]) -> np.ndarray:
    return np.array([math.nan if value is None else value for value in values], column.dtype)


def _ids(column: KeyColumn, values: list[Any]) -> IdColumn:
    flat = [each for value in values for each in value] if column.is_list else values
    distinct = list(dict.fromkeys(each for each in flat if each is not None))
    places = {value: place for place, value in enumerate(distinct, start=1)} | {None: 0}
    codes = np.array([places[each] for each in flat], code_dtype(1 + len(distinct)))
    lengths = np.array([len(value) for value in values], np.int32) if column.is_list else None
    if column.kind == "string":
        texts = pa.array(["", *distinct], pa.string())
        return IdColumn(codes, np.concatenate([np.zeros(1, np.uint64), text_keys(texts[1:])]), texts, lengths)
    return IdColumn(codes, np.array([0, *distinct], column.key_dtype), None, lengths)


def tie_key(column: KeyColumn, value: Any) -> Any:
    """Returns the key by which values that are equally frequent are sorted."""
    return value.encode() if column.kind == "string" else int(value)


def values_of(row: Row, column: KeyColumn) -> list[Any]:
    return list(row[column.name]) if column.is_list else [row[column.name]]


def vocabulary(train: Sequence[Row], column: KeyColumn, known: Sequence[Any] = ()) -> list[Any]:
    """Returns the values with ids 2, 3, ...: known ones, and behind them others, the most frequent first."""
    counts = Counter(value for row in train for value in values_of(row, column) if value is not None)
    new = [value for value, count in counts.items() if count >= column.min_count and value not in set(known)]
    return [*known, *sorted(new, key=lambda value: (-counts[value], tie_key(column, value)))]


def ids(row: Row, column: KeyColumn, values: Sequence[Any]) -> Any:
    places = {value: place for place, value in enumerate(values, start=2)} | {None: 0}
    found = [places.get(value, 1) for value in values_of(row, column)]
    return found if column.is_list else found[0]


def edges(train: Sequence[Row], column: NumberColumn) -> list[float]:
    """Returns where bins begin, but for the first."""
    numbers = sorted(float(np.float32(row[column.name])) for row in train if row[column.name] is not None)
    begins = [numbers[k * len(numbers) // column.num_bins] for k in range(1, column.num_bins)] if numbers else []
    return sorted({begin for begin in begins if begin > numbers[0]})


def moments(train: Sequence[Row], column: NumberColumn) -> tuple[float, float]:
    """Returns the mean and the standard deviation, as statistics has them."""
    import statistics

    numbers = [float(np.float32(row[column.name])) for row in train if row[column.name] is not None]
    return (statistics.fmean(numbers), statistics.pstdev(numbers) or 1.0) if numbers else (0.0, 1.0)


def read_split(dataset: Path, name: str) -> list[Row]:
    """Returns the rows of a split in order, as Python values."""
    manifest = Manifest.load(dataset)
    rows = [row for file in manifest.splits[name].files for row in pq.read_table(dataset / file.path).to_pylist()]
    assert len(rows) == manifest.splits[name].num_rows
    return rows


def read_vocabulary(dataset: Path, name: str) -> list[tuple[int, Any, int]]:
    """Returns ids, keys and counts of a vocabulary."""
    manifest = Manifest.load(dataset)
    table = pq.read_table(manifest.require_unchanged(dataset, manifest.vocabularies[name].file)).to_pydict()
    return list(zip(table["id"], table["key"], table["count"], strict=True))


LAYOUT = BlockLayout(
    numbers=(
        NumberColumn("clicked", "label", INT8),
        NumberColumn("importance", "weight", FLOAT32),
        NumberColumn("at", "time", INT64),
        NumberColumn("price", "dense", FLOAT32),
        NumberColumn("age", "dense", FLOAT32, "standardize"),
        NumberColumn("size", "bins", FLOAT32, "quantile_bins", num_bins=4),
    ),
    ids=(
        KeyColumn("site", "feature", "string", min_count=2),
        KeyColumn("user", "feature", "integer", min_count=1),
        KeyColumn("device", "feature", "hexadecimal", min_count=3),
        KeyColumn("genres", "feature", "string", is_list=True, min_count=2, max_length=4),
        KeyColumn("history", "feature", "integer", is_list=True, min_count=2),
        KeyColumn("part", "split", "string"),
    ),
    features=("site", "size", "user", "device", "genres", "history"),
)
"""A column of every kind."""


def random_rows(count: int, seed: int) -> list[Row]:
    """Returns rows of :data:`LAYOUT`, some of whose values are missing, negative, long or odd."""
    rng = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.1 else value

    def skewed(most: int) -> int:
        return int(rng.paretovariate(0.8)) % most

    def text(number: int) -> str:
        return ["", " ", 'a,b|\t"c', "Zoë", "日本", "long " * 9][number] if number < 6 else f"value {number}"

    return [
        {
            "clicked": rng.randrange(2),
            "importance": float(np.float32(rng.random() * 3)),
            "at": rng.randrange(-50, 50) * 3600,
            "price": maybe(float(np.float32(rng.gauss(0, 9)))),
            "age": maybe(float(rng.randrange(80))),
            "size": maybe(rng.choice([-0.0, 0.0, -1.5, 2.0, 2.0, float(np.float32(rng.gauss(0, 1e6)))])),
            "site": maybe(text(skewed(40))),
            "user": maybe(rng.choice([-(2**63), 2**63 - 1, -1, 0, skewed(60) - 30])),
            "device": maybe(rng.choice([0, 2**32 - 1, skewed(50)])),
            "genres": [maybe(text(skewed(20))) for _ in range(rng.randrange(5))],
            "history": [skewed(30) - 15 for _ in range(rng.choice([0, 1, 2, 40]))],
            "part": rng.choice(["train", "train", "validation", "test"]),
        }
        for _ in range(count)
    ]
