"""A small model with a table of every scheme, sharded on any device, and the same unsharded on the CPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.ranks import Ranks
from distembed.data.single_ids import carry_single_ids, mark_single_ids
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.optim.config import DenseOptimizerConfig, SparseOptimizerConfig
from distembed.optim.optimizers import Optimizers, fuse_sparse_optimizer, table_parameters
from distembed.partitions import PARTITIONS
from distembed.planning import PlanConfig, Workload, make_plan
from distembed.planning.config import TablePlanConfig
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.sharding.test_sharded_equals_unsharded import check_weights, sharding_types_of

DIM = 16
SIZES = dict(zip(PARTITIONS, (60, 300, 1000, 900, 500, 400, 700, 800, 600), strict=True))
"""Ids of each table: one table a scheme, named by it."""
SGD = SparseOptimizerConfig(name="sgd", learning_rate=0.5)
DENSE = DenseOptimizerConfig(name="sgd", learning_rate=0.3)


def tables(composition: str, data_type: DataType = DataType.FP32) -> list[CompositionalEmbeddingBagConfig]:
    """A table of every scheme, pooled by sums and means in turn."""
    made = []
    for i, (scheme, n) in enumerate(SIZES.items()):
        given: dict[str, Any] = {"assignments": [np.arange(n) % 20, np.arange(n) // 20]}
        partition = PARTITIONS[scheme](num_embeddings=n, **(given if scheme == "explicit" else {}))
        table = CompositionalEmbeddingBagConfig(scheme, n, DIM, [scheme], partition, composition)
        made.append(replace(table, pooling=("sum", "mean")[i % 2], data_type=data_type))
    return made


class Head(nn.Module):
    """A collection and one linear layer, on the device; tables may lie on the meta device."""

    def __init__(
        self, used: list[CompositionalEmbeddingBagConfig], tables_on: str, device: torch.device, weighted: bool = False
    ) -> None:
        super().__init__()
        self.embeddings = CompositionalEmbeddingBagCollection(used, device=tables_on, is_weighted=weighted)
        torch.manual_seed(0)
        self.linear = nn.Linear(sum(table.num_vectors * table.embedding_dim for table in used), 1)
        self.linear.to(device)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        embedded = self.embeddings(features).values()
        return self.linear(embedded.float()), embedded


class Reference:
    """A :class:`Head` on the CPU, unsharded and trained by torch."""

    def __init__(self, used: list[CompositionalEmbeddingBagConfig], weighted: bool = False) -> None:
        self.model = Head(used, "cpu", torch.device("cpu"), weighted)
        self.vectors = list(self.model.embeddings.embedding_bags.parameters())
        own = {id(parameter) for parameter in self.vectors}
        others = [parameter for parameter in self.model.parameters() if id(parameter) not in own]
        self._optimizers = [
            torch.optim.SGD(self.vectors, SGD.learning_rate),
            torch.optim.SGD(others, DENSE.learning_rate),
        ]

    def step(self, batch: KeyedJaggedTensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """One step of training; the output and the vectors."""
        output, embedded = self.model(batch)
        self.update(loss(output))
        return output.detach(), embedded.detach()

    def update(self, loss: Tensor) -> None:
        """The rest of a step."""
        self.model.zero_grad()
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def draw(rows: int, bags: str, generator: torch.Generator, sizes: Mapping[str, int] = SIZES) -> KeyedJaggedTensor:
    """Bags of one id, marked as the reader marks them, or of 0 to 4 ids; weighted ones are ragged."""
    values, lengths = [], []
    for size in sizes.values():
        lengths.append(
            torch.ones(rows, dtype=torch.long)
            if bags == "single"
            else torch.randint(0, 5, (rows,), generator=generator)
        )
        values.append(torch.randint(0, size, (int(lengths[-1].sum()),), generator=generator))
    ids = torch.cat(values)
    weights = torch.rand(len(ids), generator=generator) if bags == "weighted" else None
    batch = KeyedJaggedTensor(list(sizes), ids, weights=weights, lengths=torch.cat(lengths), stride=rows)
    return mark_single_ids(batch) if bags == "single" else batch


def moved(batch: KeyedJaggedTensor, device: torch.device) -> KeyedJaggedTensor:
    """The batch on the device, with its mark and what the host knows of it."""
    batch.length_per_key(), batch.offset_per_key()
    return carry_single_ids(batch, batch.to(device))


@dataclass
class Sharded:
    """A sharded model with its optimizers."""

    model: DistributedModelParallel
    optimizers: Optimizers
    device: torch.device

    @property
    def collection(self) -> Any:
        return self.model.module.get_submodule("embeddings")

    def step(self, number: int, batch: KeyedJaggedTensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """One step of training; the output and the vectors, on the CPU."""
        self.optimizers.set_learning_rates(number)
        self.optimizers.combined.zero_grad()
        output, embedded = self.model(moved(batch, self.device))
        loss(output).backward()
        self.optimizers.combined.step()
        return output.detach().cpu(), embedded.detach().cpu()


def shard(
    model: nn.Module,
    ranks: Ranks,
    sharding_type: str = "table_wise",
    sparse: SparseOptimizerConfig = SGD,
    kernel: str | None = None,
    fused_params: Mapping[str, Any] | None = None,
    optimizer_on: torch.device | None = None,
) -> Sharded:
    """Places all tables of a :class:`Head` alike; all ranks call it.

    Args:
        model: The model, its tables on the meta device.
        ranks: This rank.
        sharding_type: How tables are placed that can be.
        sparse: The optimizer of the tables.
        kernel: TorchRec's kernel of the tables, where it is not the plan's.
        fused_params: Settings of FBGEMM's tables.
        optimizer_on: The device that is asked whether it has the optimizer; the ranks' unless given.
    """
    fuse_sparse_optimizer(table_parameters(model), sparse, optimizer_on or ranks.device)
    own = {
        table.name: TablePlanConfig(sharding_types_of(table, sharding_type), min_partition=4)  # type: ignore[arg-type]
        for table in model.get_submodule("embeddings").tables()  # type: ignore[operator]
    }
    sharders: list[Any] = [
        CompositionalEmbeddingBagCollectionSharder(dict(fused_params or {}), host_memory=kernel == "fused_uvm_caching")
    ]
    plan = make_plan(model, sharders, ranks, Workload(8 * ranks.world_size), config=PlanConfig(tables=own))
    placed: Any = plan.plan["embeddings"]
    for parameter in placed.values():
        if kernel is not None or not sparse.is_fused:
            parameter.compute_kernel = kernel or "dense"
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=ranks.device, plan=plan, sharders=sharders)
    return Sharded(sharded, Optimizers(sharded, DENSE, sparse, num_steps=100), ranks.device)


def require_equal_steps(
    used: list[CompositionalEmbeddingBagConfig], composition: str, sharding_type: str, ranks: Ranks, rows: int
) -> DistributedModelParallel:
    """Three steps of tables on the device are those of plain tables on the CPU; returns the last model."""
    for bags in ("single", "ragged", "weighted"):
        weighted = bags == "weighted"
        sharded = shard(Head(used, "meta", ranks.device, weighted), ranks, sharding_type)
        reference = Reference(tables(composition), weighted)
        generator = torch.Generator().manual_seed(1)
        for number in range(3):
            batch = draw(rows, bags, generator)
            found, expected = sharded.step(number, batch, mean_square), reference.step(batch, mean_square)
            for own, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(own, wanted, msg=lambda text, bags=bags: f"{bags}: {text}")
        check_weights(sharded.model, reference.model)
    return sharded.model
