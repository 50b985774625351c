"""Drawn models and batches of which one rank alone has ids outside of the tables, under every policy and hash."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.config import perturbation
from distembed.partitions import PARTITIONS, KeyedHash
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
from distembed.sharding.placement import BY_ROWS, SHARDING_TYPES, can_be_placed
from distembed.sharding.shardings import SEQUENCE_SHARDING_TYPES
from distembed.sse import SSE
from tests.embedding.schemes import make_partition, small_composition
from tests.placing import shard_as

DIM, RATE, WORLD_SIZE, NUM_STEPS = 8, 0.02, 2, 2
TREATMENTS = ("error", "clip_to_oov", "modulo", "hash")
"""What is done with ids outside of a table."""
OUTSIDE = (-1, -(2**31), -7, 2**31 - 1, 2**20 + 3)
Dtypes = tuple[tuple[torch.dtype, ...], ...]
"""The dtype of each rank's ids, step after step."""
INT32, INT64 = torch.int32, torch.int64
RUNS: tuple[Dtypes, ...] = (((INT64, INT64),) * 2, ((INT32, INT32),) * 2, ((INT32, INT64), (INT64, INT32)))


@dataclass(frozen=True)
class Case:
    """A collection, and what its ranks are given.

    Attributes:
        tables: The tables; those of one collection are all of bags or all of sequences.
        sharding_types: How each is placed.
        is_weighted: Whether composed vectors are multiplied by weights.
        batches: The int64 batch of each rank, step after step.
    """

    tables: list[CompositionalEmbeddingConfig]
    sharding_types: dict[str, str]
    is_weighted: bool
    batches: list[list[KeyedJaggedTensor]]

    @property
    def pools(self) -> bool:
        """Whether ids are pooled."""
        return isinstance(self.tables[0], CompositionalEmbeddingBagConfig)


