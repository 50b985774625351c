"""Shared parts of the benches that load torch: skewed ids, tables, runs, ranks, and contenders that take turns."""

import argparse
import json
import math
import os
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from bench_commands import CONFIGS, told
from jaxtyping import Float, Int64
from torch import Tensor
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.cuda_driver import driver_version
from distembed.base.files import write_json
from distembed.base.ranks import Ranks, process_group
from distembed.base.version import versions
from distembed.composition import Composition
from distembed.data.reader.batch import Batch
from distembed.data.single_ids import carry_single_ids, mark_single_ids
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.embedding.settings import LookupKernel
from distembed.partitions import Partition
from distembed.planning.buffers import Step as StepEstimate
from distembed.planning.search import plan_placements
from distembed.training.build import Blueprint, TrainingState
from distembed.training.config import Config, load_config
from distembed.training.inference import evaluate_split, load_training_state
from distembed.training.run import train_run
from distembed.training.start import RunOptions

NUM_IDS, COLLISIONS, DIM, LEARNING_RATE = 400_000, 4, 16, 0.01
NUM_ROWS = NUM_IDS // COLLISIONS
NAMES = [f"C{i}" for i in range(1, 27)]
NUM_DENSE = 13
NUM_BATCHES = 8
_WARM_UP = 2
_SINGLE_IDS = mark_single_ids(KeyedJaggedTensor(["id"], torch.tensor([0]), lengths=torch.tensor([1])))

Step = Callable[[], object]


def draw_ids(count: int, generator: torch.Generator) -> Int64[Tensor, " ids"]:
    """Draws ids that are skewed like Criteo's: log-uniform over the table."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return (torch.exp(uniform * math.log(NUM_IDS)) - 1).long().clamp(max=NUM_IDS - 1)


def draw_clicks(
    num_rows: int, generator: torch.Generator
) -> tuple[Float[Tensor, "rows dense"], Float[Tensor, " rows"]]:
    """Draws uniform dense features, and labels with 25% clicks."""
    dense = torch.rand(num_rows, NUM_DENSE, generator=generator)
    return dense, (torch.rand(num_rows, generator=generator) < 0.25).float()


def make_features(ids: Int64[Tensor, " ids"], batch_size: int) -> KeyedJaggedTensor:
    """Returns ids, feature after feature, as bags of one length; single ids are marked as the reader marks them."""
    num_bags = len(NAMES) * batch_size
    bag = len(ids) // num_bags
    counts = [batch_size * bag] * len(NAMES)
    features = KeyedJaggedTensor(
        NAMES,
        ids,
        lengths=torch.full((num_bags,), bag, dtype=torch.int32, device=ids.device),
        stride=batch_size,
        length_per_key=counts,  # from the host, as the reader has it: reading it from a GPU would wait for the GPU
        offset_per_key=[0, *accumulate(counts)],
    )
    return carry_single_ids(_SINGLE_IDS, features) if bag == 1 else features


def torchrec_collection(num_rows: int, dim: int = DIM) -> EmbeddingBagCollection:
    """Returns TorchRec's own tables of ``num_rows`` rows each, on the meta device."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=num_rows, embedding_dim=dim, feature_names=[name])
        for name in NAMES
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def compositional_collection(
    partition: Partition, composition: Composition | str = "product", dim: int = DIM, kernel: LookupKernel = "auto"
) -> CompositionalEmbeddingBagCollection:
    """Returns compositional tables of a scheme, on the meta device."""
    tables = [
        CompositionalEmbeddingBagConfig(
            name, partition.num_embeddings, dim, [name], partition, composition, kernel=kernel
        )
        for name in NAMES
    ]
    return CompositionalEmbeddingBagCollection(tables, device="meta")


def draw_batch(
    ids: Int64[Tensor, " ids"], num_rows: int, generator: torch.Generator, global_batch_size: int | None = None
) -> Batch:
    """Returns a batch of ids, given feature after feature, with random dense features and labels.

    Args:
        ids: Ids, feature after feature.
        num_rows: Number of this rank's rows.
        generator: Generator of the dense features and labels.
        global_batch_size: Number of all ranks' rows; ``num_rows`` unless given.
    """
    dense, labels = draw_clicks(num_rows, generator)
    fields = {"dense_features": dense, "sparse_features": make_features(ids, num_rows), "labels": labels}
    return Batch(fields, global_batch_size or num_rows)


def trainer_step(state: TrainingState, batches: Sequence[Batch]) -> Step:
    """Returns a step of distembed's trainer, which cycles through the batches."""
    outputs = state.pipeline.outputs(cycle(batches))

    def step() -> None:  # does not read the loss, like the trainer: reading it from a GPU would wait for the GPU
        state.optimizers.set_learning_rates(0)
        next(outputs)

    return step


