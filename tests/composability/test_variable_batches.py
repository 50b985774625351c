"""Batches with a number of bags of its own for each feature: TorchRec's collections, ours, and rows written out."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.embedding.config import perturbation
from distembed.sharding.shardings import SEQUENCE_SHARDING_TYPES
from distembed.sse import SSE
from tests.composability.stock import DIM, NUM_IDS, stock_bags, take_weights
from tests.ranks import run_on_ranks
from tests.sharding.test_sequences import SIZES as SEQUENCE_SIZES
from tests.sharding.test_sequences import Head as SequenceHead
from tests.sharding.test_sequences import shard as shard_sequences
from tests.sharding.test_sharded_equals_unsharded import SHARDING_TYPES, SIZES, Head, check_weights, shard

RATE = 0.5


def draw(num_ids: dict[str, int], num_rows: int, generator: torch.Generator, weighted: bool) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids, fewer than rows, each of which has any of its feature's; features in any order."""

    def random(most: int, count: int) -> Tensor:
        return torch.randint(0, most, (count,), generator=generator)

    keys = [list(num_ids)[i] for i in torch.randperm(len(num_ids), generator=generator)]
    strides = [int(random(num_rows, 1)) + 1 if num_rows else 0 for _ in keys]
    lengths = [random(4, stride) for stride in strides]
    values = torch.cat([random(num_ids[key], int(own.sum())) for key, own in zip(keys, lengths, strict=True)])
    bags = torch.stack([random(max(stride, 1), num_rows) for stride in strides])
    order = torch.randperm(len(keys), generator=generator).tolist()
    return KeyedJaggedTensor(
        keys,
        values,
        weights=torch.rand(len(values), generator=generator) if weighted else None,
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[stride] for stride in strides],
        inverse_indices=([keys[i] for i in order], bags[order]),
    )


