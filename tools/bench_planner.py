"""Compares planners by the estimated time of their plans, and by the time and memory of planning.

::

    python tools/bench_planner.py --plans FOLDER

Each model (:data:`MODELS`, batch 65,536) is planned for clusters of H100s by up to five planners:

- *ours*: ``distembed plan``
- *TorchRec*: TorchRec's ``EmbeddingShardingPlanner`` with distembed's sharders, topology, batch and memory, and
  TorchRec's own estimates
- *estimates*: TorchRec's planner with :class:`~distembed.planning.CompositionalShardEstimator`, the ids of a row, and
  ranges of at least 32 columns
- *table-wise*: ``distembed plan`` with ``plan.sharding_types=[table_wise]``
- *saved*: plans of ``--plans``, written by ``distembed plan --output FOLDER/MODEL-NODESx8.json`` of another version

One estimate judges all plans (:mod:`distembed.planning.costs`). The bench prints the slowest rank's milliseconds, the
bytes that all ranks send in a step, and the bytes of the rank that sends most. Each plan is made in a separate process:
the bench prints its processor seconds, without building the model, and its peak memory, with all imports.
"""

import argparse
import dataclasses
import functools
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.types import ShardingPlan

from distembed.base.errors import RunError
from distembed.base.units import format_bytes
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.optim.declared import TableOptimizers
from distembed.partitions import QuotientRemainder
from distembed.planning import CompositionalShardEstimator, PlanConfig, PlanRequest, Workload
from distembed.planning.apply_plan import apply_saved_plan
from distembed.planning.buffers import Step
from distembed.planning.costs import PlacementCosts, step_times
from distembed.planning.devices import Cluster, find_device
from distembed.planning.saved_plan import read_saved_plan
from distembed.planning.search import find_plan, plan_placements
from distembed.reports.plan.plannable import ConfiguredModel
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.training.config import load_config

CONFIGS = Path(__file__).parents[1] / "configs"
BATCH_SIZE, GPUS = 65_536, 8
FEWEST_ROWS, MOST_ROWS_A_NODE, MOST_ROWS = 10**3, 5 * 10**6, 10**8
MIB = 2**20


def configured(name: str, *overrides: str) -> Callable[[Cluster], PlanRequest]:
    """Returns a function that makes the request of a config's model for a cluster."""
    config = load_config(CONFIGS / f"{name}.yaml", [f"train.batch_size={BATCH_SIZE}", *overrides])
    return lambda cluster: ConfiguredModel(config).on_cluster(cluster).request


def many_tables(num_tables: int, nodes: int) -> list[CompositionalEmbeddingBagConfig]:
    """Returns tables from 10^3 rows to the most rows that the nodes hold, log-uniform.

    Every tenth table is full; the rest are compressed a thousand times.
    """
    rng = np.random.default_rng(0)
    largest = min(nodes * MOST_ROWS_A_NODE, MOST_ROWS)
    tables = []
    for i in range(num_tables):
        num_rows = int(10 ** rng.uniform(np.log10(FEWEST_ROWS), np.log10(largest)))
        dim = int(rng.choice([64, 128]))
        num_ids = num_rows if i % 10 == 0 else 1000 * num_rows
        scheme = "naive" if i % 10 == 0 else QuotientRemainder(num_ids, collisions=1000)
        tables.append(CompositionalEmbeddingBagConfig(f"t{i}", num_ids, dim, [f"f{i}"], scheme))
    return tables


def generated(num_tables: int) -> Callable[[Cluster], PlanRequest]:
    """Returns a function that makes the request of a model of many tables, without networks, for a cluster."""

    def on_cluster(cluster: Cluster) -> PlanRequest:
        collection = CompositionalEmbeddingBagCollection(many_tables(num_tables, cluster.nodes), device="meta")
        return PlanRequest(
            nn.ModuleDict({"tables": collection}),
            [CompositionalEmbeddingBagCollectionSharder()],
            cluster,
            Workload(BATCH_SIZE),
            optimizers=TableOptimizers("row_wise_adagrad"),
        )

    return on_cluster


