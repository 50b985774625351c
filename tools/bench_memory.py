"""Compares the estimated memory of a training step with the memory allocated in the least favourable timing.

::

    python tools/bench_memory.py --output bench_memory.json

The models are DLRM over Criteo Kaggle's 26 features, with row-wise Adagrad, other models of clicks and of several
labels, and models of users and items, on gloo ranks of this machine. Each case trains ten times, five of them while
other processes keep all cores busy. The result is the highest of the ten peaks. It includes gradient buffers, but not
weights and optimizer states.

The peak is sampled from malloc's statistics, after each operator and every millisecond by a thread. Between two steps
the allocated bytes are known exactly, from the storages that operators have returned. The profiler's trace cannot be
used: it never sees the release of a tensor that one of gloo's threads frees last.
"""

import argparse
import ctypes
import dataclasses
import itertools
import json
import multiprocessing
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from bench_commands import bench_parser, kept_rows, write_output
from bench_common import estimated_step, run_ranks, surroundings
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Collectives, Ranks
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import LABELS, SCHEMAS, CategoricalFeature, Label, Schema
from distembed.data.reader.batch import Batch
from distembed.embedding import EmbeddingConfig, TableConfig
from distembed.models import (
    MODELS,
    DINConfig,
    DLRMConfig,
    ESMMConfig,
    GRUConfig,
    HSTUConfig,
    MFConfig,
    ModelConfig,
    SASRecConfig,
    TwoTowerConfig,
)
from distembed.optim.config import SparseOptimizerConfig
from distembed.planning import PlanConfig
from distembed.planning.buffers import StepBuffers
from distembed.planning.config import TablePlanConfig
from distembed.tasks import ClickConfig, MultiConfig, NextItemConfig, RatingConfig, RetrievalConfig, TaskConfig
from distembed.tasks.base import BatchPosition, TaskContext
from distembed.tasks.multi_config import LabelConfig
from distembed.training.build import Blueprint, TrainingState, build_training_state
from distembed.training.config import Config
from distembed.training.train_config import TrainConfig

DIM, NUM_STEPS, NUM_WARM = 32, 8, 3
LEAST, MOST = 0.9, 4 / 3
"""Limits of the ratio of the estimate to the highest peak."""
_SAMPLED_BYTES = 2**16
"""Smallest storage after which malloc is sampled."""


@dataclasses.dataclass(frozen=True)
class Learnt:
    """A model and its task.

    Attributes:
        schema: The columns of the dataset.
        model: The model.
        task: The task.
        tables: Names of the tables; all categorical columns unless given.
        adds_to_batches: Whether the task starts on a dataset and adds its columns to batches; else they are drawn.
    """

    schema: Schema
    model: ModelConfig
    task: TaskConfig
    tables: tuple[str, ...] = ()
    adds_to_batches: bool = False


