"""An Arrow table as the source of a preparation, and rows of every kind of column in it."""

import random
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from distembed.data.dataset.manifest import Manifest
from distembed.data.prepare.ingest import InputPart, RawInput
from distembed.data.prepare.options import PrepareOptions
from distembed.data.prepare.pipeline import prepare_rows
from distembed.data.table.blocks import ParsedBlock
from distembed.data.table.parser import REASONS, TableParser
from distembed.data.table.schema import TableSchema

SCHEMA: dict[str, Any] = {
    "label": {"column": "click"},
    "weight": {"column": "importance"},
    "dense": {"price": {"transform": "log"}, "age": {"transform": "standardize"}, "rate": {"transform": "none"}},
    "categorical": {
        "site": {"kind": "string", "min_count": 2},
        "number": {"kind": "integer", "min_count": 1},
        "code": {"kind": "hexadecimal"},
        "hashed": {"column": "site", "hash_size": 11, "hash_seed": 3},
        "genres": {"kind": "string", "separator": "|", "max_length": 3},
        "places": {"kind": "integer", "is_list": True},
        "price_bin": {"column": "price", "kind": "log_bins"},
        "age_bin": {"column": "age", "kind": "quantile_bins", "num_bins": 7},
        "site_x_code": {"cross": ["site", "code"]},
    },
    "split": "0.7,0.1,0.2",
}


def draw_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows in which every column has frequent, rare and missing values."""
    rng = random.Random(seed)

    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.1 else value

    def draw() -> int:
        return int(rng.paretovariate(0.8)) % 10_007

    return [
        {
            "click": rng.randrange(2),
            "importance": rng.choice([0.5, 1.0, 3.0]),
            "price": maybe(rng.expovariate(0.01)),
            "age": maybe(float(rng.randrange(100))),
            "rate": maybe(rng.gauss(0, 1)),
            "site": maybe(f"site é {draw()}"),
            "number": maybe((-1) ** draw() * draw() * 2**40),
            "code": maybe(f"{draw() * 2654435761 % 2**32:x}"),
            "genres": maybe("|".join(f"g{draw()}" for _ in range(rng.randrange(6)))),
            "places": maybe([draw() for _ in range(rng.randrange(4))]),
            "unused": rng.random(),
        }
        for _ in range(num_rows)
    ]


class ArrowSource:
    """A table in memory as a :class:`distembed.data.prepare.ingest.RowSource`."""

    reasons = REASONS
    wanted = "A row is one of the schema's."
    hints: Mapping[str, str] = {}

    def __init__(self, table: pa.Table, schema: TableSchema) -> None:
        self._table, self._parser = table, TableParser(schema)
        self.layout = self._parser.layout
        self.inputs = [RawInput("table", "memory", table.nbytes)]

    def parts(self, part_bytes: int) -> list[InputPart]:
        return [InputPart(0)]

    def checksum(self, source: int) -> str:
        return ""

    def open(self, part: InputPart, block_bytes: int) -> "OpenTable":
        return OpenTable(self._table)

    def parse(self, raw: pa.Table) -> ParsedBlock:
        return self._parser.parse(raw)


class OpenTable:
    bytes_read = header_lines = 0
    sha256 = ""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def raw_blocks(self) -> Generator[pa.Table, None, None]:
        for start in range(0, len(self._table), 97):
            yield self._table.slice(start, 97)

    def notes(self) -> list[str]:
        return []


def prepare_table(rows: list[dict[str, Any]], output: Path, schema: dict[str, Any] | None = None) -> Manifest:
    """Prepares rows as ``distembed prepare table`` does, split in their order."""
    parsed = TableSchema.from_json(schema or SCHEMA, "the test")
    source = ArrowSource(pa.Table.from_pylist(rows), parsed)
    recorded = {"source": "table", "schema": parsed.to_json()}
    return prepare_rows(source, output, PrepareOptions(split=parsed.split, recorded=recorded))
