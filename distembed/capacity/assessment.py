"""Whether a model fits a cluster, and what each rank of it holds: ``distembed plan``.

The plan of a config is the one that ``distembed train`` would make there. It is made on this machine, with the model on
the meta device: no GPU, no other process, no memory for the tables.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchrec.distributed.types import ShardingPlan, ShardingType

from distembed.capacity.configured_model import ConfiguredModel
from distembed.capacity.plannable import Plannable
from distembed.config import Config
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.modules import embedding_modules, table_configs
from distembed.errors import RunError, UserError
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning import Workload
from distembed.planning.alternatives import Alternative
from distembed.planning.cluster import Cluster
from distembed.planning.estimated_plan import EstimatedPlan
from distembed.planning.memory import RankMemory
from distembed.planning.plan import find_plan
from distembed.planning.plan_inputs import PlanInputs
from distembed.planning.storage import TableStorage, total, whole_table_storage
from distembed.planning.times import StepTime
from distembed.sharding.placement import Placement, place_tables
from distembed.sharding.table_slice import width
from distembed.units import enumerate_names

_MAX_NAMES = 8


@dataclass(frozen=True)
class AssessedRank:
    """What one rank holds, and how long a step takes it, under a plan.

    Attributes:
        rank: Number of the rank.
        memory: Memory at the fullest moment of a step, item by item; the allocator's reserve is not among it.
        allocator_bytes: Memory of the device that is kept free for the allocator.
        capacity_bytes: Memory of the device.
        host_capacity_bytes: Share of the node's host memory in which this rank's tables may lie.
        times: Estimated times of a step.
    """

    rank: int
    memory: RankMemory
    allocator_bytes: int
    capacity_bytes: int
    host_capacity_bytes: int
    times: StepTime

    @cached_property
    def storage(self) -> TableStorage:
        """Storage of all tables on this rank."""
        return total(self.memory.tables)

    @property
    def total_bytes(self) -> int:
        """Bytes of the device's memory that are in use or kept free."""
        return self.memory.total + self.allocator_bytes

    @property
    def fits(self) -> bool:
        """Whether the device and the host have room."""
        return self.total_bytes <= self.capacity_bytes and self.storage.host <= self.host_capacity_bytes


@dataclass(frozen=True)
class TablePlacement:
    """Where a plan puts a table.

    Attributes:
        sharding_type: TorchRec's name of the way in which the table is divided.
        compute_kernel: TorchRec's name of the kernel that looks rows up.
        ranks: Rank of each shard; empty where every rank holds the whole table.
        columns: First column of each shard, and the one behind its last.
        storage: Storage of the table on all ranks together.
        reason: Why the planner chose this placement.
        alternatives: The best other placements of the table, the best first.
    """

    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...]
    columns: tuple[tuple[int, int], ...]
    storage: TableStorage
    reason: str
    alternatives: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class AssessedTable:
    """A table of the model, and where it goes.

    Attributes:
        name: Name of the table.
        scheme: Name of its partition scheme.
        composition: Name of its composition.
        num_embeddings: Number of ids.
        num_rows: Number of rows of each partition.
        ids_per_row: Mean number of ids that a row of the batch looks up.
        one_copy: Storage of the table if one rank held it whole.
        placement: Where the plan puts it; None where there is no plan.
    """

    name: str
    scheme: str
    composition: str
    num_embeddings: int
    num_rows: tuple[int, ...]
    ids_per_row: float
    one_copy: TableStorage
    placement: TablePlacement | None

    @property
    def storage(self) -> TableStorage:
        """Storage of the table on all ranks together; zero where there is no plan."""
        return TableStorage() if self.placement is None else self.placement.storage


