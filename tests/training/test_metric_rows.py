"""Outputs that metrics take: gathered rows and the union of distinct ids, on one rank and on three."""

from typing import Any

import numpy as np
import pytest
import torch

from distembed.base.ranks import Ranks
from distembed.training.metric_rows import MetricRows
from tests.ranks import run_on_ranks

NUM_IDS = 9


class FakeTask:
    outputs = ("metrics", "users", "best", "best_scores")
    prediction_outputs = ("users", "best_scores")
    distinct_outputs = {"best": NUM_IDS}


BATCHES = [
    {"metrics": [[0.5], [1.0]], "best": [[3, 1], [8, 3]]},
    {"metrics": [[0.25]], "best": [[1, -1]]},
    {"metrics": [], "best": []},
    {"metrics": [[0.0], [2.0], [4.0]], "best": [[-1, -1], [4, 3], [0, -1]]},
]


def collected(batches: list[dict[str, Any]], ranks: Ranks) -> Any:
    task: Any = FakeTask()
    rows = MetricRows(task)
    for batch in batches:
        num_rows = len(batch["metrics"])
        rows.add(
            {
                "metrics": torch.tensor(batch["metrics"]).view(num_rows, 1),
                "best": np.array(batch["best"], np.int64).reshape(num_rows, 2),
                "users": torch.zeros(num_rows),
                "best_scores": torch.zeros(num_rows, 2),
            }
        )
    return rows.gathered(ranks)


def check(found: Any) -> None:
    assert found.keys() == {"metrics", "best"}
    assert found["metrics"][:, 0].tolist() == [0.5, 1.0, 0.25, 0.0, 2.0, 4.0]
    assert found["best"].tolist() == sorted({item for batch in BATCHES for row in batch["best"] for item in row} - {-1})


def check_on_rank(rank: int, world_size: int) -> None:
    own = [BATCHES[:2], BATCHES[2:3], BATCHES[3:]][rank]
    found = collected(own, Ranks(rank, world_size, world_size, torch.device("cpu")))
    if rank == 0:
        check(found)
    else:
        assert all(len(values) == 0 for values in found.values())


def test_metrics_get_all_rows_and_the_distinct_ids() -> None:
    alone = Ranks(0, 1, 1, torch.device("cpu"))
    check(collected(BATCHES, alone))
    assert {name: len(values) for name, values in collected([], alone).items()} == {"metrics": 0, "best": 0}


@pytest.mark.distributed
def test_three_ranks_give_the_rows_and_ids_of_one() -> None:
    run_on_ranks(3, check_on_rank)
