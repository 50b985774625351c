"""TorchRec shards a model of compositional tables over two ranks without their sharder: an error, and no replicas."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.shard import shard_modules
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.partitions import QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
from tests.placing import shard_as
from tests.ranks import run_on_ranks

NUM_IDS, DIM = 40, 4
CPU = torch.device("cpu")
Collection = CompositionalEmbeddingBagCollection | CompositionalEmbeddingCollection


def bags(device: str) -> Collection:
    partition = QuotientRemainder(NUM_IDS, collisions=4)
    return CompositionalEmbeddingBagCollection(
        [CompositionalEmbeddingBagConfig("t", NUM_IDS, DIM, ["f"], partition)], device=device
    )


def sequences(device: str) -> Collection:
    partition = QuotientRemainder(NUM_IDS, collisions=4)
    return CompositionalEmbeddingCollection(
        [CompositionalEmbeddingConfig("t", NUM_IDS, DIM, ["f"], partition)], device=device
    )


SHARDERS = {bags: CompositionalEmbeddingBagCollectionSharder, sequences: CompositionalEmbeddingCollectionSharder}
Make = Callable[[str], Collection]


class Model(nn.Module):
    """A collection two modules below, and one linear layer over the sum of its vectors."""

    def __init__(self, collection: nn.Module) -> None:
        super().__init__()
        self.arch, self.pools = nn.ModuleDict({"sparse": collection}), hasattr(collection, "embedding_bags")
        torch.manual_seed(0)
        self.linear = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        embedded = self.arch["sparse"](features)["f"]
        return self.linear(embedded if self.pools else embedded.values()).sum()


def batch(rank: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor([rank, 7 + rank, 39]), lengths=torch.tensor([1, 2]))


WITHOUT: dict[str, Callable[[Make], object]] = {
    "no sharders": lambda make: DistributedModelParallel(Model(make("cpu"))),
    "on the meta device": lambda make: DistributedModelParallel(Model(make("meta")), device=CPU),
    "wrapped later": lambda make: DistributedModelParallel(Model(make("meta")), init_data_parallel=False),
    "with a plan": lambda make: DistributedModelParallel(Model(make("cpu")), plan=ShardingPlan(plan={})),
    "the other sharders": lambda make: DistributedModelParallel(
        Model(make("cpu")),
        sharders=[EmbeddingBagCollectionSharder(), *(own() for kind, own in SHARDERS.items() if kind is not make)],
    ),
    "the collection alone": lambda make: DistributedModelParallel(make("cpu")),
    "shard_modules": lambda make: shard_modules(Model(make("cpu")), device=CPU),
    "shard_modules on the meta device": lambda make: shard_modules(Model(make("meta")), device=CPU, init_params=True),
    "shard_modules of the collection": lambda make: shard_modules(make("cpu"), device=CPU),
}


def check_refused(rank: int, world_size: int) -> None:
    for make, sharder in SHARDERS.items():
        for name, way in WITHOUT.items():
            with pytest.raises(UserError) as raised:
                way(make)
            assert f"sharders=[{sharder.__name__}(), ...]" in str(raised.value), name
            assert "each of the 2 ranks" in str(raised.value)
        with pytest.raises(UserError, match=r"the plan .* has no entry for a Compositional.* of the 2 ranks"):
            DistributedModelParallel(Model(make("cpu")), device=CPU, plan=ShardingPlan(plan={}), sharders=[sharder()])


@pytest.mark.distributed
def test_a_missing_sharder_is_named_before_tables_are_replicated() -> None:
    run_on_ranks(2, check_refused)


def data_parallel_plan(make: Make) -> nn.Module:
    return shard_as(Model(make("cpu")), [SHARDERS[make]()], {"t": "data_parallel"}, min_partition=None)


DELIBERATE: dict[str, Callable[[Make], nn.Module]] = {
    "DDP": lambda make: DistributedDataParallel(Model(make("cpu"))),
    "DDP in DistributedModelParallel": lambda make: DistributedModelParallel(
        DistributedDataParallel(Model(make("cpu"))), device=CPU
    ),
    "a plan": data_parallel_plan,
}


def check_replicas(rank: int, world_size: int) -> None:
    for make in SHARDERS:
        for name, way in DELIBERATE.items():
            whole = Model(make("cpu"))
            assert [path for path, _ in whole.arch["sparse"].named_children()]
            (sum(whole(batch(other)) for other in range(world_size)) / world_size).backward()
            expected = {key: weight.grad for key, weight in whole.named_parameters() if weight.grad is not None}
            model = way(make)
            model(batch(rank)).backward()
            found = {key.replace("module.", "").replace("_dmp_wrapped_", ""): w for key, w in model.named_parameters()}
            assert len(expected) >= 3
            for key, gradient in expected.items():
                torch.testing.assert_close(found[key].grad, gradient, msg=f"{name}: {key}")
        # neither has ranks that are joined by a process group
        copies = ShardingEnv.from_local(world_size, rank)
        DistributedModelParallel(Model(make("cpu")), env=copies, plan=ShardingPlan({}), init_data_parallel=False)
        shard_modules(Model(make("cpu")), env=copies, device=CPU, plan=ShardingPlan({}))


@pytest.mark.distributed
def test_deliberate_replicas_have_the_gradients_of_all_ranks() -> None:
    run_on_ranks(2, check_replicas)


def check_one_rank(rank: int, world_size: int) -> None:
    for make in SHARDERS:
        whole = Model(make("cpu"))
        for model in (DistributedModelParallel(Model(make("cpu"))), shard_modules(Model(make("cpu")), device=CPU)):
            torch.testing.assert_close(model(batch(0)), whole(batch(0)))


@pytest.mark.distributed
def test_one_rank_needs_no_sharder() -> None:
    run_on_ranks(1, check_one_rank)
