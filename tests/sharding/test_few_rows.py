"""Batches of no row and of one row on a rank: every scheme, composition, kernel and sharding type, on two gloo ranks.

With one id for each feature, tensors of several features have a dimension of size one, whose stride says nothing.
Operators that read an address and a number of elements then see whether rows lie side by side.
"""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import COMPOSITIONS
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.settings import LookupKernel
from distembed.partitions import PARTITIONS
from distembed.sharding import default_sharders
from tests.embedding.schemes import make_partition, small_composition
from tests.placing import shard_as
from tests.ranks import run_on_ranks
from tests.sharding.test_sharded_equals_unsharded import check_weights, sharding_types_of

SIZES = (700, 57)
"""Number of ids of the two tables that each scheme has with each composition; they are looked up together."""
DIM, RATE = 8, 0.1
BAG_TYPES = ("table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "grid_shard")
BAG_TYPES += ("data_parallel",)
SEQUENCE_TYPES = ("table_wise", "column_wise", "row_wise", "data_parallel")
BATCHES = ((1, 1), (0, 1), (1, 0), (0, 0), (2, 1))
"""Number of rows of each rank."""
CONFIGS: dict[str, tuple[Any, Any]] = {
    "bags": (CompositionalEmbeddingBagConfig, CompositionalEmbeddingBagCollection),
    "sequences": (CompositionalEmbeddingConfig, CompositionalEmbeddingCollection),
}
Case = tuple[str, str, LookupKernel]
"""``bags`` or ``sequences``, sharding type and kernel."""
ALL: list[Case] = [
    *(("bags", own, kernel) for kernel in ("auto", "fbgemm") for own in BAG_TYPES),
    *(("sequences", own, kernel) for kernel in ("auto", "fbgemm") for own in SEQUENCE_TYPES),
]
SOME: list[Case] = [("bags", "row_wise", "auto"), ("sequences", "row_wise", "auto")]


def tables(config: Any, kernel: LookupKernel) -> list[Any]:
    """Two tables of each scheme with each composition, a feature each."""
    made = []
    for scheme in PARTITIONS:
        has_several = len(make_partition(scheme, SIZES[0]).num_rows) > 1
        for composition in COMPOSITIONS if has_several else ["product"]:
            for size in SIZES:
                name = f"{scheme}_{composition}_{size}"
                parts = (make_partition(scheme, size), small_composition(composition))
                own = "auto" if "path" in composition or scheme == "explicit" or not has_several else kernel
                made.append(config(name, size, DIM, [f"f_{name}"], *parts, kernel=own))
    return made


class Model(nn.Module):
    """A collection for each scheme and width: where several schemes are in one, their rows are copied side by side."""

    def __init__(self, kind: str, kernel: LookupKernel, device: str) -> None:
        super().__init__()
        self.kind = kind
        config, collection = CONFIGS[kind]
        groups: dict[Any, list[Any]] = {}
        for table in tables(config, kernel):
            groups.setdefault((table.scheme.name, table.num_vectors), []).append(table)
        self.collections = nn.ModuleList([collection(own, device=device) for own in groups.values()])

    def tables(self) -> list[Any]:
        return [table for collection in self.collections for table in collection.tables()]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found = [collection(features) for collection in self.collections]
        if self.kind == "bags":
            return torch.cat([one[key].flatten() for one in found for key in sorted(one.keys())])
        return torch.cat([one[key].values().flatten() for one in found for key in sorted(one.keys())])


def shard(model: Model, sharding_type: str) -> DistributedModelParallel:
    vectors = [weight for name, weight in model.named_parameters() if ".functions." not in name]
    apply_optimizer_in_backward(torch.optim.SGD, vectors, {"lr": RATE})
    kinds = {}
    for table in model.tables():
        types = sharding_types_of(table, sharding_type) if hasattr(table, "pooling") else [sharding_type]
        if table.function_tables() and "column" in sharding_type:
            types = ["table_wise"]
        kinds[table.name] = types
    return shard_as(model, default_sharders(False), kinds)


def draw(sizes: dict[str, int], rows: int, has_all: bool, generator: torch.Generator) -> list[list[Tensor]]:
    """An id in each row of each feature, or in about half of them."""
    numbers = torch.ones(len(sizes), rows, dtype=torch.long)
    if not has_all:
        numbers = torch.randint(0, 2, numbers.shape, generator=generator)
    return [
        [torch.randint(0, size, (number,), generator=generator) for number in own]
        for size, own in zip(sizes.values(), numbers.tolist(), strict=True)
    ]


def batch(keys: Sequence[str], ids: list[list[Tensor]], start: int, stop: int) -> KeyedJaggedTensor:
    bags = [bag for own in ids for bag in own[start:stop]]
    values = torch.cat([torch.empty(0, dtype=torch.long), *bags])
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.long)
    return KeyedJaggedTensor(list(keys), values, lengths=lengths, stride=stop - start)


def check_case(rank: int, world_size: int, case: Case) -> None:
    kind, sharding_type, kernel = case
    reference, model = Model(kind, kernel, "cpu"), shard(Model(kind, kernel, "meta"), sharding_type)
    optimizer = torch.optim.SGD(reference.parameters(), lr=RATE)
    unfused = dict(in_backward_optimizer_filter(model.named_parameters()))
    functions = torch.optim.SGD([weight for weight in unfused.values() if weight.numel()], lr=RATE)
    sizes = {table.feature_names[0]: table.num_embeddings for table in reference.tables()}
    generator = torch.Generator().manual_seed(7)
    for number, rows in enumerate(BATCHES + BATCHES):
        ids = draw(sizes, sum(rows), number < len(BATCHES), generator)
        start = sum(rows[:rank])
        own = batch(list(sizes), ids, start, start + rows[rank])
        # a view into memory with gaps between the ids, as a column of a matrix is
        values, lengths = (given.repeat_interleave(2)[::2] for given in (own.values(), own.lengths()))
        own = KeyedJaggedTensor(own.keys(), values, lengths=lengths, stride=rows[rank])
        found = model(own)
        torch.testing.assert_close(found, reference(batch(list(sizes), ids, start, start + rows[rank])))
        functions.zero_grad()
        (found.square().sum() * world_size).backward()
        functions.step()
        optimizer.zero_grad()
        reference(batch(list(sizes), ids, 0, sum(rows))).square().sum().backward()
        optimizer.step()
    check_weights(model, reference)


def check_cases(rank: int, world_size: int, cases: Sequence[Case]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    for case in cases:
        try:
            check_case(rank, world_size, case)
        except AssertionError as error:
            raise AssertionError(f"{case} on rank {rank}: {error}") from error


@pytest.mark.distributed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_ranks_with_no_row_or_one_together_equal_one_module(cases: Sequence[Case]) -> None:
    run_on_ranks(2, check_cases, cases)
