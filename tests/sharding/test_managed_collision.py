"""TorchRec's managed collision (ZCH, MPZCH) around compositional tables, unsharded and on two ranks, beside stock.

Slots are those of stock modules for the same batches; vectors, gradients and updates are those of a plain unsharded
collection whose ids are the slots of all ranks.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import PathMLP
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.partitions import ChineseRemainder, QuotientRemainder
from distembed.sharding import (
    CompositionalManagedCollisionEmbeddingBagCollectionSharder,
    CompositionalManagedCollisionEmbeddingCollectionSharder,
)
from tests.composability.stock import AnyTypeSharder
from tests.placing import shard_as
from tests.ranks import run_on_ranks

DIM, ROWS, LR, MOST_RAW = 8, 6, 0.1, 4000
CPU = torch.device("cpu")
SLOTS = {"ab": 30, "c": 18, "d": 24, "e": 16}
FEATURES = {"ab": ["a", "b"], "c": ["c"], "d": ["d"], "e": ["e"]}
NAMES = [name for names in FEATURES.values() for name in names]
KINDS = ["row_wise", "table_wise", "column_wise", "data_parallel"]


def tables(bags: bool) -> list[Any]:
    make: Any = CompositionalEmbeddingBagConfig if bags else CompositionalEmbeddingConfig
    mean = {"pooling": "mean"} if bags else {}
    return [
        make("ab", SLOTS["ab"], DIM, ["a", "b"], QuotientRemainder(SLOTS["ab"], collisions=4)),
        make("c", SLOTS["c"], DIM, ["c"], ChineseRemainder(SLOTS["c"]), "sum", **mean),
        make("d", SLOTS["d"], DIM, ["d"], QuotientRemainder(SLOTS["d"], collisions=3), PathMLP(hidden=[5])),
        make("e", SLOTS["e"], DIM, ["e"]),
    ]


def collection(bags: bool) -> Any:
    return (CompositionalEmbeddingBagCollection if bags else CompositionalEmbeddingCollection)(tables(bags))


def stock_collection(bags: bool) -> Any:
    make: Any = EmbeddingBagConfig if bags else EmbeddingConfig
    configs = [
        make(name=name, num_embeddings=num, embedding_dim=DIM, feature_names=FEATURES[name])
        for name, num in SLOTS.items()
    ]
    return (EmbeddingBagCollection if bags else EmbeddingCollection)(tables=configs)


def manage(embeddings: Any, bags: bool, by_hash: bool = False) -> Any:
    """The collection within TorchRec's module of managed collision, which gives out slots every second batch."""
    configs = embeddings.embedding_bag_configs() if bags else embeddings.embedding_configs()
    modules: dict[str, Any] = {
        name: HashZchManagedCollisionModule(num, CPU, total_num_buckets=2, input_hash_size=MOST_RAW)
        if by_hash
        else MCHManagedCollisionModule(num, CPU, DistanceLFU_EvictionPolicy(), 2, input_hash_size=MOST_RAW, buckets=2)
        for name, num in SLOTS.items()
    }
    slots = ManagedCollisionCollection(modules, configs)
    make = ManagedCollisionEmbeddingBagCollection if bags else ManagedCollisionEmbeddingCollection
    return make(embeddings, slots, return_remapped_features=True)


class Model(nn.Module):
    """Managed collision, and a layer over the sums of all vectors."""

    def __init__(self, managed: nn.Module) -> None:
        super().__init__()
        self.managed, self.bags = managed, isinstance(managed, ManagedCollisionEmbeddingBagCollection)
        torch.manual_seed(0)
        self.linear = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        embedded, remapped = self.managed(features)
        vectors = stacked(embedded, self.bags)
        ids = torch.cat([remapped[name].values() for name in NAMES])
        lengths = torch.cat([remapped[name].lengths() for name in NAMES])
        return self.linear(vectors).square().mean(), (vectors.detach(), ids, lengths)


