"""Whether a config fits a cluster, and what each rank of it holds: ``distembed plan``.

The plan is the one that ``distembed train`` would make there. It is made on this machine, with the model on the meta
device: no GPU, no other process, no memory for the tables.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.types import ShardingType

from distembed.config import Config
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.modules import embedding_modules, table_configs
from distembed.errors import RunError, UserError
from distembed.optim.declared import TableOptimizers
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning import PlanRequest, Workload, plan_as_json
from distembed.planning.cluster import Cluster
from distembed.planning.estimated_plan import EstimatedPlan, plan_placements
from distembed.planning.plan import find_plan
from distembed.planning.plan_inputs import PlanInputs
from distembed.planning.storage import TableStorage, whole_table_storage
from distembed.planning.workload import pipeline_depth
from distembed.sharding.placement import Placement, width
from distembed.sse.config import build_sse
from distembed.training.build import Blueprint, table_optimizers, use_bf16

_MOST_NAMES = 8


@dataclass(frozen=True)
class Assessment:
    """Whether and how a config fits a cluster.

    Attributes:
        cluster: that was planned for.
        workload: of a step.
        optimizers: of the tables.
        reserve: share of a device's memory that is kept free.
        tables: of the model.
        whole: bytes of each table if one rank held it alone.
        planned: None where the planner finds no plan that fits.
        planner_says: why there is none.
        placements: of the tables, where there is a plan.
        plan_inputs: what the plan is for, which whoever takes it up compares.
    """

    cluster: Cluster
    workload: Workload
    optimizers: TableOptimizers
    reserve: float
    tables: list[CompositionalEmbeddingConfig]
    whole: Mapping[str, TableStorage]
    planned: EstimatedPlan | None
    planner_says: str
    placements: list[Placement]
    plan_inputs: PlanInputs

    @property
    def needed(self) -> TableStorage:
        """Of all tables together, each of them once."""
        return sum(self.whole.values(), TableStorage())

    @property
    def allocator_bytes(self) -> int:
        """Of each rank's memory, kept free."""
        return round(self.reserve * self.cluster.rank_bytes)

    def rank_total(self, rank: int) -> int:
        """Bytes of a rank, with what is kept free."""
        assert self.planned is not None
        return self.planned.memory[rank].total + self.allocator_bytes

    @property
    def beside_tables(self) -> dict[str, int]:
        """Bytes of each rank beside tables and what a step looks up and exchanges, by item."""
        return {**self.workload.kept_bytes(self.cluster.world_size), "allocator": self.allocator_bytes}

    @property
    def left_for_tables(self) -> int:
        """Bytes that this leaves of all ranks together."""
        return max(0, self.cluster.rank_bytes - sum(self.beside_tables.values())) * self.cluster.world_size

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return self.planned is not None and self.planned.fits

    def as_json(self) -> dict[str, Any]:
        """All of it in plain values, in bytes; README.md of :mod:`distembed.planning` says what is what."""
        cluster, planned = self.cluster, self.planned
        return {
            "fits": self.fits,
            "device": dataclasses.asdict(cluster.device),
            "nodes": cluster.nodes,
            "gpus": cluster.gpus,
            "batch_size": self.workload.batch_size,
            "pipeline_depth": pipeline_depth(cluster.device.kind, cluster.world_size),
            "reserve": self.reserve,
            "needed_by_tables": _of_table(self.needed),
            "host_capacity": cluster.host_bytes,
            "beside_tables": self.beside_tables,
            "left_for_tables": self.left_for_tables,
            "planner_says": self.planner_says,
            "ranks": [] if planned is None else [self._rank(planned, rank) for rank in range(cluster.world_size)],
            "tables": self._tables(),
            "notes": [] if planned is None else _notes(self.optimizers, self.placements),
            "plan": None if planned is None else plan_as_json(planned.plan),
            "made_for": self.plan_inputs.as_json(),
        }

    def _rank(self, planned: EstimatedPlan, rank: int) -> dict[str, Any]:
        memory = planned.memory[rank]
        of_host = sum(memory.tables.values(), TableStorage())
        return {
            "rank": rank,
            "memory": {**memory.items(), "allocator": self.allocator_bytes},
            "fullest_moment": memory.step.moment,
            "total": self.rank_total(rank),
            "capacity": self.cluster.rank_bytes,
            "host_memory": {
                "table_weights": of_host.host_weights,
                "table_optimizer_state": of_host.host_optimizer_state,
            },
            "host_capacity": self.cluster.host_bytes,
            "milliseconds": planned.times[rank].as_json(),
            "sent_bytes": dataclasses.asdict(memory.sent),
            "tables": {name: _of_table(storage) for name, storage in memory.tables.items()},
        }

    def _tables(self) -> list[dict[str, Any]]:
        placed = {placement.table.name: placement for placement in self.placements}
        of_ranks = [] if self.planned is None else [memory.tables for memory in self.planned.memory]
        described = []
        for table in self.tables:
            own = sum((of_rank[table.name] for of_rank in of_ranks if table.name in of_rank), TableStorage())
            described.append(
                {
                    "name": table.name,
                    "scheme": table.scheme.name,
                    "composition": table.combine.name,
                    "num_embeddings": table.num_embeddings,
                    "rows": list(table.scheme.num_rows),
                    "ids_per_row": sum(self.workload.ids_per_row.get(name, 1.0) for name in table.feature_names),
                    "bytes_of_one_copy": self.whole[table.name].total,
                    "bytes_on_all_ranks": own.total,
                    "host_bytes": own.host,
                    "cache_bytes": own.cache,
                    **_where(placed.get(table.name)),
                    "why": "" if self.planned is None else self.planned.why[table.name],
                }
            )
        return described