def take_turns(
    steps: Mapping[str, Step], rounds: int, seconds_a_turn: float, device: torch.device
) -> dict[str, list[float]]:
    """Returns the mean seconds of a step by contender, one value for each round; all ranks call it.

    Args:
        steps: Steps by the contender's name.
        rounds: Number of turns of each contender.
        seconds_a_turn: Approximate time of a turn.
        device: The device to wait for.
    """
    counts = {name: _steps_a_turn(step, seconds_a_turn, device) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    turns = range(rounds)
    for _ in told(turns, "rounds") if dist.get_rank() == 0 else turns:
        for name, step in steps.items():
            seconds[name].append(_seconds_a_step(step, counts[name], device))
    return seconds


def _steps_a_turn(step: Step, seconds: float, device: torch.device) -> int:
    """Returns how many steps the first rank takes in that time after three steps to warm up; all ranks call it."""
    _seconds_a_step(step, 3, device)
    count = torch.tensor(max(2, round(seconds / _seconds_a_step(step, 3, device))), device=device)
    dist.broadcast(count, src=0)
    return int(count)


def _seconds_a_step(step: Step, count: int, device: torch.device) -> float:
    """Takes ``count`` steps and returns their mean seconds; all ranks call it."""
    _wait_for_all(device)
    started = time.perf_counter()
    for _ in range(count):
        step()
    _wait_for_all(device)
    return (time.perf_counter() - started) / count


def _wait_for_all(device: torch.device) -> None:
    wait_for(device)
    dist.barrier()


def wait_for(device: torch.device) -> None:
    """Waits until a device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Measured:
    """One contender's seconds of each step, and the peak memory of its steps in bytes."""

    seconds: list[float] = field(default_factory=list)
    bytes: int = 0

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


def take_turns_in_processes(
    makers: Mapping[str, Callable[[], Step]], num_steps: int, device: torch.device, threads: int = 1
) -> dict[str, Measured]:
    """Returns the seconds and the memory of contenders that step in turn, each in a separate process.

    Memory is the peak of the process minus its memory before the first step. It includes gradients and the optimizer
    states that the first step creates.

    Args:
        makers: Functions that build a contender's step in its process; they can be pickled.
        num_steps: Number of steps of each contender, after two steps to warm up.
        device: The device to wait for.
        threads: Number of threads of each contender.
    """
    context, running = get_context("spawn"), {}
    for name, make in makers.items():
        here, there = context.Pipe()
        process = context.Process(target=_contend, args=(make, device, threads, there), daemon=True)
        process.start()
        running[name] = process, here
    found = {name: Measured() for name in running}
    for number in told(range(num_steps + _WARM_UP), "steps"):
        for name, (_, pipe) in running.items():
            pipe.send(True)
            taken = pipe.recv()
            if number >= _WARM_UP:
                found[name].seconds.append(taken)
    for name, (process, pipe) in running.items():
        pipe.send(False)
        found[name].bytes = pipe.recv()
        process.join()
    return found


def _contend(make: Callable[[], Step], device: torch.device, threads: int, results: Connection) -> None:
    """Takes a step for each request and sends its seconds; sends the peak memory at the end."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = make()
    before = _start_counting(device)
    while results.recv():
        started = time.perf_counter()
        step()
        wait_for(device)
        results.send(time.perf_counter() - started)
    results.send(_most_bytes(device) - before)


def _start_counting(device: torch.device) -> int:
    """Starts the count of the peak; returns the memory in use on a CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return 0
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return _memory("VmRSS")


def _most_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else _memory("VmHWM")


def _memory(name: str) -> int:
    """Returns a field of this process's status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def run_ranks(
    measure: Callable[[argparse.Namespace, Ranks], Any],
    options: argparse.Namespace,
    world_size: int,
    ranks_per_node: int | None = None,
    device: str = "cpu",
) -> Any:
    """Measures on new processes of one thread each, one for each rank; returns the first rank's result as JSON.

    Args:
        measure: Function of a module; all ranks call it with ``options``.
        options: The bench's options.
        world_size: Number of ranks.
        ranks_per_node: Number of ranks that count as one node; all ranks unless given.
        device: Kind of the ranks' device.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        local_world_size = ranks_per_node or world_size
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(local_world_size)}
        mp.spawn(_run_rank, (measure, options, device, environment, output), nprocs=world_size)
        return json.loads(output.read_text())


def _run_rank(
    rank: int,
    measure: Callable[[argparse.Namespace, Ranks], Any],
    options: argparse.Namespace,
    device: str,
    environment: Mapping[str, str],
    output: Path,
) -> None:
    torch.set_num_threads(1)
    local_rank = rank % int(environment["LOCAL_WORLD_SIZE"])
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(local_rank))
    with process_group(device) as ranks:
        result = measure(options, ranks)
        if ranks.is_first:
            write_json(output, result)
        dist.barrier()


def train_quietly(config: Config, run: Path, ranks: Ranks) -> Mapping[str, float] | None:
    """Trains a config into a folder without printing; returns the evaluation on the test split."""
    return train_run(config, RunOptions(run), ranks, None, lambda _: None).evaluation


def train_sample(settings: Sequence[str], dataset: Path, run: Path, ranks: Ranks) -> Path:
    """Trains ``configs/criteo_sample.yaml`` with settings on a dataset's training split; returns the run's folder."""
    splits = [f"data.path={dataset}", "data.validation=null", "data.test=null"]
    train_quietly(load_config(CONFIGS / "criteo_sample.yaml", [*settings, *splits]), run, ranks)
    return run


def evaluate_run(run: Path, dataset: Path, splits: Sequence[str], ranks: Ranks) -> list[Mapping[str, float]]:
    """Returns a run's metrics on each of some splits of a dataset."""
    state, _ = load_training_state(run, str(dataset), load_config(run / "config.yaml"), ranks)
    return [evaluate_split(state, str(dataset), split, ranks) for split in splits]


def estimated_step(blueprint: Blueprint, plan: ShardingPlan) -> StepEstimate:
    """Returns the estimate of a step with a plan."""
    placements = plan_placements(blueprint.build_plannable(), plan, blueprint.world_size)
    optimizers = blueprint.config.train.table_optimizers
    return StepEstimate(placements, blueprint.world_size, blueprint.workload(), optimizers, blueprint.device.type)


def surroundings(device: torch.device) -> dict[str, Any]:
    """Returns the conditions of a measurement: device, threads, processor and versions."""
    on_gpu = device.type == "cuda"
    return {
        "machine": {
            "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
            **({"driver": driver_version(), "cuda": torch.version.cuda} if on_gpu else {}),
            "threads": torch.get_num_threads(),
            "processor": platform.processor() or platform.machine(),
        },
        "versions": versions(),
    }
