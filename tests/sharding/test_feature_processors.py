"""TorchRec's feature processors around compositional bags, unsharded and on two ranks.

Weights of ids by their position in a bag are compared with sums of single ids' vectors that are weighted by hand.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import PathMLP
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import ChineseRemainder, MixedRadix, QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.composability.stock import AnyTypeSharder, take_weights
from tests.placing import shard_as
from tests.ranks import run_on_ranks

DIM, MOST_IDS, ROWS, LR = 8, 4, 5, 0.5
CPU = torch.device("cpu")
SIZES = {"a": 40, "b": 40, "c": 70, "d": 60, "e": 90, "f": 30}
KINDS = ["data_parallel", "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "grid_shard"]
SOME_KINDS = KINDS[::2]


def tables(kernel: str) -> list[CompositionalEmbeddingBagConfig]:
    make: Any = CompositionalEmbeddingBagConfig
    return [
        make("ab", 40, DIM, ["a", "b"], QuotientRemainder(40, collisions=4), kernel=kernel),
        make("c", 70, DIM, ["c"], ChineseRemainder(70), "sum", pooling="mean", kernel=kernel),
        make("d", 60, DIM, ["d"], QuotientRemainder(60, collisions=5), PathMLP(hidden=[5]), kernel=kernel),
        make("e", 90, DIM, ["e"], MixedRadix(90, num_partitions=3), kernel=kernel),
        make("f", 30, DIM, ["f"], kernel=kernel),
    ]


class Model(nn.Module):
    """Feature processors with bags, and one linear layer."""

    def __init__(self, collection: nn.Module, by_feature: bool = False) -> None:
        super().__init__()
        processors: Any = PositionWeightedModuleCollection(dict.fromkeys(SIZES, MOST_IDS))
        if by_feature:
            processors = {name: PositionWeightedModule(MOST_IDS) for name in SIZES}
        self.embeddings = FeatureProcessedEmbeddingBagCollection(collection, processors)
        torch.manual_seed(0)
        self.linear = nn.Linear(DIM * len(SIZES), 1)
        with torch.no_grad():
            for name in SIZES:
                self.position_weight(name).copy_(torch.rand(MOST_IDS))

    def position_weight(self, feature: str) -> Tensor:
        processors = self.embeddings._feature_processors
        if isinstance(processors, nn.ModuleDict):
            return processors[feature].position_weight
        return processors.position_weights[feature]

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, dict[str, Tensor]]:
        embedded = self.embeddings(features).to_dict()
        vectors = torch.cat([embedded[name] for name in SIZES], dim=1)
        return self.linear(vectors).square().sum(), vectors


class ByHand(nn.Module):
    """The same model of single ids' vectors, each multiplied by the weight of its position."""

    def __init__(self, collection: CompositionalEmbeddingBagCollection) -> None:
        super().__init__()
        model = Model(CompositionalEmbeddingBagCollection(collection.tables(), is_weighted=True))
        self.collection, self.linear = collection, model.linear
        self.position_weights = nn.ParameterDict({name: model.position_weight(name).detach() for name in SIZES})

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        poolings = {name: table.pooling for table in self.collection.tables() for name in table.feature_names}
        longest = max(features.length_per_key())
        # bags of one id, padded so that each feature has as many
        ids = {name: features[name].values() for name in SIZES}
        padded = torch.cat([nn.functional.pad(own, (0, longest - len(own))) for own in ids.values()])
        singles = self.collection(KeyedJaggedTensor(list(SIZES), padded, lengths=torch.ones_like(padded)))
        parts = []
        for name, own in ids.items():
            lengths = features[name].lengths()
            sums = []
            for start, length in zip((lengths.cumsum(0) - lengths).tolist(), lengths.tolist(), strict=True):
                vectors = singles[name][: len(own)][start : start + length]
                summed = (vectors * self.position_weights[name][:length].unsqueeze(1)).sum(0)
                sums.append(summed / max(length, 1) if poolings[name] == "mean" else summed)
            parts.append(torch.stack(sums))
        vectors = torch.cat(parts, dim=1)
        return self.linear(vectors).square().sum(), vectors


