"""Counts the kernels, copies and waits of a step in the trace of torch's profiler.

A processor launches no kernels; there only the outermost operators are counted.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bench_common import Step, wait_for
from bench_embedding import draw_batches, turn
from bench_train import Sizes
from torch.profiler import ProfilerActivity, profile, record_function

import gpu.embedding
import gpu.fused
import gpu.step
from distembed.base.ranks import Ranks, process_group
from gpu.results import Results
from gpu.scale import Scale, empty

_STEP = "counted step"
_WARM_STEPS = 3
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaFree")
"""CUDA calls that wait for the device, by their whole names."""


def measure(results: Results, scale: Scale) -> None:
    """Counts the steps of all contenders, at the first number of columns and the second of rows."""
    dim, size = scale.dims[0], scale.batch_sizes[1]
    with process_group(scale.device) as ranks:
        batches = draw_batches(size, 1, scale.num_ids, ranks.device)
        alone = gpu.embedding.contenders(scale.num_ids, dim) | gpu.fused.contenders(scale.num_ids, dim)
        for name, contender in alone.items():
            if results.lacks(what="tables alone", contender=name):
                step = turn(contender.make(ranks.device), batches, size, contender.width)
                results.add([{"what": "tables alone", "contender": name, **counted(step, scale.profiled_steps, ranks)}])
        for name, make in gpu.step.contenders(size, Sizes(scale.num_ids, dim), ranks).items():
            if results.lacks(what="whole step", contender=name):
                results.add([{"what": "whole step", "contender": name, **counted(make(), scale.profiled_steps, ranks)}])
                empty()


def counted(step: Step, num_steps: int, ranks: Ranks) -> dict[str, float]:
    """Takes steps under the profiler and returns the mean counts of a step."""
    for _ in range(_WARM_STEPS):
        step()
    wait_for(ranks.device)
    activities = [ProfilerActivity.CPU]
    if ranks.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        for _ in range(num_steps):
            with record_function(_STEP):
                step()
        wait_for(ranks.device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return {name: total / num_steps for name, total in count(events).items()}


def count(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the total counts of a trace's events.

    Host events count if they start within a counted step, in any thread, because the backward pass has its own thread.
    All device events count, because the device was idle before the steps.
    """
    whole = [event for event in events if event.get("ph") == "X"]
    steps = [_span(event) for event in whole if event.get("cat") == "user_annotation" and event["name"] == _STEP]
    host = [event for event in whole if any(first <= event["ts"] <= last for first, last in steps)]
    on_device = [event for event in whole if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return {
        "kernels": sum(event["cat"] == "kernel" for event in on_device),
        "copies": sum(event["cat"] == "gpu_memcpy" for event in on_device),
        "fills": sum(event["cat"] == "gpu_memset" for event in on_device),
        "device_milliseconds": sum(event["dur"] for event in on_device) / 1e3,
        "waits": sum(event.get("cat") == "cuda_runtime" and event["name"] in _WAITS for event in host),
        "operators": _outermost([event for event in host if event.get("cat") == "cpu_op"]),
    }


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    """Returns the start and the end of an event, in microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def _outermost(events: Iterable[Mapping[str, Any]]) -> int:
    """Returns the number of events that no other event of their thread contains."""
    found, ends = 0, dict[Any, float]()
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        first, last = _span(event)
        if first >= ends.get(event["tid"], -1.0):
            found += 1
            ends[event["tid"]] = last
    return found
