"""What is measured: steps of the probes, what networks reach, copies from host memory, and ranks that share cores.

Every measurement is taken in rounds, each of all measurements in turn, and its shortest round counts: what disturbs a
machine makes steps longer, never shorter.
"""

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise

from distembed.base.ranks import Ranks
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder
from distembed.planning.calibration.sharded_tables import LookupStep, ShardedTables, TimedStep

Step = Callable[[], object]
_COLLISIONS = 4
_WIDTHS, _NUM_ROWS, _NUM_TABLES = (16, 64), (128, 1024, 4096), (2, 8)
_LOOKED_UP = 4
"""Number of a rank's tables in a probe of lookups alone."""
_SMALL, _LARGE = 1_000, 200_000
_NETWORK = (512, 512, 256, 1)
_NETWORK_ROWS = 1024
_PRODUCTS = [width * next_width for width, next_width in pairwise(_NETWORK)]
NETWORK_OPERATIONS = 2 * _NETWORK_ROWS * (3 * sum(_PRODUCTS) - _PRODUCTS[0])
"""Floating-point operations of a step of the network, whose first layer has no gradient of its inputs."""
COPIED_BYTES = 2**26
_REPLICATED = 24
"""Number of small replicated tables in a probe, whose steps are nearly all starts of operations."""


def probes(ranks: Ranks) -> list[TimedStep]:
    """Returns steps of tables that are sharded in different ways, of different widths, numbers and batches.

    Every rank has as many as every other. All ranks call it.
    """
    world_size = ranks.world_size
    ways: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda i: table_wise(rank=i % world_size, compute_kernel="fused"),
        "data_parallel": lambda i: data_parallel(),
    }
    if world_size > 1:
        ways["row_wise"] = lambda i: row_wise(compute_kernel="fused")
        ways["column_wise"] = lambda i: column_wise(ranks=list(range(world_size)), compute_kernel="fused")
    placed = [
        [(table, place(i)) for i, table in enumerate(_tables(count, world_size if way == "table_wise" else 1, dim))]
        for (way, place), dim, count in product(ways.items(), _WIDTHS, _NUM_TABLES)
    ]
    small = [_table(i, _SMALL, _WIDTHS[0], is_product=i % 2 == 0) for i in range(_REPLICATED)]
    steps = []
    for own in [*placed, [(table, data_parallel()) for table in small]]:
        sharded = ShardedTables(own, ranks)
        steps += [TimedStep(sharded, num_rows) for num_rows in _NUM_ROWS]
    return steps


def lookup_probes(ranks: Ranks) -> list[LookupStep]:
    """Returns steps of lookups without exchanges, as many on every rank; the first is of the largest tables.

    All ranks call it.
    """
    steps = []
    for num_ids, dim, is_product in product((_LARGE, _SMALL), _WIDTHS, (True, False)):
        tables = [_table(i, num_ids, dim, is_product) for i in range(_LOOKED_UP * ranks.world_size)]
        places = [table_wise(rank=i // _LOOKED_UP, compute_kernel="fused") for i in range(len(tables))]
        sharded = ShardedTables(zip(tables, places, strict=True), ranks)
        steps += [LookupStep(sharded, num_rows) for num_rows in _NUM_ROWS[:0:-1]]
    return steps


def _tables(count: int, repeats: int, dim: int) -> list[CompositionalEmbeddingBagConfig]:
    """Returns tables of which half are full and half products, half of either large; each as often as said."""
    kinds = [i // repeats for i in range(count * repeats)]
    return [_table(i, _LARGE if kind % 4 in (0, 3) else _SMALL, dim, kind % 2 == 0) for i, kind in enumerate(kinds)]


def _table(i: int, num_ids: int, dim: int, is_product: bool) -> CompositionalEmbeddingBagConfig:
    scheme: Any = QuotientRemainder(num_ids, collisions=_COLLISIONS) if is_product else "naive"
    return CompositionalEmbeddingBagConfig(f"t{i}", num_ids, dim, [f"f{i}"], scheme)


def shortest_seconds(steps: Sequence[Step], rounds: int, num_steps: int, device: torch.device) -> list[float]:
    """Returns the shortest mean of ``num_steps`` of each step, over rounds in which all take turns.

    All ranks call it, with as many steps.
    """
    shortest = [math.inf] * len(steps)
    for _ in range(rounds):
        for i, step in enumerate(steps):
            step()
            _wait_for_all(device)
            started = time.perf_counter()
            for _ in range(num_steps):
                step()
            _wait_for_all(device)
            shortest[i] = min(shortest[i], (time.perf_counter() - started) / num_steps)
    return shortest


def _wait_for_all(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def network_step(device: torch.device, bf16: bool) -> Step:
    """Returns forward and backward of a network of the size of a click model's."""
    layers = [nn.Linear(width, next_width) for width, next_width in pairwise(_NETWORK)]
    network = nn.Sequential(*[module for layer in layers for module in (layer, nn.ReLU())]).to(device)
    inputs = torch.randn(_NETWORK_ROWS, _NETWORK[0], device=device)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=bf16)

    def step() -> None:
        network.zero_grad()
        with autocast:
            loss = network(inputs).sum()
        loss.backward()

    return step


def host_copy(device: torch.device) -> Step:
    """Returns the copy of :data:`COPIED_BYTES` from the machine's memory to the device."""
    host = torch.zeros(COPIED_BYTES // 4, pin_memory=device.type == "cuda")
    copy = torch.empty_like(host, device=device)
    return lambda: copy.copy_(host, non_blocking=True)
