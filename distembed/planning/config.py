"""The ``plan`` section of a config."""

from dataclasses import field
from typing import Annotated, Literal, get_args

import pydantic.dataclasses
from pydantic import Field

from distembed.base.names import STRICT
from distembed.base.validation import Width

_ByColumns = Literal["table_wise", "column_wise", "table_column_wise"]
_ByRows = Literal["row_wise", "table_row_wise", "grid_shard"]
ShardingTypes = Annotated[list[Literal[_ByColumns, _ByRows, "data_parallel"]], Field(min_length=1)]
_InHostMemory = Literal["fused_uvm", "fused_uvm_caching"]
ComputeKernels = Annotated[list[Literal["fused", "dense", _InHostMemory]], Field(min_length=1)]


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class TablePlanConfig:
    """How one table may be placed; null takes the setting of all tables.

    Attributes:
        sharding_types: Sharding types that the planner chooses from.
        min_partition: Fewest columns of a rank's range, where the table is divided by columns.
        ranks: Ranks that may hold the table's shards; null for any.
        compute_kernels: TorchRec's names of the kernels that may look the table up. Kernels in host memory are chosen
            only where they are named here or ``plan.host_memory`` is set.
    """

    sharding_types: ShardingTypes | None = None
    min_partition: Width | None = None
    ranks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    compute_kernels: ComputeKernels | None = None


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class PlanConfig:
    """How tables may be placed.

    Attributes:
        sharding_types: Sharding types that the planner chooses from. Null for all that the table can have, except
            table_column_wise, and column_wise of sequences, whose tables would all need ranges of one width.
        min_partition: Fewest columns of a rank's range, where a table is divided by columns. Null for a cache line, 32
            numbers of fp32 on a GPU and 16 on a CPU; or for 4, the fewest that FBGEMM's kernels read, where
            sharding_types divide by columns only.
        time_tolerance: Share of a step's time by which the plan may be slower than the fastest found, to use less
            memory on the fullest rank. The search stops once the fastest is known up to this share.
        host_memory: Whether tables may lie in host memory and be cached on a CUDA device.
        device: Device whose speed the ranks have: a catalogue name or a device file, with optional overrides, as
            `distembed plan --gpu` takes it. Its memory is the ranks' own. Null for the most similar catalogue device.
        reserve: Share of a device's memory that is kept free for everything a plan does not count: the allocator's
            rounding and gaps, CUDA's context and NCCL's buffers.
        polish_seconds: Seconds in which HiGHS, of the extra `polish`, looks for a faster plan after the search. It
            helps where memory is tight and ranks are few; problems of too many tables and ranks are left as they are.
        tables: Exceptions, by table name.
        together: Groups of table names; the tables of a group lie on the same ranks, in equally many shards.
    """

    sharding_types: ShardingTypes | None = None
    min_partition: Width | None = None
    host_memory: bool = False
    time_tolerance: Annotated[float, Field(ge=0, le=1)] = 0.001
    device: str | None = None
    reserve: Annotated[float, Field(ge=0, lt=1)] = 0.05
    polish_seconds: Annotated[float, Field(ge=0)] = 0.0
    tables: dict[str, TablePlanConfig] = field(default_factory=dict)
    together: list[list[str]] = field(default_factory=list)

    @property
    def allows_host_memory(self) -> bool:
        kernels = {kernel for table in self.tables.values() for kernel in table.compute_kernels or ()}
        return self.host_memory or not kernels.isdisjoint(get_args(_InHostMemory))
