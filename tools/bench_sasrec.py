"""Compares the time and memory of a SASRec step with a plain PyTorch step of equal size.

The peer (``tools/peers/plain_sasrec.py``) pads all rows to 50 items, keeps items in one ``nn.Embedding``, computes all
logits of a softmax at once, and uses torch's fused Adam; its batches are padded and its negatives drawn beforehand.
distembed's step starts from rows as the reader gives them: it cuts rows and draws negatives. Adam trains its networks,
and its items if the loss is a full softmax; otherwise a fused Adagrad trains the items. The contenders step in turn,
each in a separate process::

    python tools/bench_sasrec.py --output bench_sasrec.json
    python tools/bench_sasrec.py --loss softmax --items 1000000 --batch-size 32

Row lengths are distributed like Amazon Beauty's, or all rows have 51 items (``--full``).
"""

import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from bench_commands import bench_parser, median_ratio, write_output
from bench_common import Step, surroundings, take_turns_in_processes
from peers.plain_sasrec import PlainSASRec, Size
from rich.console import Console
from rich.table import Table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import process_group
from distembed.base.units import format_bytes
from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.reader.batch import Batch
from distembed.tasks.base import BatchPosition
from distembed.training.build import Blueprint, build_training_state
from distembed.training.config import Config, validate

LENGTH, DIM, BLOCKS, HEADS, DROPOUT, RATE = 50, 64, 2, 2, 0.2, 1e-3
NUM_ROWS = 2048
Rows = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Case:
    """The sizes of a comparison; ``full`` is whether all rows have the greatest length."""

    loss: str
    items: int
    batch_size: int
    full: bool


def draw_rows(case: Case) -> Rows:
    """Returns rows of skewed items from 1 on, with lengths distributed like Amazon Beauty's."""
    rng = np.random.default_rng(0)
    lengths = np.full(NUM_ROWS, LENGTH + 1) if case.full else np.clip(3 + rng.pareto(1.8, NUM_ROWS) * 3, 3, LENGTH + 1)
    return [(1 + ((case.items - 1) * rng.random(int(n)) ** 3).astype(np.int64)).tolist() for n in lengths]


def make_config(case: Case, folder: str) -> Config:
    """Returns the config of distembed's run."""
    train = {
        "batch_size": case.batch_size,
        "precision": "fp32",
        "device": "cpu",
        "dense_optimizer": {"name": "adam", "learning_rate": RATE},
        "sparse_optimizer": {"name": "adagrad", "learning_rate": 0.02},
    }
    model = {"name": "sasrec", "num_blocks": BLOCKS, "num_heads": HEADS, "dropout": DROPOUT}
    task = {"name": "next_item", "loss": case.loss, "max_length": LENGTH}
    embedding = {"default": {"embedding_dim": DIM}}
    return validate(
        {"data": {"path": folder}, "model": model, "task": task, "embedding": embedding, "train": train}, ""
    )


def raw_batches(rows: Rows, batch_size: int) -> Iterator[Batch]:
    """Yields batches of rows as the reader gives them, without end."""
    for first in cycle(range(0, NUM_ROWS - batch_size + 1, batch_size)):
        own = rows[first : first + batch_size]
        ids = [*range(first, first + batch_size), *(item for row in own for item in row)]
        lengths = torch.tensor([1] * batch_size + [len(row) for row in own], dtype=torch.int32)
        features = KeyedJaggedTensor(["user", "item"], torch.tensor(ids), lengths=lengths, stride=batch_size)
        yield Batch({"sparse_features": features}, batch_size)


def ours(case: Case) -> Step:
    """Returns a step of distembed's trainer."""
    stay = ExitStack()
    folder = stay.enter_context(tempfile.TemporaryDirectory())
    ranks = stay.enter_context(process_group("cpu"))
    rows = draw_rows(case)
    columns = {"user": pa.array(range(NUM_ROWS), pa.int32()), "item": pa.array(rows, pa.list_(pa.int64()))}
    pq.write_table(pa.table(columns), Path(folder) / "rows.parquet")
    mean = float(np.mean([len(row) for row in rows]))
    features = CategoricalFeature("user", NUM_ROWS), CategoricalFeature("item", case.items, True, mean)
    schema = Schema(None, (), features)
    create_manifest(folder, schema, {"train": ["rows.parquet"]})
    blueprint = Blueprint.for_ranks(make_config(case, folder), schema, ranks, {})
    state = build_training_state(blueprint, ranks, num_steps=1000)
    state.task.start(blueprint.task_context(folder, ranks))
    taken = list(zip(range(NUM_ROWS // case.batch_size), raw_batches(rows, case.batch_size), strict=False))
    prepared = (state.task.prepare_batch(batch, BatchPosition(number, 0)) for number, batch in cycle(taken))
    outputs = state.pipeline.outputs(prepared)

    def step() -> None:
        state.optimizers.set_learning_rates(0)
        loss, _ = next(outputs)
        loss.item()

    step.stay = stay  # type: ignore[attr-defined]  # the folder and the process group last as long as the step
    return step


def plain(case: Case) -> Step:
    """Returns a step of the peer."""
    model = PlainSASRec(Size(case.items, LENGTH, DIM, BLOCKS, HEADS, DIM, DROPOUT))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    rows, generator = draw_rows(case), torch.Generator().manual_seed(0)
    whole = torch.zeros(NUM_ROWS, LENGTH + 1, dtype=torch.long)
    for number, row in enumerate(rows):
        whole[number, LENGTH + 1 - len(row) :] = torch.tensor(row)
    negatives = torch.randint(1, case.items, (NUM_ROWS, LENGTH), generator=generator)
    firsts = cycle(range(0, NUM_ROWS - case.batch_size + 1, case.batch_size))

    def step() -> None:
        first = next(firsts)
        own = whole[first : first + case.batch_size]
        inputs, targets = own[:, :-1], own[:, 1:] * (own[:, :-1] != 0)
        if case.loss == "softmax":
            loss = model.softmax_loss(inputs, targets)
        else:
            loss = model.binary_loss(inputs, targets, negatives[first : first + case.batch_size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def main() -> None:
    """Compares and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--loss", choices=["binary", "softmax"], default="binary")
    parser.add_argument("--items", type=int, default=12_103)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--full", action="store_true", help="all rows of the greatest length")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    case = Case(options.loss, options.items, options.batch_size, options.full)
    makers = {"plain PyTorch": partial(plain, case), "distembed": partial(ours, case)}
    found = take_turns_in_processes(makers, options.steps, torch.device("cpu"), options.threads)
    table = Table(title=str(case))
    for heading in ("", "ms a step", "samples/s", "peak memory", "speed"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, own in found.items():
        times = f"{own.median * 1e3:.1f}", f"{case.batch_size / own.median:,.0f}"
        speed = median_ratio(found["plain PyTorch"].seconds, own.seconds)
        table.add_row(name, *times, format_bytes(own.bytes), f"{speed:.2f}x")
    Console(width=110).print(table)
    measured = {name: dataclasses.asdict(own) for name, own in found.items()}
    result = {**surroundings(torch.device("cpu")), "case": dataclasses.asdict(case), "measured": measured}
    write_output(options, result)


if __name__ == "__main__":
    main()
