"""Values as ``distembed plan --json`` prints them, invented: every number is one that no other place holds."""

import random
from typing import Any

GIB, MIB = 2**30, 2**20
MEMORY = (
    "table_weights",
    "table_optimizer_state",
    "table_cache",
    "sse_graphs",
    "network_weights",
    "network_optimizer_state",
    "gradients",
    "inputs",
    "outputs",
    "lookups",
    "activations",
    "allocator",
)


def plan_values(
    nodes: int = 1, gpus: int = 2, num_tables: int = 4, host_memory: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Values of a plan that fits."""
    draw = random.Random(seed)
    ranks = [_rank(rank, draw, host_memory) for rank in range(nodes * gpus)]
    tables = [_table(f"C{i + 1}", nodes * gpus, draw) for i in range(num_tables)]
    if host_memory:
        tables[-1] |= {"host_bytes": 11 * GIB, "cache_bytes": 2 * GIB, "compute_kernel": "fused_uvm_caching"}
    return {
        "fits": True,
        "device": {"name": "h100-80gb", "kind": "cuda", "memory_bytes": 81_559 * MIB, "memory_bandwidth": 3.35e12},
        "nodes": nodes,
        "gpus": gpus,
        "batch_size": 65_536,
        "pipeline_depth": 3,
        "reserve": 0.05,
        "needed_by_tables": {"weights": 5 * GIB, "optimizer_state": 3 * GIB, "gradients": GIB},
        "host_capacity": 200 * GIB if host_memory else 0,
        "beside_tables": {"network_weights": GIB, "activations": 14 * GIB, "allocator": 4 * GIB, "sse_graphs": 0},
        "left_for_tables": 60 * GIB * nodes * gpus,
        "planner_says": "",
        "ranks": ranks,
        "tables": tables,
        "notes": [],
        "plan": {"model.embeddings": {}},
        "remedies": [],
    }


def without_plan(values: dict[str, Any], planner_says: str = "no room for a shard\nproposal 1\n") -> dict[str, Any]:
    """The same, where the planner found none."""
    unplaced: dict[str, Any] = {
        "bytes_on_all_ranks": 0,
        "sharding_type": None,
        "compute_kernel": None,
        "ranks": [],
        "why": "",
    }
    tables = [{**table, **unplaced} for table in values["tables"]]
    nothing = {"fits": False, "plan": None, "ranks": [], "tables": tables, "planner_says": planner_says}
    return {**values, **nothing, "left_for_tables": 6 * GIB, "remedies": ["--nodes 2", "--gpu b200-180gb"]}


def overfull(values: dict[str, Any], rank: int, by: int) -> dict[str, Any]:
    """The same with one rank over its capacity by so many bytes, for its activations."""
    own = values["ranks"][rank]
    own["memory"]["activations"] += own["capacity"] + by - own["total"]
    own["total"] = own["capacity"] + by
    return {**values, "fits": False}


def milliseconds(rank: dict[str, Any]) -> str:
    """Of a step, as it is shown: with at least two digits after the point below 100, three below 10."""
    total = rank["milliseconds"]["total"]
    return f"{total:.3f}" if total < 10 else f"{total:.2f}"


def _rank(rank: int, draw: random.Random, host_memory: bool) -> dict[str, Any]:
    capacity = 81_559 * MIB
    memory = {item: draw.randrange(GIB // 4, 5 * GIB) for item in MEMORY}
    if not host_memory:
        memory["table_cache"] = 0
    memory["sse_graphs"] = 0
    memory["allocator"] = round(0.05 * capacity)
    host = (draw.randrange(GIB, 9 * GIB), draw.randrange(GIB, 9 * GIB)) if host_memory else (0, 0)
    times = {name: draw.uniform(0.1, 9) for name in ("lookup", "exchange", "networks", "all_reduce")}
    return {
        "rank": rank,
        "memory": memory,
        "fullest_moment": "output gradients",
        "total": sum(memory.values()),
        "capacity": capacity,
        "host_memory": dict(zip(("table_weights", "table_optimizer_state"), host, strict=True)),
        "host_capacity": 200 * GIB if host_memory else 0,
        "milliseconds": {**times, "total": sum(times.values())},
        "sent_bytes": {name: draw.randrange(MIB, GIB) for name in ("ids", "vectors", "gradients", "all_reduce")},
        "tables": {},
    }


def _table(name: str, world_size: int, draw: random.Random) -> dict[str, Any]:
    rank, size = draw.randrange(world_size), draw.randrange(MIB, GIB)
    return {
        "name": name,
        "scheme": "quotient_remainder",
        "composition": "product",
        "num_embeddings": 1460,
        "rows": [draw.randrange(100, 99_999), 4],
        "bytes_of_one_copy": size,
        "bytes_on_all_ranks": size,
        "host_bytes": 0,
        "cache_bytes": 0,
        "ids_per_row": 1.0,
        "sharding_type": "table_wise",
        "compute_kernel": "fused",
        "ranks": [rank],
        "columns": [[0, 16]],
        "why": "as TorchRec's planner finds fastest",
    }
