"""Tables of half precision: unsharded and sharded, beside TorchRec's own and beside float32.

What is looked up is composed in float32, so that the same numbers in float32 weights give the same outputs. A step's
update is that of float32, rounded to the weights' dtype; where a weight is replicated, so is its gradient.
"""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.checkpoints import load_checkpoint, save_checkpoint
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
    vector_names,
)
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.composability.stock import DIM, NUM_IDS, AnyTypeSharder, stock_bags, take_weights
from tests.composability.test_checkpoints import shard_by_torchrec
from tests.composability.test_sharding import Head as OverBags
from tests.composability.test_sharding import summed_tables
from tests.placing import shard_as
from tests.ranks import run_on_ranks
from tests.sharding import test_sharded_equals_unsharded as bags

STEP_OF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""By how much, of itself, rounding changes a number at most."""
SMALLEST = {torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126}
MOST_SUMMED = 16
"""Gradients of a row in one batch that are summed up, at most, and each time rounded."""
HALVES = (DataType.FP16, DataType.BF16)


def require_rounded(found: Tensor, exact: Tensor, before: Tensor, slack: float, case: str) -> None:
    """An updated weight is the exact one, rounded, as FBGEMM's update is; or off by ``slack`` by rounded gradients."""
    most = STEP_OF[found.dtype] * (2 * exact.abs() + before.abs()) + slack + SMALLEST[found.dtype] + 1e-7
    assert ((found.float() - exact).abs() <= most).all(), case


def gradient_slack(exact: Tensor, dtype: torch.dtype, settings: dict[str, float]) -> float:
    """How far the update by a gradient that is summed up in half precision lies from the exact one."""
    assert exact.grad is not None
    # an update grows by no more than this with its gradient
    slope = settings["lr"] / settings.get("eps", 1.0)
    return slope * MOST_SUMMED * STEP_OF[dtype] * float(exact.grad.abs().max())


@pytest.mark.parametrize("data_type", HALVES)
def test_unsharded_tables_compose_in_float32_and_round_their_updates(data_type: DataType) -> None:
    generator = torch.Generator().manual_seed(0)
    half, exact = bags.Head("cpu", data_type=data_type), bags.Head("cpu")
    for _ in range(3):
        before = copy_up(exact, half)
        features = bags.draw(6, "ragged", generator)
        outputs = [model(features) for model in (half, exact)]
        assert outputs[0][1].dtype == torch.float32
        torch.testing.assert_close(outputs[0], outputs[1])
        for output, _ in outputs:
            output.square().mean().backward()
        for model in (half, exact):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
        for (name, weight), one in zip(half.named_parameters(), exact.parameters(), strict=True):
            if weight.dtype == torch.float32:
                torch.testing.assert_close(weight, one)
            else:
                require_rounded(weight, one, before[name], gradient_slack(one, weight.dtype, {"lr": 0.5}), name)
        for model in (half, exact):
            model.zero_grad()


def copy_up(exact: nn.Module, half: nn.Module) -> dict[str, Tensor]:
    """Gives a float32 module the weights of the other one, and returns them."""
    weights = {name: weight.detach().float().clone() for name, weight in half.named_parameters()}
    exact.load_state_dict({**exact.state_dict(), **weights})
    return weights


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All of a sharded model's weights, as they are on the ranks; all ranks call it."""
    whole = {}
    for name, value in model.state_dict().items():
        if not hasattr(value, "local_shards"):
            whole[name] = value.detach().clone()
            continue
        mine = torch.zeros(value.size(), dtype=torch.float64)
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            mine[row : row + rows, column : column + columns] = shard.tensor.detach().double()
        dist.all_reduce(mine)
        whole[name] = mine.to(value.metadata().tensor_properties.dtype)
    return whole


OPTIMIZERS: dict[str, tuple[Any, dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-2}),
    "row_wise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-2}),
}
CASES = [
    (kind, name, data_type)
    for data_type in HALVES
    for kind in bags.SHARDING_TYPES
    for name in OPTIMIZERS
    if data_type is DataType.FP16 or kind == "data_parallel"
    # a row has a sum for each range of columns
    if name != "row_wise_adagrad" or "column" not in kind
]

SOME_CASES = [
    ("table_wise", "sgd", DataType.FP16),
    ("column_wise", "adagrad", DataType.FP16),
    ("row_wise", "row_wise_adagrad", DataType.FP16),
    ("data_parallel", "row_wise_adagrad", DataType.BF16),
]


