"""Measures the machine that this rank is on, with all ranks at once."""

import platform
import statistics
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from distembed.base.machine import host_memory_bytes, usable_cores
from distembed.base.ranks import Ranks
from distembed.base.version import versions
from distembed.planning.calibration.fit import count_numbers, fit
from distembed.planning.calibration.measure import (
    COPIED_BYTES,
    NETWORK_OPERATIONS,
    Step,
    host_copy,
    lookup_probes,
    network_step,
    probes,
    shortest_seconds,
)
from distembed.planning.devices import MeasuredDevice, device_here

_ROUNDS, _STEPS_A_ROUND = 6, 3
_FULL_SPEED = 0.9
"""Share of a lone rank's speed from which on ranks are said not to slow each other down."""


def calibrate(ranks: Ranks) -> MeasuredDevice:
    """Returns a rank's device with the numbers that are measured; all ranks call it together."""
    is_cuda = ranks.device.type == "cuda"
    memory = torch.cuda.get_device_properties(ranks.device).total_memory if is_cuda else host_memory_bytes()
    lookups = lookup_probes(ranks)
    numbers: dict[str, Any] = _numbers_beside_tables(ranks, lookups[0])
    # else the numbers of the catalogue's device that is most like the rank's
    device = replace(device_here(ranks.device, memory), name=f"measured {ranks.device.type}", **numbers)
    steps = [*probes(ranks), *lookups]
    taken = shortest_seconds(steps, _ROUNDS, _STEPS_A_ROUND, ranks.device)
    # what a rank takes with cores of its own
    share = 1.0 if device.ranks_at_once is None else min(1.0, device.ranks_at_once / ranks.local_world_size)
    seconds = [share * own for own in taken]
    fitted: dict[str, Any] = fit([count_numbers(step.estimated_seconds, device) for step in steps], seconds)
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
    """Returns the operations a second of networks, the bandwidth to host memory, and how many ranks run at once."""
    # the first rank of each node alone, while the others wait, and then all at once
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