MODELS: Mapping[str, Callable[[], Callable[[Cluster], PlanRequest]]] = {
    "kaggle": lambda: configured("criteo_kaggle", "embedding.default.force=true"),
    "terabyte": lambda: configured(
        "criteo_kaggle",
        "data.schema=criteo_terabyte",
        "embedding.default.force=true",
        "embedding.default.embedding_dim=64",
    ),
    "mlperf": lambda: configured("mlperf_dlrm_dcnv2"),
    "mlperf-qr4": lambda: configured(
        "mlperf_dlrm_dcnv2", "embedding.default.partition=quotient_remainder", "embedding.default.collisions=4"
    ),
    "1000-tables": lambda: generated(1000),
    "5000-tables": lambda: generated(5000),
}
"""Functions that make a model's request for a cluster, by the model's name."""


def table_wise(request: PlanRequest) -> ShardingPlan:
    """Returns distembed's plan with each table on one rank."""
    return find_plan(dataclasses.replace(request, config=PlanConfig(sharding_types=["table_wise"]))).plan


def topology_of(cluster: Cluster) -> Topology:
    """Returns a cluster as TorchRec's topology, with bandwidths in bytes a millisecond."""
    device, is_cpu = cluster.device, cluster.device.kind == "cpu"
    return Topology(
        world_size=cluster.world_size,
        compute_device=device.kind,
        local_world_size=cluster.ranks_per_node,
        hbm_cap=0 if is_cpu else cluster.rank_bytes,
        ddr_cap=cluster.rank_bytes if is_cpu else cluster.host_bytes_per_rank,
        hbm_mem_bw=device.memory_bandwidth / 1e3,
        ddr_mem_bw=(device.memory_bandwidth if is_cpu else device.host_bandwidth) / 1e3,
        hbm_to_ddr_mem_bw=device.host_bandwidth / 1e3,
        intra_host_bw=device.local_bandwidth / 1e3,
        inter_host_bw=device.node_bandwidth / 1e3,
    )


def torchrecs(request: PlanRequest, has_our_estimates: bool = False) -> ShardingPlan:
    """Returns the plan of TorchRec's planner, with as much memory for tables as distembed's search starts with."""
    cluster, workload = request.cluster, request.workload
    topology, batch_size, enumerator = topology_of(cluster), workload.rows_of_rank(cluster.world_size), None
    if has_our_estimates:
        constraints = {
            table.name: ParameterConstraints(
                min_partition=32,  # distembed's limit on GPUs; TorchRec's default is 128 columns
                pooling_factors=[workload.ids_per_row.get(name, 1.0) for name in table.feature_names],
            )
            for tables in request.tables_by_collection.values()
            for table in tables
        }
        estimator = CompositionalShardEstimator(topology, constraints, cluster.device.name)
        enumerator = EmbeddingEnumerator(topology, batch_size, constraints, estimator)
    room = request.plannable_bytes.min() - sum(workload.bytes_beside_tables(cluster.world_size).values())
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=enumerator,
        storage_reservation=FixedPercentageStorageReservation(1 - room / cluster.rank_bytes),
    )
    return planner.plan(request.model, list(request.sharders))


PLANNERS: Mapping[str, Callable[[PlanRequest], ShardingPlan]] = {
    "ours": lambda request: find_plan(request).plan,
    "TorchRec": torchrecs,
    "estimates": functools.partial(torchrecs, has_our_estimates=True),
    "table-wise": table_wise,
}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimate of a plan.

    Attributes:
        milliseconds: Time of the slowest rank.
        sent_bytes: Bytes that all ranks send in a step.
        most_sent_bytes: Bytes of the rank that sends most.
        fits: Whether the plan fits every rank's memory.
    """

    milliseconds: float
    sent_bytes: int
    most_sent_bytes: int
    fits: bool


def estimate(request: PlanRequest, plan: ShardingPlan) -> Estimate:
    """Returns the estimate of a plan."""
    cluster = request.cluster
    placements = plan_placements(request.model, plan, cluster.world_size)
    times = step_times(placements, PlacementCosts(request), cluster)
    ranks = Step.of(request, placements).ranks()
    sent = [rank.sent.total for rank in ranks]
    return Estimate(
        milliseconds=max(time.total for time in times),
        sent_bytes=sum(sent),
        most_sent_bytes=max(sent),
        fits=max(rank.total_bytes for rank in ranks) <= request.plannable_bytes.min()
        and max(rank.storage.host for rank in ranks) <= cluster.host_bytes_per_rank,
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a number of nodes, and a planner, or the file of a saved plan."""

    model: str
    nodes: int
    planner: str
    file: Path | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
        estimate: Estimate of the plan; None without a plan.
        failure: Why there is no plan.
        seconds: Processor seconds of planning; None for a saved plan.
        peak_bytes: Peak memory of the process until the plan was made.
    """

    estimate: Estimate | None = None
    failure: str = ""
    seconds: float | None = None
    peak_bytes: int = 0


def run(case: Case, device: str, limit_seconds: int, results: Connection) -> None:
    """Makes a plan in this process and sends the outcome."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit_seconds, limit_seconds + 10))
    request = MODELS[case.model]()(Cluster(find_device(device), case.nodes, GPUS))
    started = time.process_time()
    try:
        plan = PLANNERS[case.planner](request) if case.file is None else read_plan(case.file, request)
    except (RunError, PlannerError):
        results.send(Outcome(failure="finds none"))
        return
    seconds = time.process_time() - started
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results.send(
        Outcome(estimate(request, plan), seconds=seconds if case.file is None else None, peak_bytes=peak_bytes)
    )