@dataclass(frozen=True)
class Assessment:
    """Whether and how a model fits a cluster.

    Attributes:
        cluster: Cluster that is planned for.
        workload: Rows, ids and networks of a training step.
        reserve: Share of a device's memory that is kept free for the allocator.
        tables: Tables of the model.
        ranks: Ranks of the cluster; empty where there is no plan.
        plan: TorchRec's plan; None where the planner finds none.
        planner_error: Why the planner finds no plan; empty where it finds one.
        plan_inputs: What the plan was made for, to compare when it is used again.
        notes: What else the reader should know of the plan, a sentence each.
        lower_bound_ms: Milliseconds of the slowest rank's step that no plan that fits can go below; None where no bound
            is known.
        is_search_complete: Whether the search for the plan ended by itself; else it was stopped after its last allowed
            try.
    """

    cluster: Cluster
    workload: Workload
    reserve: float
    tables: tuple[AssessedTable, ...]
    ranks: tuple[AssessedRank, ...]
    plan: ShardingPlan | None
    planner_error: str
    plan_inputs: PlanInputs
    notes: tuple[str, ...] = ()
    lower_bound_ms: float | None = None
    is_search_complete: bool = True

    @property
    def fits(self) -> bool:
        """Whether there is a plan under which every rank has room."""
        return self.plan is not None and all(rank.fits for rank in self.ranks)

    @property
    def one_copy(self) -> TableStorage:
        """Storage of all tables, each of them once."""
        return sum((table.one_copy for table in self.tables), TableStorage())

    @property
    def allocator_bytes(self) -> int:
        """Bytes that each rank keeps free for the allocator."""
        return reserve_bytes(self.reserve, self.cluster)

    @property
    def bytes_beside_tables(self) -> dict[str, int]:
        """Bytes, by item, that each rank needs without any tables, lookups and exchanges."""
        return {**self.workload.bytes_beside_tables(self.cluster.world_size), "allocator": self.allocator_bytes}

    @property
    def bytes_left_for_tables(self) -> int:
        """Bytes of all ranks together that :attr:`bytes_beside_tables` leaves."""
        return max(0, self.cluster.rank_bytes - sum(self.bytes_beside_tables.values())) * self.cluster.world_size


def reserve_bytes(reserve: float, cluster: Cluster) -> int:
    """Returns the bytes of a share of a rank's memory."""
    return round(reserve * cluster.rank_bytes)


def assess_capacity(config: Config, cluster: Cluster) -> Assessment:
    """Plans a config for a cluster that need not be there.

    Raises:
        UserError: The settings cannot be planned at all.
        InsufficientMemory: This machine cannot make the networks.
    """
    return assess(ConfiguredModel(config), cluster)


def assess(plannable: Plannable, cluster: Cluster) -> Assessment:
    """Plans any model for a cluster that need not be there.

    Raises:
        UserError: The settings cannot be planned at all.
        InsufficientMemory: This machine cannot make the networks.
    """
    if plannable.plan.host_memory and cluster.device.kind == "cuda" and not cluster.host_memory_bytes:
        raise UserError(
            "plan.host_memory lets tables lie in the machines' memory, and how much each machine has of it is not "
            "known: say so with --host-memory, such as --host-memory 1TiB, or set plan.host_memory=false."
        )
    to_plan = plannable.on_cluster(cluster)
    request = to_plan.request
    workload, optimizers = request.workload, request.table_optimizers
    collections = {path: table_configs(module) for path, module in embedding_modules(request.model).items()}
    tables = [table for own in collections.values() for table in own]
    planned, planner_error, placements = None, "", list[Placement]()
    try:
        planned = find_plan(request)
        placements = [
            placement
            for path, own in collections.items()
            for placement in place_tables(own, planned.plan.plan[path], cluster.world_size, collection=path)
        ]
    except RunError as error:
        planner_error = str(error)
    one_copies = [whole_table_storage(table, optimizers) for table in tables]
    reserve = request.reserved_share
    return Assessment(
        cluster=cluster,
        workload=workload,
        reserve=reserve,
        tables=_assessed_tables(tables, one_copies, workload, _table_placements(planned, placements)),
        ranks=() if planned is None else _assessed_ranks(planned, cluster, reserve_bytes(reserve, cluster)),
        plan=None if planned is None else planned.plan,
        planner_error=planner_error,
        plan_inputs=to_plan.plan_inputs,
        notes=(*_notes(optimizers.sparse, placements), *to_plan.notes),
        lower_bound_ms=None if planned is None else planned.lower_bound_ms,
        is_search_complete=planned is None or planned.is_complete,
    )