def stacked(embedded: Any, bags: bool) -> Tensor:
    return torch.cat([embedded[name] if bags else embedded[name].values() for name in NAMES])


def draw(seed: int) -> KeyedJaggedTensor:
    """Raw ids, few of which occur often, in another order of features than the tables', beside another feature."""
    generator = torch.Generator().manual_seed(seed)
    names = [*reversed(NAMES), "unused"]
    lengths = torch.randint(0, 5, (len(names), ROWS), generator=generator)
    spread = torch.rand(int(lengths.sum()), generator=generator) ** 4
    raw = (spread * 60).long() * 61 % MOST_RAW
    return KeyedJaggedTensor(names, raw, lengths=lengths.flatten())


def by_slots(reference: Any, ids: Tensor, lengths: Tensor) -> Tensor:
    """The vectors of an unsharded collection that is given slots."""
    return stacked(reference(KeyedJaggedTensor(NAMES, ids, lengths=lengths)), hasattr(reference, "embedding_bags"))


@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize("by_hash", [False, True])
def test_unsharded_tables_look_up_the_slots_of_stock_modules(bags: bool, by_hash: bool) -> None:
    ours, stock = (Model(manage(make(bags), bags, by_hash)) for make in (collection, stock_collection))
    reference = collection(bags)
    if by_hash:  # no CPU kernel gives out slots
        ours.eval()
        stock.eval()
    seen = []
    for seed in range(4):
        loss, (vectors, ids, lengths) = ours(draw(seed))
        _, (_, expected_ids, _) = stock(draw(seed))
        assert torch.equal(ids, expected_ids)
        expected = by_slots(reference, ids, lengths)
        torch.testing.assert_close(vectors, expected.detach())
        ours.zero_grad()
        reference.zero_grad()
        loss.backward()
        ours.linear(expected).square().mean().backward()
        gradients = dict(ours.managed._embedding_module.named_parameters())
        for key, weight in reference.named_parameters():
            torch.testing.assert_close(gradients[key].grad, weight.grad)
        with torch.no_grad():
            for weight in (*gradients.values(), *reference.parameters()):
                weight -= LR * weight.grad
        seen.append(ids)
    assert len(torch.cat(seen).unique()) > 10
    again = Model(manage(collection(bags), bags, by_hash))
    again.load_state_dict(ours.state_dict())
    for model in (again, ours):
        model.eval()
    assert torch.equal(again(draw(9))[0], ours(draw(9))[0])


@pytest.mark.parametrize("bags", [True, False])
def test_no_cpu_kernel_of_mpzch_gives_out_slots_to_either(bags: bool) -> None:
    for make in (collection, stock_collection):
        with pytest.raises(RuntimeError, match="Expected readonly to be true"):
            Model(manage(make(bags), bags, by_hash=True))(draw(0))