def read_plan(file: Path, request: PlanRequest) -> ShardingPlan:
    """Returns the plan of a file, without comparing the inputs that it was made for."""
    saved = read_saved_plan(file)
    return apply_saved_plan(saved, request.tables_by_collection, saved.plan_inputs, request.table_optimizers.is_fused)


def run_alone(case: Case, device: str, limit_seconds: int) -> Outcome:
    """Runs a case in a separate process, with a limit on its processor seconds."""
    context = multiprocessing.get_context("fork")  # imports are done
    results, child = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(case, device, limit_seconds, child))
    process.start()
    child.close()
    try:
        return results.recv()
    except EOFError:
        process.join()
        is_late = process.exitcode == -signal.SIGXCPU
        return Outcome(failure=f"not done in {limit_seconds} s" if is_late else "fails")
    finally:
        process.join()


def report(case: Case, outcome: Outcome) -> None:
    """Prints a line of the table."""
    found = outcome.estimate
    cells = [case.model, f"{case.nodes}x{GPUS}", case.planner]
    if found is None:
        cells += [outcome.failure, "", ""]
    else:
        cells.append(f"{found.milliseconds:.3f}" + ("" if found.fits else ", does not fit"))
        cells += [format_bytes(found.sent_bytes), f"{found.most_sent_bytes / MIB:.2f} MiB"]
    if outcome.seconds is not None:
        cells += [f"{outcome.seconds:.1f} s", f"{outcome.peak_bytes / MIB:.0f} MiB"]
    print(f"| {' | '.join(cells)} |", flush=True)


def cases(options: argparse.Namespace, model: str, nodes: int) -> list[Case]:
    """Returns the cases of a model on a cluster, in the order of ``--planners``."""
    found = [Case(model, nodes, planner) for planner in options.planners]
    file = options.plans / f"{model}-{nodes}x{GPUS}.json" if options.plans is not None else None
    return found + ([Case(model, nodes, "saved", file)] if file is not None and file.exists() else [])


def slower(outcomes: Sequence[Outcome]) -> float | None:
    """Returns the share by which the first plan is slower than the best later plan that fits; None without plans."""
    first, *others = [found.estimate for found in outcomes]
    times = [found.milliseconds for found in others if found is not None and found.fits]
    return first.milliseconds / min(times) - 1 if first is not None and times else None


def main() -> None:
    """Makes every plan, and prints the table and the first planner's differences to the best of the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[name for name in MODELS if name[0] != "5"])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 8, 128])
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=list(PLANNERS))
    parser.add_argument("--gpu", default="h100-80gb", help="device, as in `distembed plan --gpu`")
    parser.add_argument("--plans", type=Path, help="folder of saved plans, named like kaggle-4x8.json")
    parser.add_argument("--limit", type=int, default=120, help="most processor seconds of a case")
    options = parser.parse_args()
    print("| model | devices | planner | ms a step | sent by all | by the rank that sends most | made in | peak |")
    print("|---|---|---|---|---|---|---|---|")
    differences = []
    for model in options.models:
        for nodes in options.nodes:
            outcomes = []
            for case in cases(options, model, nodes):
                outcomes.append(run_alone(case, options.gpu, options.limit))
                report(case, outcomes[-1])
            share = slower(outcomes)
            if share is not None:
                differences.append(f"{model} {nodes}x{GPUS}: {share:+.2%}")
    print(f"\nfirst planner against the fastest of the others that fit: {'; '.join(differences)}")


if __name__ == "__main__":
    main()