CLICKS = Learnt(SCHEMAS["criteo_kaggle"], DLRMConfig(bottom=[128, 64], top=[128, 64]), ClickConfig())
CLICK_MODELS = ["dcn", "dcnv2", "gdcn", "deepfm", "finalmlp"]
"""Models of the criteo rows in their default sizes."""
_MOST_IDS = 200_000
SMALL_CLICKS = dataclasses.replace(
    CLICKS.schema,
    categorical=tuple(
        dataclasses.replace(each, num_embeddings=min(each.num_embeddings, _MOST_IDS))
        for each in CLICKS.schema.categorical
    ),
)
"""Criteo rows with smaller vocabularies: full tables of all ids take 4.3 GB, which no step touches."""
_CLICK, _CONVERSION, _RATING = Label("click"), Label("conversion"), Label("rating", "number")
TWO_LABELS = dataclasses.replace(SMALL_CLICKS, label=None, labels=(_CLICK, _CONVERSION))
THREE_LABELS = dataclasses.replace(SMALL_CLICKS, label=None, labels=(_CLICK, _CONVERSION, _RATING))
_AFTER = MultiConfig(labels={"click": LabelConfig(), "conversion": LabelConfig(after="click")})
LABEL_MODELS = {
    "MMoE": Learnt(THREE_LABELS, MODELS["mmoe"](), MultiConfig()),
    "PLE": Learnt(THREE_LABELS, MODELS["ple"](), MultiConfig()),
    "ESMM": Learnt(TWO_LABELS, ESMMConfig(click="click"), _AFTER),
}
"""Models of several labels in their default sizes."""
USERS, ITEMS = CategoricalFeature("user", 50_000), CategoricalFeature("item", 20_000)
RATINGS = Learnt(Schema("rating", (), (USERS, ITEMS), label_kind="number"), MFConfig(), RatingConfig())
SEQUENCES = Schema(None, (), (USERS, CategoricalFeature("item", 20_000, True, 25.0)))
SOFTMAX = Learnt(SEQUENCES, SASRecConfig(dropout=0.1), NextItemConfig(), ("item",))
BINARY = Learnt(SEQUENCES, SASRecConfig(dropout=0.1), NextItemConfig(loss="binary"), ("item",))
POINTWISE = Learnt(SEQUENCES, HSTUConfig(dropout=0.1), NextItemConfig(), ("item",))
_HISTORY = CategoricalFeature("history", 20_000, True, 25.0, table="item")
HISTORIES = Schema("label", ("price",), (USERS, CategoricalFeature("item", 20_000), _HISTORY))
DIN, TRANSFORMER = (
    Learnt(HISTORIES, DINConfig(history=kind), ClickConfig(), ("user", "item")) for kind in ("attention", "transformer")
)
_TASTE = CategoricalFeature("history", 20_000, True, 24.0, table="item")
PAIRS = Schema(
    None,
    ("age", "price"),
    (USERS, CategoricalFeature("item", 20_000), _TASTE, CategoricalFeature("genres", 500, True, 3.0)),
)
IN_BATCH, SAMPLED = (
    Learnt(
        PAIRS,
        TwoTowerConfig(item_features=["genres", "price"]),
        RetrievalConfig(loss=loss, item="item", item_features=["genres", "price"]),
        ("user", "item", "genres"),
        adds_to_batches=True,
    )
    for loss in ("in_batch", "sampled")
)
RECURRENT = Learnt(SEQUENCES, GRUConfig(), NextItemConfig(loss="binary"), ("item",))


@dataclasses.dataclass(frozen=True)
class Case:
    """Tables and their placement.

    Attributes:
        name: Name of the case.
        table: Settings of all tables.
        sharding_types: Sharding types, assigned to the tables in turn.
        nodes: Number of nodes.
        ranks_per_node: Number of ranks of a node.
        learnt: The model and its task.
        rows_share: The batch size as a share of ``--batch-size``; smaller for sequences and costly networks.
    """

    name: str
    table: dict[str, Any]
    sharding_types: Sequence[str]
    nodes: int = 1
    ranks_per_node: int = 2
    learnt: Learnt = CLICKS
    rows_share: float = 1.0


