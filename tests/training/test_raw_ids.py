"""Raw 64-bit ids from end to end: prepared without a vocabulary, trained on ranks, predicted and exported."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from distembed.training.config import load_config
from distembed.training.describe import describe
from tests.small_runs import distembed, losses

NUM_ROWS, NUM_USERS = 1500, 40
SCHEMA = {
    "label": {"column": "click"},
    "dense": {"age": {"transform": "none"}},
    "categorical": {
        "user": {"kind": "integer", "hash_size": 2**62},
        "pages": {"column": "pages", "kind": "integer", "is_list": True, "hash_size": 2**62},
    },
    "split": "0.8,0.1,0.1",
}
TABLES = {
    "user": {"partition": "multi_hash", "moduli": [60, 50, 200], "composition": "weighted_sum"},
    "pages": {"partition": "multi_hash", "num_buckets": 100, "composition": "product", "pooling": "mean"},
}


def write_rows(path: Path) -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(-(2**63), 2**63 - 1, NUM_USERS)
    raw[:4] = 2**63 - 1, -(2**63), -1, 0
    users = rng.integers(0, NUM_USERS, NUM_ROWS)
    click = rng.random(NUM_ROWS) < np.where(users % 2, 0.9, 0.1)
    pages = [rng.choice(raw, rng.integers(0, 4)).tolist() for _ in range(NUM_ROWS)]
    columns = {"click": click.astype(np.int8), "age": rng.normal(size=NUM_ROWS).astype(np.float32)}
    pq.write_table(pa.table({**columns, "user": raw[users], "pages": pa.array(pages, pa.list_(pa.int64()))}), path)


def write_config(path: Path, dataset: Path) -> Path:
    values = {
        "data": {"path": str(dataset)},
        "model": {"name": "dlrm", "bottom": [8], "top": [8]},
        "embedding": {"default": {"embedding_dim": 8}, "tables": TABLES},
        "train": {
            "batch_size": 64,
            "precision": "fp32",
            "device": "cpu",
            "log_every": 1,
            "epochs": 4,
            "dense_optimizer": {"name": "adam", "learning_rate": 0.01},
            "sparse_optimizer": {"name": "row_wise_adagrad", "learning_rate": 0.1},
        },
    }
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.mark.thorough
@pytest.mark.distributed
def test_raw_ids_are_trained_and_served_without_a_vocabulary(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.parquet")
    (tmp_path / "schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    rows, schema, dataset = (tmp_path / name for name in ("rows.parquet", "schema.yaml", "dataset"))
    distembed("prepare", "table", rows, "--schema", schema, "--output", dataset)
    config = write_config(tmp_path / "config.yaml", dataset)
    tables = {table.config.name: table.config for table in describe(load_config(config)).tables}
    assert tables["user"].num_embeddings == tables["pages"].num_embeddings == 2**62
    # two vectors of 8 numbers, and an importance row of 4; two factors of 8
    assert tables["user"].memory_bytes == 4 * (8 * (60 + 50) + 4 * 200)
    assert tables["pages"].memory_bytes == 4 * 8 * 200
    distembed("train", config, "--run-dir", tmp_path / "one")
    distembed("train", config, "plan.sharding_types=[row_wise]", "--run-dir", tmp_path / "two", ranks=2)
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-3)
    # ranks draw other replacements than one process, from all 2^62 ids
    distembed("train", config, "sse.tables={user: {p0: 0.5}}", "train.max_steps=3", "--run-dir", tmp_path / "sse")
    evaluation = json.loads((tmp_path / "two" / "evaluation.json").read_text())
    assert evaluation["auc"] > 0.8  # 0.9 at best
    distembed("predict", tmp_path / "two", "--output", tmp_path / "predictions.parquet")
    distembed("export", tmp_path / "two", "--output", tmp_path / "model")
    distembed("predict", tmp_path / "two", "--input", rows, "--output", tmp_path / "of_rows.parquet")
    # the raw rows of the test split are encoded as they were for it
    of_split, of_rows = (
        pq.read_table(tmp_path / f"{name}.parquet")["prediction"].to_numpy() for name in ("predictions", "of_rows")
    )
    assert np.allclose(of_rows[-len(of_split) :], of_split, atol=1e-6)
