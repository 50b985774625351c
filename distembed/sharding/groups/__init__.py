r"""Groups: tables that are looked up together on the rank that owns them, ids -> rows -> vectors -> composed -> pooled.

Tables with the same scheme, composition and dimensions form a *group*: one FBGEMM table-batched embedding (TBE) a
partition serves the T features of the group's tables::

    p_1 rows of all T features -> TBE 1 -> vectors [B, T, dim_1] \
    p_2 rows of all T features -> TBE 2 -> vectors [B, T, dim_2] / composed [B, T, width]

Weights that every rank has are stacked, and looked up by torch in the place of a TBE. Each kind of group has its lookup
and the lookup's memory and time, from which plans are made; :func:`group_type` chooses the kind for both.

FBGEMM's unpooled backward is 40 times slower on the CPU than its pooled one, so a single id is looked up as a bag of
its own. One TBE for the tables of all partitions is slower too: the gradients of its output have to be joined again.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from distembed.composition import Product
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.kinds import fused_optimizer_name
from distembed.sharding.groups.base import AbsentGroup, Group, LookupRequest
from distembed.sharding.groups.fused import (
    FusedGroup,
    fused_refusal,
    is_faster_alone,
    reason_against_settings,
    reason_not_fused,
    reason_not_loaded,
)
from distembed.sharding.groups.load import GroupLoad, Launches, LookupMemory, LookupWork, TableLoad
from distembed.sharding.groups.per_id import (
    DistinctGroup,
    PathGroup,
    PerIdGroup,
    PooledGroup,
    ProductGroup,
    SequenceGroup,
    zeros_stay_zero,
)
from distembed.sharding.table_slice import LocalTable, TableSlice, is_pooled

__all__ = [
    "Group",
    "GroupLoad",
    "Launches",
    "LookupMemory",
    "LookupRequest",
    "LookupWork",
    "TableLoad",
    "fused_refusal",
    "group_key",
    "group_type",
    "lookup_formula",
    "make_group",
    "reason_not_fused",
]


def group_type(table_slice: TableSlice, device_kind: str, optimizer: str | None) -> type[Group]:
    """Returns the class of the group that looks a slice up on ``cpu`` or ``cuda``; ``optimizer`` is FBGEMM's name."""
    table = table_slice.table
    if _may_fuse(table_slice, optimizer) and reason_not_fused(table_slice, device_kind, optimizer) is None:
        return FusedGroup
    return unfused_group_type(table)


def _may_fuse(table_slice: TableSlice, optimizer: str | None) -> bool:
    """Returns whether a table's ``kernel`` setting allows the fused lookup; ``auto`` does where it is faster."""
    table = table_slice.table
    if table.kernel == "auto" and len(table.scheme.num_rows) == 1:
        return bool(table_slice.sharded) and is_faster_alone(optimizer)
    return table.kernel != "fbgemm"


def unfused_group_type(table: CompositionalEmbeddingConfig) -> type[Group]:
    """Returns the class of the group that looks a table up by FBGEMM's tables, one TBE for each partition."""
    # the first rule that holds decides; a maximum over a bag commutes with no composition
    if not is_pooled(table):
        return SequenceGroup
    if table.function_tables():
        return PathGroup
    takes_max = getattr(table, "pooling", None) == "max"
    if not takes_max and (table.combine.commutes_with_sum or len(table.scheme.num_rows) == 1):
        return PooledGroup
    if not takes_max and type(table.combine) is Product:
        return ProductGroup
    return PerIdGroup if zeros_stay_zero(table.combine) else DistinctGroup


def make_group(
    tables: Sequence[LocalTable],
    replicated: Mapping[str, nn.Parameter],
    gradient_scale: int,
    tbes: Sequence[Any],
    device_kind: str,
) -> Group:
    """Makes the group of tables that have equal group keys (:func:`group_key`), for the TBEs of their partitions.

    On a CPU this compiles the fused kernels at their first use. Tables without rows on this rank get an
    :class:`AbsentGroup`.

    Raises:
        UserError: A table has ``kernel='fused'`` and cannot be looked up in one pass.
    """
    first = tables[0]
    if not first.partitions:
        return AbsentGroup(tables, is_pooled(first.table))
    optimizer = fused_optimizer_name(tbes[0].optimizer) if tbes and hasattr(tbes[0], "optimizer") else None
    if _may_fuse(first, optimizer):
        reasons = ((local.table, reason_not_fused(local, device_kind, optimizer)) for local in tables)
        table, reason = next((refusal for refusal in reasons if refusal[1] is not None), (first.table, None))
        reason = reason or reason_against_settings(tbes) or reason_not_loaded(first, device_kind)
        if reason is None:
            return FusedGroup(tables, replicated, gradient_scale)
        if first.table.kernel == "fused":
            raise fused_refusal(table, reason)
    return unfused_group_type(first.table)(tables, replicated, gradient_scale)


def group_key(table_slice: TableSlice) -> Hashable:
    """Returns a key that is equal for tables that can share a group: one TBE for each partition and one formula."""
    return (*lookup_formula(table_slice.table), table_slice.shape)


def lookup_formula(table: CompositionalEmbeddingConfig) -> tuple[Hashable, ...]:
    """Returns the part of a group's key that does not depend on the placement."""
    combine = table.combine
    # with one partition there is nothing to compose, and compositions do not differ
    formula = (combine.name, *combine.setting_values().values())
    return (
        table.scheme.name,
        len(table.scheme.num_rows),
        formula if len(table.scheme.num_rows) > 1 else None,
        table.embedding_dim,
        getattr(table, "pooling", None) == "max",
        table.data_type,
        table.kernel,
    )