PRODUCT = {"partition": "mixed_radix", "num_partitions": 3, "composition": "product"}
PATH = {"partition": "quotient_remainder", "collisions": 60, "composition": "path_mlp"}
FULL, QUOTIENT = {"partition": "naive"}, {"partition": "quotient_remainder", "composition": "product"}
CASES = [
    Case("product, table-wise", PRODUCT, ["table_wise"]),
    Case("product, by columns", PRODUCT, ["column_wise"]),
    Case("product, by rows", PRODUCT, ["row_wise"]),
    Case("product, replicated", PRODUCT, ["data_parallel"]),
    Case("product, mixed", PRODUCT, ["table_wise", "column_wise", "row_wise", "data_parallel"]),
    Case("path_mlp, table-wise", PATH, ["table_wise"]),
    Case("path_mlp, by rows", PATH, ["row_wise"]),
    Case("product, by rows in nodes", PRODUCT, ["table_row_wise"], 2, 2),
    Case("product, grid", PRODUCT, ["grid_shard"], 2, 2),
    *(
        Case(f"{name}, {ranks} rank(s){label}", table, ["table_wise"], 1, ranks, learnt, share)
        for name, learnt, share in (
            ("MF", RATINGS, 1.0),
            ("SASRec, softmax", SOFTMAX, 1 / 16),
            ("SASRec, binary", BINARY, 1 / 16),
            ("GRU, binary", RECURRENT, 1 / 16),
            ("HSTU, softmax", POINTWISE, 1 / 16),
            ("DIN, attention", DIN, 1 / 4),
            ("DIN, transformer", TRANSFORMER, 1 / 4),
            *(
                (name, Learnt(SMALL_CLICKS, MODELS[name](), ClickConfig()), 1 / 2 if name == "gdcn" else 1.0)
                for name in CLICK_MODELS
            ),
            *((name, learnt, 1 / 4 if name == "PLE" else 1.0) for name, learnt in LABEL_MODELS.items()),
            ("two towers, in_batch", IN_BATCH, 1.0),
            ("two towers, sampled", SAMPLED, 1.0),
        )
        for ranks in (1, 2)
        for label, table in (("", FULL), (", product", QUOTIENT))
        if learnt is SOFTMAX or not label
    ),
]


