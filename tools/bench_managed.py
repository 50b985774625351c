"""Measures managed ids: hit rate, evictions and bytes of each policy, and their cost in a DLRM step on a CPU.

A stream of 10^6 raw ids is skewed, and its frequent ids change over time. A table of quotient-remainder slots takes it
in batches. The step is the one of ``bench_train.py``, with 26 tables; it takes turns with managed ids and without.
Steps, and giving slots alone, have batches of their own that do not repeat with the default options: new ids arrive all
the time::

    OMP_NUM_THREADS=1 python tools/bench_managed.py --output bench_managed.json
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from typing import get_args

import numpy as np
import torch
from bench_commands import bench_parser, kept_rows, median_ratio, write_output
from bench_common import NUM_IDS, Step, draw_ids, surroundings, take_turns, trainer_step
from bench_train import build_ours, draw_batches
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from distembed.base.ranks import Ranks, process_group
from distembed.data.hashing import mix64_array
from distembed.embedding.managed import ManagedFeatures, ManagedIds
from distembed.embedding.managed_sizes import ManagedSizes
from distembed.embedding.settings import AdmissionConfig, EvictionConfig, ManagedConfig
from distembed.training.managed_ids import evict_ids, managed_tables

NUM_SLOTS, DRIFT, NUM_DRAWN = 20_000, 40_000, 200
POLICIES = get_args(EvictionConfig.__annotations__["policy"])
NUM_CANDIDATES = NUM_SLOTS // 4, NUM_SLOTS, 5 * NUM_SLOTS  # the first is the default
WITHOUT = "no managed ids"


def draw_stream(count: int) -> NDArray[np.int64]:
    """Draws raw ids by a law of Zipf; the most frequent ids are others after each eighth of the stream."""
    ranks = draw_ids(count, torch.Generator().manual_seed(0)).numpy()
    period = np.arange(count) * 8 // count
    return mix64_array((ranks + period * DRIFT).astype(np.uint64)).view(np.int64)


def measure_policy(
    eviction: EvictionConfig, candidates: int, stream: NDArray[np.int64], batch_size: int
) -> dict[str, float]:
    """Admits the stream to a new table; returns its counts, its bytes, and an eviction's median milliseconds."""
    config = ManagedConfig(NUM_SLOTS + 2, admission=AdmissionConfig(candidates=candidates), eviction=eviction)
    managed, hits, seconds = ManagedIds(ManagedSizes("C3", config)), 0, list[float]()
    for step, start in enumerate(range(0, len(stream), batch_size), start=1):
        managed.start_batch()
        hits += int((managed.admit(stream[start : start + batch_size]) > 1).sum())
        if step % eviction.every == 0:
            started = time.perf_counter()
            managed.evict()
            seconds.append(time.perf_counter() - started)
    return {
        "hit_rate": hits / len(stream),
        "evictions": managed.num_evicted,
        "bytes": sum(state.nbytes for state in managed.state.values()) + managed._places.nbytes,
        "counted_bytes": managed.sizes.memory_bytes,
        "evict_ms": 1e3 * statistics.median(seconds),
    }


@dataclass
class Contender:
    """A DLRM step, and for managed ids its part that gives slots, and an eviction of all tables."""

    step: Step
    slots: Step | None = None
    evict: Step | None = None


def make_contenders(batch_size: int, ranks: Ranks) -> dict[str, Contender]:
    """Builds DLRM without managed ids, with slots for all ids, and with slots for a tenth of them."""
    drawn, contenders = draw_batches(batch_size, NUM_IDS, 2 * NUM_DRAWN), dict[str, Contender]()
    batches, fresh = drawn[:NUM_DRAWN], drawn[NUM_DRAWN:]
    for name, size in {WITHOUT: None, "slots for all ids": NUM_IDS, "slots for a tenth": NUM_IDS // 10}.items():
        config = None if size is None else ManagedConfig(size, eviction=EvictionConfig(every=1))
        _, state = build_ours(batch_size, ranks, "fp32", ids=config)
        contenders[name] = contender = Contender(trainer_step(state, batches))
        if config is not None:
            features = ManagedFeatures({table.feature_names[0]: own for _, table, own in managed_tables(state.model)})
            parts = (batch["sparse_features"] for batch in cycle(fresh))
            contender.slots = lambda give=features, turn=parts: give(next(turn), admits=True)  # type: ignore[misc]
            contender.evict = partial(evict_ids, state.model, state.optimizers.combined, 1)
    return contenders


def evict_milliseconds(contender: Contender, rounds: int) -> float:
    """Returns the median time of an eviction of all tables, each after five steps."""
    seconds = []
    for _ in range(rounds if contender.evict else 0):
        for _ in range(5):
            contender.step()
        started = time.perf_counter()
        contender.evict()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds or [0.0])


def main() -> None:
    """Measures the policies and the steps, and prints two tables."""
    parser = bench_parser(__doc__)
    parser.add_argument("--ids", type=int, default=10**6, help="ids of the stream")
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--every", type=int, default=10, help="batches between evictions of the stream")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of one contender's turn")
    options = parser.parse_args()
    console, stream = Console(width=120), draw_stream(options.ids)
    every = options.every
    policies = {policy: EvictionConfig(policy, every) for policy in POLICIES}
    policies[f"lfu, half-life {every}"] = EvictionConfig("lfu", every, half_life_steps=every)
    measures = {
        f"{name}, {candidates:,}": partial(measure_policy, own, candidates, stream, options.batch_size)
        for (name, own), candidates in product(policies.items(), NUM_CANDIDATES)
    }
    measured = kept_rows(options, measures)
    table = Table("policy, candidates", "hit rate", "evicted ids", "bytes", "counted", "evict, ms")
    for policy, own in measured.items():
        counts = (f"{own[key]:,}" for key in ("evictions", "bytes", "counted_bytes"))
        table.add_row(policy, f"{own['hit_rate']:.4f}", *counts, f"{own['evict_ms']:.1f}")
    console.print(table)
    with process_group("cpu") as ranks:
        contenders = make_contenders(options.batch_size, ranks)
        steps = {name: own.step for name, own in contenders.items()}
        seconds = take_turns(steps, options.rounds, options.seconds, ranks.device)
        parts = {name: own.slots for name, own in contenders.items() if own.slots}
        slots = take_turns(parts, options.rounds, options.seconds / 10, ranks.device)
        evictions = {name: evict_milliseconds(own, options.rounds) for name, own in contenders.items()}
    table = Table("step", "ms", "cost", "giving slots, ms", "an eviction of 26 tables, ms")
    for name, own in seconds.items():
        cost, step = median_ratio(own, seconds[WITHOUT]) - 1, 1e3 * statistics.median(own)
        part = 1e3 * statistics.median(slots.get(name, [0.0]))
        table.add_row(name, f"{step:.0f}", f"{cost:+.1%}", f"{part:.1f}", f"{evictions[name]:.0f}")
    console.print(table)
    write_output(
        options,
        {
            **surroundings(torch.device("cpu")),
            "policies": measured,
            "step": seconds,
            "slots": slots,
            "evict_ms": evictions,
        },
    )


if __name__ == "__main__":
    main()
