"""A collection on pretended CUDA: sharded as on a card, and stepped forward and backward under watch."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.single_ids import carry_single_ids, mark_single_ids
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.partitions import PARTITIONS
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
from tests.cuda.must_wait import answered, copied_by_torchrec
from tests.cuda.pretend import CUDA, Watch, pretend_cuda
from tests.cuda.stand_ins import absent_ranks, stand_in_tables

ROWS, DIM, WORLD_SIZE = 8, 16, 2
FEATURES = ("a", "b", "c")
NUM_EMBEDDINGS = {"a": 1000, "b": 60, "c": 400}
RAGGED = {"a": 4, "b": 0, "c": 2}
"""Numbers of ids of each row of ragged batches."""
BAGS = ("single", "ragged", "weighted")
BAG_SHARDINGS = (
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
    "data_parallel",
)
SEQUENCE_SHARDINGS = ("table_wise", "column_wise", "row_wise", "data_parallel")


@dataclass(frozen=True)
class Cell:
    """What is rehearsed.

    Attributes:
        scheme: Name of the partition scheme.
        composition: Name of the composition.
        sharding: How all tables are placed.
        pooling: How bags are pooled; None for sequences.
        settings: Further settings of the tables.
    """

    scheme: str
    composition: str
    sharding: str
    pooling: str | None = "sum"
    settings: tuple[tuple[str, Any], ...] = ()

    def module(self) -> Any:
        """Returns the collection on the CPU."""
        settings = dict(self.settings)
        if self.pooling is None:
            return CompositionalEmbeddingCollection(
                [CompositionalEmbeddingConfig(**self._arguments(name), **settings) for name in FEATURES], device="cpu"
            )
        tables = [
            CompositionalEmbeddingBagConfig(**self._arguments(name), pooling=self.pooling, **settings)
            for name in FEATURES
        ]
        return CompositionalEmbeddingBagCollection(tables, device="cpu")

    def _arguments(self, name: str) -> dict[str, Any]:
        n = NUM_EMBEDDINGS[name]
        given: dict[str, Any] = {"assignments": [np.arange(n) % 20, np.arange(n) // 20]}
        partition = PARTITIONS[self.scheme](num_embeddings=n, **(given if self.scheme == "explicit" else {}))
        partition.load_state(partition.state)  # rows are stored from now on, as after a checkpoint
        return {
            "name": name,
            "num_embeddings": n,
            "embedding_dim": DIM,
            "feature_names": [name],
            "partition": partition,
            "composition": self.composition,
        }


class Rehearsed:
    """A sharded collection, its watch, and what TorchRec waited for.

    Attributes:
        module: The sharded collection.
        watch: Counts what is launched.
        waited: Names of TorchRec's functions that waited.
        dist_launches: What had been launched of the last step when its ids were where they are looked up.
        dist_bytes: What had been moved by then.
        strict: Whether copies to the device are refused; before the first step constants are copied.
    """

    def __init__(self) -> None:
        self.module: Any = None
        self.watch: Watch
        self.waited: list[str] = []
        self.dist_launches = self.dist_bytes = 0
        self.strict = False
        self.ids_per_row = dict.fromkeys(FEATURES, 1)

    def may_copy(self, origin: str) -> bool:
        """Returns whether a copy to the device in a function is allowed now."""
        return not self.strict or copied_by_torchrec(origin)

    def batch(self, bags: str) -> KeyedJaggedTensor:
        """Returns a batch on the device, as a reader hands it to a pipeline: numbers of ids are known on the host."""
        self.ids_per_row = dict.fromkeys(FEATURES, 1) if bags == "single" else RAGGED
        counts = [ROWS * self.ids_per_row[name] for name in FEATURES]
        lengths = torch.tensor([self.ids_per_row[name] for name in FEATURES for _ in range(ROWS)], dtype=torch.int32)
        features = KeyedJaggedTensor(
            list(FEATURES),
            torch.zeros(sum(counts), dtype=torch.int64, device=CUDA),
            weights=torch.ones(sum(counts), device=CUDA) if bags == "weighted" else None,
            lengths=lengths.to(CUDA),
            stride=ROWS,
            length_per_key=counts,
            offset_per_key=[0, *np.cumsum(counts).tolist()],
        )
        if bags == "single":  # what mark_single_ids says of a batch that is still on the CPU
            on_host = KeyedJaggedTensor(list(FEATURES), lengths.long(), lengths=lengths, stride=ROWS)
            carry_single_ids(mark_single_ids(on_host), features)
        return features

    def step(self, features: KeyedJaggedTensor) -> None:
        """Looks up, and goes back with a gradient of every number."""
        ctx = self.module.create_context()
        received = self.module.input_dist(ctx, features).wait().wait()
        self.dist_launches, self.dist_bytes = self.watch.launches.total(), self.watch.moved_bytes
        outputs = self.module.compute_and_output_dist(ctx, received).wait()
        if isinstance(outputs, dict):
            values: Sequence[Tensor] = [own.values() for own in outputs.values()]
        else:
            values = [outputs.values()]
        torch.stack([own.sum() for own in values]).sum().backward()

    def rehearse(self, bags: str) -> None:
        """Steps twice: once freely, when constants are copied, and once under watch."""
        self.strict = False
        self.step(self.batch(bags))
        again = self.batch(bags)
        self.strict = True
        self.waited.clear()
        self.watch.reset()
        self.step(again)


@contextmanager
def rehearsed(cell: Cell, world_size: int = WORLD_SIZE) -> Iterator[Rehearsed]:
    """Within the block a cell's collection is sharded over ranks, of which this process is the first."""
    with ExitStack() as stack:
        module = nn.ModuleDict({"embeddings": cell.module()})
        stack.enter_context(absent_ranks(world_size))
        stack.enter_context(stand_in_tables())
        made = Rehearsed()
        made.watch = stack.enter_context(pretend_cuda(made.may_copy))
        stack.enter_context(answered(lambda name: ROWS * made.ids_per_row[name], made.waited))
        sharders: list[Any] = [
            CompositionalEmbeddingBagCollectionSharder({"learning_rate": 0.01}),  # by FBGEMM's SGD: trained, not frozen
            CompositionalEmbeddingCollectionSharder({"learning_rate": 0.01}),
        ]
        huge = 2**40
        topology = Topology(
            world_size=world_size, local_world_size=world_size, compute_device="cuda", hbm_cap=huge, ddr_cap=huge
        )
        constraint = ParameterConstraints(sharding_types=[cell.sharding], min_partition=DIM // 2)
        planner = EmbeddingShardingPlanner(topology=topology, constraints=dict.fromkeys(FEATURES, constraint))
        plan = planner.plan(module, sharders)
        model = DistributedModelParallel(module, device=CUDA, plan=plan, sharders=sharders, init_data_parallel=False)
        made.module = model.module["embeddings"]
        yield made
