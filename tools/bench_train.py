"""Compares the time of a whole DLRM step with plain PyTorch, TorchRec and the reference DLRM, in one interleaved run.

Every contender trains the paper's DLRM (13 dense, 26 categorical features, D=16) on equal batches of skewed ids, drawn
beforehand. All have equally many parameters: plain PyTorch's and TorchRec's tables are hashed to the size of
distembed's, and the reference DLRM (``tools/peers/reference_dlrm.py``) has its own quotient-remainder tables::

    python tools/bench_train.py --output bench_train.json
    OMP_NUM_THREADS=2 python tools/bench_train.py --batch-sizes 2048 --only bf16

The reference DLRM is trained by SGD, its default, and by Adagrad. Every run times TorchRec's DLRM and the reference
DLRM with SGD, the baselines of the ratios.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from bench_commands import bench_parser, median_ratio, write_output
from bench_common import (
    COLLISIONS,
    DIM,
    LEARNING_RATE,
    NAMES,
    NUM_BATCHES,
    NUM_DENSE,
    NUM_IDS,
    NUM_ROWS,
    Step,
    draw_batch,
    draw_ids,
    surroundings,
    take_turns,
    torchrec_collection,
    trainer_step,
)
from peers.reference_dlrm import ReferenceDLRM, Rows
from peers.reference_dlrm import Size as ReferenceSize
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.distributed.types import ShardingEnv
from torchrec.models.dlrm import DLRM as TorchRecDLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Ranks, process_group
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.reader.batch import Batch
from distembed.embedding import EmbeddingConfig, TableConfig
from distembed.models import DLRM
from distembed.planning import Workload, make_plan
from distembed.sse import SSE
from distembed.training.build import Blueprint, TrainingState, build_training_state, use_bf16
from distembed.training.config import Config
from distembed.training.train_config import TrainConfig

_B = TypeVar("_B")
_T = TypeVar("_T")


def schema_of(num_ids: int) -> Schema:
    """Returns the columns of the batches, given each feature's number of ids."""
    dense = tuple(f"I{i}" for i in range(1, NUM_DENSE + 1))
    return Schema("label", dense, tuple(CategoricalFeature(name, num_ids) for name in NAMES))


SCHEMA = schema_of(NUM_IDS)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The size of all tables: each feature's number of ids, and the columns of a vector."""

    num_ids: int = NUM_IDS
    dim: int = DIM

    @property
    def num_rows(self) -> int:
        """Rows of a hashed table."""
        return self.num_ids // COLLISIONS


SIZES = Sizes()


def draw_batches(batch_size: int, num_ids: int, count: int = NUM_BATCHES) -> list[Batch]:
    """Draws batches of one id for each feature, modulo ``num_ids``; in pinned memory if there is a GPU."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        ids = draw_ids(len(NAMES) * batch_size, generator) % num_ids
        batch = draw_batch(ids, batch_size, generator)
        batches.append(batch.pin_memory() if torch.cuda.is_available() else batch)
    return batches


def build_ours(
    batch_size: int,
    ranks: Ranks,
    precision: str,
    sizes: Sizes = SIZES,
    sse: Mapping[str, SSE] | None = None,
    **table_settings: Any,
) -> tuple[Blueprint, TrainingState]:
    """Builds distembed's DLRM with quotient-remainder tables of more settings; returns its blueprint and its state."""
    table = TableConfig(
        partition="quotient_remainder", collisions=COLLISIONS, embedding_dim=sizes.dim, **table_settings
    )
    train = TrainConfig(batch_size=batch_size, precision=precision)  # type: ignore[arg-type]
    config = Config(embedding=EmbeddingConfig(default=table), train=train)
    blueprint = Blueprint.for_ranks(config, schema_of(sizes.num_ids), ranks, sse or {})
    return blueprint, build_training_state(blueprint, ranks, num_steps=1000)


