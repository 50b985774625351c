"""Files of edges to prepare graphs from."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq

from distembed.graph.prepare import GraphOptions, NodeIds

TEN = NodeIds(num_embeddings=10)
WEIGHTED = GraphOptions(weight="weight")
DROP = GraphOptions(unknown="drop")


def table_of(sources: Any, targets: Any, weights: Any = None) -> pa.Table:
    columns = {"source": sources, "target": targets}
    return pa.table(columns if weights is None else columns | {"weight": weights})


def write(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=997)
        return path
    delimiter = "\t" if ".tsv" in path.name else ","
    content = pa.BufferOutputStream()
    pcsv.write_csv(table, content, pcsv.WriteOptions(delimiter=delimiter))
    raw = content.getvalue().to_pybytes()
    # two members, as some tools leave them
    path.write_bytes(gzip.compress(raw[:100]) + gzip.compress(raw[100:]) if path.suffix == ".gz" else raw)
    return path
