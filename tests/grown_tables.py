"""A small dataset with a feature of every scheme and composition, before and after its tables have grown."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema

BEFORE = {"full": 30, "small": 20, "qr": 103, "cat": 57, "parts": 64, "mlp": 90, "radix": 60, "crt": 70, "hash": 90}
BEFORE |= {"same": 61, "given": 6, "bag": 50, "tiny": 5, "multi": 80, "cut": 70}
NOW = {"full": 41, "small": 80, "qr": 177, "cat": 58, "parts": 99, "mlp": 140, "radix": 131, "crt": 99, "hash": 125}
NOW |= {"same": 61, "given": 9, "bag": 77, "tiny": 6, "multi": 190, "cut": 140}
ROWS = {"train": 203, "validation": 31, "test": 33}
TABLES: dict[str, dict[str, Any]] = {
    "full": {"partition": "naive"},
    "small": {"threshold": 25, "force": False},
    "cat": {"composition": "concat"},
    "parts": {"composition": "feature"},
    "mlp": {"composition": "path_mlp", "hidden": [5], "activation": "tanh"},
    "radix": {"partition": "mixed_radix", "num_partitions": 3, "composition": "sum"},
    "crt": {"partition": "chinese_remainder", "moduli": [11, 9]},
    "hash": {"partition": "remainder"},
    "multi": {"partition": "multi_hash", "num_partitions": 3, "composition": "weighted_sum"},
    "cut": {"partition": "truncated", "bounds": [90, 10], "composition": "concat"},
    "bag": {"partition": "mixed_radix", "composition": "path_linear", "pooling": "max"},
}
"""Settings that differ from product over quotient-remainder, which ``qr``, ``same`` and ``tiny`` have.

Of the four quotients of ``tiny`` no id has the last, which is gone when it grows.
"""


def write_dataset(folder: Path, sizes: dict[str, int], seed: int = 0) -> Path:
    """Writes two dense features, single-valued ones of these sizes, and bags; labels depend on the first two."""
    rng = np.random.default_rng(seed)
    for split, rows in ROWS.items():
        dense = rng.normal(size=(2, rows)).astype(np.float32)
        columns: dict[str, Any] = {
            "label": (dense[0] + rng.normal(size=rows) > 0).astype(np.int8),
            **{f"I{i}": values for i, values in enumerate(dense, start=1)},
            **{name: rng.integers(0, size, rows, dtype=np.int32) for name, size in sizes.items() if name != "bag"},
            "bag": pa.array([rng.integers(0, sizes["bag"], k % 4).tolist() for k in range(rows)], pa.list_(pa.int32())),
        }
        (folder / split).mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / split / "part-0.parquet")
    features = tuple(CategoricalFeature(n, size, n == "bag", 1.5 if n == "bag" else 1.0) for n, size in sizes.items())
    create_manifest(folder, Schema("label", ("I1", "I2"), features), {s: [f"{s}/part-0.parquet"] for s in ROWS})
    return folder


def write_assignments(path: Path, num_ids: int) -> Path:
    """Writes two columns that tell the ids apart, of which new ids have new values behind the known ones."""
    ids = np.arange(num_ids)
    pq.write_table(pa.table({"make": ids // 2, "type": ids % 2}), path)
    return path


def config_values(dataset: Path, assignments: Path, sparse: str) -> dict[str, Any]:
    given = {"partition": "explicit", "assignments": str(assignments), "columns": ["make", "type"]}
    return {
        "data": {"path": str(dataset)},
        "model": {"bottom": [8], "top": [8]},
        "embedding": {
            "default": {"partition": "quotient_remainder", "embedding_dim": 8, "force": True},
            "tables": {**TABLES, "given": given},
        },
        "train": {
            "batch_size": 32,
            "precision": "fp32",
            "device": "cpu",
            "log_every": 4,
            "dense_optimizer": {"name": "adam", "learning_rate": 0.01},
            "sparse_optimizer": {"name": sparse, "learning_rate": 0.1},
        },
    }
