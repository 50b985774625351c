"""Times a training step of SASRec against a plain PyTorch one of the same size, and what memory both take.

The peer (:mod:`peers.plain_sasrec`) pads all rows to 50 items, has its items in one ``nn.Embedding``, makes all logits
of a softmax at once, and is trained by torch's fused Adam; its batches are padded, and its negatives drawn, beforehand.
Ours is the trainer's step on rows as the reader gives them: it cuts them, draws negatives, and trains networks by Adam,
and the items too where a softmax has gradients in all of them; those that are only looked up, by a fused Adagrad. Both
contenders step in processes of their own, in turn::

    python tools/bench_sasrec.py --output bench_sasrec.json
    python tools/bench_sasrec.py --loss softmax --items 1000000 --batch-size 32

Lengths of rows fall as those of Amazon Beauty's users do, or all rows have 51 items (``--full``).
"""

import argparse
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
from bench_common import surroundings
from bench_processes import Step, take_turns_in_processes
from peers.plain_sasrec import PlainSASRec, Size
from rich.console import Console
from rich.table import Table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.files import write_json
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
    """What is compared.

    Attributes:
        loss: ``binary`` or ``softmax``.
        items: Number of items.
        batch_size: Rows of a step.
        full: Whether all rows have the greatest length.
    """

    loss: str
    items: int
    batch_size: int
    full: bool


def draw_rows(case: Case) -> Rows:
    """Returns rows of items that are skewed, none of which is 0; lengths fall as those of Amazon Beauty's users do."""
    rng = np.random.default_rng(0)
    lengths = np.full(NUM_ROWS, LENGTH + 1) if case.full else np.clip(3 + rng.pareto(1.8, NUM_ROWS) * 3, 3, LENGTH + 1)
    return [(1 + ((case.items - 1) * rng.random(int(n)) ** 3).astype(np.int64)).tolist() for n in lengths]


def make_config(case: Case, folder: str) -> Config:
    """Returns the config of this project's run."""
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
    """Yields batches of rows as the reader gives them, again and again."""
    for first in cycle(range(0, NUM_ROWS - batch_size + 1, batch_size)):
        own = rows[first : first + batch_size]
        ids = [*range(first, first + batch_size), *(item for row in own for item in row)]
        lengths = torch.tensor([1] * batch_size + [len(row) for row in own], dtype=torch.int32)
        features = KeyedJaggedTensor(["user", "item"], torch.tensor(ids), lengths=lengths, stride=batch_size)
        yield Batch({"sparse_features": features}, batch_size)


def ours(case: Case) -> Step:
    """Returns a step of this project's trainer."""
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
    """Compares, prints a table, and writes all measurements to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=["binary", "softmax"], default="binary")
    parser.add_argument("--items", type=int, default=12_103)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--full", action="store_true", help="all rows of the greatest length")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file of all measurements")
    options = parser.parse_args()
    case = Case(options.loss, options.items, options.batch_size, options.full)
    makers = {"plain PyTorch": partial(plain, case), "distembed": partial(ours, case)}
    found = take_turns_in_processes(makers, options.steps, torch.device("cpu"), options.threads)
    table = Table(title=str(case))
    for heading in ("", "ms a step", "samples/s", "peak memory", "speed"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, own in found.items():
        ratios = [a / b for a, b in zip(found["plain PyTorch"].seconds, own.seconds, strict=True)]
        speed = f"{np.median(ratios):.2f}x"
        table.add_row(
            name, f"{own.median * 1e3:.1f}", f"{case.batch_size / own.median:,.0f}", format_bytes(own.bytes), speed
        )
    Console(width=110).print(table)
    if options.output is not None:
        measured = {name: dataclasses.asdict(own) for name, own in found.items()}
        result = {**surroundings(torch.device("cpu")), "case": dataclasses.asdict(case), "measured": measured}
        write_json(options.output, result)


if __name__ == "__main__":
    main()
