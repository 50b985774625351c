"""Whether a model fits a cluster, and the memory and time of each rank: ``distembed plan``.

The plan of a config is the one that ``distembed train`` would make there. It is made on this machine, with the model on
the meta device: no GPU, no other process, no memory for the tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchrec.distributed.types import ShardingPlan, ShardingType

from distembed.base.errors import RunError, UserError
from distembed.base.units import enumerate_names, format_bytes
from distembed.embedding.collections import embedding_modules, table_configs
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.kinds import OPTIMIZERS
from distembed.optim.table_storage import TableSize, TableStorage, whole_table_storage
from distembed.planning import PlanRequest, Workload
from distembed.planning.devices import Cluster
from distembed.planning.other_placements import Alternative
from distembed.planning.saved_plan import PlanInputs
from distembed.planning.search import EstimatedPlan, find_plan, some_plan_fits
from distembed.planning.storage import PlannedRank
from distembed.reports.plan.plannable import ConfiguredModel, ModelOnCluster, Plannable
from distembed.sharding.placement import Placement
from distembed.sharding.table_slice import width
from distembed.training.config import Config


@dataclass(frozen=True)
class AssessedTable:
    """A table of the model, and its place: ``storage`` and all fields after it keep their defaults without a plan."""

    name: str
    scheme: str
    composition: str
    num_embeddings: int
    num_rows: tuple[int, ...]  # of each partition
    ids_per_row: float  # mean number of ids that a row of the batch looks up
    one_copy: TableStorage  # storage if one rank held the table whole
    size: TableSize = TableSize()  # bytes to serve and to train it, and of the full table
    storage: TableStorage = TableStorage()  # on all ranks together
    sharding_type: str | None = None
    compute_kernel: str | None = None
    ranks: tuple[int, ...] = ()  # of each shard; empty where every rank holds the whole table
    columns: tuple[tuple[int, int], ...] = ()  # first column of each shard, and last column + 1
    why: str = ""  # why the planner chose this place
    alternatives: tuple[Alternative, ...] = ()  # the best other places, the best first


@dataclass(frozen=True)
class Assessment:
    """Whether and how a model fits a cluster."""

    cluster: Cluster
    workload: Workload
    reserve: float  # share of a device's memory that is kept free for the allocator
    tables: tuple[AssessedTable, ...]
    ranks: tuple[PlannedRank, ...]  # empty where there is no plan
    plan: ShardingPlan | None
    planner_error: str  # why the planner finds no plan; empty where it finds one
    plan_inputs: PlanInputs  # written into a saved plan, and compared when a run applies it
    managed_bytes: tuple[int, ...] = ()  # of managed ids on the device of each rank; empty where there are none
    notes: tuple[str, ...] = ()  # sentences for the reader
    lower_bound_ms: float | None = None  # of the slowest rank's step; no plan that fits goes below it
    is_search_complete: bool = True  # else the search was stopped after its last allowed try

    @property
    def fits(self) -> bool:
        """Whether there is a plan under which every rank has room."""
        return self.plan is not None and all(rank.fits for rank in self.ranks)

    @property
    def rows_per_second(self) -> float | None:
        """Rows of all ranks in a second, by the slowest rank's step; None where there is no plan or no time."""
        milliseconds = max((rank.times.total for rank in self.ranks), default=0.0)
        return 1e3 * self.workload.batch_size / milliseconds if milliseconds else None

    @property
    def one_copy(self) -> TableStorage:
        """Storage of all tables, each of them once."""
        return sum((table.one_copy for table in self.tables), TableStorage())

    @property
    def size(self) -> TableSize:
        """Bytes to serve and to train all tables, and of full tables."""
        return sum((table.size for table in self.tables), TableSize())

    @property
    def allocator_bytes(self) -> int:
        """Bytes that the largest rank keeps free for the allocator."""
        return round(self.reserve * self.cluster.rank_bytes)

    @property
    def bytes_beside_tables(self) -> dict[str, int]:
        """Bytes, by item, that each rank needs without any tables, lookups and exchanges."""
        beside = self.workload.bytes_beside_tables(self.cluster.world_size)
        managed = {"managed_ids": max(self.managed_bytes)} if self.managed_bytes else {}
        return {**beside, **managed, "allocator": self.allocator_bytes}

    @property
    def bytes_left_for_tables(self) -> int:
        """Bytes of all ranks together that :attr:`bytes_beside_tables` leaves."""
        beside = sum(self.workload.bytes_beside_tables(self.cluster.world_size).values())
        memory = self.cluster.bytes_by_rank
        managed = self.managed_bytes or (0,) * len(memory)
        return sum(
            max(0, num_bytes - round(self.reserve * num_bytes) - beside - own)
            for num_bytes, own in zip(memory, managed, strict=True)
        )


def assess_capacity(config: Config, cluster: Cluster) -> Assessment:
    """Plans a config for a cluster, which need not exist; a config that does not fit is no error.

    Raises:
        UserError: The settings cannot be planned at all.
        InsufficientMemory: This machine cannot make the networks.
    """
    return assess(ConfiguredModel(config), cluster)


