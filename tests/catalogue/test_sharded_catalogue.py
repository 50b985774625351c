"""A catalogue whose table is sharded in every way, on gloo ranks, against one process.

Of its softmax losses are compared, and all weights after a step; and ranks and best items of rankings.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import COMPOSITIONS
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.share import TableShare
from distembed.models.queries import Catalogue
from distembed.optim.optimizers import table_parameters
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
from distembed.tasks.catalogue import CatalogueRanking, RankedItems
from distembed.tasks.catalogue.softmax import SoftmaxItems, cross_entropy
from tests.catalogue.test_ranking import jagged, rank_on_two
from tests.embedding.schemes import make_partition
from tests.ranks import run_on_ranks

DIM = 16
NUM_IDS = 101
LAYOUTS = ["table_wise", "row_wise", "column_wise", "data_parallel"]
TABLES = [
    ("naive", "product"),
    ("quotient_remainder", "product"),
    ("quotient_remainder", "path_mlp"),
    ("mixed_radix", "sum"),
    ("chinese_remainder", "concat"),
]
TARGETS = torch.arange(13) * 7 + 3
INPUTS = torch.arange(13) * 5 + 1


class Tied(nn.Module):
    """Maps items to queries by a matrix and scores them with all; a second table has the vectors of a user."""

    def __init__(self, scheme: str, composition: str, is_bag: bool, device: str = "cpu") -> None:
        super().__init__()
        make = CompositionalEmbeddingBagConfig if is_bag else CompositionalEmbeddingConfig
        collection = CompositionalEmbeddingBagCollection if is_bag else CompositionalEmbeddingCollection
        combine = COMPOSITIONS[composition]()
        items = make("item", NUM_IDS, DIM, ["item"], make_partition(scheme, NUM_IDS), combine, dense_gradient=True)
        self.embeddings = collection([make("user", 20, DIM, ["user"]), items], device=device)
        self.catalogue = Catalogue(self, "embeddings", items, bias=True, num_reserved=2)
        torch.manual_seed(0)
        nn.init.normal_(self.catalogue.bias)
        self.head = Head(is_bag)

    def forward(self, features: KeyedJaggedTensor, targets: Tensor) -> Tensor:
        return self.head(self.embeddings(features), targets, self.catalogue)


class Head(nn.Module):
    def __init__(self, is_bag: bool) -> None:
        super().__init__()
        self.is_bag = is_bag
        self.hidden = nn.Linear(DIM, DIM)

    def forward(self, embedded: object, targets: Tensor, catalogue: Catalogue) -> Tensor:
        user, item = embedded["user"], embedded["item"]  # type: ignore[index]
        if not self.is_bag:
            user, item = user.values(), item.values()
        items = SoftmaxItems(catalogue.share(), catalogue.num_reserved, items_at_once=9, queries_at_once=4)
        return cross_entropy(torch.tanh(self.hidden(user + item)), targets, catalogue.bias, items)


def features(rows: slice) -> KeyedJaggedTensor:
    ids = INPUTS[rows]
    values = torch.cat([ids % 20, ids])
    return KeyedJaggedTensor(["user", "item"], values, lengths=torch.ones(2 * len(ids), dtype=torch.int64))


def vectors(share: TableShare) -> tuple[Tensor, Tensor]:
    chunks = list(share.chunks(11))
    return torch.cat([chunk.ids for chunk in chunks]), torch.cat([chunk.vectors for chunk in chunks])


def cases(world_size: int) -> Iterator[tuple[str, str, str, bool]]:
    """Yields all tables on four ranks, and two of them on fewer."""
    for layout in LAYOUTS:
        for scheme, composition in TABLES if world_size == 4 else TABLES[:2]:
            if layout != "column_wise" or composition != "path_mlp":
                yield layout, scheme, composition, scheme == "mixed_radix"


def shard(model: Tied, world_size: int, layout: str) -> DistributedModelParallel:
    """Places both tables by one layout."""
    sharders = [CompositionalEmbeddingBagCollectionSharder(), CompositionalEmbeddingCollectionSharder()]
    apply_optimizer_in_backward(torch.optim.SGD, table_parameters(model), {"lr": 1.0})  # of users
    constraints = {name: ParameterConstraints(sharding_types=[layout], min_partition=4) for name in ("user", "item")}
    topology = Topology(world_size=world_size, local_world_size=world_size, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders)


def compare(rank: int, world_size: int, layout: str, scheme: str, composition: str, is_bag: bool) -> None:
    reference = Tied(scheme, composition, is_bag)
    expected = reference(features(slice(None)), TARGETS)
    expected.mean().backward()
    sharded = shard(Tied(scheme, composition, is_bag, device="meta"), world_size, layout)
    bounds = {1: [0, 13], 2: [0, 0, 13], 4: [0, 5, 5, 6, 13]}[world_size]  # some ranks have no row
    rows = slice(bounds[rank], bounds[rank + 1])
    losses = sharded(features(rows), TARGETS[rows])
    torch.testing.assert_close(losses, expected[rows].detach(), rtol=1e-5, atol=1e-6)
    (losses.sum() * world_size / len(TARGETS)).backward()
    for own in (reference, sharded):
        torch.optim.SGD(own.parameters(), lr=1.0).step()
    inner = sharded.module
    assert isinstance(inner, Tied)
    where = f"{layout} {scheme} {composition}"
    for name, parameter in inner.named_parameters():
        if not name.startswith("embeddings"):
            torch.testing.assert_close(
                parameter, reference.get_parameter(name), rtol=1e-4, atol=1e-6, msg=f"{where} {name}: {{}}".format
            )
    for table in ("user", "item"):
        ids, own_vectors = vectors(inner.embeddings.share(table))
        _, all_vectors = vectors(reference.embeddings.share(table))
        torch.testing.assert_close(
            own_vectors, all_vectors[ids], rtol=1e-4, atol=1e-6, msg=f"{where} {table}: {{}}".format
        )
        counts = torch.zeros(len(all_vectors), dtype=torch.int64).index_add_(0, ids, torch.ones_like(ids))
        dist.all_reduce(counts)
        assert bool((counts == 1).all()), where


NUM_QUERIES = 7
RELEVANT = [[(17 * row + step) % NUM_IDS for step in range(row % 3)] for row in range(NUM_QUERIES)]
EXCLUDED = [list(range(row, NUM_IDS, 3)) for row in range(NUM_QUERIES)]


def rank_rows(model: Any, rows: slice, num_best: int) -> RankedItems:
    queries = torch.randn(NUM_QUERIES, DIM, generator=torch.Generator().manual_seed(1))
    ranking = CatalogueRanking(model.catalogue, (0, 1), num_best)
    return ranking.rank(queries[rows], jagged(RELEVANT[rows]), jagged(EXCLUDED[rows]))


def compare_ranks(rank: int, world_size: int) -> None:
    rows = slice(0, 2) if rank == 0 else slice(2, NUM_QUERIES)
    relevant = slice(0, 1) if rank == 0 else slice(1, None)
    for layout in LAYOUTS:
        for scheme in ("naive", "quotient_remainder"):
            whole = Tied(scheme, "product", False)
            inner = shard(Tied(scheme, "product", False, device="meta"), world_size, layout).module
            for num_best in (0, 5):
                expected, found = rank_rows(whole, slice(None), num_best), rank_rows(inner, rows, num_best)
                assert torch.equal(found.ranks, expected.ranks[relevant]), f"{layout} {scheme}"
                assert torch.equal(found.best, expected.best[rows]), f"{layout} {scheme}"


def compare_all(rank: int, world_size: int) -> None:
    for case in cases(world_size):
        compare(rank, world_size, *case)
    if world_size == 2:
        rank_on_two(rank)
        compare_ranks(rank, world_size)


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_equal_one_process(world_size: int) -> None:
    run_on_ranks(world_size, compare_all)
