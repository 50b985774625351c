"""TorchRec's ways to shard a model and to copy one that is sharded: with its own collection, and with ours."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.shard import shard, shard_modules
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.distributed.utils import copy_to_device, filter_state_dict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, ShardedCompositionalEmbeddingBagCollection
from tests.composability.stock import DIM, NUM_IDS, stock_bags, take_weights
from tests.placing import plan_as
from tests.ranks import run_on_ranks
from tests.sharding.test_sharded_equals_unsharded import draw, tables

CPU, META = torch.device("cpu"), torch.device("meta")


class Head(nn.Module):
    """A collection and one linear layer over its output."""

    def __init__(self, embeddings: nn.Module, dims: dict[str, int]) -> None:
        super().__init__()
        self.embeddings, self.keys = embeddings, list(dims)
        torch.manual_seed(0)
        self.linear = nn.Linear(sum(dims.values()), 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        by_key = self.embeddings(features).to_dict()  # TorchRec's order of keys is that of the plan
        vectors = torch.cat([by_key[key] for key in self.keys], dim=1)
        return self.linear(vectors), vectors


def stock_head(device: str) -> Head:
    return Head(stock_bags(device), dict.fromkeys(NUM_IDS, DIM))


def summed_tables() -> list[CompositionalEmbeddingBagConfig]:
    """Each composition once; no maxima, which a planner would divide by rows like any other table."""
    return [table for table in tables() if table.name in ("b", "cd", "e", "g", "hi", "j", "k")]


def our_head(device: str) -> Head:
    used = summed_tables()
    dims = {
        key: table.embedding_dim for table in used for name in table.feature_names for key in table.vector_names(name)
    }
    return Head(CompositionalEmbeddingBagCollection(used, device=device), dims)


Made = tuple[Callable[[str], Head], ModuleSharder[Any], KeyedJaggedTensor]


def both() -> list[Made]:
    """A model with TorchRec's collection and one with ours, with its sharder and a batch."""
    stock_batch = KeyedJaggedTensor(list(NUM_IDS), torch.arange(9), lengths=torch.tensor([1, 0, 3, 1, 2, 2]))
    return [
        (stock_head, EmbeddingBagCollectionSharder(), stock_batch),
        (our_head, CompositionalEmbeddingBagCollectionSharder(), draw(3, "ragged", torch.Generator().manual_seed(0))),
    ]


def make_plan(model: nn.Module, sharder: Any, kind: str = "table_wise") -> ShardingPlan:
    configs = model.get_submodule("embeddings").embedding_bag_configs()
    return plan_as(model, [sharder], {config.name: kind for config in configs}, min_partition=None)


def require_same_steps(model: nn.Module, make: Callable[[str], nn.Module], features: KeyedJaggedTensor) -> None:
    """The outputs of the unsharded model, and a backward pass."""
    reference = make("cpu")
    bare = model.module if isinstance(model, DistributedModelParallel) else model
    take_weights(bare.module if hasattr(bare, "module") else bare, reference)
    output, vectors = model(features)
    expected, expected_vectors = reference(features)
    torch.testing.assert_close(vectors, expected_vectors)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()


def late_data_parallel(model: nn.Module, sharders: list[Any]) -> nn.Module:
    wrapped = DistributedModelParallel(model, device=CPU, sharders=sharders, init_data_parallel=False)
    wrapped.init_data_parallel()
    return wrapped


def late_weights(model: nn.Module, sharders: list[Any]) -> nn.Module:
    wrapped = DistributedModelParallel(
        model, device=CPU, sharders=sharders, init_parameters=False, init_data_parallel=False
    )
    wrapped.init_data_parallel()
    return wrapped


WAYS: dict[str, Callable[[Callable[[str], nn.Module], Any], nn.Module]] = {
    "shard_modules": lambda make, own: shard_modules(make("cpu"), sharders=[own]),
    "shard_modules of meta tables": lambda make, own: shard_modules(make("meta"), sharders=[own], init_params=True),
    "shard_modules with a plan": lambda make, own: shard_modules(
        make("cpu"), device=CPU, plan=make_plan(make("meta"), own), sharders=[own]
    ),
    "DistributedModelParallel": lambda make, own: DistributedModelParallel(make("cpu"), device=CPU, sharders=[own]),
    "of meta tables": lambda make, own: DistributedModelParallel(make("meta"), device=CPU, sharders=[own]),
    "with a plan": lambda make, own: DistributedModelParallel(
        make("meta"), device=CPU, plan=make_plan(make("meta"), own), sharders=[own]
    ),
    "data parallel later": lambda make, own: late_data_parallel(make("meta"), [own]),
    "weights not initialised": lambda make, own: late_weights(make("meta"), [own]),
}


def check_ways(rank: int, world_size: int) -> None:
    for make, sharder, features in both():
        for name, way in WAYS.items():
            try:
                require_same_steps(way(make, sharder), make, features)
            except Exception as error:
                raise AssertionError(f"{make.__name__}, {name}: {error}") from error


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_way_to_shard_gives_the_unsharded_models_outputs(world_size: int) -> None:
    run_on_ranks(world_size, check_ways)


