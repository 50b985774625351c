"""TorchRec's ``Topology`` and ``ParameterConstraints`` as a plan request."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType, Topology
from torchrec.distributed.types import ModuleSharder

from distembed.base.errors import InsufficientMemory, UserError
from distembed.planning.cluster import Cluster
from distembed.planning.devices import DEVICES, find_device
from distembed.planning.request import PlanRequest
from distembed.planning.workload import Workload


@contextmanager
def planner_errors() -> Iterator[None]:
    """Raises TorchRec's ``PlannerError`` with our message."""
    try:
        yield
    except (InsufficientMemory, UserError) as error:
        is_memory, types = isinstance(error, InsufficientMemory), PlannerErrorType
        raise PlannerError(str(error), types.INSUFFICIENT_STORAGE if is_memory else types.INPUT_VALIDATION) from error
    except ValidationError as error:
        mistakes = "; ".join(
            f"{'.'.join(map(str, own['loc']))} is {own['input']!r}: {own['msg']}" for own in error.errors()
        )
        raise PlannerError(f"A constraint is impossible: {mistakes}.", PlannerErrorType.INPUT_VALIDATION) from error


def planned_cluster(topology: Topology, device_name: str | None) -> Cluster:
    """Returns the cluster of a topology, whose bandwidths are bytes a millisecond."""
    kind, world_size, ranks_per_node = topology.compute_device, topology.world_size, topology.local_world_size
    if kind not in ("cpu", "cuda"):
        raise UserError(f"Topology has compute_device={kind!r}; compositional tables are on cpu or cuda.")
    if world_size % ranks_per_node or topology.intra_group_size != ranks_per_node:
        raise UserError(
            f"Topology has {world_size} ranks, local_world_size={ranks_per_node} and a fast network among "
            f"{topology.intra_group_size} ranks; nodes need as many ranks each, and pod_size is to be left out."
        )
    is_cpu = kind == "cpu"
    hbm, ddr = (tuple(max(0, getattr(own.storage, name)) for own in topology.devices) for name in ("hbm", "ddr"))
    memory = ddr if is_cpu else hbm
    memory_bytes = max(memory) * (ranks_per_node if is_cpu else 1)
    if device_name is not None:
        device = dataclasses.replace(find_device(device_name, "device"), memory_bytes=memory_bytes)
        if device.kind != kind:
            raise UserError(f"device={device_name!r} is a {device.kind} device, and the topology's are {kind}.")
    else:
        alike = [own for own in DEVICES.values() if own.kind == kind]
        device = min(alike, key=lambda own: abs(own.memory_bytes - memory_bytes))
        bandwidth = 1e3 * (topology.ddr_mem_bw if is_cpu else topology.hbm_mem_bw)
        faster = bandwidth / device.memory_bandwidth
        device = dataclasses.replace(
            device,
            memory_bytes=memory_bytes,
            memory_bandwidth=bandwidth,
            lookup_bandwidth=faster * device.lookup_bandwidth,
            reduce_bandwidth=faster * device.reduce_bandwidth,
            host_bandwidth=1e3 * topology.hbm_to_ddr_mem_bw,
            local_bandwidth=1e3 * topology.intra_host_bw,
            node_bandwidth=1e3 * topology.inter_host_bw,
        )
    nodes = world_size // ranks_per_node
    return Cluster(device, nodes, ranks_per_node, memory_by_rank=memory, host_memory_by_rank=() if is_cpu else ddr)


def constrained_request(
    model: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    cluster: Cluster,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints],
) -> PlanRequest:
    """Returns the request for steps of ``batch_size`` rows a rank, with the ids and caches that constraints give."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; give the rows of one rank's batch, 1 or more.")
    request = PlanRequest(model, sharders, cluster, Workload(batch_size * cluster.world_size))
    if not request.tables_by_collection:
        raise UserError("No sharder takes a collection of the model; give those of default_sharders() among others.")
    ids_per_row, weighted = dict[str, float](), set[str]()
    for table in (table for tables in request.tables_by_collection.values() for table in tables):
        own, features = constraints.get(table.name, ParameterConstraints()), table.feature_names
        factors = own.pooling_factors * len(features) if len(own.pooling_factors) == 1 else own.pooling_factors
        if len(factors) != len(features):
            raise UserError(
                f"ParameterConstraints of table {table.name!r}: pooling_factors has {len(factors)} numbers, and the "
                f"table has {len(features)} features; give a number for each."
            )
        if not all(0 <= factor < math.inf for factor in factors):
            raise UserError(
                f"ParameterConstraints of table {table.name!r}: pooling_factors is {own.pooling_factors}; give numbers "
                "of ids, 0 or more."
            )
        ids_per_row |= dict(zip(features, factors, strict=True))
        weighted |= {*features} if own.is_weighted else set()
    ratios = {own.cache_params.load_factor for own in constraints.values() if own.cache_params is not None} - {None}
    if len(ratios) > 1:
        raise UserError(
            f"ParameterConstraints have cache_params with load_factor {sorted(ratios)}; give all tables one."
        )
    workload = dataclasses.replace(request.workload, ids_per_row=ids_per_row, weighted=frozenset(weighted))
    return dataclasses.replace(request, workload=workload, cache_load_factor=next(iter(ratios), None))
