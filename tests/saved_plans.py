"""Plans of TorchRec's planner for the tables of :mod:`tests.layouts`, saved to files and applied from them."""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

from distembed.embedding import CompositionalEmbeddingBagCollection
from distembed.planning import plan_as_json
from distembed.planning.apply_plan import apply_saved_plan
from distembed.planning.saved_plan import PlanInputs, read_saved_plan, table_plan_inputs
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.sharding.placement import SHARDING_TYPES
from tests.layouts import tables

MODULE = "model.embeddings"
LAYOUTS = (*SHARDING_TYPES, "mixed")
MIXED_LAYOUT = dict(
    zip("abcde", ("column_wise", "row_wise", "table_wise", "data_parallel", "table_column_wise"), strict=True)
)
IN_RANGES = ("column_wise", "table_column_wise", "grid_shard")
Json = Any


def local_world_size(world_size: int) -> int:
    """Returns the number of ranks on each of several machines."""
    return next(size for size in (2, 3, 1) if world_size % size == 0)


@cache
def _planned(layout: str, world_size: int, device: str) -> str:
    model = nn.ModuleDict(
        {"model": nn.ModuleDict({"embeddings": CompositionalEmbeddingBagCollection(tables(), device="meta")})}
    )
    kinds = {table.name: MIXED_LAYOUT[table.name] if layout == "mixed" else layout for table in tables()}
    constraints = {
        # a function needs whole vectors
        name: ParameterConstraints(
            sharding_types=["table_wise" if name == "c" and kind in IN_RANGES else kind], min_partition=4
        )
        for name, kind in kinds.items()
    }
    topology = Topology(world_size=world_size, local_world_size=local_world_size(world_size), compute_device=device)
    sharders: list[Any] = [CompositionalEmbeddingBagCollectionSharder()]
    plan = EmbeddingShardingPlanner(topology=topology, constraints=constraints).plan(model, sharders)
    return json.dumps(plan_as_json(plan))


def planned(layout: str = "mixed", world_size: int = 4, device: str = "cpu") -> Json:
    """Returns the plan of TorchRec's planner for the tables ``a`` to ``e``, as JSON."""
    return json.loads(_planned(layout, world_size, device))


def inputs_now(world_size: int = 4, device: str = "cpu", **changes: Any) -> PlanInputs:
    """Returns the inputs of the run that the plans below are applied in."""
    values = {
        "batch_size": 64,
        "model": {"name": "dlrm", "bottom": [16], "top": [16, 8]},
        "sparse_optimizer": "sgd",
        "dense_optimizer": "adam",
        "tables": table_plan_inputs(tables()),
    }
    return PlanInputs(world_size, local_world_size(world_size), device, **{**values, **changes})


def plan_file(plan: Json, plan_inputs: PlanInputs) -> Json:
    return {"made_for": json.loads(json.dumps(plan_inputs.as_json())), "plan": plan}


def apply_file(content: Json, now: PlanInputs, **arguments: Any) -> Json:
    """Returns the plan that is read from a file with this content and applied, as JSON again."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return plan_as_json(apply_saved_plan(read_saved_plan(path), {MODULE: tables()}, now, **arguments))


def apply_plan(plan: Json, world_size: int = 4, device: str = "cpu", **arguments: Any) -> Json:
    """Returns a plan that is saved with the inputs of the run and applied, as JSON again."""
    now = inputs_now(world_size, device)
    return apply_file(plan_file(plan, now), now, **arguments)


def shards(*spans: tuple[int, int, int], rows: int, axis: int = 1, whole: int = 16) -> Json:
    """Returns shards of ``(rank, start, stop)`` along columns (axis 1) or rows (axis 0), with all of the other axis."""
    sizes = [[rows, stop - start] if axis == 1 else [stop - start, whole] for _, start, stop in spans]
    offsets = [[0, start] if axis == 1 else [start, 0] for _, start, _ in spans]
    return [
        {"rank": rank, "offset": offset, "size": size}
        for (rank, *_), offset, size in zip(spans, offsets, sizes, strict=True)
    ]