def draw(rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, MOST_IDS + 1, (len(SIZES), ROWS), generator=generator)
    counts = lengths.sum(1).tolist()
    ids = [torch.randint(0, n, (num,), generator=generator) for n, num in zip(SIZES.values(), counts, strict=True)]
    return KeyedJaggedTensor(list(SIZES), torch.cat(ids), lengths=lengths.flatten())


@pytest.mark.parametrize("by_feature", [False, True])
def test_unsharded_processors_weight_each_ids_vector(by_feature: bool) -> None:
    model = Model(CompositionalEmbeddingBagCollection(tables("auto"), is_weighted=True), by_feature)
    reference = ByHand(CompositionalEmbeddingBagCollection(tables("auto")))
    loss, vectors = model(draw(0))
    expected_loss, expected = reference(draw(0))
    torch.testing.assert_close(vectors, expected)
    loss.backward()
    expected_loss.backward()
    for name in SIZES:
        torch.testing.assert_close(model.position_weight(name).grad, reference.position_weights[name].grad)
    gradients = dict(model.embeddings._embedding_bag_collection.named_parameters())
    for key, weight in reference.collection.named_parameters():
        torch.testing.assert_close(gradients[key].grad, weight.grad)


def shard(model: Model, inner: Any, kind: str) -> DistributedModelParallel:
    collection = model.embeddings._embedding_bag_collection
    apply_optimizer_in_backward(torch.optim.SGD, collection.embedding_bags.parameters(), {"lr": LR})
    kinds = {config.name: kind for config in collection.embedding_bag_configs()}
    if "column" in kind or "grid" in kind:
        kinds["d"] = "table_wise"  # a function needs whole vectors
    return shard_as(model, [FeatureProcessedEmbeddingBagCollectionSharder(ebc_sharder=inner)], kinds)


def shard_ours(tables: list[CompositionalEmbeddingBagConfig], kind: str, by_feature: bool) -> DistributedModelParallel:
    bags = CompositionalEmbeddingBagCollection(tables, is_weighted=True)
    return shard(Model(bags, by_feature), CompositionalEmbeddingBagCollectionSharder(), kind)


class Twice(Model):
    """Looks two batches up before there is a backward pass."""

    def forward(self, features: KeyedJaggedTensor, others: KeyedJaggedTensor) -> Tensor:
        return super().forward(features)[0] + super().forward(others)[0]


def check_two_lookups(rank: int, world_size: int) -> None:
    """Rows are updated by the backward pass of one lookup before that of the other begins."""
    for kernel, kind in (("auto", "table_wise"), ("fbgemm", "table_wise"), ("fbgemm", "row_wise")):
        bags = CompositionalEmbeddingBagCollection(tables(kernel), is_weighted=True)
        model = shard(Twice(bags), CompositionalEmbeddingBagCollectionSharder(), kind)
        reference = ByHand(CompositionalEmbeddingBagCollection(tables(kernel)))
        model(draw(rank), draw(world_size + rank)).backward()
        (sum(reference(draw(other))[0] for other in range(2 * world_size)) / world_size).backward()
        for name in SIZES:
            found, expected = model.module.position_weight(name).grad, reference.position_weights[name].grad
            torch.testing.assert_close(found, expected, msg=f"{kernel}, {kind}: {name}")


@pytest.mark.distributed
def test_weights_have_gradients_of_the_rows_that_were_looked_up_though_these_change_meanwhile() -> None:
    run_on_ranks(2, check_two_lookups)


