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
    """Ways in which one table may be placed; null is as for all tables.

    Attributes:
        sharding_types: Sharding types that the planner chooses from.
        min_partition: The fewest columns that a rank gets of a table that is divided by columns.
        ranks: Ranks that the table is pinned to: its shards lie on some of these; null for any.
        compute_kernels: Compute kernels that look the table up, by TorchRec's name; those in host memory are taken only
            where they are named here or ``plan.host_memory`` is set.
    """

    sharding_types: ShardingTypes | None = None
    min_partition: Width | None = None
    ranks: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    compute_kernels: ComputeKernels | None = None


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class PlanConfig:
    """Ways in which tables may be placed.

    Attributes:
        sharding_types: Sharding types that the planner chooses from. Null for all that the table can have, but for
            table_column_wise, and for column_wise of sequences, whose tables would all have ranges of one width.
        min_partition: The fewest columns that a rank gets of a table that is divided by columns. Null for a line of the
            cache, 32 numbers of fp32 on a GPU and 16 on a CPU; or, where sharding_types are ways by columns alone, for
            4, the fewest that FBGEMM's kernels read.
        time_tolerance: Share of a step's time by which the plan may be slower than the fastest that was found, to have
            fewer bytes on the fullest rank; the search ends where the fastest is known up to this share.
        host_memory: Whether tables may lie in host memory and be cached on a CUDA device.
        device: Device that ranks compute like: a name of the catalogue or a device file, with other numbers behind it,
            as `distembed plan --gpu` takes them; its memory is that of the ranks' own. Null for the catalogue's that is
            most like theirs.
        reserve: Share of a device's memory that is kept free, for what no plan counts: the allocator's rounding and
            gaps, CUDA's context and NCCL's buffers.
        polish_seconds: Seconds in which HiGHS, of the extra `polish`, looks for a faster plan after the search. It is
            for tight memory on few ranks; problems of too many tables and ranks are left as they are.
        tables: Exceptions, by table name.
        together: Groups of tables that lie on the same ranks, in as many shards each, by table name.
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
        """Whether any table may lie in host memory."""
        named = {kernel for own in self.tables.values() for kernel in own.compute_kernels or ()}
        return self.host_memory or not named.isdisjoint(get_args(_InHostMemory))
