r"""Compares the speed of BPR with RecBole's BPR on equal rows, epoch by epoch in turn.

RecBole needs NumPy 1, so it runs in a separate environment, whose Python is ``--peer``; its wheel ships the data::

    python -m venv /tmp/recbole
    /tmp/recbole/bin/pip install torch==2.13.0 numpy==1.26.4 scipy==1.12.0 scikit-learn==1.4.2 pandas==2.2.3 \
        colorlog==4.7.2 colorama==0.4.4 texttable tabulate tqdm pyyaml tensorboard thop plotly psutil
    /tmp/recbole/bin/pip install --no-deps recbole==1.2.1
    python tools/bench_bpr.py --peer /tmp/recbole/bin/python \
        --data /tmp/recbole/lib/python3.11/site-packages/recbole/dataset_example/ml-100k
    python tools/bench_bpr.py --peer /tmp/recbole/bin/python --draw 100000 --epochs 5

Both train on 80% of the rows of MovieLens-100k or of random rows (``--draw``), with one negative item for each row that
the row's user does not have, vectors and batches of equal size, and one thread that computes. distembed reads ahead
with a second thread. RecBole's Adam updates all rows of its tables; distembed's Adagrad updates the rows of the batch.
On a busy machine use the ratio by processor time, which counts all threads.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from bench_commands import run_distembed, told
from rich.console import Console
from rich.table import Table

from distembed.base.ranks import Ranks, process_group
from distembed.data.reader import BatchOrder, BatchReader
from distembed.tasks.base import BatchPosition
from distembed.training.build import Blueprint, build_training_state
from distembed.training.config import Config, load_config

_PEER = Path(__file__).parent / "peers" / "recbole_bpr.py"


class Epoch(NamedTuple):
    """The rows of an epoch, its seconds, and the process's processor time in all threads."""

    rows: int
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.rows / self.seconds

    @property
    def cpu_rate(self) -> float:
        """Samples a processor second."""
        return self.rows / self.cpu_seconds


def draw_rows(folder: Path, num_ids: int) -> Path:
    """Writes random interactions in RecBole's format: ``num_ids`` users and items, five rows a user, skewed items."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(num_ids), 5)
    items = np.exp(rng.random(len(users)) * np.log(num_ids)).astype(int)
    rows = zip(users.tolist(), items.tolist(), strict=True)
    data = folder / "drawn"
    data.mkdir()
    lines = ["user_id:token\titem_id:token", *(f"{user}\t{item}" for user, item in rows)]
    (data / "drawn.inter").write_text("\n".join(lines) + "\n")
    return data


def prepare(data: Path, folder: Path) -> Path:
    """Makes a dataset of RecBole's rows, with 80% of them for training."""
    columns = ["--user", "user_id", "--item", "item_id", "--implicit", "--split", "random:0.8,0.1,0.1"]
    run_distembed("prepare", "ratings", data / f"{data.name}.inter", "--output", folder / "dataset", *columns)
    return folder / "dataset"


def ours(config: Config, ranks: Ranks) -> Callable[[], Epoch]:
    """Returns a function that trains an epoch with distembed's trainer and reader, on one rank."""
    dataset = config.data.require_path()
    blueprint = Blueprint.for_ranks(config, config.data.load_schema(), ranks, {})
    state = build_training_state(blueprint, ranks, num_steps=1_000_000)
    state.task.start(blueprint.task_context(dataset, ranks))
    reader = BatchReader(dataset, config.data.train, BatchOrder(config.train.batch_size), rank=0, world_size=1)
    steps = 0

    def epoch() -> Epoch:
        nonlocal steps
        started, started_cpu = time.perf_counter(), time.process_time()
        batches = (
            state.task.prepare_batch(batch, BatchPosition(step, 0))
            for step, batch in enumerate(islice(reader, reader.batches_per_epoch), start=steps)
        )
        done = sum(1 for _ in state.pipeline.outputs(batches))
        steps += done
        return Epoch(reader.num_rows, time.perf_counter() - started, time.process_time() - started_cpu)

    return epoch


def peer(python: str, data: Path, batch_size: int, dim: int) -> Callable[[], Epoch]:
    """Returns a function that trains an epoch with RecBole, in a process that waits between epochs."""
    command = [python, str(_PEER), str(data), "--batch-size", str(batch_size), "--dim", str(dim)]
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, cwd=tempfile.mkdtemp())
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    while (line := stdout.readline().strip()) != "ready":
        if not line and process.poll() is not None:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")

    def epoch() -> Epoch:
        stdin.write("\n")
        stdin.flush()
        return Epoch(*json.loads(stdout.readline()))

    return epoch


def main() -> None:
    """Trains epochs of both in turn, and prints samples/s and the ratio for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="folder of a RecBole dataset, for example ml-100k")
    source.add_argument("--draw", type=int, help="number of users and of items to draw")
    parser.add_argument("--peer", required=True, help="Python of an environment with recbole==1.2.1")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("batch", "RecBole samples/s", "distembed samples/s", "ratio (of turns)", "ratio by processor time")
    with tempfile.TemporaryDirectory() as folder, process_group("cpu") as ranks:
        data = options.data.absolute() if options.draw is None else draw_rows(Path(folder), options.draw)
        dataset = prepare(data, Path(folder))
        for batch_size in options.batch_sizes:
            settings = [
                f"data.path={dataset}",
                "model={name: mf, biases: false}",
                "task.name=ranking",
                f"embedding.default.embedding_dim={options.dim}",
                f"train.batch_size={batch_size}",
                "train.precision=fp32",
                "train.sparse_optimizer={name: adagrad, learning_rate: 0.05}",
            ]
            theirs = peer(options.peer, data, batch_size, options.dim)
            contenders = theirs, ours(load_config(None, settings), ranks)
            for epoch in contenders:
                epoch()
            turns = [[epoch() for epoch in contenders] for _ in told(range(options.epochs), "epochs")]
            ratios = sorted(own.rate / recbole.rate for recbole, own in turns)
            first, second = (statistics.median(turn[which].rate for turn in turns) for which in (0, 1))
            cpu_ratio = statistics.median(own.cpu_rate / recbole.cpu_rate for recbole, own in turns)
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            table.add_row(f"{batch_size:,}", f"{first:,.0f}", f"{second:,.0f}", spread, f"{cpu_ratio:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