class _MallocStatistics(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _allocated_bytes() -> int:
    """Returns the bytes that malloc has allocated in this process."""
    statistics = _libc.mallinfo2()
    return int(statistics.uordblks + statistics.hblkhd)


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _MallocStatistics


class Allocations(TorchDispatchMode):
    """Tracks malloc's allocations, and the storages that operators have returned.

    Attributes:
        peak: Most bytes allocated by malloc since ``peak`` was set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._stopped = threading.Event()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for value in tree_iter(returned):
            if isinstance(value, Tensor) and not value.is_meta:
                self._follow(value.untyped_storage())
        return returned

    @property
    def storage_bytes(self) -> int:
        """Bytes of the live storages."""
        return sum(self._sizes.values())

    def _follow(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._sizes.pop, storage._cdata, None)
        if storage.nbytes() >= _SAMPLED_BYTES:
            self.sample()

    def sample(self) -> None:
        """Updates the peak."""
        self.peak = max(self.peak, _allocated_bytes())

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Also samples in a thread within the block, which sees allocations inside operators."""

        def keep_sampling() -> None:
            while not self._stopped.wait(1e-3):
                self.sample()

        thread = threading.Thread(target=keep_sampling, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()


def draw_batches(schema: Schema, rank: int, num_rows: int, batch_size: int) -> Iterator[Batch]:
    """Yields batches of uniform ids: one id a row, or lists of uniform lengths for multi-hot features."""
    generator = np.random.default_rng(rank)
    longest = round(2 * min((f.mean_ids_per_row for f in schema.categorical if f.multi_hot), default=0.0)) - 1
    for _ in range(NUM_STEPS):
        drawn = generator.integers(1, longest + 1, num_rows) if longest > 0 else np.zeros(num_rows, np.int64)
        lengths, columns = [], []
        for feature in schema.categorical:
            times = round(feature.mean_ids_per_row / ((longest + 1) / 2)) if feature.multi_hot else 0
            lengths.append(drawn * times if feature.multi_hot else np.ones(num_rows, np.int64))
            columns.append(generator.integers(2, feature.num_embeddings, lengths[-1].sum()))
        ids = KeyedJaggedTensor(
            list(schema.categorical_names),
            torch.from_numpy(np.concatenate(columns)),
            lengths=torch.from_numpy(np.concatenate(lengths)).int(),
            stride=num_rows,
        )
        fields = {"dense_features": torch.zeros(num_rows, len(schema.dense))}
        fields |= {field.name: torch.zeros(field.shape(num_rows)) for field in schema.fields if field.name == LABELS}
        yield Batch({**fields, "sparse_features": ids}, batch_size)


def start_on_rows(state: TrainingState, schema: Schema, ranks: Ranks, folder: Path) -> None:
    """Starts the task on a dataset of 100,000 drawn rows, which it writes into the folder."""
    generator = np.random.default_rng(0)

    def drawn(feature: CategoricalFeature) -> pa.Array:
        ids = pa.array(generator.integers(2, feature.num_embeddings, 100_000), pa.int32())
        return pa.ListArray.from_arrays(np.arange(100_001, dtype=np.int32), ids) if feature.multi_hot else ids

    columns = {feature.name: drawn(feature) for feature in schema.categorical}
    columns |= {name: generator.random(100_000, np.float32) for name in schema.dense}
    (folder / "train").mkdir()
    pq.write_table(pa.table(columns), folder / "train" / "part-0.parquet")
    create_manifest(folder, schema, {"train": ["train/part-0.parquet"]})
    data = DataConfig(path=str(folder), validation=None, test=None)
    state.task.start(TaskContext(data, str(folder), schema, ranks, 0, {}))
    state.task.start_lines()


def blueprint_of(case: Case, batch_size: int, ranks: Ranks) -> Blueprint:
    """Returns the blueprint of the case's model."""
    sharding_types = itertools.cycle(case.sharding_types)
    learnt = case.learnt
    plans = {
        name: TablePlanConfig(sharding_types=[sharding_type], min_partition=DIM // 2)  # type: ignore[list-item]
        for name, sharding_type in zip(learnt.tables or learnt.schema.categorical_names, sharding_types, strict=False)
    }
    config = Config(
        model=learnt.model,
        task=learnt.task,
        embedding=EmbeddingConfig(default=TableConfig(**case.table, embedding_dim=DIM, threshold=0, force=True)),
        plan=PlanConfig(tables=plans),
        train=TrainConfig(
            batch_size=batch_size,
            precision="fp32",
            log_every=1,
            sparse_optimizer=SparseOptimizerConfig(name="row_wise_adagrad"),
        ),
    )
    return Blueprint.for_ranks(config, learnt.schema, ranks, {})


def kept_bytes(state: TrainingState) -> int:
    """Returns the bytes of this rank's weights, buffers and optimizer states."""
    states = state.optimizers.combined.state_dict()["state"].values()
    networks = [buffer for name, buffer in state.model.named_buffers() if ".embeddings." not in name]
    values = [*state.model.state_dict().values(), *networks, *[v for own in states for v in own.values()]]
    return sum(map(_local_bytes, values))


def _local_bytes(value: Any) -> int:
    if hasattr(value, "local_shards"):
        return sum(_local_bytes(shard.tensor) for shard in value.local_shards())
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0


def measure(case: Case, batch_size: int, repeats: int, ranks: Ranks) -> tuple[StepBuffers, list[int]]:
    """Returns this rank's estimate and its measured peaks, the second half of them under load; all ranks call it."""
    batch_size = round(batch_size * case.rows_share)
    blueprint, num_rows = blueprint_of(case, batch_size, ranks), batch_size // ranks.world_size
    adds = case.learnt.adds_to_batches
    schema = blueprint.schema if adds else blueprint.batch_schema
    peaks = []
    with Allocations() as allocations, allocations.sampled(), tempfile.TemporaryDirectory() as folder:
        state = build_training_state(blueprint, ranks, num_steps=repeats * NUM_STEPS)
        if adds:
            start_on_rows(state, schema, ranks, Path(folder))
        for repeat in range(repeats):
            with _busy_cores(ranks.rank == 0 and repeat >= repeats // 2):
                dist.barrier()
                batches = draw_batches(schema, ranks.rank, num_rows, batch_size)
                if adds:
                    batches = prepared_batches(state, batches)
                peaks.append(peak_bytes(state, allocations, batches))
                del batches
                dist.barrier()
        kept = kept_bytes(state)
    unstarted = blueprint_of(case, batch_size, ranks)
    return estimated_step(unstarted, state.plan).buffers(ranks.rank), [peak - kept for peak in peaks]


def prepared_batches(state: TrainingState, batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields the batches with the task's additions."""
    for step, batch in enumerate(batches):
        yield state.task.prepare_batch(batch, BatchPosition(step, 0))


def peak_bytes(state: TrainingState, allocations: Allocations, batches: Iterator[Batch]) -> int:
    """Steps through all batches and returns the peak in bytes, with weights and optimizer states."""
    highest = 0
    for number, _ in enumerate(state.pipeline.outputs(batches)):
        # the first steps create optimizer states, and in the last steps no next batch is in memory
        if NUM_WARM <= number < NUM_STEPS - 2:
            highest = max(highest, allocations.storage_bytes + allocations.peak - _allocated_bytes())
        allocations.peak = _allocated_bytes()
    return highest


@contextmanager
def _busy_cores(wanted: bool) -> Iterator[None]:
    """Keeps a process for each core busy."""
    count = (os.cpu_count() or 1) if wanted else 0
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_keep_busy, args=(os.getpid(),), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        if processes:
            time.sleep(1.0)  # until they have started
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _keep_busy(parent: int) -> None:
    while os.getppid() == parent:
        sorted(range(100_000), key=lambda number: -number)


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one case, in bytes, on the rank whose estimate is farthest from its highest peak.

    Attributes:
        case: Name of the case.
        moment: The estimated moment of the peak.
        estimate: Estimated bytes.
        lowest: The lowest of the peaks.
        highest: The highest of the peaks.
        ratio: Estimate over highest peak.
        is_close: Whether the ratio is within the limits.
    """

    case: str
    moment: str
    estimate: int
    lowest: int
    highest: int
    ratio: float
    is_close: bool


def summarise(case: Case, results: Sequence[tuple[StepBuffers, list[int]]]) -> Row:
    """Returns the row of one case, given the results of all ranks."""

    def distance(result: tuple[StepBuffers, list[int]]) -> float:
        ratio = result[0].total / max(result[1])
        return max(ratio / MOST, LEAST / ratio)

    estimate, peaks = max(results, key=distance)
    ratio = estimate.total / max(peaks)
    return Row(case.name, estimate.moment, estimate.total, min(peaks), max(peaks), ratio, LEAST <= ratio <= MOST)


def measure_cases(options: argparse.Namespace, ranks: Ranks) -> list[dict[str, Any]]:
    """Returns the rows of the chosen cases that take this number of ranks; all ranks call it."""
    rows = []
    for case in _chosen(options):
        if (case.nodes * case.ranks_per_node, case.ranks_per_node) == (ranks.world_size, ranks.local_world_size):
            results = Collectives().gather(measure(case, options.batch_size, options.repeats, ranks))
            rows.append(dataclasses.asdict(summarise(case, results)))
    return rows


def _chosen(options: argparse.Namespace) -> list[Case]:
    return [case for case in CASES if options.only in case.name]


def main() -> None:
    """Measures every case and prints a table."""
    parser = bench_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=4096, help="rows of all ranks together")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--only", default="", help="cases whose name contains this text")
    options = parser.parse_args()
    sizes = sorted({(case.nodes * case.ranks_per_node, case.ranks_per_node) for case in _chosen(options)})
    measures = {
        f"{ranks} ranks, {own} a node": partial(run_ranks, measure_cases, options, ranks, own) for ranks, own in sizes
    }
    rows = [row for measured in kept_rows(options, measures).values() for row in measured]
    table = Table("case", "fullest moment", "estimate, MB", "lowest", "highest", "to highest", "close")
    for row in rows:
        sizes_text = [f"{row[name] / 1e6:.1f}" for name in ("estimate", "lowest", "highest")]
        close = "yes" if row["is_close"] else "no"
        table.add_row(row["case"], row["moment"], *sizes_text, f"{row['ratio']:.2f}", close)
    Console(width=120).print(table)
    result = {**surroundings(torch.device("cpu")), "rows": rows}
    print(json.dumps(result))
    write_output(options, result)


if __name__ == "__main__":
    main()
