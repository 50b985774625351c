"""Groups: tables that are looked up in one go on the rank that owns them, ids -> rows -> vectors -> composed -> pooled.

Ids come in and composed vectors, summed over bags, go out, as with a plain table. Tables with the same scheme,
composition and dimensions form a *group*: one FBGEMM table-batched embedding (TBE) a partition serves the T features of
the group's tables::

    p_1 rows of all T features -> TBE 1 -> vectors [B, T, dim_1] \
    p_2 rows of all T features -> TBE 2 -> vectors [B, T, dim_2] / composed [B, T, width]

Replicated weights are stacked, one table's below the other's, and looked up by torch in the place of a TBE.

A file is a kind of group: its lookup, and beside it what the lookup takes of memory and time, from which plans are
made. :func:`group_type` chooses the kind, for a lookup and for a plan alike.

============ ======================================================================= =====================
file         order of its steps                                                      tables
============ ======================================================================= =====================
``pooled``   TBEs sum over bags, sums are composed                                   sum, concat, feature; one partition
``per_id``   distinct ids are looked up and composed, then pooled                    maxima
``product``  the same, or bags are summed in buckets that share a factor             product
``path``     the same as ``per_id``, functions of the path last                      path_linear, path_mlp
``sequence`` distinct ids are looked up and composed, each id gets its vector        all, of sequences
``fused``    one pass for all of it                                                  see there
``absent``   nothing: the rows of the tables are all on other ranks                  all, divided by rows
============ ======================================================================= =====================

FBGEMM's unpooled mode has a backward 40 times slower on the CPU than its pooled one, so a single id is looked up as a
bag of its own. One TBE for the tables of all partitions is slower too: the gradients of its output have to be put
together again.
"""

from distembed.sharding.groups.base import Group, LocalTable, LookupRequest
from distembed.sharding.groups.choice import group_key, group_type, lookup_formula, make_group
from distembed.sharding.groups.fused import fused_refusal, reason_not_fused
from distembed.sharding.groups.load import GroupLoad, Launches, LookupMemory, LookupWork, TableLoad

__all__ = [
    "Group",
    "GroupLoad",
    "Launches",
    "LocalTable",
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