def check_sharded(rank: int, world_size: int, cases: list[tuple[str, str, DataType]]) -> None:
    for case in cases:
        check_sharded_steps(rank, world_size, *case)


def check_sharded_steps(rank: int, world_size: int, kind: str, name: str, data_type: DataType) -> None:
    """Each step is that of an unsharded float32 module that has the same weights and has seen the same gradients."""
    optimizer, settings = OPTIMIZERS[name]
    model = bags.shard(bags.Head("meta", data_type=data_type), optimizer, settings, kind)
    exact, generator = bags.Head("cpu"), torch.Generator().manual_seed(1)
    vectors = [weight for key, weight in exact.named_parameters() if "embedding_bags" in key]
    sparse = optimizer(vectors, **settings)
    for step in range(3):
        case = f"{kind} {name} {data_type} step {step}"
        held = whole_weights(model)
        exact.load_state_dict(held)
        for key, weight in held.items():
            expected = data_type_to_torch(data_type) if "embedding_bags" in key else torch.float32
            assert weight.dtype == expected or not weight.is_floating_point(), case
        features = bags.draw(6, "ragged", generator)
        start, stop = 6 * rank // world_size, 6 * (rank + 1) // world_size
        output, values = model(bags.part(features, start, stop))
        expected_output, expected_values = exact(features)
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, expected_values[start:stop], msg=lambda text, case=case: f"{case}: {text}")
        (output.square().sum() * world_size / 6).backward()
        expected_output.square().mean().backward()
        sparse.step()
        model.zero_grad()
        after, state = whole_weights(model), model.state_dict()
        for key, weight in exact.named_parameters():
            if "embedding_bags" in key:
                # FBGEMM's gradients are float32
                is_sharded = hasattr(state[key], "local_shards")
                slack = 0.0 if is_sharded else gradient_slack(weight, held[key].dtype, settings)
                require_rounded(after[key], weight, held[key].float(), slack, f"{case} {key}")
        exact.zero_grad()
    for own in model.fused_optimizer.state_dict()["state"].values():
        for value in own.values():
            shards = [shard.tensor for shard in value.local_shards()] if hasattr(value, "local_shards") else [value]
            assert all(shard.dtype == torch.float32 for shard in shards)


def data_type_to_torch(data_type: DataType) -> torch.dtype:
    return {DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}[data_type]


@pytest.mark.thorough
@pytest.mark.distributed
def test_sharded_tables_take_the_steps_of_float32_and_round_them() -> None:
    run_on_ranks(2, check_sharded, SOME_CASES)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_sharded_tables_take_the_steps_of_float32_on_all_layouts(world_size: int) -> None:
    run_on_ranks(world_size, check_sharded, CASES)


def stock_half(device: str, data_type: DataType) -> EmbeddingBagCollection:
    return stock_bags(device, data_type=data_type)


def our_half(device: str, data_type: DataType) -> CompositionalEmbeddingBagCollection:
    tables = [
        CompositionalEmbeddingBagConfig(f"t_{name}", size, DIM, [name], data_type=data_type, kernel="fbgemm")
        for name, size in NUM_IDS.items()
    ]
    return CompositionalEmbeddingBagCollection(tables, device=device)


def check_beside_stock(rank: int, world_size: int) -> None:
    """Full tables that FBGEMM looks up: the same numbers to the bit, after steps too."""
    dims = dict.fromkeys(NUM_IDS, DIM)
    first = stock_bags("cpu").state_dict()
    for kind, optimizer in (("table_wise", "adagrad"), ("row_wise", "row_wise_adagrad"), ("column_wise", "adagrad")):
        models = []
        for make in (stock_half, our_half):
            model, _ = shard_by_torchrec(OverBags(make("meta", DataType.FP16), dims), kind, optimizer)
            whole = make("cpu", DataType.FP16)
            whole.load_state_dict(dict(zip(whole.state_dict(), first.values(), strict=True)))
            take_weights(model.module.embeddings, whole)
            models.append(model)
        for step in range(3):
            generator = torch.Generator().manual_seed(2 * step + rank)
            ids = torch.cat([torch.randint(0, size, (4,), generator=generator) for size in NUM_IDS.values()])
            features = KeyedJaggedTensor(list(NUM_IDS), ids, lengths=torch.tensor([1, 0, 3] * 3))
            outputs = [model(features) for model in models]
            assert torch.equal(*(vectors for _, vectors in outputs)), (kind, step)
            for output, _ in outputs:
                output.square().sum().backward()
        states = [whole_weights(model) for model in models]
        for theirs, ours in zip(states[0].values(), states[1].values(), strict=True):
            assert theirs.dtype == ours.dtype and torch.equal(theirs, ours), kind