def ours(
    batch_size: int, ranks: Ranks, precision: str, sizes: Sizes = SIZES, sse: Mapping[str, SSE] | None = None
) -> Step:
    """Returns a step of distembed's trainer with quotient-remainder tables."""
    _, state = build_ours(batch_size, ranks, precision, sizes, sse)
    return trainer_step(state, draw_batches(batch_size, sizes.num_ids))


class _TorchRecTask(nn.Module):
    """A model with its loss, as TorchRec's pipelines expect it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model(batch["dense_features"], batch["sparse_features"]).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])
        return loss, loss.detach()


def torchrec(
    batch_size: int,
    ranks: Ranks,
    fused: bool,
    num_rows: int = NUM_ROWS,
    dim: int = DIM,
    pipeline_type: type[TrainPipelineBase[Any, Any]] = TrainPipelineBase,
) -> Step:
    """Returns a step of TorchRec's own DLRM and pipeline with hashed tables.

    Args:
        batch_size: Rows of a step.
        ranks: This rank, the only one.
        fused: Whether the networks use torch's fused optimizer.
        num_rows: Rows of each table; ids are hashed beforehand.
        dim: Columns of each table.
        pipeline_type: TorchRec's pipeline.
    """
    collection = torchrec_collection(num_rows, dim)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": LEARNING_RATE})
    task = _TorchRecTask(TorchRecDLRM(collection, NUM_DENSE, [512, 256, 64, dim], [512, 256, 1]))
    sharders = [EmbeddingBagCollectionSharder()]
    plan = make_plan(task, sharders, ranks, Workload(batch_size))
    model = DistributedModelParallel(
        task,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=ranks.device,
        plan=plan,
        sharders=sharders,
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=LEARNING_RATE, fused=fused),
    )
    pipeline = pipeline_type(model, CombinedOptimizer([model.fused_optimizer, dense]), ranks.device)
    batches = cycle(draw_batches(batch_size, num_rows))
    return lambda: pipeline.progress(batches)


class _PlainBags(nn.Module):
    """Hashed ``nn.EmbeddingBag`` tables, each looked up by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True) for _ in NAMES)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        ids = features.values().view(len(NAMES), -1)
        return torch.stack([bag(column.unsqueeze(1)) for bag, column in zip(self.bags, ids, strict=True)], dim=1)


def plain(batch_size: int) -> Step:
    """Returns a step of DLRM over ``nn.EmbeddingBag`` with sparse gradients and torch's optimizers."""
    model = DLRM(_PlainBags(), NAMES, DIM, NUM_DENSE)
    model.stack = nn.Identity()  # the bags' vectors are stacked already
    bags = list(model.embeddings.parameters())
    sparse = torch.optim.Adagrad(bags, lr=LEARNING_RATE)
    dense = torch.optim.Adagrad(
        [p for n, p in model.named_parameters() if not n.startswith("embeddings")], lr=LEARNING_RATE
    )

    def loss(batch: Batch) -> Tensor:
        logits = model(batch["dense_features"], batch["sparse_features"])
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])

    return _eager_step(loss, draw_batches(batch_size, NUM_ROWS), [sparse, dense])


def _eager_step(
    loss: Callable[[_B], Tensor], batches: Iterable[_B], optimizers: Sequence[torch.optim.Optimizer]
) -> Step:
    """Returns a step in plain PyTorch that cycles through the batches."""
    in_turn = cycle(batches)

    def step() -> None:
        value = loss(next(in_turn))
        for optimizer in optimizers:
            optimizer.zero_grad()
        value.backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def reference_rows(batch: Batch) -> Rows:
    """Returns the batch in the reference DLRM's form: separate offsets and ids of each feature."""
    features = batch["sparse_features"].split([1] * len(NAMES))
    return Rows(
        batch["dense_features"],
        [feature.offsets()[:-1].long() for feature in features],
        [feature.values().contiguous() for feature in features],
        batch["labels"],
    )


