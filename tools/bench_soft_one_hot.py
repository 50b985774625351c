"""Times a step of the paper's DLRM with and without soft one-hot vectors of its 13 dense features.

The contenders take turns step by step: the bottom network alone, with soft one-hot vectors in addition (``both``), and
soft one-hot vectors instead of the bottom network::

    python tools/bench_soft_one_hot.py --output bench_soft_one_hot.json

A step's time is processor time over all threads, so that other work on the machine has little effect. The ratio is the
median over rounds of a contender's time to the bottom network's time.
"""

import json
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from bench_commands import bench_parser, median_ratio, write_output
from bench_common import COLLISIONS, DIM, NUM_IDS, Step, surroundings, trainer_step
from bench_train import SCHEMA, draw_batches
from rich.console import Console
from rich.table import Table

from distembed.base.ranks import Ranks, process_group
from distembed.embedding import EmbeddingConfig, TableConfig
from distembed.models import DLRMConfig, SoftOneHotConfig
from distembed.training.build import Blueprint, build_training_state
from distembed.training.config import Config
from distembed.training.train_config import TrainConfig

BASELINE = "bottom"


def make_step(dense: str, bins: int, batch_size: int, precision: str, ranks: Ranks) -> Step:
    """Returns a step of distembed's trainer with quotient-remainder tables."""
    table = TableConfig(partition="quotient_remainder", collisions=COLLISIONS, embedding_dim=DIM)
    train = TrainConfig(batch_size=batch_size, precision=precision)  # type: ignore[arg-type]
    soft_one_hot = None if dense == BASELINE else SoftOneHotConfig(bins=bins)
    model = DLRMConfig(dense=dense, soft_one_hot=soft_one_hot)  # type: ignore[arg-type]
    config = Config(model=model, embedding=EmbeddingConfig(default=table), train=train)
    state = build_training_state(Blueprint.for_ranks(config, SCHEMA, ranks, {}), ranks, num_steps=1000)
    return trainer_step(state, draw_batches(batch_size, NUM_IDS))


def measure(steps: Mapping[str, Step], rounds: int) -> dict[str, list[float]]:
    """Returns the processor seconds of every contender's step in every round, after five rounds to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 5):
        for name, step in steps.items():
            started = time.process_time()
            step()
            if number >= 5:
                seconds[name].append(time.process_time() - started)
    return seconds


def main() -> None:
    """Measures every contender and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[2048])
    parser.add_argument("--bins", type=int, default=SoftOneHotConfig().bins)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    table = Table("dense", "precision", "batch", "bins", "ms of the processor", "to bottom")
    with process_group("cpu") as ranks:
        for batch_size in options.batch_sizes:
            for precision in ("fp32", "bf16"):
                steps = {
                    dense: make_step(dense, options.bins, batch_size, precision, ranks)
                    for dense in (BASELINE, "both", "soft_one_hot")
                }
                for dense, seconds in (measured := measure(steps, options.rounds)).items():
                    ratio = median_ratio(seconds, measured[BASELINE])
                    milliseconds = 1000 * statistics.median(seconds)
                    row = {"dense": dense, "precision": precision, "batch_size": batch_size, "bins": options.bins}
                    rows.append({**row, "milliseconds": milliseconds, "ratio_to_bottom": ratio})
                    table.add_row(*map(str, row.values()), f"{milliseconds:.1f}", f"{ratio:.3f}x")
    Console(width=110).print(table)
    result = {**surroundings(torch.device("cpu")), "rows": rows}
    print(json.dumps(result))
    write_output(options, result)


if __name__ == "__main__":
    main()
