"""Tables that are frozen, or that no optimizer trains, stay as they are to the bit, wherever they are placed.

All else of the model, functions of frozen tables too, is trained as in the unsharded model.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import PathMLP
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.optim.declared import declared_optimizers
from distembed.partitions import QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
from distembed.sharding.lookup import sharded_lookups
from distembed.sharding.placement import can_be_placed
from tests.placing import shard_as
from tests.ranks import run_on_ranks

ROWS, STEPS, RATE, EPS, DIM, NUM_IDS = 8, 3, 0.1, 1e-3, 8, 90
COMPOSITIONS: dict[str, Any] = {name: name for name in ("product", "sum", "concat", "feature", "path_linear")}
COMPOSITIONS["path_mlp"] = PathMLP(hidden=[5])
SHARDERS: list[Any] = [CompositionalEmbeddingBagCollectionSharder(), CompositionalEmbeddingCollectionSharder()]
BAG_TYPES = ("table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "grid_shard")
BAG_TYPES += ("data_parallel",)
SEQUENCE_TYPES = ("table_wise", "column_wise", "row_wise", "data_parallel")
Case = tuple[str, str, str, str]
"""``bags`` or ``sequences``, sharding type, kernel (``dense`` is TorchRec's), and why tables are not trained."""
NO_GRADIENT, NO_OPTIMIZER, DECAY = "no gradient", "no optimizer", "no gradient, others decay"
ALL: list[Case] = [
    (kind, own, kernel, why)
    for kind, types in (("bags", BAG_TYPES), ("sequences", SEQUENCE_TYPES))
    for own in types
    for kernel in ("auto", "fbgemm", "dense")
    for why in (NO_GRADIENT, NO_OPTIMIZER, DECAY)
    # a dense optimizer trains tables without a fused one where torch holds their gradients
    if not (why == NO_OPTIMIZER and (own == "data_parallel" or kernel == "dense"))
    # torch's form of the optimizer has no decay for weights that every rank has
    if not (why == DECAY and (own not in ("table_wise", "column_wise") or kernel != "fbgemm"))
]
SOME: list[Case] = [
    ("bags", "row_wise", "auto", NO_GRADIENT),
    ("bags", "table_wise", "fbgemm", NO_OPTIMIZER),
    ("bags", "grid_shard", "auto", NO_OPTIMIZER),
    ("bags", "column_wise", "fbgemm", DECAY),
    ("bags", "row_wise", "dense", NO_GRADIENT),
    ("bags", "data_parallel", "auto", NO_GRADIENT),
    ("sequences", "column_wise", "auto", NO_GRADIENT),
    ("sequences", "row_wise", "fbgemm", NO_OPTIMIZER),
]


class Model(nn.Module):
    """The collection as a model; a function of a trained table is frozen alone."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        embeddings.get_parameter("functions.free_path_linear__p1").requires_grad_(False)

    def forward(self, features: KeyedJaggedTensor) -> list[Tensor]:
        found = self.embeddings(features).values()
        # torch's wrapper finds tensors in lists, and none in a KeyedTensor
        return [found] if isinstance(found, Tensor) else [own.values() for own in found]


def make_model(case: Case, device: str) -> nn.Module:
    """A frozen table and a trained one of each composition, side by side in one collection."""
    kind, sharding_type, kernel, why = case
    config: Any = CompositionalEmbeddingBagConfig if kind == "bags" else CompositionalEmbeddingConfig
    tables = [
        config(
            f"{prefix}_{name}",
            NUM_IDS,
            DIM,
            [f"{prefix}_{name}"],
            QuotientRemainder(NUM_IDS, collisions=4),
            combine,
            kernel="auto" if kernel == "dense" or name not in ("product", "sum", "concat") else kernel,
        )
        for name, combine in COMPOSITIONS.items()
        if kind == "bags" or name != "feature"  # sequences are of one width
        for prefix in ("frozen", "free")
    ]
    collection: Any = CompositionalEmbeddingBagCollection if kind == "bags" else CompositionalEmbeddingCollection
    return Model(collection(tables, device=device))


def freeze(model: nn.Module) -> None:
    for weight in vectors(model, "frozen"):
        weight.requires_grad_(False)


def vectors(model: nn.Module, prefix: str) -> list[nn.Parameter]:
    return [own for name, own in model.named_parameters() if f".{prefix}_" in name and ".functions." not in name]


def shard(model: nn.Module, case: Case) -> DistributedModelParallel:
    _, sharding_type, kernel, why = case
    settings = {"lr": RATE, "eps": EPS} | ({"weight_decay": 0.5} if why == DECAY else {})
    if kernel != "dense":
        for prefix in ("free",) if why == NO_OPTIMIZER else ("free", "frozen"):
            apply_optimizer_in_backward(torch.optim.Adagrad, vectors(model, prefix), dict(settings))
    if why != NO_OPTIMIZER:  # though an optimizer is declared
        freeze(model)
    kinds = {
        table.name: sharding_type if can_be_placed(table, sharding_type) else "table_wise"
        for table in model.get_submodule("embeddings").tables()
    }
    return shard_as(model, SHARDERS, kinds, kernel="dense" if kernel == "dense" else None)


def batch(number: int, keys: list[str], start: int, stop: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 4, (len(keys), ROWS), generator=generator)
    ids = torch.randint(0, NUM_IDS, (int(lengths.sum()),), generator=generator)
    bags = ids.split(lengths.flatten().tolist())
    own = [bags[i * ROWS + row] for i in range(len(keys)) for row in range(start, stop)]
    return KeyedJaggedTensor(keys, torch.cat(own), lengths=lengths[:, start:stop].flatten())


def train(model: nn.Module, keys: list[str], start: int, stop: int, optimizers: list[Any]) -> None:
    world = ROWS // (stop - start)
    for number in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        vectors = model(batch(number, keys, start, stop))
        loss = torch.stack([(own - 1).square().sum() for own in vectors]).sum()
        (loss * world / ROWS).backward()
        for optimizer in optimizers:
            optimizer.step()


def weights(model: nn.Module) -> Iterator[tuple[str, tuple[slice, ...], Tensor]]:
    """(name, place in the whole, copy of the numbers) of what this rank has."""
    for name, value in model.state_dict().items():
        for own in value.local_shards() if isinstance(value, ShardedTensor) else ():
            offsets, sizes = own.metadata.shard_offsets, own.metadata.shard_sizes
            place = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            yield name, place, own.tensor.detach().view(sizes).clone()
        if not isinstance(value, ShardedTensor):
            yield name, (), value.detach().clone()


def check(rank: int, world_size: int, cases: list[Case]) -> None:
    for case in cases:
        plain = make_model(case, "cpu")
        freeze(plain)
        keys = [table.feature_names[0] for table in plain.embeddings.tables()]
        functions = [own for name, own in plain.named_parameters() if ".functions." in name]
        settings = {"weight_decay": 0.5} if case[3] == DECAY else {}
        tables = torch.optim.Adagrad(vectors(plain, "free"), lr=RATE, eps=EPS, **settings)
        others = torch.optim.SGD(functions, lr=RATE)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            sharded = shard(make_model(case, "meta"), case)
        untrained = [str(own.message) for own in warned if "without an optimizer are not trained" in str(own.message)]
        assert bool(untrained) == (rank == 0 and case[3] == NO_OPTIMIZER), (case, untrained)
        assert all("frozen_" in text and "free_" not in text for text in untrained)
        before = list(weights(sharded))
        dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
        used = [own for name, own in dense.items() if ".functions." in name]
        in_torch = [own for name, own in dense.items() if ".functions." not in name]
        in_torch_optimizers = [torch.optim.Adagrad(in_torch, lr=RATE, eps=EPS)] if in_torch else []
        train(plain, keys, 0, ROWS, [tables, others])
        start = rank * ROWS // world_size
        optimizers = [torch.optim.SGD(used, lr=RATE), *in_torch_optimizers]
        train(sharded, keys, start, start + ROWS // world_size, optimizers)
        whole, moved = plain.state_dict(), set()
        for (name, place, first), (_, _, last) in zip(before, weights(sharded), strict=True):
            is_frozen = ".frozen_" in name and ".functions." not in name
            if is_frozen or case[3] != DECAY:  # torch decays all rows, FBGEMM the ones that are looked up
                expected = whole[name][place] if place else whole[name]
                assert torch.allclose(last, expected, rtol=1e-4, atol=1e-5), f"{case} {name}"
            if is_frozen or name.endswith("functions.free_path_linear__p1"):
                assert torch.equal(first, last), f"{case} {name}"
            elif not torch.equal(first, last):
                moved.add(name)
        assert moved, case
        states = sharded.fused_optimizer.state_dict()["state"]
        assert not [name for name, own in states.items() if ".frozen_" in name and own], case


@pytest.mark.thorough
@pytest.mark.distributed
def test_frozen_tables_stay_and_others_are_trained_as_unsharded() -> None:
    run_on_ranks(2, check, SOME)


def check_weights(rank: int, world_size: int) -> None:
    for kernel in ("auto", "fbgemm"):
        features = [f"frozen_{name}" for name in ("product", "sum", "concat")]
        tables: list[Any] = [
            CompositionalEmbeddingBagConfig(
                name, NUM_IDS, DIM, [name], QuotientRemainder(NUM_IDS, collisions=4), name[7:], kernel=kernel
            )
            for name in features
        ]
        bags = batch(0, features, 0, ROWS)
        plain_weights = torch.linspace(0.5, 2, len(bags.values())).requires_grad_()
        id_weights = plain_weights.detach().clone().requires_grad_()
        plain = CompositionalEmbeddingBagCollection(tables, is_weighted=True).requires_grad_(False)
        with_weights = KeyedJaggedTensor(features, bags.values(), plain_weights, lengths=bags.lengths())
        plain(with_weights).values().square().sum().backward()
        model = nn.ModuleDict(
            {"embeddings": CompositionalEmbeddingBagCollection(tables, device="meta", is_weighted=True)}
        )
        sharded = shard(model, ("bags", "table_wise", kernel, NO_GRADIENT))
        for group in sharded.fused_optimizer.param_groups:
            group["lr"] = 1.0  # as a schedule does
        sharded.fused_optimizer.step()
        before = list(weights(sharded))
        (lookup,) = sharded_lookups(sharded)  # dists send no gradients of weights
        with_weights = KeyedJaggedTensor(features, bags.values(), id_weights, lengths=bags.lengths())
        lookup(with_weights).square().sum().backward()
        torch.testing.assert_close(id_weights.grad, plain_weights.grad)
        for factor in (torch.nan, torch.inf, 3e38):
            (lookup(with_weights) * factor).sum().backward()
        for (name, _, first), (_, _, last) in zip(before, weights(sharded), strict=True):
            assert torch.equal(first, last), (kernel, name)


@pytest.mark.distributed
def test_gradients_of_ids_weights_pass_through_frozen_tables_and_do_not_move_them() -> None:
    run_on_ranks(1, check_weights)


def check_stock(rank: int, world_size: int) -> None:
    config = EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=NUM_IDS, feature_names=["t"])
    model = nn.ModuleDict({"embeddings": EmbeddingBagCollection([config], device=torch.device("meta"))})
    model.requires_grad_(False)
    sharded = shard_as(model, [EmbeddingBagCollectionSharder()], {"t": "table_wise"}, compute_kernels=["fused"])
    before = list(weights(sharded))
    sharded.module["embeddings"](batch(0, ["t"], 0, ROWS)).values().sum().backward()
    for (_, _, first), (_, _, last) in zip(before, weights(sharded), strict=True):
        assert not torch.equal(first, last)


@pytest.mark.distributed
def test_stock_trains_a_frozen_table() -> None:
    run_on_ranks(1, check_stock)


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_plan_counts_no_state_of_a_frozen_table(kind: str) -> None:
    model = make_model((kind, "table_wise", "auto", NO_GRADIENT), "meta")
    fused: dict[str, Any] = {"optimizer": EmbOptimType.ADAM}
    sharders = [type(own)(fused_params=dict(fused)) for own in SHARDERS]
    freeze(model)
    named = declared_optimizers(model, sharders)
    assert named == {name: None if name.startswith("frozen") else "adam" for name in named}
    units = next(own for own in sharders if isinstance(model.embeddings, own.module_type)).shardable_parameters(
        model.embeddings
    )
    assert [name for name, own in units.items() if hasattr(own, "_optimizer_classes")] == [
        name for name in units if name.startswith("free")
    ]


@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_a_table_is_frozen_as_a_whole_or_refused_by_name(kind: str) -> None:
    model = make_model((kind, "table_wise", "auto", NO_GRADIENT), "meta")
    next(own for name, own in model.named_parameters() if "frozen_sum__p0" in name).requires_grad_(False)
    with pytest.raises(UserError, match=r"'frozen_sum' .*__p0: requires_grad=False; .*__p1: requires_grad=True\. Call"):
        declared_optimizers(model, SHARDERS)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("case", ALL, ids=" ".join)
def test_frozen_tables_stay_in_every_case(case: Case) -> None:
    run_on_ranks(2, check, [case])
