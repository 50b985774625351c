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
"""Ranks count as independent if, all at once, each reaches at least this share of a lone rank's speed."""


def calibrate(ranks: Ranks) -> MeasuredDevice:
    """Measures a rank's device; all ranks call it. Numbers that are not measured are the nearest catalogue device's."""
    is_cuda = ranks.device.type == "cuda"
    memory = torch.cuda.get_device_properties(ranks.device).total_memory if is_cuda else host_memory_bytes()
    lookups = lookup_probes(ranks)
    numbers: dict[str, Any] = _numbers_beside_tables(ranks, lookups[0])
    device = replace(device_here(ranks.device, memory), name=f"measured {ranks.device.type}", **numbers)
    steps = [*probes(ranks), *lookups]
    measured_seconds = shortest_seconds(steps, _ROUNDS, _STEPS_A_ROUND, ranks.device)
    # the fit is for a rank with cores of its own: a measured step lasts longer where ranks share cores
    core_share = 1.0 if device.ranks_at_once is None else min(1.0, device.ranks_at_once / ranks.local_world_size)
    seconds = [core_share * step_seconds for step_seconds in measured_seconds]
    fitted: dict[str, Any] = fit([count_device_numbers(step.estimated_seconds, device) for step in steps], seconds)
    measured = replace(device, **fitted)
    estimated_seconds = [step.estimated_seconds(measured) for step in steps]
    errors = [abs(estimate / real - 1) for estimate, real in zip(estimated_seconds, measured_seconds, strict=True)]
    machine = {  # without names of hosts
        "processor": torch.cuda.get_device_name(ranks.device) if is_cuda else platform.machine(),
        "backend": dist.get_backend(),
        "ranks": ranks.world_size,
        "ranks_per_node": ranks.local_world_size,
        "threads_per_rank": torch.get_num_threads(),
        "versions": versions(),
    }
    return MeasuredDevice(replace(measured, error=statistics.median(errors)), sorted({*numbers, *fitted}), machine)


def _numbers_beside_tables(ranks: Ranks, lookups: Step) -> dict[str, float]:
    """Returns measured speeds of networks, bandwidth to host memory, and, on CPUs, ``ranks_at_once``."""
    # `alone`: only the first rank of each node works; `lookups`: all ranks at once
    alone = lookups if ranks.rank % ranks.local_world_size == 0 else lambda: None
    networks = [network_step(ranks.device, bf16) for bf16 in (False, True)]
    steps: list[Step] = [alone, lookups, *networks, host_copy(ranks.device)]
    alone_seconds, together_seconds, *other_seconds = shortest_seconds(steps, _ROUNDS, _STEPS_A_ROUND, ranks.device)
    numbers, core_share = {"utilisation": 1.0}, 1.0
    if ranks.device.type == "cpu":
        # with speed s of a lone rank's when n ranks run, the node does the work of s n lone ranks at once
        speed, num_ranks = min(1.0, alone_seconds / together_seconds), ranks.local_world_size
        most_at_once = usable_cores() / torch.get_num_threads()
        if speed < _FULL_SPEED:
            ranks_at_once = min(speed * num_ranks, max(1.0, most_at_once))
        else:
            ranks_at_once = max(float(num_ranks), most_at_once)
        numbers["ranks_at_once"] = ranks_at_once
        core_share = min(1.0, ranks_at_once / num_ranks)
    fp32_seconds, bf16_seconds, copy_seconds = [core_share * seconds for seconds in other_seconds]
    return numbers | {
        "fp32_flops": NETWORK_OPERATIONS / fp32_seconds,
        "bf16_flops": NETWORK_OPERATIONS / bf16_seconds,
        "host_bandwidth": COPIED_BYTES / copy_seconds,
    }


Floats = npt.NDArray[np.float64]

BANDWIDTHS = ("lookup_bandwidth", "memory_bandwidth", "local_bandwidth", "node_bandwidth", "reduce_bandwidth")
SECONDS = ("row_seconds", "launch_seconds", "collective_seconds")
_GB = 1e9


def count_device_numbers(estimate: Callable[[Device], float], device: Device) -> Mapping[str, float]:
    """Returns how often the estimated seconds of a step count each of a device's numbers.

    A time (like ``row_seconds``) is counted so many times, a bandwidth for so many gigabytes. The estimate is linear in
    times and in 1 / bandwidth, so one number at a time is set to a unit on a device where nothing else takes time.
    """
    nothing: dict[str, Any] = dict.fromkeys(SECONDS, 0.0) | dict.fromkeys(BANDWIDTHS, math.inf)
    free = replace(device, **nothing, host_bandwidth=math.inf, ranks_at_once=None)  # on it nothing takes any time
    units: dict[str, Any] = dict.fromkeys(SECONDS, 1.0) | dict.fromkeys(BANDWIDTHS, _GB)
    return {name: estimate(replace(free, **{name: unit})) for name, unit in units.items()}


def fit(counts: Sequence[Mapping[str, float]], seconds: Sequence[float]) -> dict[str, float]:
    """Returns the device numbers whose estimates are nearest to the measured ``seconds``, one for each step.

    ``counts`` has each step's :func:`count_device_numbers`. Numbers that no step counts are left out, and bandwidths
    that the fit finds infinite.
    """
    # rows divided by the measured seconds: the target is 1, and errors are relative
    names = [name for name in counts[0] if any(step_counts[name] > 0 for step_counts in counts)]
    matrix = np.array([[step_counts[name] for name in names] for step_counts in counts]) / np.array(seconds)[:, None]
    fitted = dict(zip(names, _least_squares(matrix).tolist(), strict=True))
    return {
        name: _GB / value if name in BANDWIDTHS else value
        for name, value in fitted.items()
        if value > 0 or name in SECONDS
    }


def _least_squares(matrix: Floats) -> Floats:
    """Returns x >= 0 that minimises ``|matrix @ x - 1|``: the best subset of columns with a positive solution."""
    num_rows, num_columns = matrix.shape
    scales, target = matrix.max(axis=0), np.ones(num_rows)
    best, least = np.zeros(num_columns), float(num_rows)
    for chosen in chain.from_iterable(combinations(range(num_columns), count + 1) for count in range(num_columns)):
        columns = list(chosen)
        scaled = matrix[:, columns] / scales[columns]
        values, *_ = np.linalg.lstsq(scaled, target, rcond=None)
        error = float(np.square(scaled @ values - target).sum())
        if (values > 0).all() and error < least:
            best, least = np.zeros(num_columns), error
            best[columns] = values / scales[columns]
    return best