class StockSharder(EmbeddingCollectionSharder):
    """TorchRec's, which offers row-wise tables on CUDA only, though gloo has what they need."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return ["row_wise"]


def stock_sharder(bags: bool) -> Any:
    if bags:
        return ManagedCollisionEmbeddingBagCollectionSharder(ebc_sharder=AnyTypeSharder({"learning_rate": LR}))
    return ManagedCollisionEmbeddingCollectionSharder(ec_sharder=StockSharder({"learning_rate": LR}))


def our_sharder(bags: bool) -> Any:
    if bags:
        return CompositionalManagedCollisionEmbeddingBagCollectionSharder()
    return CompositionalManagedCollisionEmbeddingCollectionSharder()


def shard(model: Model, sharder: Any, kind: str = "row_wise") -> DistributedModelParallel:
    # a function needs whole vectors
    kinds = {name: "table_wise" if kind == "column_wise" and name == "d" else kind for name in SLOTS}
    return shard_as(model, [sharder], kinds, compute_kernels=["dense" if kind == "data_parallel" else "fused"])


def shard_ours(bags: bool, kind: str, by_hash: bool = False) -> DistributedModelParallel:
    model = Model(manage(collection(bags), bags, by_hash))
    embeddings = model.managed._embedding_module
    vectors = embeddings.embedding_bags if bags else embeddings.embeddings
    apply_optimizer_in_backward(torch.optim.SGD, vectors.parameters(), {"lr": LR})
    return shard(model, our_sharder(bags), kind)


def gather(own: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def check_sharded(rank: int, world_size: int, folder: Path, bags: bool, by_hash: bool, kinds: list[str]) -> None:
    for kind in kinds:
        stock = shard(Model(manage(stock_collection(bags), bags, by_hash)), stock_sharder(bags))
        ours, reference = shard_ours(bags, kind, by_hash), collection(bags)
        if by_hash:
            ours.eval()
            stock.eval()
        owners = set()
        for step in range(1 if by_hash else 5):
            loss, (vectors, ids, lengths) = ours(draw(2 * step + rank))
            _, (_, expected_ids, _) = stock(draw(2 * step + rank))
            assert torch.equal(ids, expected_ids), f"{kind}: step {step}"
            parts = [by_slots(reference, *own) for own in gather((ids, lengths))]
            torch.testing.assert_close(vectors, parts[rank].detach(), msg=f"{kind}: step {step}")
            ours.zero_grad()
            reference.zero_grad()
            loss.backward()
            (sum(ours.module.linear(own).square().mean() for own in parts) / world_size).backward()
            trained = reference.embedding_bags if bags else reference.embeddings
            with torch.no_grad():
                for weight in trained.parameters():
                    weight -= LR * weight.grad
            owners |= {int(own) * world_size // SLOTS["ab"] for own in ids[: int(lengths[: 2 * ROWS].sum())]}
        assert by_hash or owners == set(range(world_size))
        dcp.save(ours.state_dict(), checkpoint_id=str(folder / kind))
        other = shard_ours(bags, KINDS[(KINDS.index(kind) + 1) % len(KINDS)], by_hash)
        state = other.state_dict()
        assert state.keys() == ours.state_dict().keys()
        dcp.load(state, checkpoint_id=str(folder / kind))
        other.load_state_dict(state)
        for model in (ours, other):
            model.eval()
        loss, (vectors, ids, _) = ours(draw(20 + rank))
        _, (loaded_vectors, loaded_ids, _) = other(draw(20 + rank))
        assert torch.equal(loaded_ids, ids)
        torch.testing.assert_close(loaded_vectors, vectors, msg=f"{kind}: loaded")


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("bags", [True, False])
@pytest.mark.parametrize(
    ("by_hash", "kinds"),
    [(False, KINDS[:1]), pytest.param(False, KINDS[1:], marks=pytest.mark.slow), (True, KINDS[:1])],
)
def test_sharded_tables_look_up_the_slots_of_stock_modules(
    tmp_path: Path, bags: bool, by_hash: bool, kinds: list[str]
) -> None:
    run_on_ranks(2, check_sharded, tmp_path, bags, by_hash, kinds)


def variable(rank: int) -> KeyedJaggedTensor:
    """Weighted bags of which each feature has another number, and rows that share them."""
    generator = torch.Generator().manual_seed(rank)
    strides = [[2 + i % 3] for i in range(len(NAMES))]
    lengths = torch.randint(0, 4, (sum(own for (own,) in strides),), generator=generator)
    num_ids = int(lengths.sum())
    rows = torch.stack([torch.arange(ROWS) % own for (own,) in strides])
    return KeyedJaggedTensor(
        NAMES,
        torch.randint(0, MOST_RAW, (num_ids,), generator=generator),
        weights=torch.rand(num_ids, generator=generator),
        lengths=lengths,
        stride_per_key_per_rank=strides,
        inverse_indices=(NAMES, rows),
    )


def weighted_bags() -> CompositionalEmbeddingBagCollection:
    return CompositionalEmbeddingBagCollection(tables(True), is_weighted=True)


def check_variable(rank: int, world_size: int) -> None:
    features = variable(rank)
    model = shard(Model(manage(weighted_bags(), True)), our_sharder(True))
    _, (vectors, ids, _) = model(features)
    plain = KeyedJaggedTensor(
        NAMES,
        ids,
        weights=features.weights(),
        lengths=features.lengths(),
        stride_per_key_per_rank=features.stride_per_key_per_rank(),
        inverse_indices=features.inverse_indices(),
    )
    torch.testing.assert_close(vectors, stacked(weighted_bags()(plain), True).detach())


@pytest.mark.distributed
def test_weights_and_batch_sizes_of_features_stay_with_the_slots() -> None:
    run_on_ranks(2, check_variable)


class Task(nn.Module):
    """The loss and the slots of a model, as pipelines take them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        loss, seen = self.model(features)
        return loss, seen