def written_out(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same rows, each with its own copy of its bags."""
    names, bags = features.inverse_indices()
    values, lengths, weights = [], [], []
    for key, jagged in features.to_dict().items():
        own = bags[names.index(key)].tolist()
        by_bag = jagged.values().split(jagged.lengths().tolist())
        values += [by_bag[i] for i in own]
        lengths += [len(by_bag[i]) for i in own]
        if features.weights_or_none() is not None:
            by_bag = jagged.weights().split(jagged.lengths().tolist())
            weights += [by_bag[i] for i in own]
    return KeyedJaggedTensor(
        features.keys(),
        torch.cat([features.values()[:0], *values]),
        weights=torch.cat([features.weights()[:0], *weights]) if features.weights_or_none() is not None else None,
        lengths=torch.tensor(lengths, dtype=torch.long),
        stride=bags.shape[1],
    )


def outputs_of(embedded: Any) -> dict[str, Tensor]:
    """What a collection gives, by key: pooled vectors, or the vectors, lengths and ids of sequences."""
    if hasattr(embedded, "to_dict"):
        return dict(embedded.to_dict())
    parts = {key: (own.values(), own.lengths(), own.weights_or_none()) for key, own in embedded.items()}
    return {f"{key}.{i}": tensor for key, own in parts.items() for i, tensor in enumerate(own) if tensor is not None}


def require_equal(actual: Any, expected: Any) -> None:
    ours, wanted = outputs_of(actual), outputs_of(expected)
    assert ours.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(ours[key], tensor, msg=lambda text, key=key: f"{key}: {text}", check_dtype=False)


@pytest.mark.parametrize("weighted", [False, True])
def test_bags_are_those_of_stock_and_of_rows_written_out(weighted: bool) -> None:
    stock = stock_bags("cpu", weighted)
    full = [CompositionalEmbeddingBagConfig(f"t_{name}", size, DIM, [name], "naive") for name, size in NUM_IDS.items()]
    ours = CompositionalEmbeddingBagCollection(full, is_weighted=weighted)
    ours.load_state_dict({key.replace(".weight", "__p0.weight"): own for key, own in stock.state_dict().items()})
    for seed in range(5):
        features = draw(NUM_IDS, 9, torch.Generator().manual_seed(seed), weighted)
        require_equal(ours(features), stock(features))
        require_equal(ours(features), stock(written_out(features)))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_every_composition_and_pooling_gives_what_rows_written_out_give(num_rows: int, weighted: bool) -> None:
    collection = Head("cpu", weighted=weighted).embeddings
    features = draw(SIZES, num_rows, torch.Generator().manual_seed(0), weighted)
    gradients = []
    for batch in (features, written_out(features)):
        collection.zero_grad()
        collection(batch).values().square().sum().backward()
        gradients.append([weight.grad.clone() for weight in collection.parameters()])
    require_equal(collection(features), collection(written_out(features)))
    torch.testing.assert_close(*gradients)


def test_sequences_are_those_of_rows_written_out() -> None:
    collection = SequenceHead("cpu").embeddings
    for num_rows in (0, 1, 9):
        features = draw(SEQUENCE_SIZES, num_rows, torch.Generator().manual_seed(num_rows), weighted=False)
        require_equal(collection(features), collection(written_out(features)))


def test_without_inverse_indices_bags_stay_as_they_are() -> None:
    """As with stock: sequences have lengths of their own for each feature, and pooled vectors cannot stand in rows."""
    features = draw(NUM_IDS, 9, torch.Generator().manual_seed(0), weighted=False)
    features._inverse_indices = None
    stock = EmbeddingCollection(
        [
            EmbeddingConfig(name=f"t_{n}", num_embeddings=size, embedding_dim=DIM, feature_names=[n])
            for n, size in NUM_IDS.items()
        ]
    )
    full = [CompositionalEmbeddingConfig(f"t_{name}", size, DIM, [name], "naive") for name, size in NUM_IDS.items()]
    ours = CompositionalEmbeddingCollection(full)
    ours.load_state_dict({key.replace(".weight", "__p0.weight"): own for key, own in stock.state_dict().items()})
    require_equal(ours(features), stock(features))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        stock_bags("cpu")(features)
    bags = [CompositionalEmbeddingBagConfig(f"t_{name}", size, DIM, [name]) for name, size in NUM_IDS.items()]
    with pytest.raises(UserError, match=r"unequal numbers of bags .* give inverse_indices"):
        CompositionalEmbeddingBagCollection(bags)(features)


def batch_of(rank: int, step: int, sizes: dict[str, int], weighted: bool) -> KeyedJaggedTensor:
    """Each rank has another number of rows, and of each feature another number of bags."""
    return draw(sizes, (5, 8)[rank], torch.Generator().manual_seed(10 * step + rank), weighted)


def check_sharded(rank: int, world_size: int, bags: list[tuple[str, bool]]) -> None:
    settings = {"lr": RATE}
    for kind, weighted in bags:
        model = shard(Head("meta", weighted=weighted), torch.optim.SGD, settings, kind)
        check_trained(rank, Head("cpu", weighted=weighted), model, weighted)
    for kind in SEQUENCE_SHARDING_TYPES:
        model = shard_sequences(SequenceHead("meta"), torch.optim.SGD, settings, kind)
        check_trained(rank, SequenceHead("cpu"), model, weighted=False)
    check_replaced_ids(rank)


def check_trained(rank: int, reference: Any, model: DistributedModelParallel, weighted: bool) -> None:
    """Two steps: outputs and updated weights are those of one module that sees both ranks' rows."""
    sizes = SIZES if isinstance(reference, Head) else SEQUENCE_SIZES
    world = dist.get_world_size()
    replicated = dict(in_backward_optimizer_filter(model.named_parameters()))
    for step in range(2):
        expected = [reference(batch_of(other, step, sizes, weighted)) for other in range(world)]
        output, vectors = model(batch_of(rank, step, sizes, weighted))
        torch.testing.assert_close(output, expected[rank][0])
        if isinstance(vectors, Tensor):
            torch.testing.assert_close(vectors, expected[rank][1])
        else:
            require_equal(vectors, expected[rank][1])
        (output.square().sum() * world / 10).backward()
        (sum(own.square().sum() for own, _ in expected) / 10).backward()
        for weight in (*replicated.values(), *reference.parameters()):
            weight.data.sub_(weight.grad, alpha=RATE)
        reference.zero_grad()
        model.zero_grad()
    check_weights(model, reference)


def check_replaced_ids(rank: int) -> None:
    """The ids of each bag are replaced once, as in the unsharded collection."""
    tables = [
        CompositionalEmbeddingBagConfig(name, size, DIM, [name], "quotient_remainder", sse=SSE(0.5), id_policy="modulo")
        for name, size in NUM_IDS.items()
    ]

    def make(device: str) -> nn.Module:
        return nn.ModuleDict({"embeddings": CompositionalEmbeddingBagCollection(tables, device=device)})

    reference = make("cpu")["embeddings"]
    reference.sse = perturbation(tables, rank)
    model = shard(make("meta"), torch.optim.SGD, {"lr": RATE})
    features = draw(NUM_IDS, 9, torch.Generator().manual_seed(rank), weighted=False)
    features.values()[::2] -= 1000
    ours = model.module["embeddings"](features)
    require_equal(ours, reference(features))
    assert not torch.equal(ours.values(), reference.eval()(features).values())


def shard_stock(kind: Any) -> nn.Module:
    """TorchRec's own bags, with the weights that the unsharded ones have."""
    module, sharder = stock_bags("meta"), EmbeddingBagCollectionSharder()
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": RATE})
    placed = construct_module_sharding_plan(
        module, {f"t_{name}": kind for name in NUM_IDS}, sharder, local_size=2, world_size=2, device_type="cpu"
    )
    model = DistributedModelParallel(
        nn.ModuleDict({"embeddings": module}),
        device=torch.device("cpu"),
        plan=ShardingPlan({"embeddings": placed}),
        sharders=[sharder],
    )
    take_weights(model.module["embeddings"], stock_bags("cpu"))
    return model.module["embeddings"]


def check_stock(rank: int, world_size: int, kind: str) -> None:
    """TorchRec's own bags give the same where its fused CPU kernels run them, and fail otherwise."""
    fused = EmbeddingComputeKernel.FUSED.value
    features = batch_of(rank, 0, NUM_IDS, weighted=False)
    if kind == "by rows":
        output = shard_stock(row_wise(compute_kernel=fused))(features)
        with pytest.raises(RuntimeError, match="invalid tensor size"):  # gloo gathers equal parts only
            output.values().sum().backward()
        return
    for place in (table_wise(rank=0, compute_kernel=fused), column_wise(ranks=[0, 1], compute_kernel=fused)):
        require_equal(shard_stock(place)(features), stock_bags("cpu")(features))
    module = shard_stock(data_parallel())
    with pytest.raises(RuntimeError, match="out of bounds"):  # the dense kernel reads bags of equal numbers
        module(features)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["by rows", "otherwise"])  # an exchange that fails leaves ranks that exchange no more
def test_stock_bags_take_them_by_table_and_by_column_only(kind: str) -> None:
    run_on_ranks(2, check_stock, kind)


BAGS = list(itertools.product(SHARDING_TYPES, [False, True]))
"""Sharding types, and whether ids have weights; by turns but in the slow test."""


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize(
    "bags", [BAGS[::4] + BAGS[3::4], pytest.param(BAGS, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_sharded_collections_train_on_them_as_unsharded_ones(bags: list[tuple[str, bool]]) -> None:
    run_on_ranks(2, check_sharded, bags)
