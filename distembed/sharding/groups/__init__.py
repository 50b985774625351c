r"""Groups: tables that are looked up together on the rank that owns them, ids -> rows -> vectors -> composed -> pooled.

Ids come in and composed vectors, summed over bags, go out, as with a plain table. Tables with the same scheme,
composition and dimensions form a *group*: one FBGEMM table-batched embedding (TBE) a partition serves the T features of
the group's tables::

    p_1 rows of all T features -> TBE 1 -> vectors [B, T, dim_1] \
    p_2 rows of all T features -> TBE 2 -> vectors [B, T, dim_2] / composed [B, T, width]

Weights that every rank has are stacked, and looked up by torch in the place of a TBE. Each kind of group has its lookup
and the lookup's memory and time, from which plans are made; :func:`group_type` chooses the kind for both.

FBGEMM's unpooled mode has a backward 40 times slower on the CPU than its pooled one, so a single id is looked up as a
bag of its own. One TBE for the tables of all partitions is slower too: the gradients of its output have to be put
together again.
"""

from distembed.sharding.groups.base import Group, LookupRequest
from distembed.sharding.groups.choice import group_key, group_type, lookup_formula, make_group
from distembed.sharding.groups.fused import fused_refusal, reason_not_fused
from distembed.sharding.groups.load import GroupLoad, Launches, LookupMemory, LookupWork, TableLoad

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
