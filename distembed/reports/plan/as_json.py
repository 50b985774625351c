"""The plain values of ``distembed plan --json``; the README of :mod:`distembed.planning` says what they mean.

Sizes are in bytes, times in milliseconds.
"""

import dataclasses
from typing import Any

from distembed.planning.devices import Cluster
from distembed.planning.request import pipeline_depth
from distembed.planning.saved_plan import saved_plan_as_json
from distembed.planning.storage import PlannedRank, TableStorage
from distembed.reports.plan.assessment import AssessedTable, Assessment
from distembed.reports.plan.report import CapacityReport


def report_as_json(report: CapacityReport) -> dict[str, Any]:
    """Returns the values of an assessment, with all notes and the remedies."""
    values = assessment_as_json(report.assessment)
    values |= {"notes": list(report.notes), "remedies": list(report.remedies.arguments)}
    if (smallest := report.smallest) is not None:
        found, one_less = smallest.assessment, smallest.one_less
        values["smallest"] = {
            "found": None if found is None else _cluster_values(found.cluster),
            "proven": smallest.is_proven,
            "tried": [{**_cluster_values(cluster), "fits": fits} for cluster, fits in smallest.tried],
            "untried": smallest.num_untried,
            "one_less": None if one_less is None else _cluster_values(one_less),
            "shortage": list(smallest.shortage),
        }
    return values | ({} if report.cost is None else {"training_run": dataclasses.asdict(report.cost)})


def assessment_as_json(assessment: Assessment) -> dict[str, Any]:
    """Returns what a saved plan holds: the plan, what it was made for, and what every rank holds under it."""
    cluster = assessment.cluster
    return {
        "fits": assessment.fits,
        "device": dataclasses.asdict(cluster.device),
        **_cluster_values(cluster),
        "batch_size": assessment.workload.batch_size,
        "pipeline_depth": pipeline_depth(cluster.device.kind, cluster.world_size),
        "reserve": assessment.reserve,
        "needed_by_tables": _storage_values(assessment.one_copy),
        "host_capacity": cluster.host_bytes_per_rank,
        "beside_tables": assessment.bytes_beside_tables,
        "left_for_tables": assessment.bytes_left_for_tables,
        "planner_says": assessment.planner_error,
        "rows_per_second": assessment.rows_per_second,
        "lower_bound_ms": assessment.lower_bound_ms,
        "search_complete": assessment.is_search_complete,
        "ranks": [_rank_values(rank) for rank in assessment.ranks],
        "tables": [_table_values(table) for table in assessment.tables],
        "notes": list(assessment.notes),
        **saved_plan_as_json(assessment.plan_inputs, assessment.plan),
    }


def _cluster_values(cluster: Cluster) -> dict[str, int]:
    return {"nodes": cluster.nodes, "gpus": cluster.ranks_per_node}


def _rank_values(rank: PlannedRank) -> dict[str, Any]:
    storage = rank.storage
    return {
        "rank": rank.rank,
        "memory": rank.memory,
        "fullest_moment": rank.moment,
        "total": rank.total_bytes,
        "capacity": rank.capacity_bytes,
        "host_memory": {"table_weights": storage.host_weights, "table_optimizer_state": storage.host_optimizer_state},
        "host_capacity": rank.host_capacity_bytes,
        "milliseconds": {**dataclasses.asdict(rank.times), "total": rank.times.total},
        "sent_bytes": dataclasses.asdict(rank.sent),
        "tables": {name: _storage_values(storage) for name, storage in rank.tables.items()},
    }


def _table_values(table: AssessedTable) -> dict[str, Any]:
    """Returns the values of one table; those of its place are empty where there is no plan."""
    return {
        "name": table.name,
        "scheme": table.scheme,
        "composition": table.composition,
        "num_embeddings": table.num_embeddings,
        "rows": list(table.num_rows),
        "ids_per_row": table.ids_per_row,
        "bytes_of_one_copy": table.one_copy.total,
        "bytes_on_all_ranks": table.storage.total,
        "host_bytes": table.storage.host,
        "cache_bytes": table.storage.cache,
        "sharding_type": table.sharding_type,
        "compute_kernel": table.compute_kernel,
        "ranks": list(table.ranks),
        "columns": list(map(list, table.columns)),
        "why": table.why,
        "alternatives": list(map(dataclasses.asdict, table.alternatives)),
    }


def _storage_values(storage: TableStorage) -> dict[str, int]:
    return {name: getattr(storage, name) for name in ("weights", "optimizer_state", "gradients", "cache", "host")}
