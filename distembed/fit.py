"""Whether a config fits a cluster, and what each rank of it holds: ``distembed plan``.

The plan is the one that ``distembed train`` would make there. It is made on this machine, with the model on the meta
device: no GPU, no other process, no memory for the tables.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import nn
from torchrec.distributed.types import ShardingPlan

from distembed.config import Config
from distembed.describe import format_bytes
from distembed.embedding.tables import CompositionalTables
from distembed.errors import RunError, UserError
from distembed.planning import plan_as_json
from distembed.planning.devices import Device
from distembed.planning.optimizer_states import IS_ROW_WISE
from distembed.planning.plan import RESERVED_SHARE, find_plan, topology_of
from distembed.planning.storage import TableStorage, table_storage, whole_table_storage
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.sharding.placement import place
from distembed.training.build import build_plannable
from distembed.training.config import DenseOptimizerConfig
from distembed.training.optimizers import needs_dense_kernel

_FLOAT_BYTES = 4
_MOST_RANKS_SHOWN = 16
_MODULE = "model.embeddings"


@dataclass(frozen=True)
class Cluster:
    """What there is to plan for.

    Attributes:
        device: of each rank.
        nodes: machines.
        gpus: ranks on each machine.
    """

    device: Device
    nodes: int
    gpus: int

    def __post_init__(self) -> None:
        for field in ("nodes", "gpus"):
            if getattr(self, field) < 1:
                raise UserError(f"--{field} is {getattr(self, field)}; it must be 1 or more.")

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.nodes * self.gpus

    @property
    def rank_bytes(self) -> int:
        """Memory of a rank; ranks on a CPU share their machine's."""
        return self.device.memory_bytes // (self.gpus if self.device.kind == "cpu" else 1)


@dataclass(frozen=True)
class Fit:
    """A plan and what it takes.

    Attributes:
        cluster: that was planned for.
        plan: None where the planner finds none that fits.
        planner_says: why there is none.
        needed: bytes of all tables together, each of them once.
        tables: bytes by table, for each rank.
        dense: bytes by item of the networks, the same on each rank.
        reserved: bytes for activations, buffers and the allocator, the same on each rank.
        description: of each table.
    """

    cluster: Cluster
    plan: ShardingPlan | None
    planner_says: str
    needed: TableStorage
    tables: list[dict[str, TableStorage]]
    dense: dict[str, int]
    reserved: int
    description: list[dict[str, Any]]

    def rank_total(self, rank: int) -> int:
        """Bytes of a rank, with what is reserved."""
        return sum(table.total for table in self.tables[rank].values()) + sum(self.dense.values()) + self.reserved

    @property
    def left_for_tables(self) -> int:
        """Bytes of all ranks together beside networks and what is reserved."""
        of_rank = self.cluster.rank_bytes - sum(self.dense.values()) - self.reserved
        return max(0, of_rank) * self.cluster.world_size

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        if self.plan is None:
            return False
        return all(self.rank_total(rank) <= self.cluster.rank_bytes for rank in range(self.cluster.world_size))

    def as_json(self) -> dict[str, Any]:
        """``{fits, device, nodes, gpus, needed_by_tables, left_for_tables, planner_says, ranks, tables, plan}``."""
        cluster = self.cluster
        return {
            "fits": self.fits,
            "device": dataclasses.asdict(cluster.device),
            "nodes": cluster.nodes,
            "gpus": cluster.gpus,
            "needed_by_tables": dataclasses.asdict(self.needed),
            "left_for_tables": self.left_for_tables,
            "planner_says": self.planner_says,
            "ranks": [self._rank_as_json(rank) for rank in range(len(self.tables))],
            "tables": self.description,
            "plan": None if self.plan is None else plan_as_json(self.plan),
        }

    def _rank_as_json(self, rank: int) -> dict[str, Any]:
        of_tables = sum(self.tables[rank].values(), TableStorage())
        return {
            "rank": rank,
            **{f"table_{name}": value for name, value in dataclasses.asdict(of_tables).items()},
            **self.dense,
            "reserved": self.reserved,
            "total": self.rank_total(rank),
            "capacity": self.cluster.rank_bytes,
            "tables": {name: dataclasses.asdict(own) for name, own in self.tables[rank].items()},
        }


def find_fit(config: Config, cluster: Cluster) -> Fit:
    """Plans a config for a cluster.

    Raises:
        UserError: for settings that cannot be planned at all.
    """
    schema, device = config.data.load_schema(), torch.device(cluster.device.kind)
    model = build_plannable(config.model, config.embedding, config.train, schema, cluster.world_size, device)
    collection = model.get_submodule(_MODULE)
    assert isinstance(collection, CompositionalTables)
    plan, planner_says = _plan(config, cluster, model)
    names = config.train.sparse_optimizer.name, config.train.dense_optimizer.name
    is_fused = not needs_dense_kernel(config.train.sparse_optimizer)
    whole = {table.name: whole_table_storage(table, *names, is_fused) for table in collection.tables()}
    tables: list[dict[str, TableStorage]] = []
    if plan is not None:
        units: Mapping[str, Any] = plan.plan[_MODULE]
        placements = [place(table, units[table.name], cluster.world_size) for table in collection.tables()]
        tables = table_storage(placements, cluster.world_size, *names)
    dense = _dense_bytes(model, config.train.dense_optimizer)
    reserved = round(RESERVED_SHARE * cluster.rank_bytes)
    needed = sum(whole.values(), TableStorage())
    description = _describe(collection, whole, tables, plan)
    return Fit(cluster, plan, planner_says, needed, tables, dense, reserved, description)


