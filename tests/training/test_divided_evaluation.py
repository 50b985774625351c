"""Evaluations and predictions that ranks divide: as on one rank, and in order."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.training import inference
from distembed.training.prediction_columns import RankOrder
from tests.small_runs import ROWS, distembed, run_command, train_small

_BATCH = 37


def run_in_small_batches(rank: int, arguments: Sequence[object], folder: Path, ranks: int, port: int) -> None:
    """Has batches so small that each rank has several, and the last has fewer rows."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inference, "EVALUATION_BATCH_SIZE", _BATCH)
        run_command(rank, arguments, folder, ranks, port)


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_ranks_predict_and_evaluate_as_one_does(dataset: Path, tmp_path: Path) -> None:
    run = train_small(tmp_path, dataset, max_steps=5)
    predictions, metrics = [], []
    for ranks in (1, 2):
        predictions.append(tmp_path / f"{ranks}.parquet")
        distembed("predict", run, "--output", predictions[-1], ranks=ranks, run=run_in_small_batches)
        metrics.append(json.loads(distembed("evaluate", run, "--json", ranks=ranks, run=run_in_small_batches).stdout))
    one, table = (pq.read_table(path) for path in predictions)
    # the batches are the same to the bit; a matrix product may round by where its factors lie in memory
    np.testing.assert_allclose(table["prediction"], one["prediction"], rtol=1e-6)
    labels = pq.read_table(dataset / "test" / "part-0.parquet")["label"].to_numpy()
    assert len(table) == ROWS["test"] and np.array_equal(table["label"].to_numpy(), labels)
    assert pq.read_metadata(predictions[1]).num_row_groups == -(-ROWS["test"] // _BATCH)
    assert metrics[1]["rows"] == ROWS["test"] and [found.pop("split") for found in metrics] == ["test", "test"]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_tables_come_out_rank_after_rank(tmp_path: Path, num_ranks: int) -> None:
    columns = pa.schema({"row": pa.int64()})
    steps = [[3, 3, 3], [2, 3, 0], [0, 0, 0]]
    rows = {(step, rank): [100 * rank + 10 * step + i for i in range(counts[rank])]
            for step, counts in enumerate(steps) for rank in range(num_ranks)}  # fmt: skip
    written: list[pa.Table] = []
    with RankOrder(columns, num_ranks, tmp_path) as in_order:
        for step in range(len(steps)):
            tables = [pa.table({"row": rows[step, rank]}, schema=columns) for rank in range(num_ranks)]
            in_order.write(tables, written.append)
        assert in_order.finish(written.append) == sum(map(len, rows.values()))
    expected = [row for rank in range(num_ranks) for step in range(len(steps)) for row in rows[step, rank]]
    assert [row for table in written for row in table["row"].to_pylist()] == expected
    assert all(len(table) for table in written) and not list(tmp_path.iterdir())
