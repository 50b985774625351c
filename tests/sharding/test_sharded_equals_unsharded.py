"""The sharded collection on gloo ranks against the unsharded one: outputs, gradients, updated weights."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import Concat, PathMLP, TensorTrain
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.embedding.settings import VectorExchange
from distembed.partitions import (
    ChineseRemainder,
    Clustered,
    Explicit,
    MixedRadix,
    MultiHash,
    QuotientRemainder,
    Remainder,
    Truncated,
)
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, default_sharders
from distembed.sharding.placement import BY_ROWS
from tests.placing import shard_as
from tests.ranks import run_cases, run_on_ranks

SIZES = {"a": 1000, "b": 77, "c": 5000, "d": 5000, "e": 30, "f": 300, "g": 400}
SIZES |= {"h": 600, "i": 600, "j": 900, "k": 500, "l": 500, "m": 200, "n": 64, "o": 1, "p": 3}
SIZES |= {"q": 700, "r": 700, "s": 800, "t": 900, "u": 600, "v": 700, "w": 600}
SIZES |= {"aa": 900, "ab": 900, "x": 400, "y": 300, "z": 300}
DIM = 8


def tables() -> list[CompositionalEmbeddingBagConfig]:
    make = CompositionalEmbeddingBagConfig
    return [
        make("a", 1000, DIM, ["a"], QuotientRemainder(1000, collisions=4)),
        make("b", 77, DIM, ["b"], QuotientRemainder(77, collisions=5), "concat"),
        make("cd", 5000, DIM, ["c", "d"], QuotientRemainder(5000, collisions=60), "product", pooling="mean"),
        make("e", 30, 20, ["e"]),
        make("f", 300, DIM, ["f"], Remainder(300, 4), pooling="mean"),
        make("g", 400, 16, ["g"], QuotientRemainder(400), "sum"),
        make("hi", 600, DIM, ["h", "i"], QuotientRemainder(600, collisions=7), PathMLP(hidden=[5]), pooling="mean"),
        make("j", 900, 4, ["j"], MixedRadix(900, num_partitions=3), "path_linear"),
        make("k", 500, 12, ["k"], ChineseRemainder(500), "feature"),
        make("l", 500, DIM, ["l"], QuotientRemainder(500, collisions=3), PathMLP(hidden=[5]), pooling="mean"),
        make("m", 200, DIM, ["m"], MixedRadix(200, num_partitions=3), "product", pooling="max"),
        # fewer rows than there are ranks
        make("o", 1, DIM, ["o"]),
        make("p", 3, DIM, ["p"], QuotientRemainder(3, collisions=2), "path_linear"),
        # the divided partition is the largest: of vectors, or of importance numbers
        make("q", 700, DIM, ["q"], MultiHash(700, moduli=[90, 80, 70]), "weighted_sum", pooling="mean"),
        make("r", 700, DIM, ["r"], MultiHash(700, moduli=[20, 30, 300]), "weighted_sum"),
        make("s", 800, DIM, ["s"], MultiHash(800, num_buckets=100, num_partitions=3), "product"),
        make("t", 900, DIM, ["t"], MultiHash(900, num_buckets=100), "sum"),
        make("u", 600, DIM, ["u"], QuotientRemainder(600, collisions=5), TensorTrain(2, [4, 2]), pooling="mean"),
        make("v", 700, DIM, ["v"], MixedRadix(700, num_partitions=3), TensorTrain([2, 4])),
        make("w", 600, DIM, ["w"], Clustered(600, num_buckets=40, num_partitions=4), "concat_sum"),
        make("aa", 900, 16, ["aa"], Truncated(900, bounds=[300, 40]), Concat([4, 12])),
        make("ab", 900, DIM, ["ab"], Truncated(900, bounds=[30, 200]), "sum", pooling="mean"),
        # unified: z has the vocabulary of y
        make(
            "xyz",
            700,
            DIM,
            ["z", "x", "y"],
            MultiHash(700, num_buckets=100),
            "concat",
            pooling="mean",
            first_ids={"x": 0, "y": 400, "z": 400},
        ),
        make("n", 64, DIM, ["n"], Explicit(64, [torch.arange(64) // 8, torch.arange(64) % 8]), Concat([4, 4])),
    ]


class Head(nn.Module):
    """A collection and one linear layer."""

    def __init__(self, device: str, weighted: bool = False, data_type: DataType = DataType.FP32) -> None:
        super().__init__()
        # maxima go with no weights
        used = [table for table in tables() if not (weighted and table.pooling == "max")]
        used = [dataclasses.replace(table, data_type=data_type) for table in used]
        self.embeddings = CompositionalEmbeddingBagCollection(used, device=device, is_weighted=weighted)
        torch.manual_seed(0)
        self.linear = nn.Linear(
            sum(table.num_vectors * table.embedding_dim * len(table.feature_names) for table in used), 1
        )

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        embedded = self.embeddings(features)
        return self.linear(embedded.values()), embedded.values()


def sharding_types_of(table: CompositionalEmbeddingBagConfig, sharding_type: str) -> list[str]:
    """The type itself, or where the table cannot have it table-wise."""
    unable: list[object] = []
    if "column" in sharding_type or sharding_type == "grid_shard":
        unable += [table] * (table.combine.columns(table.embedding_dim, len(table.scheme.num_rows)) is None)
    if sharding_type in BY_ROWS and table.pooling == "max":
        unable.append(table)
    return ["table_wise"] if unable else [sharding_type]


def shard(
    model: nn.Module,
    optimizer: Any,
    settings: dict[str, float],
    sharding_type: str = "table_wise",
    exchange: VectorExchange | None = None,
) -> DistributedModelParallel:
    if optimizer is not None:
        vectors = model.get_submodule("embeddings.embedding_bags").parameters()
        apply_optimizer_in_backward(optimizer, vectors, dict(settings))  # TorchRec adds to the settings
    sharders = [CompositionalEmbeddingBagCollectionSharder()] if exchange is None else default_sharders(False, exchange)
    kinds = {
        table.name: sharding_types_of(table, sharding_type) for table in model.get_submodule("embeddings").tables()
    }
    return shard_as(model, sharders, kinds, kernel="dense" if optimizer is None else None)


def draw(rows: int, bags: str, generator: torch.Generator) -> KeyedJaggedTensor:
    """Bags of one id, or ragged ones of 0 to 4 ids; weighted ones are ragged."""
    values, lengths = [], []
    for size in SIZES.values():
        if bags == "single":
            lengths.append(torch.ones(rows, dtype=torch.long))
        else:
            lengths.append(torch.randint(0, 5, (rows,), generator=generator))
        values.append(torch.randint(0, size, (int(lengths[-1].sum()),), generator=generator))
    ids = torch.cat(values)
    weights = torch.rand(len(ids), generator=generator) if bags == "weighted" else None
    # the batch's features are in another order than the tables', as in real data
    shuffled = KeyedJaggedTensor(list(SIZES), ids, weights=weights, lengths=torch.cat(lengths))
    return shuffled.permute(list(reversed(range(len(SIZES)))))


def part(features: KeyedJaggedTensor, start: int, stop: int) -> KeyedJaggedTensor:
    """The rows from ``start`` to ``stop`` of every feature."""
    values, lengths, weights = [], [], []
    for jagged in features.to_dict().values():
        first, last = jagged.offsets()[start], jagged.offsets()[stop]
        values.append(jagged.values()[first:last])
        lengths.append(jagged.lengths()[start:stop])
        if features.weights_or_none() is not None:
            weights.append(jagged.weights()[first:last])
    return KeyedJaggedTensor(
        features.keys(),
        torch.cat(values),
        weights=torch.cat(weights) if weights else None,
        lengths=torch.cat(lengths),
        stride=stop - start,
    )


OPTIMIZERS: dict[str, tuple[Any, dict[str, float], Callable[..., torch.optim.Optimizer]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}, torch.optim.SGD),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2}, torch.optim.Adagrad),
    "row_wise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2}, RowWiseAdagrad),
    # no kernel has it fused: dense kernels, and torch's optimizer
    "amsgrad": (None, {"lr": 0.01, "eps": 1e-3}, partial(torch.optim.Adam, amsgrad=True)),
}


class RowWiseAdagradOfSlices:
    """Row-wise Adagrad of the unsharded tables with an accumulator for each range of columns that a rank has."""

    def __init__(self, reference: nn.Module, model: DistributedModelParallel, lr: float, eps: float) -> None:
        self.lr, self.eps = lr, eps
        self.slices = []
        sharded = model.state_dict()
        for key, weight in reference.named_parameters():
            if "embedding_bags" in key:
                shards = sharded[key].metadata().shards_metadata if hasattr(sharded[key], "metadata") else []
                ranges = {(shard.shard_offsets[1], shard.shard_sizes[1]) for shard in shards} or {(0, weight.shape[1])}
                for start, columns in ranges:
                    self.slices.append((weight, slice(start, start + columns), torch.zeros(len(weight), 1)))

    def step(self) -> None:
        for weight, columns, accumulated in self.slices:
            gradient = weight.grad[:, columns]
            accumulated += gradient.square().mean(dim=1, keepdim=True)
            weight.data[:, columns] -= self.lr * gradient / (accumulated.sqrt() + self.eps)


def check_equal(rank: int, world_size: int, sharding_type: str, name: str, bags: str) -> None:
    fused, settings, plain = OPTIMIZERS[name]
    reference = Head("cpu", weighted=bags == "weighted")
    model = shard(Head("meta", weighted=bags == "weighted"), fused, settings, sharding_type)
    sparse: Any = plain(reference.embeddings.embedding_bags.parameters(), **settings)
    if name == "row_wise_adagrad" and ("column" in sharding_type or sharding_type == "grid_shard"):
        sparse = RowWiseAdagradOfSlices(reference, model, **settings)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    of_tables = {key: weight for key, weight in dense.items() if "embedding_bags" in key}
    unfused = plain([weight for weight in of_tables.values() if weight.numel()], **settings) if of_tables else None
    bounds = [0, 1, 6] if world_size == 2 else [round(6 * i / world_size) for i in range(world_size + 1)]
    start, stop = bounds[rank], bounds[rank + 1]
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        features = draw(6, bags, generator)
        if step % 2:  # the order of features may change from batch to batch
            features = features.permute(torch.randperm(len(SIZES), generator=generator).tolist())
        expected, expected_values = reference(features)
        output, values = model(part(features, start, stop))
        torch.testing.assert_close(values, expected_values[start:stop])
        torch.testing.assert_close(output, expected[start:stop])
        # ranks hold unequally many rows: the sum over all, as the trainer takes it
        (output.square().sum() * world_size / 6).backward()
        expected.square().mean().backward()
        for key, weight in reference.named_parameters():
            if key in dense and key not in of_tables:
                torch.testing.assert_close(dense[key].grad, weight.grad)
                for copy in (weight, dense[key]):
                    copy.data.sub_(copy.grad, alpha=0.3)
            elif key in of_tables and dense[key].shape == weight.shape:
                torch.testing.assert_close(dense[key].grad, weight.grad)
        sparse.step()
        if unfused is not None:
            unfused.step()
        reference.zero_grad()
        model.zero_grad()
    assert {key for key in dense if key not in of_tables} == {
        key for key, _ in reference.named_parameters() if "embedding_bags" not in key
    }
    check_weights(model, reference)


def check_weights(model: nn.Module, reference: nn.Module, rtol: float = 1.3e-6, atol: float = 1e-5) -> None:
    """What this rank holds is what the unsharded module has there, and the ranks together hold all of it."""
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for key, weight in reference.state_dict().items():
        close = {"rtol": rtol, "atol": atol, "msg": lambda text, key=key: f"{key}: {text}"}
        if not hasattr(state[key], "local_shards"):
            torch.testing.assert_close(state[key].cpu(), weight, **close)
            continue
        held = 0
        for local in state[key].local_shards():
            (row, column), (rows, columns) = local.metadata.shard_offsets, local.metadata.shard_sizes
            expected = weight[row : row + rows, column : column + columns]
            torch.testing.assert_close(local.tensor.cpu(), expected, **close)
            held += local.tensor.numel()
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, held)
        assert sum(by_rank) == weight.numel(), key


SHARDING_TYPES = ["table_wise", "column_wise", "table_column_wise", "row_wise", "data_parallel"]
ALL = list(itertools.product(SHARDING_TYPES, OPTIMIZERS, ["single", "ragged", "weighted"]))
MANY, SOME = ALL[::7], ALL[2::14]
"""Each sharding type, each kind of batches and each optimizer."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(1, SOME, id="1"),
        pytest.param(2, MANY, id="2"),
        pytest.param(2, ALL, id="2, all", marks=pytest.mark.slow),
        pytest.param(4, SOME, id="4"),
        pytest.param(4, ALL, id="4, all", marks=pytest.mark.slow),
    ],
)
def test_ranks_together_equal_one_module(world_size: int, cases: list[tuple[str, str, str]]) -> None:
    run_cases(world_size, check_equal, cases)


