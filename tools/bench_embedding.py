"""Times forward, backward and update of 26 tables against TorchRec's hashed tables and a floor of bytes moved.

::

    OMP_NUM_THREADS=1 python tools/bench_embedding.py --batch-sizes 128 2048 8192 --bags 1 10

Every contender is a sharded collection on one rank. A step maps ids to pooled vectors and takes a given gradient back;
row-wise Adagrad, or ``--optimizer``, updates the tables within the backward pass, and Adagrad updates the functions of
paths after it. TorchRec's tables get hashed ids, and hashing is part of the step. The floor is the time in which this
machine copies the bytes that a step has to move: ids, each id's row of every partition, the pooled vectors and their
gradient, and every distinct row with its optimizer state, read and written once.
"""

import dataclasses
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from bench_commands import bench_parser, median_ratio, write_output
from bench_common import (
    COLLISIONS,
    DIM,
    LEARNING_RATE,
    NAMES,
    NUM_BATCHES,
    NUM_IDS,
    compositional_collection,
    draw_ids,
    make_features,
    take_turns,
    torchrec_collection,
    wait_for,
)
from bench_common import Step as Turn
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Ranks, process_group
from distembed.composition import COMPOSITIONS, Composition, PathMLP
from distembed.embedding.batches import with_ids
from distembed.embedding.ids import IdMapper
from distembed.embedding.settings import LookupKernel
from distembed.kernels.tables import num_states
from distembed.partitions import ChineseRemainder, MixedRadix, MultiHash, Naive, Partition, QuotientRemainder, Remainder
from distembed.planning import Workload, make_plan
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder

BASELINE = "TorchRec, hashed"
CPU = torch.device("cpu")

ROW_WISE = "row_wise_adagrad"
OPTIMIZERS = {ROW_WISE: RowWiseAdagrad, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}

Step = Callable[[KeyedJaggedTensor, Tensor], None]
"""Takes a batch and the gradient of the output."""


def draw_batches(batch_size: int, bag: int, num_ids: int = NUM_IDS, device: torch.device = CPU) -> list[Tensor]:
    """Draws the ids of every batch, feature after feature, taken modulo ``num_ids``."""
    generator = torch.Generator().manual_seed(0)
    drawn = [draw_ids(len(NAMES) * batch_size * bag, generator) % num_ids for _ in range(NUM_BATCHES)]
    return [ids.to(device) for ids in drawn]


def turn(step: Step, batches: Sequence[Tensor], batch_size: int, width: int) -> Turn:
    """Returns a step that cycles through batches, given as ids; ``width`` is the columns of a feature's output."""
    in_turn = cycle(batches)
    gradient = torch.randn(batch_size, len(NAMES) * width, device=batches[0].device) * 1e-3
    # new features for each step: used features have computed their offsets already
    return lambda: step(make_features(next(in_turn), batch_size), gradient)


@dataclasses.dataclass(frozen=True)
class Contender:
    """A scheme of tables.

    Attributes:
        partition: The partitions, for the floor.
        dims: Dimension of each partition's vectors, for the floor.
        width: Number of columns of a feature's output.
        make: Builds the step on a device.
    """

    partition: Partition
    dims: tuple[int, ...]
    width: int
    make: Callable[[torch.device], Step]


def shard(module: nn.Module, sharder: ModuleSharder, device: torch.device, optimizer: str) -> nn.Module:
    """Returns the sharded collection on one rank, with an optimizer in its backward pass."""
    apply_optimizer_in_backward(
        OPTIMIZERS[optimizer], module.get_submodule("e.embedding_bags").parameters(), {"lr": LEARNING_RATE}
    )
    plan = make_plan(module, [sharder], Ranks(0, 1, 1, device), Workload(512))
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(
        module, env=env, device=device, plan=plan, sharders=[sharder], init_data_parallel=False
    )
    return sharded.module["e"]


def ours(
    partition: Partition,
    composition: Composition,
    dim: int = DIM,
    kernel: LookupKernel = "auto",
    optimizer: str = ROW_WISE,
) -> Contender:
    """Returns distembed's tables."""
    table = compositional_collection(partition, composition, dim).tables()[0]

    def make(device: torch.device) -> Step:
        collection = compositional_collection(partition, composition, dim, kernel)
        sharded = shard(
            nn.ModuleDict({"e": collection}), CompositionalEmbeddingBagCollectionSharder(), device, optimizer
        )
        functions = list(sharded.get_submodule("functions").parameters())
        dense = torch.optim.Adagrad(functions, lr=LEARNING_RATE, fused=True) if functions else None

        def step(features: KeyedJaggedTensor, gradient: Tensor) -> None:
            sharded(features).values().backward(gradient)
            if dense is not None:
                dense.step()
                dense.zero_grad()

        return step

    dims = tuple(part.dim for part in table.lookup_tables())
    return Contender(partition, dims, table.num_vectors * dim, make)


def torchrec(partition: Partition, dim: int = DIM, optimizer: str = ROW_WISE) -> Contender:
    """Returns TorchRec's own tables with as many rows as the partition; fewer rows than ids get hashed ids."""
    num_rows = partition.total_rows

    def make(device: torch.device) -> Step:
        collection = torchrec_collection(num_rows, dim)
        sharded = shard(nn.ModuleDict({"e": collection}), EmbeddingBagCollectionSharder(), device, optimizer)

        def step(features: KeyedJaggedTensor, gradient: Tensor) -> None:
            if num_rows < partition.num_embeddings:
                features = with_ids(features, features.values() % num_rows, None)
            sharded(features).values().backward(gradient)

        return step

    return Contender(partition, (dim,), dim, make)


