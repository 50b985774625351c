"""Measures the numbers of this machine from which times are estimated, by real steps of small tables.

The estimate of a step is a sum of counts times numbers of the device: rows, bytes, operations, collectives. The
*probes* (:mod:`distembed.planning.probes`) are steps of tables with different sharding types, widths and batches, on
all ranks at once. The fit minimises the sum of the estimates' squared relative errors over the device's numbers::

    seconds of probe i  =  sum over numbers j of  count[i, j] * number[j],   number[j] >= 0

Numbers that cannot be measured, like the bandwidth between nodes on one node, stay the catalogue's; the file says so.
"""

import math
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from distembed.base.machine import host_memory_bytes, usable_cores
from distembed.base.ranks import Ranks
from distembed.base.version import versions
from distembed.planning.devices import Device, MeasuredDevice, device_here
from distembed.planning.probes import (
    COPIED_BYTES,
    NETWORK_OPERATIONS,
    Step,
    host_copy,
    lookup_probes,
    network_step,
    probes,
    shortest_seconds,
)

_ROUNDS, _STEPS_A_ROUND = 6, 3
_FULL_SPEED = 0.9
"""Share of a lone rank's speed from which on ranks count as not slowing each other down."""


def calibrate(ranks: Ranks) -> MeasuredDevice:
    """Returns a rank's device with the measured numbers; all ranks call it together."""
    is_cuda = ranks.device.type == "cuda"
    memory = torch.cuda.get_device_properties(ranks.device).total_memory if is_cuda else host_memory_bytes()
    lookups = lookup_probes(ranks)
    numbers: dict[str, Any] = _numbers_beside_tables(ranks, lookups[0])
    # else the numbers of the catalogue's device that is most like the rank's
    device = replace(device_here(ranks.device, memory), name=f"measured {ranks.device.type}", **numbers)
    steps = [*probes(ranks), *lookups]
    taken = shortest_seconds(steps, _ROUNDS, _STEPS_A_ROUND, ranks.device)
    # seconds of a rank with cores of its own
    share = 1.0 if device.ranks_at_once is None else min(1.0, device.ranks_at_once / ranks.local_world_size)
    seconds = [share * own for own in taken]
    fitted: dict[str, Any] = fit([count_device_numbers(step.estimated_seconds, device) for step in steps], seconds)
    found = replace(device, **fitted)
    errors = [abs(step.estimated_seconds(found) / own - 1) for step, own in zip(steps, taken, strict=True)]
    machine = {  # without names of hosts
        "processor": torch.cuda.get_device_name(ranks.device) if is_cuda else platform.machine(),
        "backend": dist.get_backend(),
        "ranks": ranks.world_size,
        "ranks_per_node": ranks.local_world_size,
        "threads_per_rank": torch.get_num_threads(),
        "versions": versions(),
    }
    return MeasuredDevice(replace(found, error=statistics.median(errors)), sorted({*numbers, *fitted}), machine)


def _numbers_beside_tables(ranks: Ranks, lookups: Step) -> dict[str, float]:
    """Returns the speed of networks, the bandwidth to host memory, and the number of ranks at once."""
    # first one rank of each node alone, then all ranks at once
    alone = lookups if ranks.rank % ranks.local_world_size == 0 else lambda: None
    networks = [network_step(ranks.device, bf16) for bf16 in (False, True)]
    steps: list[Step] = [alone, lookups, *networks, host_copy(ranks.device)]
    lone, together, *beside_others = shortest_seconds(steps, _ROUNDS, _STEPS_A_ROUND, ranks.device)
    numbers, share = {"utilisation": 1.0}, 1.0
    if ranks.device.type == "cpu":
        # how many the node's cores and memory run at once, each as fast as if it were alone
        speed, num_ranks = min(1.0, lone / together), ranks.local_world_size
        most = usable_cores() / torch.get_num_threads()
        at_once = min(speed * num_ranks, max(1.0, most)) if speed < _FULL_SPEED else max(float(num_ranks), most)
        numbers["ranks_at_once"] = at_once
        share = min(1.0, at_once / num_ranks)
    in_fp32, in_bf16, copied = [share * seconds for seconds in beside_others]
    return numbers | {
        "fp32_flops": NETWORK_OPERATIONS / in_fp32,
        "bf16_flops": NETWORK_OPERATIONS / in_bf16,
        "host_bandwidth": COPIED_BYTES / copied,
    }


Floats = npt.NDArray[np.float64]

BANDWIDTHS = ("lookup_bandwidth", "memory_bandwidth", "local_bandwidth", "node_bandwidth", "reduce_bandwidth")
SECONDS = ("row_seconds", "launch_seconds", "collective_seconds")
_GB = 1e9


def count_device_numbers(estimate: Callable[[Device], float], device: Device) -> Mapping[str, float]:
    """Returns how many of each of a device's numbers an estimate counts: seconds, or gigabytes over a bandwidth.

    ``estimate`` returns the seconds of a step on a device.
    """
    nothing: dict[str, Any] = dict.fromkeys(SECONDS, 0.0) | dict.fromkeys(BANDWIDTHS, math.inf)
    free = replace(device, **nothing, host_bandwidth=math.inf, ranks_at_once=None)  # on it nothing takes any time
    units: dict[str, Any] = dict.fromkeys(SECONDS, 1.0) | dict.fromkeys(BANDWIDTHS, _GB)
    return {name: estimate(replace(free, **{name: unit})) for name, unit in units.items()}


def fit(counts: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Returns a device's numbers that explain the measured seconds; numbers without any count are left out.

    ``counts`` has each step's :func:`count_device_numbers`, ``seconds`` each step's time.
    """
    names = [name for name in counts[0] if any(own[name] > 0 for own in counts)]
    matrix = np.array([[own[name] for name in names] for own in counts]) / np.array(seconds)[:, None]
    found = dict(zip(names, _least_squares(matrix).tolist(), strict=True))
    return {
        name: _GB / value if name in BANDWIDTHS else value
        for name, value in found.items()
        if value > 0 or name in SECONDS
    }


def _least_squares(matrix: Floats) -> Floats:
    """Returns the non-negative numbers whose products with the rows are nearest to 1; tries all subsets."""
    num_rows, num_columns = matrix.shape
    scales, ones = matrix.max(axis=0), np.ones(num_rows)
    best, least = np.zeros(num_columns), float(num_rows)
    for chosen in chain.from_iterable(combinations(range(num_columns), count + 1) for count in range(num_columns)):
        own = list(chosen)
        scaled = matrix[:, own] / scales[own]
        values, *_ = np.linalg.lstsq(scaled, ones, rcond=None)
        error = float(np.square(scaled @ values - ones).sum())
        if (values > 0).all() and error < least:
            best, least = np.zeros(num_columns), error
            best[own] = values / scales[own]
    return best
