"""Compares the peak memory of a training step with the plan's estimate, tables and networks included.

The cases are from :mod:`bench_memory`, which samples malloc on a processor. On a GPU torch's allocator gives the peak.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from bench_common import estimated_step, wait_for
from bench_memory import CASES, FULL, Allocations, Case, blueprint_of, draw_batches, peak_bytes

from distembed.base.ranks import Ranks, process_group
from distembed.data.reader.batch import Batch
from distembed.data.single_ids import mark_single_ids
from distembed.training.build import Blueprint, TrainingState, build_training_state
from gpu.results import Results
from gpu.scale import Scale, empty

Peak = Callable[[TrainingState, Iterator[Batch]], int]


def cases() -> list[Case]:
    """Returns products, paths and full tables, table-wise."""
    by_name = {case.name: case for case in CASES}
    full = Case("full, table-wise", FULL, ["table_wise"])
    return [by_name["product, table-wise"], by_name["path_mlp, table-wise"], full]


def measure(results: Results, scale: Scale) -> None:
    """Measures each case at each number of rows except the smallest."""
    with process_group(scale.device) as ranks:
        for case in cases()[: scale.memory_cases]:
            for size in scale.batch_sizes[1:]:
                if results.lacks(case=case.name, batch_size=size):
                    blueprint = blueprint_of(case, size, ranks)
                    planned, measured = planned_and_measured(blueprint, ranks)
                    row = {"case": case.name, "batch_size": size, "planned_bytes": sum(planned.values())}
                    results.add([{**row, "measured_bytes": measured, "planned": planned}])
                    empty()


def planned_and_measured(blueprint: Blueprint, ranks: Ranks) -> tuple[dict[str, int], int]:
    """Returns the plan's estimate for this rank, by item, and the most bytes allocated in a step."""
    size, schema = blueprint.config.train.batch_size, blueprint.batch_schema
    with allocations_on(ranks.device) as peak:
        state = build_training_state(blueprint, ranks, num_steps=1000)
        measured = peak(state, map(_as_the_reader_gives_it, draw_batches(schema, 0, size, size)))
    return dict(estimated_step(blueprint, state.plan).rank(0).memory), measured


@contextmanager
def allocations_on(device: torch.device) -> Iterator[Peak]:
    """Yields a function that steps through batches and returns the most bytes allocated since the block began."""
    if device.type != "cuda":
        with Allocations() as allocations, allocations.sampled():
            yield lambda state, batches: peak_bytes(state, allocations, batches)
        return
    empty()
    before = torch.cuda.memory_allocated(device)

    def peak(state: TrainingState, batches: Iterator[Batch]) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        for _ in state.pipeline.outputs(batches):
            pass
        wait_for(device)
        return torch.cuda.max_memory_allocated(device) - before

    yield peak


def _as_the_reader_gives_it(batch: Batch) -> Batch:
    """Marks the batch's single ids, and pins it for a GPU."""
    mark_single_ids(batch["sparse_features"])
    return batch.pin_memory() if torch.cuda.is_available() else batch
