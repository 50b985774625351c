"""Trains a table of 10^9 raw 64-bit ids, without a vocabulary, and measures the peak memory of each command.

::

    python tools/bench_raw_ids.py --rows 2000000 --output bench_raw_ids.json
    python tools/bench_raw_ids.py --rows 200000 --buckets 262144    # a minute

A row has a raw user id, one of 10^9 numbers of 64 bits, whose rank follows Zipf's law; an item of 10,000; a number; and
a label that depends on all three. ``prepare`` maps each raw id to one of 2^62 ids without counting any
(``hash_size``), and ``multi_hash`` maps these to ``--buckets`` rows for each of two hashes. The full table would have
16 numbers for each of the 10^9 ids: 64 GB in fp32. A hashed table (``remainder``) of equal bytes is trained too.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from bench_commands import bench_parser, timed_command, told, write_output
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from distembed.data.hashing import mix64_array

NUM_IDS, NUM_ITEMS, DIM = 10**9, 10_000, 16
SCHEMA = {
    "label": {"column": "click"},
    "dense": {"age": {"transform": "none"}},
    "categorical": {"user": {"kind": "integer", "hash_size": 2**62}, "item": {"kind": "integer"}},
    "split": "0.8,0.1,0.1",
}
_CHUNK_ROWS = 2**18


def normal(ids: NDArray[np.int64], seed: int) -> NDArray[np.float64]:
    """Returns a number for each id, about normal: the sum of four uniform hashes of the id."""
    keys = ids.astype(np.uint64) + np.uint64(seed << 40)
    uniform = [mix64_array(keys + np.uint64(i << 36)) / 2.0**64 - 0.5 for i in range(4)]
    return sum(uniform, np.zeros(len(ids))) * np.sqrt(3.0)


def write_rows(path: Path, num_rows: int) -> int:
    """Writes the rows, and returns the number of distinct users among them."""
    rng, seen = np.random.default_rng(0), []
    schema = pa.schema([("click", pa.int8()), ("age", pa.float32()), ("user", pa.int64()), ("item", pa.int64())])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, _CHUNK_ROWS):
            size = min(_CHUNK_ROWS, num_rows - start)
            # rank^-1: the logarithm of the rank is uniform
            ranks = np.exp(rng.uniform(0.0, np.log(NUM_IDS), size)).astype(np.int64)
            items, age = rng.integers(0, NUM_ITEMS, size), rng.normal(size=size)
            score = 1.5 * normal(ranks, 1) + 0.5 * normal(items, 2) + 0.3 * age - 0.5
            click = rng.random(size) < 1.0 / (1.0 + np.exp(-score))
            users = mix64_array(ranks.astype(np.uint64)).view(np.int64)
            writer.write(pa.table([click.astype(np.int8), age.astype(np.float32), users, items], schema=schema))
            seen.append(np.unique(ranks))
    return len(np.unique(np.concatenate(seen)))


def config(buckets: int, **user: Any) -> dict[str, Any]:
    """Returns a config whose user table has these settings."""
    return {
        "model": {"name": "dlrm", "bottom": [32, DIM], "top": [64, 32]},
        "embedding": {"default": {"embedding_dim": DIM}, "tables": {"user": user}},
        "train": {
            "batch_size": 4096,
            "dense_optimizer": {"name": "adam", "learning_rate": 0.001},
            "sparse_optimizer": {"name": "row_wise_adagrad", "learning_rate": 0.03},
        },
    }


def main() -> None:
    """Measures, and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows (default 2 million)")
    parser.add_argument("--buckets", type=int, default=2**22, help="rows of each hash (default 2^22)")
    arguments = parser.parse_args()
    buckets, results = arguments.buckets, dict[str, Any]()
    table = Table("command", "seconds", "peak MB", "test AUC", "logloss")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, schema, dataset = folder / "rows.parquet", folder / "schema.yaml", folder / "dataset"
        results["distinct_users"] = write_rows(rows, arguments.rows)
        schema.write_text(yaml.safe_dump(SCHEMA))
        program = [sys.executable, "-m", "distembed"]
        prepare = [*program, "prepare", "table", str(rows), "--schema", str(schema), "--output", str(dataset)]
        commands = {"prepare": prepare}
        contenders: dict[str, dict[str, Any]] = {
            "multi_hash, sum": {"partition": "multi_hash", "num_buckets": buckets, "composition": "sum"},
            "multi_hash, product": {"partition": "multi_hash", "num_buckets": buckets},
            "remainder": {"partition": "remainder", "num_buckets": 2 * buckets},
        }
        for contender, user in contenders.items():
            file, run = folder / f"{contender}.yaml", folder / contender
            file.write_text(yaml.safe_dump(config(buckets, **user)))
            commands[contender] = [*program, "train", str(file), f"data.path={dataset}", "--run-dir", str(run)]
        for label, command in told([*commands.items()], "commands"):
            taken = timed_command(command)
            file = folder / label / "evaluation.json"
            scores = json.loads(file.read_text()) if file.exists() else {}
            found = {"seconds": taken.seconds, "peak_bytes": taken.peak_bytes}
            results[label] = found | {key: scores[key] for key in ("auc", "logloss") if key in scores}
            cells = [f"{scores[key]:.4f}" if key in scores else "" for key in ("auc", "logloss")]
            table.add_row(label, f"{taken.seconds:.0f}", f"{taken.peak_bytes / 1e6:,.0f}", *cells)
    Console(width=120).print(table, f"{results['distinct_users']:,} distinct users in {arguments.rows:,} rows")
    write_output(arguments, results)


if __name__ == "__main__":
    main()