def draw_case(number: int) -> Case:
    """The case of a number; the kind of collection, the first table's sharding type and policy go round."""
    rng = np.random.default_rng(number)
    pools = number % 2 == 0
    is_weighted = bool(pools and rng.random() < 0.5)
    tables, sharding_types = [], {}
    kinds = SHARDING_TYPES if pools else SEQUENCE_SHARDING_TYPES
    for i in range(int(rng.integers(1, 5))):
        wanted = kinds[number // 2 % len(kinds)] if i == 0 else str(rng.choice(kinds))
        treatment = TREATMENTS[number // 3 % len(TREATMENTS)] if i == 0 else str(rng.choice(TREATMENTS))
        if not pools and "column" in wanted:
            # the planner may give one rank both halves of a table, and half of another, which are not equally wide
            wanted = "table_wise" if "column_wise" in sharding_types.values() else "column_wise"
        table = _draw_table(rng, f"t{i}", treatment, wanted, pools, is_weighted)
        tables.append(table)
        sharding_types[table.name] = wanted
    odd_rank = int(rng.integers(WORLD_SIZE + 1))  # or none
    lengths_dtype = INT32 if rng.random() < 0.5 else INT64
    batches = [
        [_draw_batch(rng, tables, rank == odd_rank, is_weighted, lengths_dtype) for rank in range(WORLD_SIZE)]
        for _ in range(NUM_STEPS)
    ]
    return Case(tables, sharding_types, is_weighted, batches)


def _draw_table(
    rng: np.random.Generator, name: str, treatment: str, sharding_type: str, pools: bool, is_weighted: bool
) -> CompositionalEmbeddingConfig:
    """A table that can be placed so."""
    poolings = ["sum", "mean"] if is_weighted or sharding_type in BY_ROWS else ["sum", "mean", "max"]
    while True:
        num_ids = int(rng.choice([1, 2, 5, 60, 1000]))
        partition = make_partition(str(rng.choice(list(PARTITIONS))), num_ids)
        names = [key for key in COMPOSITIONS if pools or key != "feature"] if len(partition.num_rows) > 1 else ["sum"]
        fields: dict[str, Any] = {
            "name": name,
            "num_embeddings": num_ids,
            "embedding_dim": DIM,
            "feature_names": [f"{name}_{j}" for j in range(int(rng.integers(1, 3)))],
            "partition": partition,
            "composition": small_composition(str(rng.choice(names))),
            "id_policy": str(rng.choice(TREATMENTS[:3])) if treatment == "hash" else treatment,
            "oov_id": int(rng.integers(num_ids)),
            "pre_hash": KeyedHash(int(rng.integers(100))) if treatment == "hash" else None,
            "sse": SSE(0.3, reserved=[0] if num_ids > 5 else []) if rng.random() < 0.4 else None,
            "id_dtype": INT32 if rng.random() < 0.6 else INT64,
            "kernel": "auto" if rng.random() < 0.7 else "fbgemm",
        }
        try:
            if not pools:
                table = CompositionalEmbeddingConfig(**fields)
            else:
                table = CompositionalEmbeddingBagConfig(**fields, pooling=str(rng.choice(poolings)))
        except UserError:  # dims that do not add up, for this number of partitions
            continue
        if can_be_placed(table, sharding_type) and all(part.dim % 4 == 0 for part in table.lookup_tables()):
            return table


def _draw_batch(
    rng: np.random.Generator,
    tables: list[CompositionalEmbeddingConfig],
    has_ids_outside: bool,
    is_weighted: bool,
    lengths_dtype: torch.dtype,
) -> KeyedJaggedTensor:
    """Bags of one id or ragged ones, at times no row at all, and a feature that no table reads, in any order."""
    num_rows, is_single = int(rng.choice([0, 1, 1, 4, 7])), rng.random() < 0.3
    features: list[tuple[str, CompositionalEmbeddingConfig | None]] = [
        (name, table) for table in tables for name in table.feature_names
    ]
    features += [("unread", None)]
    rng.shuffle(features)  # type: ignore[arg-type]
    values, lengths = [np.zeros(0, np.int64)], []
    for _, table in features:
        own = np.ones(num_rows, np.int64) if is_single else rng.integers(0, 4, num_rows)
        ids = rng.integers(0, 10 if table is None else table.num_embeddings, own.sum())
        if table is None or (has_ids_outside and (table.id_policy != "error" or table.pre_hash is not None)):
            outside = rng.choice([*OUTSIDE, 1 if table is None else table.num_embeddings], len(ids))
            ids = np.where(rng.random(len(ids)) < 0.5, outside, ids)
        values.append(ids)
        lengths.append(own)
    ids = np.concatenate(values)
    return KeyedJaggedTensor(
        [name for name, _ in features],
        torch.from_numpy(ids),
        weights=torch.from_numpy(rng.random(len(ids), np.float32)) if is_weighted else None,
        lengths=torch.from_numpy(np.concatenate(lengths)).to(lengths_dtype),
        stride=num_rows,
    )


def as_dtype(features: KeyedJaggedTensor, dtype: torch.dtype) -> KeyedJaggedTensor:
    """The batch with ids of a dtype; of an odd number of rows there are gaps in memory, as in a matrix's column."""
    values, lengths = features.values().to(dtype), features.lengths()
    if features.stride() % 2:
        values, lengths = (own.repeat_interleave(2)[::2] for own in (values, lengths))
    return KeyedJaggedTensor(
        features.keys(),
        values,
        weights=features.weights_or_none(),
        lengths=lengths,
        stride=features.stride(),
    )


class Outputs(nn.Module):
    """A collection, and all that it gives, by key."""

    def __init__(self, case: Case, device: str) -> None:
        super().__init__()
        self._pools = case.pools
        self.embeddings: Any = (
            CompositionalEmbeddingBagCollection(case.tables, device=device, is_weighted=case.is_weighted)  # type: ignore[arg-type]
            if case.pools
            else CompositionalEmbeddingCollection(case.tables, device=device, need_indices=True)
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        embedded = self.embeddings(features)
        if self._pools:
            return dict(embedded.to_dict())
        return {key: own.values() for key, own in embedded.items()}


def shard(case: Case) -> DistributedModelParallel:
    """The model under the case's plan; all ranks call it."""
    model = Outputs(case, "meta")
    vectors = model.embeddings.embedding_bags if case.pools else model.embeddings.embeddings
    apply_optimizer_in_backward(torch.optim.SGD, vectors.parameters(), {"lr": RATE})
    sharders = [CompositionalEmbeddingBagCollectionSharder(), CompositionalEmbeddingCollectionSharder()]
    return shard_as(model, sharders, case.sharding_types)


Step = dict[str, Tensor]


def train_sharded(case: Case, dtypes: Dtypes, rank: int) -> tuple[list[Step], DistributedModelParallel]:
    """This rank's outputs of every step, and the model behind the last; all ranks call it."""
    model = shard(case)
    replicated = dict(in_backward_optimizer_filter(model.named_parameters()))
    steps = []
    for batches, kinds in zip(case.batches, dtypes, strict=True):
        outputs = model(as_dtype(batches[rank], kinds[rank]))
        steps.append({key: value.detach().clone() for key, value in outputs.items()})
        (_loss(outputs) * WORLD_SIZE).backward()
        for weight in replicated.values():
            weight.data.sub_(weight.grad, alpha=RATE)
        model.zero_grad()
    return steps, model


def train_unsharded(case: Case, dtypes: Dtypes) -> tuple[list[list[Step]], nn.Module]:
    """The outputs of every step and rank, of one module that takes the ranks' batches in turn, and that module."""
    model = Outputs(case, "cpu")
    perturbations = [perturbation(case.tables, rank) for rank in range(WORLD_SIZE)]
    steps = []
    for batches, kinds in zip(case.batches, dtypes, strict=True):
        losses, by_rank = [], []
        for rank, batch in enumerate(batches):
            model.embeddings.sse = perturbations[rank]
            outputs = model(as_dtype(batch, kinds[rank]))
            by_rank.append({key: value.detach().clone() for key, value in outputs.items()})
            losses.append(_loss(outputs))
        sum(losses, torch.zeros(())).backward()
        for weight in model.parameters():
            weight.data.sub_(weight.grad, alpha=RATE)
        model.zero_grad()
        steps.append(by_rank)
    return steps, model


def _loss(outputs: Step) -> Tensor:
    """The outputs' numbers and their squares, each with a weight of its own."""
    by_key = [(i + 1) * (value.square().sum() + value.sum()) for i, value in enumerate(outputs.values())]
    return torch.stack(by_key).sum()
