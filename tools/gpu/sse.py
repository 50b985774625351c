"""Whole steps with and without replaced ids, in turns, by the rules of :mod:`bench_sse`."""

import statistics

from bench_commands import median_ratio
from bench_common import NAMES, take_turns
from bench_sse import random_graph, rules
from bench_train import Sizes, ours

from distembed.base.ranks import process_group
from gpu.results import Results
from gpu.scale import Scale, empty

BASELINE = "none"
P0 = 0.01
_EDGES_OF_AN_ID = 5


def measure(results: Results, scale: Scale) -> None:
    """Measures each number of rows except the smallest, at the first number of columns."""
    sizes = Sizes(scale.num_ids, scale.dims[0])
    by_name = rules(P0, random_graph(_EDGES_OF_AN_ID * scale.num_ids, scale.num_ids))
    with process_group(scale.device) as ranks:
        for size in scale.batch_sizes[1:]:
            if not results.lacks(batch_size=size):
                continue
            steps = {BASELINE: ours(size, ranks, "bf16", sizes)}
            for name, rule in by_name.items():
                steps[name] = ours(size, ranks, "bf16", sizes, dict.fromkeys(NAMES, rule))
            seconds = take_turns(steps, scale.rounds, scale.seconds_a_turn, ranks.device)
            results.add(
                {
                    "batch_size": size,
                    "dim": sizes.dim,
                    "rule": name,
                    "p0": P0 if name != BASELINE else 0.0,
                    "milliseconds": statistics.median(values) * 1e3,
                    "ratio": median_ratio(values, seconds[BASELINE]),
                }
                for name, values in seconds.items()
            )
            steps.clear()
            empty()