def check_pipelines(rank: int, world_size: int) -> None:
    """Two pipelines over one model, as of training and evaluation, against calls of another one."""
    for bags in (True, False):
        plain, piped = (shard_ours(bags, "row_wise") for _ in range(2))
        for train in (True, False):
            batches = [draw(2 * step + rank + 10 * train) for step in range(4)]
            plain.train(train)
            piped.train(train)
            optimizer = torch.optim.SGD(piped.module.linear.parameters(), lr=LR)
            pipeline = TrainPipelineSparseDist(piped, optimizer, CPU, execute_all_batches=True)
            found = iter(batches)
            for features in batches:
                vectors, ids, _ = pipeline.progress(found)
                loss, (expected, expected_ids, _) = plain(features)
                assert torch.equal(ids, expected_ids)
                torch.testing.assert_close(vectors, expected)
                if train:
                    plain.zero_grad()
                    loss.backward()
                    with torch.no_grad():
                        for weight in plain.module.linear.parameters():
                            weight -= LR * weight.grad


@pytest.mark.thorough
@pytest.mark.distributed
def test_pipelines_one_after_the_other_take_the_steps_of_calls() -> None:
    run_on_ranks(2, check_pipelines)


def check_wrong_sharders(rank: int, world_size: int) -> None:
    for bags in (True, False):
        name = type(our_sharder(bags)).__name__
        inner: Any = our_sharder(bags)._e_sharder
        wrong: list[Any] = [None, [stock_sharder(bags)]]
        if bags:
            wrong.append([ManagedCollisionEmbeddingBagCollectionSharder(ebc_sharder=inner)])
        else:
            wrong.append([ManagedCollisionEmbeddingCollectionSharder(ec_sharder=inner)])
        for sharders in wrong:
            with pytest.raises(UserError, match=rf"{name}\(\)"):
                DistributedModelParallel(Model(manage(collection(bags), bags)), device=CPU, sharders=sharders)
        with pytest.raises(UserError, match="shard it by TorchRec's ManagedCollision"):
            DistributedModelParallel(
                Model(manage(stock_collection(bags), bags)), device=CPU, sharders=[our_sharder(bags)]
            )
        drops = manage(collection(bags), bags, by_hash=True)
        for own in drops._managed_collision_collection._managed_collision_modules.values():
            own._disable_fallback = True
        with pytest.raises(UserError, match=r"disable_fallback=True drops ids.*no_bag=True"):
            shard(Model(drops), our_sharder(bags))
        ab = dataclasses.replace(tables(bags)[0], first_ids={"a": 0, "b": 10})
        unified = manage(type(collection(bags))([ab, *tables(bags)[1:]]), bags)
        with pytest.raises(UserError, match="'ab' is unified, and managed collision.*leave first_ids out"):
            shard(Model(unified), our_sharder(bags))


@pytest.mark.distributed
def test_a_wrong_sharder_names_the_right_one() -> None:
    run_on_ranks(1, check_wrong_sharders)