def assess(plannable: Plannable, cluster: Cluster) -> Assessment:
    """Plans any model for a cluster, which need not exist; raises the errors of :func:`assess_capacity`."""
    to_plan = _on_cluster(plannable, cluster)
    request, planned, planner_error = to_plan.request, None, ""
    try:
        planned = find_plan(request)
    except RunError as error:
        planner_error = str(error)
    if planned is None:
        collections = embedding_modules(request.model).values()
        tables = [_table(request, table) for collection in collections for table in table_configs(collection)]
        notes = to_plan.notes
    else:
        tables = [_placed_table(request, planned, placement) for placement in planned.placements]
        notes = [*_notes(request.table_optimizers.sparse, planned.placements), *to_plan.notes, *_managed_notes(request)]
    return Assessment(
        cluster=cluster,
        workload=request.workload,
        reserve=request.reserved_share,
        tables=tuple(tables),
        ranks=() if planned is None else tuple(planned.ranks),
        plan=None if planned is None else planned.plan,
        planner_error=planner_error,
        plan_inputs=to_plan.plan_inputs,
        managed_bytes=tuple(map(int, request.managed_bytes)) if request.managed_names else (),
        notes=tuple(notes),
        lower_bound_ms=None if planned is None else planned.lower_bound_ms,
        is_search_complete=planned is None or planned.is_complete,
    )


def is_fitting(plannable: Plannable, cluster: Cluster) -> bool:
    """Returns ``assess(plannable, cluster).fits`` without the reports, mostly much sooner; raises equal errors."""
    return some_plan_fits(_on_cluster(plannable, cluster).request)


def _on_cluster(plannable: Plannable, cluster: Cluster) -> ModelOnCluster:
    """Returns the model's request; refuses tables in host memory where the size of host memory is unknown."""
    if plannable.plan.allows_host_memory and cluster.device.kind == "cuda" and not cluster.host_memory_bytes:
        raise UserError(
            "plan.host_memory, or a table's compute_kernels, let tables lie in host memory, and the size of it is not "
            "known: add --host-memory SIZE of a machine, such as --host-memory 1TiB, or set plan.host_memory=false and "
            "leave fused_uvm and fused_uvm_caching out of plan.tables.NAME.compute_kernels."
        )
    return plannable.on_cluster(cluster)


def _table(request: PlanRequest, table: CompositionalEmbeddingConfig) -> AssessedTable:
    return AssessedTable(
        name=table.name,
        scheme=table.scheme.name,
        composition=table.combine.name,
        num_embeddings=table.num_embeddings,
        num_rows=tuple(table.scheme.num_rows),
        ids_per_row=sum(request.workload.ids_per_row.get(name, 1.0) for name in table.feature_names),
        one_copy=whole_table_storage(table, request.table_optimizers),
        size=TableSize.of(table, request.table_optimizers),
    )


def _placed_table(request: PlanRequest, planned: EstimatedPlan, placement: Placement) -> AssessedTable:
    name, unit, columns = placement.table.name, placement.unit, _column_ranges(placement)
    return replace(
        _table(request, placement.table),
        storage=sum((rank.tables[name] for rank in planned.ranks if name in rank.tables), TableStorage()),
        sharding_type=unit.sharding_type,
        compute_kernel=unit.compute_kernel,
        ranks=tuple(shard.placement.rank() for shard in unit.sharding_spec.shards) if columns else (),
        columns=columns,
        why=planned.why[name],
        alternatives=tuple(planned.alternatives[name]),
    )


def _column_ranges(placement: Placement) -> tuple[tuple[int, int], ...]:
    """Returns the range of columns of each shard; none where every rank holds the whole table."""
    if placement.unit.sharding_type == ShardingType.DATA_PARALLEL.value:
        return ()
    shards = placement.unit.sharding_spec.shards
    return tuple((shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1]) for shard in shards)


def _managed_notes(request: PlanRequest) -> list[str]:
    """Returns notes on managed ids: their time, and their bytes of host memory where its size is not known."""
    if not request.managed_names:
        return []
    notes = ["the time in which managed ids get slots, and the time of evictions, are not estimated"]
    host_bytes = int(request.managed_host_bytes.max())
    if host_bytes and not all(request.cluster.host_bytes_by_rank):
        notes.append(
            f"managed ids take up to {format_bytes(host_bytes)} of host memory on each rank while training, and the "
            "size of host memory is not known: add --host-memory SIZE of a machine, such as --host-memory 1TiB"
        )
    return notes


def _notes(sparse_optimizer: str, placements: Sequence[Placement]) -> list[str]:
    """Returns a note on tables divided by columns, if the optimizer keeps a state per row: each range has its own."""
    if not OPTIMIZERS[sparse_optimizer].has_row_states:
        return []
    names = [
        placed.table.name
        for placed in placements
        if placed.divided is None and any(stop - start < width(placed.table) for start, stop in _column_ranges(placed))
    ]
    text = f"{sparse_optimizer} keeps a number for each row of a range of columns, so that tables in several ranges "
    return [f"{text}train a little otherwise than whole ones: {enumerate_names(names, most=8)}"] if names else []