def check_one_collection(rank: int, world_size: int) -> None:
    for make, sharder, features in both():
        for generate in (table_wise(rank=world_size - 1), row_wise(), data_parallel()):
            whole = make("cpu").embeddings
            if sharder.module_type is CompositionalEmbeddingBagCollection:
                whole = CompositionalEmbeddingBagCollection(summed_tables())
            require_same_vectors(shard(copy.deepcopy(whole), generate, sharder=sharder), whole, features)
    columns = [own for own in tables() if own.name in ("a", "b")]
    whole = CompositionalEmbeddingBagCollection(columns)
    placed = column_wise(ranks=[0, world_size - 1])
    sharded = shard(CompositionalEmbeddingBagCollection(columns), placed, sharder=sharder)
    require_same_vectors(sharded, whole, features)
    # each table in another way, and the module itself in the place of a model
    by_table = {columns[0].name: row_wise(), columns[1].name: table_wise(rank=0)}
    require_same_vectors(
        shard(CompositionalEmbeddingBagCollection(columns), by_table, sharder=sharder), whole, features
    )
    alone = shard_modules(CompositionalEmbeddingBagCollection(columns), sharders=[sharder])
    assert isinstance(alone, ShardedCompositionalEmbeddingBagCollection)
    require_same_vectors(alone, whole, features)


def require_same_vectors(sharded: nn.Module, whole: nn.Module, features: KeyedJaggedTensor) -> None:
    take_weights(sharded, whole)
    torch.testing.assert_close(sharded(features).values(), whole(features).values())


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_collection_is_sharded_by_generators_of_plans(world_size: int) -> None:
    run_on_ranks(world_size, check_one_collection)


def check_meta(rank: int, world_size: int) -> None:
    """A model without memory: names and shapes, as for a plan of a checkpoint; nothing of it can be run."""
    for make, sharder, _ in both():
        plan = make_plan(make("meta"), sharder)
        model = DistributedModelParallel(
            make("meta"), device=META, plan=copy.deepcopy(plan), sharders=[sharder], init_data_parallel=False
        )
        state = model.state_dict()
        assert state.keys() == make("meta").state_dict().keys()
        shards = [own for value in state.values() if hasattr(value, "local_shards") for own in value.local_shards()]
        assert shards and all(own.tensor.is_meta for own in shards)
        same = make("meta").state_dict()
        assert {key: value.shape for key, value in state.items()} == {key: own.shape for key, own in same.items()}
        # on the CPU by the same plan, which still says so
        placed = DistributedModelParallel(make("meta"), device=CPU, plan=plan, sharders=[sharder])
        assert not any(weight.is_meta for weight in placed.parameters())


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_model_on_the_meta_device_is_sharded_without_memory(world_size: int) -> None:
    run_on_ranks(world_size, check_meta)


def check_copies(rank: int, world_size: int) -> None:
    for make, sharder, _ in both():
        model = DistributedModelParallel(make("cpu"), device=CPU, sharders=[sharder], init_data_parallel=False)
        # a process group cannot be copied, nor can TorchRec's hooks be pickled
        with pytest.raises(TypeError, match="ProcessGroup"):
            copy.deepcopy(model)
        with pytest.raises(AttributeError, match="post_state_dict_hook"):
            pickle.dumps(model)
        # which take process groups for those of NCCL
        if not hasattr(torch._C._distributed_c10d, "ProcessGroupNCCL"):
            for take in (model.copy, lambda device, own=model: copy_to_device(own, CPU, device)):
                with pytest.raises(AttributeError, match="ProcessGroupNCCL"):
                    take(CPU)
        assert type(model.module.embeddings.copy(CPU)) is sharder.sharded_module_type
        own = filter_state_dict(model.state_dict(), "embeddings")
        assert own.keys() == make("meta").embeddings.state_dict().keys()


@pytest.mark.distributed
def test_a_sharded_model_is_copied_as_far_as_stock_is() -> None:
    run_on_ranks(2, check_copies)


def check_reset(rank: int, world_size: int) -> None:
    """Weights that are drawn anew are new ones in TorchRec's collection, and the first ones in ours."""
    for make, sharder, features in both():
        model = DistributedModelParallel(make("meta"), device=CPU, sharders=[sharder])
        with torch.no_grad():
            first = model(features)[1]
            for weight in model.parameters():
                weight.zero_()
            assert not model(features)[1].any()
            for module in model.modules():
                if isinstance(module, sharder.sharded_module_type):
                    module.reset_parameters()
            again = model(features)[1]
        assert again.any()
        if sharder.module_type is CompositionalEmbeddingBagCollection:
            assert torch.equal(first, again)


@pytest.mark.distributed
def test_reset_parameters_draws_weights_anew() -> None:
    run_on_ranks(2, check_reset)