def id_check() -> Contender:
    """Returns the check of ids alone, the first part of every step of distembed's tables."""
    full = Naive(NUM_IDS)
    tables = compositional_collection(full).tables()

    def make(device: torch.device) -> Step:
        map_ids = IdMapper(tables)

        def step(features: KeyedJaggedTensor, gradient: Tensor) -> None:
            map_ids(features)

        return step

    return Contender(full, (), 0, make)


def contenders(optimizer: str = ROW_WISE) -> dict[str, Contender]:
    """Returns every contender by name."""
    quotient_remainder = QuotientRemainder(NUM_IDS, collisions=COLLISIONS)
    remainder = Remainder(NUM_IDS, collisions=COLLISIONS)
    make = partial(ours, optimizer=optimizer)
    by_name = {
        BASELINE: torchrec(remainder, optimizer=optimizer),
        "id check alone": id_check(),
    }
    for name, partition in (("full", Naive(NUM_IDS)), ("hashed", remainder)):
        for label, kernel in (("", "auto"), (", FBGEMM's lookup", "fbgemm"), (", in one pass", "fused")):
            by_name[f"{name}{label}"] = make(partition, COMPOSITIONS["product"](), kernel=kernel)
    for name, composition in COMPOSITIONS.items():
        by_name[f"quotient-remainder, {name}"] = make(quotient_remainder, composition())
    product = COMPOSITIONS["product"]()
    by_name["quotient-remainder, path_mlp 16"] = make(quotient_remainder, PathMLP(hidden=[16]))
    by_name["quotient-remainder, product, FBGEMM's lookups"] = make(quotient_remainder, product, kernel="fbgemm")
    for composition in (product, COMPOSITIONS["tensor_train"]()):
        by_name[f"mixed radix of 3, {composition.name}"] = make(MixedRadix(NUM_IDS, num_partitions=3), composition)
    by_name["Chinese remainder of 2, product"] = make(ChineseRemainder(NUM_IDS), product)
    for label, kernel in (("two hashes, product", "auto"), ("two hashes, product, FBGEMM's lookups", "fbgemm")):
        by_name[label] = make(MultiHash(NUM_IDS, collisions=2 * COLLISIONS), product, kernel=kernel)
    three = MultiHash(NUM_IDS, collisions=2 * COLLISIONS, num_partitions=3)
    by_name["two hashes, weighted by a third"] = make(three, COMPOSITIONS["weighted_sum"]())
    return by_name


def bytes_moved(contender: Contender, batch: Tensor, batch_size: int, optimizer: str = ROW_WISE) -> int:
    """Returns the fewest bytes that a step reads and writes: float32 numbers, int64 ids, and optimizer states."""
    ids = batch.cpu().view(len(NAMES), -1)
    moved = ids.numel() * 8 + 2 * batch_size * len(NAMES) * contender.width * 4
    for j, dim in enumerate(contender.dims):
        distinct = sum(len(contender.partition.rows(table_ids)[j].unique()) for table_ids in ids)
        moved += ids.numel() * dim * 4 + distinct * 2 * (dim + num_states(optimizer, dim)) * 4
    return moved


def copy_bytes_per_second(device: torch.device = CPU, num_bytes: int = 2**28) -> float:
    """Returns the bytes read and written a second by a copy that exceeds the device's caches."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = []
    for _ in range(5):
        wait_for(device)
        started = time.perf_counter()
        target.copy_(source)
        wait_for(device)
        seconds.append(time.perf_counter() - started)
    return 2 * num_bytes / min(seconds)


def main() -> None:
    """Measures every contender and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048, 8192])
    parser.add_argument("--bags", type=int, nargs="+", default=[1, 10], help="ids of each feature in a row")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds of one contender's turn")
    parser.add_argument(
        "--only", default="", help="the baseline and contenders whose name has a match of this regular expression"
    )
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=ROW_WISE, help="optimizer of the tables")
    options = parser.parse_args()
    try:
        chosen = {name: own for name, own in contenders(options.optimizer).items() if re.search(options.only, name)}
    except re.error as error:
        parser.error(f"--only {options.only!r} is no regular expression: {error}")
    if not chosen:
        parser.error(f"--only {options.only!r} matches no contender; there are: {'; '.join(contenders())}")
    chosen = {BASELINE: contenders(options.optimizer)[BASELINE], **chosen}
    rows: list[dict[str, Any]] = []
    table = Table("contender", "batch", "bag", "ms", f"to {BASELINE}", "to the floor")
    with process_group("cpu"):
        bandwidth = copy_bytes_per_second()
        for batch_size in options.batch_sizes:
            steps = {name: c.make(CPU) for name, c in chosen.items()}
            for bag in options.bags:
                batches = draw_batches(batch_size, bag)
                turns = {name: turn(step, batches, batch_size, chosen[name].width) for name, step in steps.items()}
                seconds = take_turns(turns, options.rounds, options.seconds, CPU)
                for name, values in seconds.items():
                    floor = bytes_moved(chosen[name], batches[0], batch_size, options.optimizer) / bandwidth
                    ratio = median_ratio(values, seconds[BASELINE])
                    middle = statistics.median(values)
                    row = {"contender": name, "batch_size": batch_size, "bag": bag, "milliseconds": middle * 1000}
                    rows.append({**row, "ratio": ratio, "ratio_to_floor": middle / floor})
                    times = f"{middle * 1000:.3f}", f"{ratio:.2f}x", f"{middle / floor:.1f}x"
                    table.add_row(name, str(batch_size), str(bag), *times)
    Console(width=110).print(table)
    print(f"{torch.get_num_threads()} threads, copies at {bandwidth / 1e9:.1f} GB/s read and written")
    write_output(options, rows)


if __name__ == "__main__":
    main()