def check_odd_batches(rank: int, world_size: int) -> None:
    for sharding_type in SHARDING_TYPES:
        check_empty_bags(check_empty_rank(rank, sharding_type))
    # tests.composability.test_dtypes trains the other types in half precision
    check_half_precision("table_column_wise")
    check_refusals()


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_rank_without_rows_takes_part_and_an_id_outside_its_table_is_named() -> None:
    run_on_ranks(2, check_odd_batches)


def check_empty_rank(rank: int, sharding_type: str) -> nn.Module:
    model = shard(Head("meta"), torch.optim.SGD, {"lr": 0.5}, sharding_type)
    features = draw(3, "ragged", torch.Generator().manual_seed(0))
    output, _ = model(part(features, 0, 3) if rank == 0 else part(features, 0, 0))
    assert output.shape == (3 if rank == 0 else 0, 1)
    output.sum().backward()
    torch.testing.assert_close(output.detach(), Head("cpu")(part(features, 0, len(output)))[0].detach())
    return model


def check_empty_bags(model: nn.Module) -> None:
    lengths = torch.zeros(2 * len(SIZES), dtype=torch.long)
    output, values = model(KeyedJaggedTensor(list(SIZES), torch.empty(0, dtype=torch.long), lengths=lengths))
    assert not values.any()
    output.sum().backward()


