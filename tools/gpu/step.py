"""Whole training steps of the paper's DLRM: distembed's trainer against TorchRec's pipeline, in turns.

The contenders are from :mod:`bench_train`. TorchRec's pipeline prepares the next batch during a step, as distembed's
does on a GPU.
"""

import statistics
from collections.abc import Callable

from bench_commands import median_ratio
from bench_common import Step, take_turns
from bench_train import Sizes, ours, torchrec
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from distembed.base.ranks import Ranks, process_group
from gpu.results import Results
from gpu.scale import Scale, empty

BASELINE = "TorchRec, hashed, fp32"


def contenders(batch_size: int, sizes: Sizes, ranks: Ranks) -> dict[str, Callable[[], Step]]:
    """Returns the functions that build each contender's step, by name, the baseline first."""

    def stock(num_rows: int) -> Step:
        return torchrec(batch_size, ranks, True, num_rows, sizes.dim, TrainPipelineSparseDist)

    return {
        BASELINE: lambda: stock(sizes.num_rows),
        "TorchRec, full, fp32": lambda: stock(sizes.num_ids),
        "distembed, quotient-remainder, fp32": lambda: ours(batch_size, ranks, "fp32", sizes),
        "distembed, quotient-remainder, bf16": lambda: ours(batch_size, ranks, "bf16", sizes),
    }


def measure(results: Results, scale: Scale) -> None:
    """Measures each number of columns and rows, all contenders in turns."""
    with process_group(scale.device) as ranks:
        for dim in scale.dims:
            for size in scale.batch_sizes:
                if not results.lacks(dim=dim, batch_size=size):
                    continue
                steps = {name: make() for name, make in contenders(size, Sizes(scale.num_ids, dim), ranks).items()}
                seconds = take_turns(steps, scale.rounds, scale.seconds_a_turn, ranks.device)
                results.add(
                    {
                        "dim": dim,
                        "batch_size": size,
                        "contender": name,
                        "milliseconds": statistics.median(values) * 1e3,
                        "samples_per_second": size / statistics.median(values),
                        "speed_ratio": median_ratio(seconds[BASELINE], values),
                    }
                    for name, values in seconds.items()
                )
                steps.clear()
                empty()