def _assessed_ranks(planned: EstimatedPlan, cluster: Cluster, allocator_bytes: int) -> tuple[AssessedRank, ...]:
    """Returns every rank with what the plan gives it."""
    return tuple(
        AssessedRank(rank, memory, allocator_bytes, cluster.rank_bytes, cluster.host_bytes_per_rank, times)
        for rank, (memory, times) in enumerate(zip(planned.memory, planned.times, strict=True))
    )


def _assessed_tables(
    tables: Sequence[CompositionalEmbeddingConfig],
    one_copies: Sequence[TableStorage],
    workload: Workload,
    placements: Mapping[str, TablePlacement],
) -> tuple[AssessedTable, ...]:
    """Returns every table with its place, where the plan says one."""
    return tuple(
        AssessedTable(
            name=table.name,
            scheme=table.scheme.name,
            composition=table.combine.name,
            num_embeddings=table.num_embeddings,
            num_rows=tuple(table.scheme.num_rows),
            ids_per_row=sum(workload.ids_per_row.get(name, 1.0) for name in table.feature_names),
            one_copy=one_copy,
            placement=placements.get(table.name),
        )
        for table, one_copy in zip(tables, one_copies, strict=True)
    )


def _table_placements(planned: EstimatedPlan | None, placements: Sequence[Placement]) -> dict[str, TablePlacement]:
    """Returns by table where it goes and what it takes there; nothing where there is no plan."""
    if planned is None:
        return {}
    return {placement.table.name: _table_placement(placement, planned) for placement in placements}


def _table_placement(placement: Placement, planned: EstimatedPlan) -> TablePlacement:
    """Returns where a table goes, and what it takes there."""
    name, unit, columns = placement.table.name, placement.unit, _column_ranges(placement)
    storages = [memory.tables[name] for memory in planned.memory if name in memory.tables]
    return TablePlacement(
        sharding_type=unit.sharding_type,
        compute_kernel=unit.compute_kernel,
        ranks=tuple(shard.placement.rank() for shard in unit.sharding_spec.shards) if columns else (),
        columns=columns,
        storage=sum(storages, TableStorage()),
        reason=planned.why[name],
        alternatives=tuple(planned.alternatives.get(name, ())),
    )


def _column_ranges(placement: Placement) -> tuple[tuple[int, int], ...]:
    """Returns the range of columns of each shard; none where every rank holds the whole table."""
    if placement.unit.sharding_type == ShardingType.DATA_PARALLEL.value:
        return ()
    starts_and_sizes = [(shard.shard_offsets[1], shard.shard_sizes[1]) for shard in placement.unit.sharding_spec.shards]
    return tuple((start, start + size) for start, size in starts_and_sizes)


def _notes(sparse_optimizer: str, placements: Sequence[Placement]) -> tuple[str, ...]:
    """Returns the note that an optimizer trains tables in several ranges of columns a little otherwise than whole."""
    divided_by_columns = [
        placement.table.name
        for placement in placements
        if placement.divided is None and 0 < _widest_range(placement) < width(placement.table)
    ]
    if not divided_by_columns or not OPTIMIZERS[sparse_optimizer].has_row_states:
        return ()
    return (
        f"{sparse_optimizer} keeps a number for each row of a range of columns, so that tables in several ranges "
        f"train a little otherwise than whole ones: {enumerate_names(divided_by_columns, _MAX_NAMES)}",
    )


def _widest_range(placement: Placement) -> int:
    """Returns the number of columns of a table's widest shard; 0 where every rank holds the whole table."""
    return max((stop - start for start, stop in _column_ranges(placement)), default=0)