def _plan(config: Config, cluster: Cluster, model: nn.Module) -> tuple[ShardingPlan | None, str]:
    sharders: list[Any] = [CompositionalEmbeddingBagCollectionSharder(host_memory=config.plan.host_memory)]
    topology = topology_of(cluster.device.kind, cluster.device.memory_bytes, cluster.world_size, cluster.gpus)
    batch_size = -(-config.train.batch_size // cluster.world_size)
    is_fused = not needs_dense_kernel(config.train.sparse_optimizer)
    try:
        plan = find_plan(
            model,
            sharders,
            topology,
            batch_size,
            config.plan,
            is_fused,
            sparse_optimizer=config.train.sparse_optimizer.name,
            dense_optimizer=config.train.dense_optimizer.name,
        )
        return plan, ""
    except RunError as error:
        return None, str(error)


def _dense_bytes(model: nn.Module, optimizer: DenseOptimizerConfig) -> dict[str, int]:
    """The networks' weights, gradients and optimizer state; functions of path-based tables count as tables."""
    sizes = [weight.numel() for name, weight in model.named_parameters() if not name.startswith(f"{_MODULE}.")]
    weights = _FLOAT_BYTES * sum(sizes)
    num_states = len(IS_ROW_WISE[optimizer.name])
    state = num_states * weights + (_FLOAT_BYTES * len(sizes) if num_states else 0)
    return {"dense_weights": weights, "dense_gradients": weights, "dense_optimizer_state": state}


def _describe(
    collection: CompositionalTables[Any],
    whole: Mapping[str, TableStorage],
    storage: list[dict[str, TableStorage]],
    plan: ShardingPlan | None,
) -> list[dict[str, Any]]:
    placed = {} if plan is None else plan_as_json(plan)[_MODULE]
    described = []
    for table in collection.tables():
        own = sum((of_rank[table.name] for of_rank in storage if table.name in of_rank), TableStorage())
        where = placed.get(table.name, {})
        described.append(
            {
                "name": table.name,
                "scheme": table.scheme.name,
                "rows": list(table.scheme.num_rows),
                "bytes_of_one_copy": whole[table.name].total,
                "bytes_on_all_ranks": own.total,
                "sharding_type": where.get("sharding_type"),
                "compute_kernel": where.get("compute_kernel"),
                "ranks": where.get("ranks", []),
            }
        )
    return described


def print_fit(fit: Fit, console: Console) -> None:
    """Tables, ranks and a bar for each, and whether it fits."""
    if fit.plan is not None:
        console.print(_tables_table(fit))
        console.print(_ranks_table(fit))
    cluster = fit.cluster
    where = f"{cluster.nodes} x {cluster.gpus} {cluster.device.name} ({format_bytes(cluster.rank_bytes)} a rank)"
    console.print(f"{'fits' if fit.fits else 'does not fit'}: {where}", highlight=False, soft_wrap=True)
    if not fit.fits:
        largest = max(fit.description, key=lambda row: row["bytes_of_one_copy"])
        console.print(
            f"  tables with their optimizer take {format_bytes(fit.needed.total)}, the largest ({largest['name']}) "
            f"{format_bytes(largest['bytes_of_one_copy'])}; {format_bytes(fit.left_for_tables)} are left for them on "
            f"{cluster.world_size} rank(s), beside {format_bytes(sum(fit.dense.values()))} for the networks and "
            f"{format_bytes(fit.reserved)} reserved on each",
            highlight=False,
            soft_wrap=True,
        )


def _tables_table(fit: Fit) -> Table:
    table = Table("table", "scheme", "placed", "ranks", title="tables", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("memory, all ranks", justify="right")
    for row in fit.description:
        ranks = sorted(set(row["ranks"]))
        shown = ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{len(ranks)} of {fit.cluster.world_size}"
        kernel = "" if row["compute_kernel"] == "fused" else f" ({row['compute_kernel']})"
        placed = f"{row['sharding_type']}{kernel}"
        table.add_row(row["name"], row["scheme"], placed, shown or "all", format_bytes(row["bytes_on_all_ranks"]))
    return table


def _ranks_table(fit: Fit) -> Table:
    table = Table("rank", title="memory by rank", title_justify="left", box=SIMPLE_HEAD)
    for column in ("tables", "optimizer", "networks", "reserved", "total"):
        table.add_column(column, justify="right")
    table.add_column(f"of {format_bytes(fit.cluster.rank_bytes)}")
    shown = sorted(range(len(fit.tables)), key=fit.rank_total, reverse=True)
    if len(shown) > _MOST_RANKS_SHOWN:
        left_out = len(shown) - _MOST_RANKS_SHOWN
        table.caption = f"the fullest and the emptiest; {left_out} ranks between them are left out"
        shown = shown[: _MOST_RANKS_SHOWN // 2] + shown[-_MOST_RANKS_SHOWN // 2 :]
    else:
        shown.sort()
    for rank in shown:
        own = sum(fit.tables[rank].values(), TableStorage())
        sizes = (own.weights + own.gradients, own.optimizer_state, sum(fit.dense.values()), fit.reserved)
        total = fit.rank_total(rank)
        bar = Bar(size=fit.cluster.rank_bytes, begin=0, end=min(total, fit.cluster.rank_bytes), width=24)
        table.add_row(str(rank), *map(format_bytes, sizes), format_bytes(total), bar)
    return table