def reference(batch_size: int, optimizer_type: type[torch.optim.Optimizer] = torch.optim.SGD) -> Step:
    """Returns a step of the reference DLRM with its own quotient-remainder tables and one of torch's optimizers."""
    model = ReferenceDLRM(ReferenceSize([NUM_IDS] * len(NAMES), COLLISIONS, DIM, NUM_DENSE))
    optimizer = optimizer_type(model.parameters(), lr=LEARNING_RATE)
    rows = [reference_rows(batch) for batch in draw_batches(batch_size, NUM_IDS)]
    return _eager_step(model.loss, rows, [optimizer])


BASELINE = "TorchRec DLRM, hashed, fp32"
REFERENCE = "reference DLRM, quotient-remainder, fp32, SGD"


def contenders(batch_size: int, ranks: Ranks) -> dict[str, Callable[[], Step]]:
    """Returns the functions that build each contender's step, by name."""
    return {
        "nn.EmbeddingBag, hashed, fp32": lambda: plain(batch_size),
        REFERENCE: lambda: reference(batch_size),
        "reference DLRM, quotient-remainder, fp32, Adagrad": lambda: reference(batch_size, torch.optim.Adagrad),
        BASELINE: lambda: torchrec(batch_size, ranks, fused=False),
        "TorchRec DLRM, hashed, fp32, fused dense optimizer": lambda: torchrec(batch_size, ranks, fused=True),
        "distembed, quotient-remainder, fp32": lambda: ours(batch_size, ranks, "fp32"),
        "distembed, quotient-remainder, bf16": lambda: ours(batch_size, ranks, "bf16"),
    }


def choose(by_name: Mapping[str, _T], texts: Sequence[str]) -> dict[str, _T]:
    """Returns the baselines and the contenders whose names contain one of the texts; without texts, all contenders.

    Raises:
        ValueError: A text is in no name.
    """
    unknown = [text for text in texts if not any(text in name for name in by_name)]
    if unknown:
        raise ValueError(f"--only {unknown[0]!r} is in no contender's name; there are: {'; '.join(by_name)}.")
    always = (BASELINE, REFERENCE) if texts else by_name
    return {name: own for name, own in by_name.items() if name in always or any(text in name for text in texts)}


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one contender at one batch size; a ratio of speeds is the median of the ratios of each round."""

    contender: str
    batch_size: int
    samples_per_second: float
    ratio_to_torchrec: float
    ratio_to_reference: float


def summarise(seconds: dict[str, list[float]], batch_size: int) -> Iterator[Row]:
    """Yields every contender's medians over rounds."""
    for name, values in seconds.items():
        ratios = (median_ratio(seconds[base], values) for base in (BASELINE, REFERENCE))
        yield Row(name, batch_size, batch_size / statistics.median(values), *ratios)


def main() -> None:
    """Measures every contender and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of one contender's turn")
    only = "the baselines and contenders whose name contains one of the texts"
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help=only)
    options = parser.parse_args()
    rows = []
    with process_group("cpu") as ranks:
        for batch_size in options.batch_sizes:
            chosen = choose(contenders(batch_size, ranks), options.only)
            steps = {name: make() for name, make in chosen.items()}
            seconds = take_turns(steps, options.rounds, options.seconds, ranks.device)
            rows += list(summarise(seconds, batch_size))
    table = Table("contender", "batch", "samples/s", "to TorchRec", "to the reference")
    for row in rows:
        ratios = f"{row.ratio_to_torchrec:.2f}x", f"{row.ratio_to_reference:.2f}x"
        table.add_row(row.contender, str(row.batch_size), f"{row.samples_per_second:,.0f}", *ratios)
    Console(width=110).print(table)
    faster = use_bf16("auto", torch.device("cpu"))
    if not faster:
        print("This processor multiplies no faster in bf16 than in fp32: its bf16 rows do not hold for one that does.")
    here = {**surroundings(torch.device("cpu")), "multiplies_faster_in_bf16": faster}
    result = {**here, "rows": [dataclasses.asdict(row) for row in rows]}
    print(json.dumps(result))
    write_output(options, result)


if __name__ == "__main__":
    main()