def check_half_precision(sharding_type: str) -> None:
    features = draw(3, "ragged", torch.Generator().manual_seed(0))
    reference = Head("cpu", data_type=DataType.FP16)
    model = shard(Head("meta", data_type=DataType.FP16), torch.optim.SGD, {"lr": 0.5}, sharding_type)
    output, values = model(features)
    torch.testing.assert_close(values, reference(features)[1])
    output.sum().backward()
    state = model.state_dict()
    for key, weight in reference.state_dict().items():
        own = torch.float16 if "embedding_bags" in key else torch.float32
        assert state[key].dtype == weight.dtype, key
        assert weight.dtype == own or not weight.is_floating_point(), key


def check_refusals() -> None:
    model, weighted = (shard(Head("meta", own), torch.optim.SGD, {"lr": 0.5}) for own in (False, True))
    single = draw(2, "single", torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match="is_weighted=True, but the KeyedJaggedTensor has no weights"):
        weighted(single)
    single.values()[2 * single.keys().index("b") + 1] = 77  # feature b has ids up to 76
    with pytest.raises(UserError, match=r"feature 'b'.*position 1.* is 77.*between 0 and 76"):
        model(single)
    with pytest.raises(UserError, match=r"the batch has no feature 'a', only \['b'\]"):
        model(KeyedJaggedTensor(["b"], torch.tensor([1]), lengths=torch.tensor([1])))
    features = draw(2, "weighted", torch.Generator().manual_seed(0))
    features.weights().requires_grad_()
    with pytest.raises(UserError, match=r"weights .* need gradients.*detach the weights"):
        weighted(features)
    with torch.no_grad():
        weighted(features)


def test_the_planner_sees_one_unit_a_table() -> None:
    model = Head("meta")
    apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.embedding_bags.parameters(), {"lr": 0.1})
    sharder = CompositionalEmbeddingBagCollectionSharder()
    units = sharder.shardable_parameters(model.embeddings)
    for table in tables():
        rows, columns = units[table.name].shape
        assert columns == table.num_vectors * table.embedding_dim
        numbers = sum(part.num_parameters for part in table.lookup_tables())
        assert 0 <= rows * columns - numbers < columns  # rounded up to whole rows
    assert all(unit._optimizer_classes == [RowWiseAdagrad] for unit in units.values())
    assert sharder.compute_kernels("table_wise", "cuda") == ["fused"]  # never host memory unasked
