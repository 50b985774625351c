"""Saving and loading a checkpoint of a whole model with its optimizers: seconds, bytes, and bytes a second."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
from bench_common import wait_for
from bench_train import Sizes, build_ours, draw_batches

from distembed.base.ranks import process_group
from distembed.checkpoints import load_checkpoint, save_checkpoint
from gpu.results import Results
from gpu.scale import Scale, empty

_STEPS = 3


def measure(results: Results, scale: Scale) -> None:
    """For each number of columns trains some steps, saves once and loads twice."""
    with process_group(scale.device) as ranks:
        for dim in scale.dims:
            if not results.lacks(dim=dim):
                continue
            size, sizes = scale.batch_sizes[0], Sizes(scale.num_ids, dim)
            _, state = build_ours(size, ranks, "fp32", sizes)
            for _ in state.pipeline.outputs(islice(cycle(draw_batches(size, sizes.num_ids)), _STEPS)):
                pass
            model, optimizer = state.model, state.optimizers.combined
            with tempfile.TemporaryDirectory(dir=results.path.parent) as folder:
                path = Path(folder) / f"step-{_STEPS:08}"
                saved = _seconds(partial(save_checkpoint, path, model, optimizer, {"step": _STEPS}), ranks.device)
                num_bytes = sum(file.stat().st_size for file in path.iterdir())
                load = partial(load_checkpoint, path, model, optimizer)
                loaded = min(_seconds(load, ranks.device) for _ in range(2))
            results.add([{"dim": dim, "num_bytes": num_bytes, "save_seconds": saved, "load_seconds": loaded}])
            del state, model, optimizer, load
            empty()


def _seconds(function: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    started = time.perf_counter()
    function()
    wait_for(device)
    return time.perf_counter() - started
