"""Constants of the time model that count operations, against those that torch's profiler counts in sharded steps.

What a step starts is what an estimate counts on a device whose operations alone take time.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise

from distembed.base.ranks import Ranks
from distembed.composition import PathMLP
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.embedding.settings import QuantizedCommsConfig
from distembed.partitions import QuotientRemainder
from distembed.planning.calibrate import count_device_numbers
from distembed.planning.devices import DEVICES
from distembed.planning.probes import ShardedTables, TimedStep
from tests.ranks import run_on_ranks

NUM_IDS, DIM, ROWS = 400, 16, 16
NUM_TABLES = (1, 3)
TOLERANCE, FEW = 0.2, 5
"""Share by which a step's estimate may differ, and number of operations by which it may in any case."""
QUOTIENT = QuotientRemainder(NUM_IDS, collisions=4)
WAYS: Mapping[str, Callable[[int], Any]] = {
    "table_wise": lambda world_size: table_wise(rank=0, compute_kernel="fused"),
    "row_wise": lambda world_size: row_wise(compute_kernel="fused"),
    "column_wise": lambda world_size: column_wise(ranks=list(range(world_size)), compute_kernel="fused"),
    "data_parallel": lambda world_size: data_parallel(),
}
KINDS: Mapping[str, dict[str, Any]] = {
    "full": {},
    "one pass": {"partition": QUOTIENT},
    "one pass, 3 features": {"partition": QUOTIENT, "feature_names": ["a", "b", "c"]},
    "partitions": {"partition": QUOTIENT, "kernel": "fbgemm"},
    "concatenated": {"partition": QUOTIENT, "kernel": "fbgemm", "composition": "concat"},
    "distinct ids": {"partition": QUOTIENT, "kernel": "fbgemm"},
    "path": {"partition": QUOTIENT, "composition": PathMLP(hidden=[8])},
}
CODECS, CODED_WAYS = QuantizedCommsConfig("fp16", "bf16"), ("table_wise", "row_wise", "column_wise")
CASES = {
    1: [(way, kind) for way in ("table_wise", "data_parallel") for kind in KINDS],
    2: [(way, kind) for way in WAYS for kind in KINDS if (way, kind) != ("column_wise", "path")],
}
"""Way and kind of tables, by number of ranks; one rank is not given rows or columns to divide."""


def sharded(ranks: Ranks, way: str, kind: str, num_tables: int, comms: QuantizedCommsConfig) -> ShardedTables:
    tables = []
    for i in range(num_tables):
        settings = dict(KINDS[kind])
        features = [f"{name}{i}" for name in settings.pop("feature_names", ["f"])]
        table = CompositionalEmbeddingBagConfig(f"t{i}", NUM_IDS, DIM, features, **settings)
        tables.append((table, WAYS[way](ranks.world_size)))
    return ShardedTables(tables, ranks, comms, ids_per_bag=3 if kind == "distinct ids" else 1)


def count_all(rank: int, world_size: int, every: bool, file: Path) -> None:
    """Writes what the steps of the cases start on the first rank, and what is estimated."""
    ranks = Ranks(rank, world_size, world_size, torch.device("cpu"))
    found = {}
    # one number of tables after the other, and every one of full tables
    counts = [NUM_TABLES if every or kind == "full" else NUM_TABLES[at % 2 :][:1] for at, kind in enumerate(KINDS)]
    numbers = dict(zip(KINDS, counts, strict=True))
    cases = [(way, kind, number, QuantizedCommsConfig()) for way, kind in CASES[world_size] for number in numbers[kind]]
    cases += [(way, "full", 3, CODECS) for way in CODED_WAYS if world_size == 2]
    for way, kind, number, comms in cases:
        tables = sharded(ranks, way, kind, number, comms)
        started = count_started(TimedStep(tables, ROWS))
        estimated = count_device_numbers(lambda own: tables.estimate(ROWS, own)[0].total / 1e3, DEVICES["cpu-256gb"])  # noqa: B023
        name = f"{way}, {kind}, {number}{', codecs' if comms.is_used else ''}"
        found[name] = [*started, estimated["launch_seconds"], estimated["collective_seconds"]]
    if rank == 0:
        file.write_text(json.dumps(found))


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", CASES)
def test_a_step_starts_as_many_operations_as_are_estimated(world_size: int, every: bool, tmp_path: Path) -> None:
    run_on_ranks(world_size, count_all, every, tmp_path / "counted.json")
    counted: dict[str, list[float]] = json.loads((tmp_path / "counted.json").read_text())
    plain = {name: numbers for name, numbers in counted.items() if not name.endswith("codecs")}
    assert {name.split(", ")[0] for name in plain} == {way for way, _ in CASES[world_size]}
    for name, (launches, collectives, estimated, estimated_collectives) in plain.items():
        assert abs(estimated - launches) <= max(FEW, TOLERANCE * launches), (name, launches, estimated)
        # an estimate has the average of the networks' gradients, which these steps have not
        assert 0 <= estimated_collectives - collectives <= 1 or ", path, " in name, name
    for way in CODED_WAYS if world_size == 2 else ():
        without, coded = (counted[f"{way}, full, 3{codecs}"] for codecs in ("", ", codecs"))
        assert coded[2] - without[2] == pytest.approx(coded[0] - without[0], abs=2), way


_NUM_WARM_STEPS, _NUM_STEPS = 3, 2
_STARTS_NOTHING = frozenset(
    "_local_scalar_dense _reshape_alias _unsafe_view alias as_strided chunk contiguous detach detach_ empty empty_like "
    "empty_strided expand expand_as flatten is_nonzero is_pinned item lift_fresh narrow new_empty new_empty_strided "
    "permute record_stream reshape resize_ resolve_conj resolve_neg result_type select set_ slice split "
    "split_with_sizes squeeze t to transpose unbind unflatten unsqueeze view view_as".split()
)
_PASSES = ("_Fused", "_FusedBackward")


class Started(NamedTuple):
    """Operations and collectives that a step starts."""

    launches: float
    collectives: float


def count_started(step: Callable[[], object]) -> Started:
    """Takes steps under the profiler, and returns what a step starts."""
    for _ in range(_NUM_WARM_STEPS):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(_NUM_STEPS):
            step()
    events: list[Any] = list(profiled.events() or ())
    launches = sum(_num_innermost(event) for event in events if event.cpu_parent is None)
    collectives = sum(event.name.startswith("c10d::") for event in events)
    return Started(launches / _NUM_STEPS, collectives / _NUM_STEPS)


def _num_innermost(event: Any) -> int:
    within = sum(map(_num_innermost, event.cpu_children)) + (event.name in _PASSES)
    namespace, _, name = event.name.partition("::")
    return within or int(namespace in ("aten", "fbgemm") and name.split(".")[0] not in _STARTS_NOTHING)
