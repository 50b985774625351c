"""Runs of a softmax over all items on two ranks, however these are placed, with the losses and metrics of one rank."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.processes import run_processes
from tests.ranks import free_port
from tests.training.test_next_item import config, evaluations  # noqa: F401  (a fixture)
from tests.training.test_runs import call, losses

LAYOUTS = ("table_wise", "row_wise", "column_wise", "data_parallel")
TABLES = {
    "full": {"partition": "naive"},
    "quotient_remainder": {"partition": "quotient_remainder", "collisions": 4, "threshold": 0, "force": True},
}


def write_config(folder: Path, table: str, layout: str | None) -> Path:
    values: dict[str, Any] = {
        "extends": "config.yaml",
        "task": {"loss": "softmax"},
        "embedding": {"tables": {"item": {"embedding_dim": 8, **TABLES[table]}}},
        "train": {"dense_optimizer": {"name": "adam", "learning_rate": 0.01, "weight_decay": 0.01}},
    }
    if layout is not None:
        own = {"sharding_types": [layout], **({"min_partition": 4} if layout == "column_wise" else {})}
        values["plan"] = {"tables": {"item": own}}
    path = folder / f"{table}_{layout}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def train_on_two(rank: int, ports: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    for table in TABLES:
        for layout in LAYOUTS:
            os.environ["MASTER_PORT"] = str(ports.pop())
            call("train", folder / f"{table}_{layout}.yaml", "--run-dir", folder / f"{table}_{layout}")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1200)
def test_all_layouts_have_the_metrics_of_one_rank(config: Path, tmp_path: Path) -> None:  # noqa: F811
    for table in TABLES:
        for layout in (*LAYOUTS, None):
            write_config(tmp_path, table, layout)
        call("train", tmp_path / f"{table}_None.yaml", "--run-dir", tmp_path / table)
    run_processes(2, train_on_two, [free_port() for _ in range(len(TABLES) * len(LAYOUTS))], tmp_path)
    for table in TABLES:
        for layout in LAYOUTS:
            found, expected = tmp_path / f"{table}_{layout}", tmp_path / table
            assert losses(found) == pytest.approx(losses(expected), rel=1e-3), (table, layout)
            for own, other in zip(evaluations(found), evaluations(expected), strict=True):
                assert own == pytest.approx(other, abs=0.02), (table, layout)
