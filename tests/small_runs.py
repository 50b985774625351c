"""A small dataset with a signal, and the ``distembed`` command in a process of its own."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from distembed.commands import cli
from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema
from tests.command_ranks import Run, run_on_command_ranks

SIZES = {"C1": 5, "C2": 400, "C3": 1000, "M": 50}
# 31 batches of 64, and one row in the last of 30 batches of 65
ROWS = {"train": 1951, "validation": 301, "test": 203}


def write_dataset(
    folder: Path,
    dense_scale: float = 1.0,
    num_ids: int = 400,
    change: Callable[[str, pa.Table], pa.Table] = lambda split, table: table,
    more: Sequence[CategoricalFeature] = (),
    sizes: Mapping[str, int] | None = None,
    **schema: Any,
) -> Path:
    """Writes two dense features, three single-valued ones and a multi-hot one; labels depend on dense ones and C2.

    Args:
        change: Returns the table of a split as it is written.
        more: Features that it adds.
        sizes: Numbers of ids of features, in the schema alone.
        schema: Other fields of the schema.
    """
    rng = np.random.default_rng(0)
    weight_of_id = rng.normal(size=400)
    for split, rows in ROWS.items():
        dense = rng.normal(size=(2, rows)).astype(np.float32) * dense_scale
        ids = {name: (size * rng.random(rows) ** 3).astype(np.int32) for name, size in SIZES.items() if name != "M"}
        logit = dense[0] - dense[1] + weight_of_id[ids["C2"]] - 1
        bags = [rng.integers(0, SIZES["M"], rng.integers(0, 4)).tolist() for _ in range(rows)]
        columns = {
            "label": (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int8),
            "I1": dense[0],
            "I2": dense[1],
            **ids,
            "M": pa.array(bags, pa.list_(pa.int32())),
        }
        (folder / split).mkdir(parents=True)
        pq.write_table(change(split, pa.table(columns)), folder / split / "part-0.parquet", row_group_size=256)
    sizes = {**SIZES, "C2": num_ids, **(sizes or {})}
    features = tuple(CategoricalFeature(n, s, n == "M", 1.5 if n == "M" else 1.0) for n, s in sizes.items())
    described = Schema(**{"label": "label", "dense": ("I1", "I2"), "categorical": (*features, *more), **schema})
    create_manifest(folder, described, {split: [f"{split}/part-0.parquet"] for split in ROWS})
    return folder


def config_values(dataset: Path) -> dict[str, Any]:
    """Returns a small model's config, with compressed tables, in fp32 with SGD, which does not amplify rounding."""
    return {
        "data": {"path": str(dataset)},
        "model": {"bottom": [16], "top": [16]},
        "embedding": {"default": {"partition": "quotient_remainder", "embedding_dim": 8, "threshold": 10}},
        "train": {
            "batch_size": 64,
            "precision": "fp32",
            "device": "cpu",
            "log_every": 1,
            "dense_optimizer": {"name": "sgd", "learning_rate": 0.1},
            "sparse_optimizer": {"name": "sgd", "learning_rate": 1.0},
        },
    }


def train_small(folder: Path, dataset: Path, max_steps: int, *settings: str) -> Path:
    """Trains the small model for so many steps of 31, with its config beside the run; returns the run's folder."""
    (folder / "config.yaml").write_text(yaml.safe_dump(config_values(dataset)))
    call("train", folder / "config.yaml", f"train.max_steps={max_steps}", *settings, "--run-dir", folder / "run")
    return folder / "run"


def command(*arguments: object, ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", "distembed", *map(str, arguments)]


def call(*arguments: object) -> str:
    """Runs the command in this process and returns what it says; its errors are raised."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        cli.app([str(argument) for argument in arguments], standalone_mode=False)
    return said.getvalue()


def metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of metrics of one kind: ``train`` or ``eval``."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run, "train")]


def stopped_at(step: int, run: Path, copy: Path) -> Path:
    """A copy of a run whose later checkpoints were never written."""
    shutil.copytree(run, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name.split("-")[1]) > step:
            shutil.rmtree(checkpoint)
    return copy


def run_command(rank: int, arguments: Sequence[object], folder: Path, ranks: int = 1, port: int = 0) -> None:
    """Does what ``python -m distembed`` does, printing to files, with the environment of ``torch.distributed.run``."""
    for descriptor, name in ((1, "output"), (2, "errors")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if errors := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{errors}.{rank}"  # each rank has its own, as under a launcher
    sys.argv[1:] = map(str, arguments)
    cli.main()


def distembed(
    *arguments: object, ranks: int = 1, code: int = 0, run: Run = run_command
) -> subprocess.CompletedProcess[str]:
    """Runs the command in processes that are kept for it and checks its exit code; output and errors are text."""
    with tempfile.TemporaryDirectory() as folder:
        returned = run_on_command_ranks(ranks, run, arguments, Path(folder))
        output, errors = ((Path(folder) / name).read_text() for name in ("output", "errors"))
    assert returned == code, f"exit code {returned}\n{output}\n{errors}"
    return subprocess.CompletedProcess(arguments, returned, output, errors)