@pytest.mark.distributed
def test_full_tables_of_fp16_are_stocks_to_the_bit() -> None:
    run_on_ranks(2, check_beside_stock)


def test_stock_makes_fp16_of_bf16_and_ours_makes_bf16() -> None:
    features = KeyedJaggedTensor(list(NUM_IDS), torch.arange(9), lengths=torch.tensor([1, 0, 3, 1, 2, 2]))
    for data_type in HALVES:
        stock, ours = stock_half("cpu", data_type), our_half("cpu", data_type)
        assert {weight.dtype for weight in stock.parameters()} == {torch.float16}
        assert {weight.dtype for weight in ours.parameters()} == {data_type_to_torch(data_type)}
        assert stock(features).values().dtype == ours(features).values().dtype == torch.float32


def check_bf16_is_refused(rank: int, world_size: int) -> None:
    dims = dict.fromkeys(NUM_IDS, DIM)
    features = KeyedJaggedTensor(list(NUM_IDS), torch.arange(9), lengths=torch.tensor([1, 0, 3, 1, 2, 2]))
    for kind in ("table_wise", "row_wise", "data_parallel"):
        stock, _ = shard_by_torchrec(OverBags(stock_half("meta", DataType.BF16), dims), kind, "adagrad")
        with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
            stock(features)
        ours = OverBags(our_half("meta", DataType.BF16), dims)
        if kind == "data_parallel":
            shard_by_torchrec(ours, kind, "adagrad")[0](features)
        else:
            with pytest.raises(UserError, match=f"'t_user' has data_type BF16 and is planned {kind}, but FBGEMM"):
                shard_by_torchrec(ours, kind, "adagrad")


@pytest.mark.distributed
def test_what_fbgemm_does_not_have_in_bf16_is_refused_by_name() -> None:
    run_on_ranks(1, check_bf16_is_refused)


def half_head() -> nn.Module:
    used = [dataclasses.replace(table, data_type="FP16") for table in summed_tables()]
    dims = dict.fromkeys(vector_names(used), 0)
    for table in used:
        dims |= dict.fromkeys(vector_names([table]), table.embedding_dim)
    return OverBags(CompositionalEmbeddingBagCollection(used, device="meta"), dims)


def check_checkpoints(rank: int, world_size: int, folder: Path) -> None:
    """Weights come back to the bit, and float32 states, on another layout, by torch's functions and by ours."""
    made = {
        kind: shard_by_torchrec(half_head(), kind, "adagrad") for kind in ("table_wise", "row_wise", "data_parallel")
    }
    model, optimizer = made.pop("table_wise")
    for step in range(2):
        model(bags.draw(4, "ragged", torch.Generator().manual_seed(step)))[0].square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = whole_weights(model)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=str(folder / "torch"))
    save_checkpoint(folder / "ours", model, optimizer, {"step": 2})
    for kind, (other, its_optimizer) in made.items():
        its_optimizer.optimizers[-1][1].init_state()
        state = {"model": other.state_dict(), "optimizer": its_optimizer.state_dict()}
        dcp.load(state, checkpoint_id=str(folder / "torch"))
        other.load_state_dict(state["model"])
        its_optimizer.load_state_dict(state["optimizer"])
        require_same(whole_weights(other), saved, kind)
        again, again_optimizer = shard_by_torchrec(half_head(), kind, "adagrad")
        load_checkpoint(folder / "ours", again, again_optimizer)
        require_same(whole_weights(again), saved, kind)


def require_same(found: dict[str, Tensor], expected: dict[str, Tensor], case: str) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), f"{case} {name}"


@pytest.mark.distributed
def test_checkpoints_of_fp16_come_back_to_the_bit_on_another_layout(tmp_path: Path) -> None:
    run_on_ranks(2, check_checkpoints, tmp_path)


