"""Tables alone: forward, backward and update, and a step's share of the device's memory bandwidth.

The share is the time in which the device copies the bytes that a step has to move, over the time of the step (see
:mod:`bench_embedding`).
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench_commands import median_ratio
from bench_common import COLLISIONS, take_turns
from bench_embedding import Contender, bytes_moved, copy_bytes_per_second, draw_batches, ours, torchrec, turn

from distembed.base.ranks import process_group
from distembed.composition import COMPOSITIONS, PathMLP
from distembed.partitions import MixedRadix, Naive, QuotientRemainder, Remainder
from gpu.results import Results
from gpu.scale import Scale, empty

BASELINE = "TorchRec, hashed"


def contenders(num_ids: int, dim: int) -> dict[str, Contender]:
    """Returns all contenders by name, the baseline first."""
    halves = QuotientRemainder(num_ids, collisions=COLLISIONS)
    by_name = {
        BASELINE: torchrec(Remainder(num_ids, collisions=COLLISIONS), dim),
        "TorchRec, full": torchrec(Naive(num_ids), dim),
    }
    for name in ("product", "sum", "concat", "path_linear"):
        by_name[f"quotient-remainder, {name}"] = ours(halves, COMPOSITIONS[name](), dim)
    by_name["quotient-remainder, path_mlp 16"] = ours(halves, PathMLP(hidden=[16]), dim)
    by_name["mixed radix of 3, product"] = ours(MixedRadix(num_ids, num_partitions=3), COMPOSITIONS["product"](), dim)
    return by_name


def measure(results: Results, scale: Scale) -> None:
    """Measures each number of columns and rows, all contenders in turns."""
    measure_in_turns(results, scale, contenders)


def measure_in_turns(results: Results, scale: Scale, contenders: Callable[[int, int], dict[str, Contender]]) -> None:
    """Measures the contenders of a number of ids and of columns in turns, at each number of columns and rows."""
    with process_group(scale.device) as ranks:
        bandwidth = copy_bytes_per_second(ranks.device, scale.copied_bytes)
        for dim in scale.dims:
            missing = [size for size in scale.batch_sizes if results.lacks(dim=dim, batch_size=size)]
            if not missing:
                continue
            chosen = contenders(scale.num_ids, dim)
            steps = {name: contender.make(ranks.device) for name, contender in chosen.items()}
            for size in missing:
                batches = draw_batches(size, 1, scale.num_ids, ranks.device)
                turns = {name: turn(step, batches, size, chosen[name].width) for name, step in steps.items()}
                seconds = take_turns(turns, scale.rounds, scale.seconds_a_turn, ranks.device)
                moved = {name: bytes_moved(contender, batches[0], size) for name, contender in chosen.items()}
                results.add(
                    {"dim": dim, "batch_size": size, "copy_bytes_per_second": bandwidth, **row}
                    for row in _rows(seconds, moved, bandwidth)
                )
            steps.clear()
            empty()


def _rows(seconds: Mapping[str, list[float]], moved: Mapping[str, int], bandwidth: float) -> Iterator[dict[str, Any]]:
    for name, values in seconds.items():
        middle = statistics.median(values)
        yield {
            "contender": name,
            "milliseconds": middle * 1e3,
            "ratio": median_ratio(values, seconds[BASELINE]),
            "moved_bytes": moved[name],
            "share_of_bandwidth": moved[name] / bandwidth / middle,
        }