def assess_capacity(config: Config, cluster: Cluster) -> Assessment:
    """Plans a config for a cluster.

    Raises:
        UserError: for settings that cannot be planned at all.
    """
    is_cuda = cluster.device.kind == "cuda"
    if config.plan.host_memory and is_cuda and not cluster.host_memory_bytes:
        raise UserError(
            "plan.host_memory lets tables lie in the machines' memory, and how much each machine has of it is not "
            "known: say so with --host-memory, such as --host-memory 1TiB, or set plan.host_memory=false."
        )
    schema, device = config.data.load_schema(), torch.device(cluster.device.kind)
    # all CUDA devices of the catalogue have bf16
    bf16 = config.train.precision != "fp32" if is_cuda else use_bf16(config.train.precision, device)
    sse = build_sse(config.sse, {feature.name: feature.num_embeddings for feature in schema.categorical}, ())
    blueprint = Blueprint(config, schema, cluster.world_size, cluster.gpus, device, bf16, sse)
    model, workload, optimizers = blueprint.build_plannable(), blueprint.workload(), table_optimizers(config.train)
    tables = [table for module in embedding_modules(model).values() for table in table_configs(module)]
    request = PlanRequest(model, blueprint.sharders, cluster, workload, config.plan, optimizers)
    planned, planner_says, placements = None, "", list[Placement]()
    try:
        planned = find_plan(request)
        placements = plan_placements(model, planned.plan, cluster.world_size)
    except RunError as error:
        planner_says = str(error)
    whole = {
        table.name: whole_table_storage(table, optimizers.sparse, optimizers.dense, optimizers.is_fused)
        for table in tables
    }
    reserve = request.reserved_share
    made = blueprint.plan_inputs(model)
    return Assessment(cluster, workload, optimizers, reserve, tables, whole, planned, planner_says, placements, made)


def _of_table(storage: TableStorage) -> dict[str, int]:
    return {
        "weights": storage.weights,
        "optimizer_state": storage.optimizer_state,
        "gradients": storage.gradients,
        "cache": storage.cache,
        "host": storage.host,
    }


def _where(placement: Placement | None) -> dict[str, Any]:
    """Ranks of a table, and the range of columns of each; none where every rank has all of it."""
    if placement is None:
        return {"sharding_type": None, "compute_kernel": None, "ranks": [], "columns": []}
    unit = placement.unit
    ranks, columns = [], []
    if unit.sharding_type != ShardingType.DATA_PARALLEL.value:
        for shard in unit.sharding_spec.shards:
            start = shard.shard_offsets[1]
            ranks.append(shard.placement.rank())
            columns.append([start, start + shard.shard_sizes[1]])
    return {
        "sharding_type": unit.sharding_type,
        "compute_kernel": unit.compute_kernel,
        "ranks": ranks,
        "columns": columns,
    }


def _notes(optimizers: TableOptimizers, placements: list[Placement]) -> list[str]:
    by_columns = [
        placement.table.name
        for placement in placements
        if placement.divided is None and 0 < _widest(placement) < width(placement.table)
    ]
    if by_columns and OPTIMIZERS[optimizers.sparse].has_row_states:
        return [
            f"{optimizers.sparse} keeps a number for each row of a range of columns, so that tables in several ranges "
            f"train a little otherwise than whole ones: {_enumerated(by_columns)}"
        ]
    return []


def _enumerated(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _widest(placement: Placement) -> int:
    """Columns of a table's widest range."""
    return max((stop - start for start, stop in _where(placement)["columns"]), default=0)