@pytest.mark.parametrize("data_type", HALVES)
@pytest.mark.parametrize("composition", ["product", "sum", "feature", "path_mlp"])
def test_sequences_of_half_precision_are_those_of_float32_with_the_same_weights(
    composition: str, data_type: DataType
) -> None:
    table = CompositionalEmbeddingConfig("a", 60, 8, ["a"], "quotient_remainder", composition, data_type=data_type)  # type: ignore[arg-type]
    half = CompositionalEmbeddingCollection([table])
    exact = CompositionalEmbeddingCollection([dataclasses.replace(table, data_type="FP32")])
    copy_up(exact, half)
    features = KeyedJaggedTensor(["a"], torch.arange(9) * 6, lengths=torch.tensor([4, 0, 5]))
    for key, expected in exact(features).items():
        found = half(features)[key].values()
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected.values())
        found.square().sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype == weight.dtype for weight in half.parameters())


def test_planners_count_half_of_the_bytes() -> None:
    def storages(data_type: DataType) -> list[int]:
        model = CompositionalEmbeddingBagCollection(
            [
                CompositionalEmbeddingBagConfig("a", 8000, 16, ["a"], "quotient_remainder", data_type=data_type),
                CompositionalEmbeddingBagConfig("b", 9000, 16, ["b"], "quotient_remainder", "sum", data_type=data_type),
            ],
            device="meta",
        )
        sharder: Any = CompositionalEmbeddingBagCollectionSharder()
        units = sharder.shardable_parameters(model)
        own = [table.memory_bytes for table in model.tables()]
        enumerator = EmbeddingEnumerator(topology=Topology(world_size=1, compute_device="cpu"), batch_size=1)
        options = enumerator.enumerate(model, [sharder])
        planned = [
            option.tensor.numel() * option.tensor.element_size()
            for option in options
            if option.compute_kernel == EmbeddingComputeKernel.FUSED.value
        ]
        return [*own, *planned, *(unit.numel() * unit.element_size() for unit in units.values())]

    def stock_storages(data_type: DataType) -> list[int]:
        options = EmbeddingEnumerator(topology=Topology(world_size=1, compute_device="cpu"), batch_size=1).enumerate(
            stock_half("meta", data_type), [EmbeddingBagCollectionSharder()]
        )
        return [option.tensor.numel() * option.tensor.element_size() for option in options]

    for count in (storages, stock_storages):
        whole = count(DataType.FP32)
        for data_type in HALVES:
            assert [2 * own for own in count(data_type)] == whole


def shard_one(collection: nn.Module, sharder: Any, kind: str) -> nn.Module:
    return shard_as(collection, [sharder], {"t": kind}, min_partition=None)


def check_outputs(rank: int, world_size: int) -> None:
    """One table a collection, so that one of two ranks has nothing to look up where the table is not divided."""
    features = KeyedJaggedTensor(["item"], torch.arange(7) * 5, lengths=torch.tensor([4, 0, 3]))
    config = EmbeddingBagConfig(name="t", num_embeddings=400, embedding_dim=DIM, feature_names=["item"])
    for kind in ("row_wise", "data_parallel"):
        stock = EmbeddingBagCollection([config], device=torch.device("meta"))
        vectors = shard_one(stock, AnyTypeSharder({"output_dtype": DataType.FP16}), kind)(features).values()
        assert vectors.dtype == (torch.float16 if kind == "row_wise" else torch.float32)
    cases = itertools.product(("table_wise", "row_wise", "data_parallel"), ("product", "feature", "path_mlp"))
    for (kind, composition), data_type in zip(cases, itertools.cycle(HALVES), strict=False):
        dtype = torch.float32 if kind == "data_parallel" else data_type_to_torch(data_type)
        table = CompositionalEmbeddingBagConfig("t", 400, DIM, ["item"], "quotient_remainder", composition)
        sharder = CompositionalEmbeddingBagCollectionSharder({"output_dtype": data_type})
        model = shard_one(CompositionalEmbeddingBagCollection([table], device="meta"), sharder, kind)
        vectors = model(features).values()
        expected = CompositionalEmbeddingBagCollection([table])(features).values()
        assert vectors.dtype == dtype, (kind, composition)
        # partial sums of row-wise tables are rounded, and their sums once more
        most = 4 * STEP_OF.get(dtype, 0.0) * float(expected.abs().max()) + 1e-7
        assert ((vectors.float() - expected).abs() <= most).all(), (kind, composition, data_type)
        vectors.float().sum().backward()


@pytest.mark.distributed
def test_outputs_are_rounded_to_the_dtype_that_is_asked_for() -> None:
    run_on_ranks(2, check_outputs)