def check_sharded(rank: int, world_size: int, folder: Path, kernel: str, by_feature: bool, kinds: list[str]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    for kind in kinds:
        model = shard_ours(tables(kernel), kind, by_feature)
        reference = ByHand(CompositionalEmbeddingBagCollection(tables(kernel)))
        for step in range(2):
            loss, vectors = model(draw(2 * step + rank))
            losses = [reference(draw(2 * step + other)) for other in range(world_size)]
            torch.testing.assert_close(vectors, losses[rank][1], msg=f"{kind}: step {step}")
            model.zero_grad()
            reference.zero_grad()
            loss.backward()
            (sum(own for own, _ in losses) / world_size).backward()
            for name in SIZES:
                found, expected = model.module.position_weight(name).grad, reference.position_weights[name].grad
                torch.testing.assert_close(found, expected, msg=f"{kind}: {name}")
            with torch.no_grad():
                # data-parallel tables have torch's optimizer for their gradients
                for weight in reference.collection.embedding_bags.parameters():
                    weight -= LR * weight.grad
        # by torch's checkpoints to another layout, and to the unsharded model
        dcp.save(model.state_dict(), checkpoint_id=str(folder / kind))
        other = shard_ours(tables(kernel), KINDS[(KINDS.index(kind) + 4) % len(KINDS)], by_feature)
        whole = Model(CompositionalEmbeddingBagCollection(tables(kernel), is_weighted=True), by_feature)
        assert set(model.state_dict()) == set(whole.state_dict())
        for loaded in (other, whole):
            state = loaded.state_dict()
            dcp.load(state, checkpoint_id=str(folder / kind))
            loaded.load_state_dict(state)
            expected = reference(draw(9 + rank))[1]
            torch.testing.assert_close(loaded(draw(9 + rank))[1], expected, msg=f"{kind}: loaded")


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("kernel", "by_feature", "kinds"),
    [
        ("auto", False, ["row_wise"]),
        ("fbgemm", True, SOME_KINDS),
        # which loads a kernel for each formula
        *(pytest.param(*own, KINDS, marks=pytest.mark.slow) for own in (("auto", False), ("fbgemm", True))),
    ],
)
def test_sharded_processors_take_the_steps_of_weighting_by_hand(
    tmp_path: Path, kernel: str, by_feature: bool, kinds: list[str]
) -> None:
    run_on_ranks(2, check_sharded, tmp_path, kernel, by_feature, kinds)


def stock_bags() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=DIM,
            feature_names=list(table.feature_names),
        )
        for table in tables("auto")
    ]
    return EmbeddingBagCollection(configs, is_weighted=True)


def full_tables() -> list[CompositionalEmbeddingBagConfig]:
    make: Any = CompositionalEmbeddingBagConfig
    return [make(t.name, t.num_embeddings, DIM, t.feature_names) for t in tables("auto")]


def check_beside_stock(rank: int, world_size: int, kinds: list[str]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    for kind in kinds:
        whole = Model(stock_bags())
        stock = shard(Model(stock_bags()), AnyTypeSharder(), kind)
        take_weights(stock, whole)
        ours = shard_ours(full_tables(), kind, by_feature=False)
        take_weights(ours, whole_as_ours(whole))
        # TorchRec leaves data-parallel tables to the dense optimizer
        for step in range(1 if kind == "data_parallel" else 2):
            (loss, vectors), (expected_loss, expected) = (model(draw(2 * step + rank)) for model in (ours, stock))
            torch.testing.assert_close(vectors, expected, msg=f"{kind}: step {step}")
            for model, own in ((ours, loss), (stock, expected_loss)):
                model.zero_grad()
                own.backward()
            for name in SIZES:
                found, gradient = (model.module.position_weight(name).grad for model in (ours, stock))
                torch.testing.assert_close(found, gradient, msg=f"{kind}: {name}")


def whole_as_ours(whole: Model) -> nn.Module:
    """A module whose state dict has a stock model's numbers under the names of full tables of ours."""
    model = Model(CompositionalEmbeddingBagCollection(full_tables(), is_weighted=True))
    model.load_state_dict({re.sub(r"(bags\.\w+)\.", r"\1__p0.", key): own for key, own in whole.state_dict().items()})
    return model


@pytest.mark.distributed
@pytest.mark.parametrize("kinds", [SOME_KINDS, pytest.param(KINDS, marks=pytest.mark.slow)], ids=len)
def test_processors_of_full_tables_take_the_steps_of_stock_ones(kinds: list[str]) -> None:
    run_on_ranks(2, check_beside_stock, kinds)


def check_wrong_sharder(rank: int, world_size: int) -> None:
    plan = shard_ours(tables("auto"), "row_wise", by_feature=False).plan if world_size > 1 else None
    for sharders in (None, [FeatureProcessedEmbeddingBagCollectionSharder()]):
        model = Model(CompositionalEmbeddingBagCollection(tables("auto"), is_weighted=True))
        with pytest.raises(UserError, match=r"ebc_sharder=CompositionalEmbeddingBagCollectionSharder\(\)"):
            DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wrapper_that_was_given_no_sharder_of_ours_names_it(world_size: int) -> None:
    run_on_ranks(world_size, check_wrong_sharder)
