"""The common part of the benches of training steps: skewed ids, tables, and contenders that take turns."""

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, cycle
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.cuda_driver import driver_version
from distembed.base.version import versions
from distembed.composition import Composition
from distembed.data.reader.batch import Batch
from distembed.data.single_ids import carry_single_ids, mark_single_ids
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.embedding.settings import LookupKernel
from distembed.partitions import Partition
from distembed.training.build import TrainingState

NUM_IDS, COLLISIONS, DIM, LEARNING_RATE = 400_000, 4, 16, 0.01
NUM_ROWS = NUM_IDS // COLLISIONS
NAMES = [f"C{i}" for i in range(1, 27)]
NUM_DENSE = 13
NUM_BATCHES = 8
_SINGLE_IDS = mark_single_ids(KeyedJaggedTensor(["id"], torch.tensor([0]), lengths=torch.tensor([1])))

Step = Callable[[], object]


def draw_ids(count: int, generator: torch.Generator) -> Int64[Tensor, " ids"]:
    """Draws ids that are skewed like Criteo's: log-uniform over the table."""
    uniform = torch.rand(count, generator=generator, dtype=torch.float64)
    return (torch.exp(uniform * math.log(NUM_IDS)) - 1).long().clamp(max=NUM_IDS - 1)


def draw_clicks(
    num_rows: int, generator: torch.Generator
) -> tuple[Float[Tensor, "rows dense"], Float[Tensor, " rows"]]:
    """Draws uniform dense features, and labels of which a quarter are clicks."""
    dense = torch.rand(num_rows, NUM_DENSE, generator=generator)
    return dense, (torch.rand(num_rows, generator=generator) < 0.25).float()


def make_features(ids: Int64[Tensor, " ids"], batch_size: int) -> KeyedJaggedTensor:
    """Returns ids, feature after feature, as bags of one length; single ones are marked, as the reader marks them."""
    num_bags = len(NAMES) * batch_size
    bag = len(ids) // num_bags
    counts = [batch_size * bag] * len(NAMES)
    features = KeyedJaggedTensor(
        NAMES,
        ids,
        lengths=torch.full((num_bags,), bag, dtype=torch.int32, device=ids.device),
        stride=batch_size,
        length_per_key=counts,  # known on the host, as a reader knows it: a GPU would be waited for
        offset_per_key=[0, *accumulate(counts)],
    )
    return carry_single_ids(_SINGLE_IDS, features) if bag == 1 else features


def torchrec_collection(num_rows: int, dim: int = DIM) -> EmbeddingBagCollection:
    """Returns TorchRec's own tables of that many rows each, on the meta device."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=num_rows, embedding_dim=dim, feature_names=[name])
        for name in NAMES
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def compositional_collection(
    partition: Partition, composition: Composition | str = "product", dim: int = DIM, kernel: LookupKernel = "auto"
) -> CompositionalEmbeddingBagCollection:
    """Returns compositional tables with that scheme, on the meta device."""
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
    """Returns a batch of these ids with random dense features and labels.

    Args:
        ids: Ids, feature after feature.
        num_rows: The number of this rank's rows.
        generator: The generator of the dense features and labels.
        global_batch_size: The number of all ranks' rows; ``num_rows`` unless given.
    """
    dense, labels = draw_clicks(num_rows, generator)
    fields = {"dense_features": dense, "sparse_features": make_features(ids, num_rows), "labels": labels}
    return Batch(fields, global_batch_size or num_rows)


def trainer_step(state: TrainingState, batches: Sequence[Batch]) -> Step:
    """Returns a step of this project's trainer on one batch after another, again and again."""
    outputs = state.pipeline.outputs(cycle(batches))

    def step() -> None:  # the loss is not looked at, as in training: a GPU would be waited for
        state.optimizers.set_learning_rates(0)
        next(outputs)

    return step


def take_turns(
    steps: Mapping[str, Step], rounds: int, seconds_a_turn: float, device: torch.device
) -> dict[str, list[float]]:
    """Returns the seconds of every contender's step in every round; all ranks call it.

    Args:
        steps: Every contender's step by name; all ranks take equally many.
        rounds: How often each contender has its turn.
        seconds_a_turn: The time of one contender's turn, about.
        device: The device to wait for.
    """
    counts = {name: _steps_a_turn(step, seconds_a_turn, device) for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(_seconds_a_step(step, counts[name], device))
    return seconds


def _steps_a_turn(step: Step, seconds: float, device: torch.device) -> int:
    """Returns how many steps the first rank takes in that time once it is warm; all ranks call it."""
    _seconds_a_step(step, 3, device)
    count = torch.tensor(max(2, round(seconds / _seconds_a_step(step, 3, device))), device=device)
    dist.broadcast(count, src=0)
    return int(count)


def _seconds_a_step(step: Step, count: int, device: torch.device) -> float:
    """Takes ``count`` steps and returns the mean of their seconds; all ranks call it."""
    _wait_for_all(device)
    started = time.perf_counter()
    for _ in range(count):
        step()
    _wait_for_all(device)
    return (time.perf_counter() - started) / count


def wait_for(device: torch.device) -> None:
    """Waits until a device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wait_for_all(device: torch.device) -> None:
    """Waits until all ranks and their devices have finished; all ranks call it."""
    wait_for(device)
    dist.barrier()


def surroundings(device: torch.device) -> dict[str, Any]:
    """Returns what a measurement depends on beside the code: device, threads, processor and versions."""
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
