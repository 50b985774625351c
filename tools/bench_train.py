"""Times a whole training step of DLRM against plain PyTorch, TorchRec and the reference DLRM, in one interleaved run.

Every contender trains the paper's DLRM (13 dense, 26 categorical features, D=16) on the same batches of skewed ids,
drawn beforehand. Plain PyTorch's and TorchRec's tables are hashed to the size of ours, and the reference DLRM
(:mod:`peers.reference_dlrm`) has quotient-remainder tables of its own, so that all hold as many parameters::

    python tools/bench_train.py --output bench_train.json
    OMP_NUM_THREADS=2 python tools/bench_train.py --batch-sizes 2048 --only bf16

The reference DLRM is trained by SGD, its default, and by Adagrad. Both it and TorchRec's are timed in every run, as
ratios are to them.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
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

from distembed.base.files import write_json
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
    """Returns the columns of batches whose features have so many ids each."""
    dense = tuple(f"I{i}" for i in range(1, NUM_DENSE + 1))
    return Schema("label", dense, tuple(CategoricalFeature(name, num_ids) for name in NAMES))


SCHEMA = schema_of(NUM_IDS)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The size of all tables: numbers of ids of a feature and of a vector's columns."""

    num_ids: int = NUM_IDS
    dim: int = DIM

    @property
    def num_rows(self) -> int:
        """Rows of a hashed table."""
        return self.num_ids // COLLISIONS


SIZES = Sizes()


def draw_batches(batch_size: int, num_ids: int) -> list[Batch]:
    """Draws batches of one id for each feature, taken modulo ``num_ids``; for a GPU they are pinned."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(NUM_BATCHES):
        ids = draw_ids(len(NAMES) * batch_size, generator) % num_ids
        batch = draw_batch(ids, batch_size, generator)
        batches.append(batch.pin_memory() if torch.cuda.is_available() else batch)
    return batches


def build_ours(
    batch_size: int, ranks: Ranks, precision: str, sizes: Sizes = SIZES, sse: Mapping[str, SSE] | None = None
) -> tuple[Blueprint, TrainingState]:
    """Builds this project's DLRM with quotient-remainder tables; returns what it is built from, and itself."""
    table = TableConfig(partition="quotient_remainder", collisions=COLLISIONS, embedding_dim=sizes.dim)
    train = TrainConfig(batch_size=batch_size, precision=precision)  # type: ignore[arg-type]
    config = Config(embedding=EmbeddingConfig(default=table), train=train)
    blueprint = Blueprint.for_ranks(config, schema_of(sizes.num_ids), ranks, sse or {})
    return blueprint, build_training_state(blueprint, ranks, num_steps=1000)


def ours(
    batch_size: int, ranks: Ranks, precision: str, sizes: Sizes = SIZES, sse: Mapping[str, SSE] | None = None
) -> Step:
    """Returns a step of this project's trainer with quotient-remainder tables."""
    _, state = build_ours(batch_size, ranks, precision, sizes, sse)
    return trainer_step(state, draw_batches(batch_size, sizes.num_ids))


class _TorchRecTask(nn.Module):
    """A model and its loss, in the form that TorchRec's pipelines expect."""

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
        fused: Whether the networks' optimizer is torch's fused one.
        num_rows: Rows of each table; ids are hashed to them beforehand.
        dim: Columns of each table.
        pipeline_type: TorchRec's pipeline; where there is a GPU, one that works ahead of the step.
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
    """Hashed tables of torch's own, each looked up by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(NUM_ROWS, DIM, mode="sum", sparse=True) for _ in NAMES)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        ids = features.values().view(len(NAMES), -1)
        return torch.stack([bag(column.unsqueeze(1)) for bag, column in zip(self.bags, ids, strict=True)], dim=1)


class _Identity(nn.Module):
    """Takes the place of DLRM's stacking, as the vectors are stacked already."""

    def forward(self, stacked: Tensor) -> Tensor:
        return stacked


def plain(batch_size: int) -> Step:
    """Returns a step of the same DLRM over ``nn.EmbeddingBag`` with sparse gradients and torch's optimizers."""
    model = DLRM(_PlainBags(), NAMES, DIM, NUM_DENSE)
    model.stack = _Identity()
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
    """Returns a step as one writes it in plain PyTorch, on one batch after another, again and again."""
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
    """Returns the batch as the reference DLRM takes it: offsets and ids of each feature by themselves."""
    features = batch["sparse_features"].split([1] * len(NAMES))
    return Rows(
        batch["dense_features"],
        [feature.offsets()[:-1].long() for feature in features],
        [feature.values().contiguous() for feature in features],
        batch["labels"],
    )


def reference(batch_size: int, optimizer_type: type[torch.optim.Optimizer] = torch.optim.SGD) -> Step:
    """Returns a step of the reference DLRM with its own quotient-remainder tables, under one of torch's optimizers."""
    model = ReferenceDLRM(ReferenceSize([NUM_IDS] * len(NAMES), COLLISIONS, DIM, NUM_DENSE))
    optimizer = optimizer_type(model.parameters(), lr=LEARNING_RATE)
    rows = [reference_rows(batch) for batch in draw_batches(batch_size, NUM_IDS)]
    return _eager_step(model.loss, rows, [optimizer])


BASELINE = "TorchRec DLRM, hashed, fp32"
REFERENCE = "reference DLRM, quotient-remainder, fp32, SGD"


def contenders(batch_size: int, ranks: Ranks) -> dict[str, Callable[[], Step]]:
    """Returns what makes each contender's step, by name."""
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
    """Returns those whose names hold one of the texts, and the two that ratios are to; without texts, all of them.

    Raises:
        ValueError: A text is in no name.
    """
    unknown = [text for text in texts if not any(text in name for name in by_name)]
    if unknown:
        raise ValueError(f"--only {unknown[0]!r} is in no contender's name; there are: {'; '.join(by_name)}.")
    always = (BASELINE, REFERENCE)
    return {
        name: value
        for name, value in by_name.items()
        if not texts or name in always or any(text in name for text in texts)
    }


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
        ratios = (
            statistics.median(b / a for a, b in zip(values, seconds[base], strict=True))
            for base in (BASELINE, REFERENCE)
        )
        yield Row(name, batch_size, batch_size / statistics.median(values), *ratios)


def main() -> None:
    """Measures every contender and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one contender's turn")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="contenders whose name holds one, beside the baselines"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
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
        table.add_row(
            row.contender,
            str(row.batch_size),
            f"{row.samples_per_second:,.0f}",
            f"{row.ratio_to_torchrec:.2f}x",
            f"{row.ratio_to_reference:.2f}x",
        )
    Console(width=110).print(table)
    faster = use_bf16("auto", torch.device("cpu"))
    if not faster:
        print("This processor multiplies no faster in bf16 than in fp32: rows in bf16 say nothing about one that does.")
    here = {**surroundings(torch.device("cpu")), "multiplies_faster_in_bf16": faster}
    result = {**here, "rows": [dataclasses.asdict(row) for row in rows]}
    print(json.dumps(result))
    if options.output is not None:
        write_json(options.output, result)


if __name__ == "__main__":
    main()
