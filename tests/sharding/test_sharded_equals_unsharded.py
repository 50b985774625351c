"""The sharded collection on gloo ranks against the unsharded one: outputs, gradients, updated weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import Concat, PathMLP
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig, vector_names
from distembed.errors import UserError
from distembed.partitions import ChineseRemainder, Explicit, MixedRadix, QuotientRemainder, Remainder
from distembed.planning import make_plan
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.ranks import run_on_ranks

SIZES = {"a": 1000, "b": 77, "c": 5000, "d": 5000, "e": 30, "f": 300, "g": 400}
SIZES |= {"h": 600, "i": 600, "j": 900, "k": 500, "l": 500, "m": 200, "n": 64}
DIM = 8


def tables() -> list[CompositionalEmbeddingBagConfig]:
    make = CompositionalEmbeddingBagConfig
    return [
        make("a", 1000, DIM, ["a"], QuotientRemainder(1000, collisions=4)),
        make("b", 77, DIM, ["b"], QuotientRemainder(77, collisions=5), "concat"),
        make("cd", 5000, DIM, ["c", "d"], QuotientRemainder(5000, collisions=60), "product", pooling="mean"),
        make("e", 30, DIM, ["e"]),
        make("f", 300, DIM, ["f"], Remainder(300, 4), pooling="mean"),
        make("g", 400, DIM, ["g"], QuotientRemainder(400), "sum"),
        make("hi", 600, DIM, ["h", "i"], QuotientRemainder(600, collisions=7), PathMLP(hidden=[5]), pooling="mean"),
        make("j", 900, DIM, ["j"], MixedRadix(900, num_partitions=3), "path_linear"),
        make("k", 500, DIM, ["k"], ChineseRemainder(500), "feature"),
        make("l", 500, DIM, ["l"], QuotientRemainder(500, collisions=3), PathMLP(hidden=[5]), pooling="mean"),
        make("m", 200, DIM, ["m"], MixedRadix(200, num_partitions=3), "product", pooling="max"),
        make("n", 64, DIM, ["n"], Explicit(64, [torch.arange(64) // 8, torch.arange(64) % 8]), Concat([4, 4])),
    ]


class Head(nn.Module):
    """A collection and one linear layer."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.embeddings = CompositionalEmbeddingBagCollection(tables(), device=device)
        torch.manual_seed(0)
        self.names = vector_names(tables())
        self.linear = nn.Linear(len(self.names) * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        embedded = self.embeddings(features).to_dict()
        return self.linear(torch.cat([embedded[name] for name in self.names], dim=1))


def shard(model: nn.Module, optimizer: Any, settings: dict[str, float]) -> DistributedModelParallel:
    vectors = model.get_submodule("embeddings.embedding_bags").parameters()
    apply_optimizer_in_backward(optimizer, vectors, dict(settings))  # TorchRec adds to the settings
    cpu, sharders = torch.device("cpu"), [CompositionalEmbeddingBagCollectionSharder()]
    world = dist.get_world_size()
    plan = make_plan(model, sharders, device=cpu, world_size=world, local_world_size=world, batch_size=8)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=cpu, plan=plan, sharders=sharders)


def draw(rows: int, max_ids: int, generator: torch.Generator) -> KeyedJaggedTensor:
    """Bags of 1 id where ``max_ids`` is 1, else of 0 to ``max_ids``."""
    values, lengths = [], []
    for size in SIZES.values():
        if max_ids == 1:
            lengths.append(torch.ones(rows, dtype=torch.long))
        else:
            lengths.append(torch.randint(0, max_ids + 1, (rows,), generator=generator))
        values.append(torch.randint(0, size, (int(lengths[-1].sum()),), generator=generator))
    return KeyedJaggedTensor(list(SIZES), torch.cat(values), lengths=torch.cat(lengths))


def part(features: KeyedJaggedTensor, start: int, stop: int) -> KeyedJaggedTensor:
    """The rows from ``start`` to ``stop`` of every feature."""
    values, lengths = [], []
    for jagged in features.to_dict().values():
        offsets = jagged.offsets()
        values.append(jagged.values()[offsets[start] : offsets[stop]])
        lengths.append(jagged.lengths()[start:stop])
    return KeyedJaggedTensor(list(SIZES), torch.cat(values), lengths=torch.cat(lengths))


def check_equal(rank: int, world_size: int, name: str, max_ids: int) -> None:
    optimizers: dict[str, tuple[Any, dict[str, float], Callable[..., torch.optim.Optimizer]]] = {
        "sgd": (torch.optim.SGD, {"lr": 0.5}, torch.optim.SGD),
        "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-4}, torch.optim.Adagrad),
        "row_wise_adagrad": (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-4}, RowWiseAdagrad),
    }
    fused, settings, plain = optimizers[name]
    reference = Head("cpu")
    model = shard(Head("meta"), fused, settings)
    sparse = plain(reference.embeddings.embedding_bags.parameters(), **settings)
    bounds = [0, 1, 6] if world_size == 2 else [round(6 * i / world_size) for i in range(world_size + 1)]
    start, stop = bounds[rank], bounds[rank + 1]
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        features = draw(6, max_ids, generator)
        expected = reference(features)
        output = model(part(features, start, stop))
        torch.testing.assert_close(output, expected[start:stop])
        # ranks hold unequally many rows: the sum over all, as the trainer takes it
        (output.square().sum() * world_size / 6).backward()
        expected.square().mean().backward()
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        assert len(dense) == 2 + 4  # the linear layer, and the functions of three path-based tables
        for key, weight in reference.named_parameters():
            if key in dense:
                torch.testing.assert_close(dense[key].grad, weight.grad)
                for copy in (weight, dense[key]):
                    copy.data.sub_(copy.grad, alpha=0.3)
        sparse.step()
        reference.zero_grad()
        model.zero_grad()
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for key, weight in reference.state_dict().items():
        for local in state[key].local_shards() if hasattr(state[key], "local_shards") else []:
            torch.testing.assert_close(local.tensor, weight)


def check_all_equal(rank: int, world_size: int) -> None:
    for optimizer in ("sgd", "adagrad", "row_wise_adagrad"):
        for max_ids in (1, 4):
            check_equal(rank, world_size, optimizer, max_ids)


# every case in one start of the ranks: starting them takes longer than all that they do
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_together_equal_one_module(world_size: int) -> None:
    run_on_ranks(world_size, check_all_equal)


def check_odd_batches(rank: int, world_size: int) -> None:
    check_empty_rank(rank, world_size)
    check_bad_id(rank, world_size)
    check_odd_dimension(rank, world_size)


@pytest.mark.distributed
def test_a_rank_without_rows_takes_part_and_an_id_outside_its_table_is_named() -> None:
    run_on_ranks(2, check_odd_batches)


def check_empty_rank(rank: int, world_size: int) -> None:
    model = shard(Head("meta"), torch.optim.SGD, {"lr": 0.5})
    features = draw(3, 2, torch.Generator().manual_seed(0))
    output = model(part(features, 0, 3) if rank == 0 else part(features, 0, 0))
    assert output.shape == (3 if rank == 0 else 0, 1)
    output.sum().backward()
    torch.testing.assert_close(output.detach(), Head("cpu")(part(features, 0, len(output))).detach())


def check_bad_id(rank: int, world_size: int) -> None:
    model = shard(Head("meta"), torch.optim.SGD, {"lr": 0.5})
    features = draw(2, 1, torch.Generator().manual_seed(0))
    features.values()[3] = 77  # feature b has ids up to 76
    with pytest.raises(UserError, match=r"feature 'b'.*position 1.* is 77.*between 0 and 76"):
        model(features)


def check_odd_dimension(rank: int, world_size: int) -> None:
    table = CompositionalEmbeddingBagConfig("a", 100, 8, ["a"], QuotientRemainder(100), Concat([5, 3]))
    model = nn.ModuleDict({"embeddings": CompositionalEmbeddingBagCollection([table], device="meta")})
    with pytest.raises(UserError, match="'a__p0' have 5 numbers; FBGEMM takes multiples of 4"):
        shard(model, torch.optim.SGD, {"lr": 0.5})


def check_planner_unit(rank: int, world_size: int) -> None:
    model = Head("meta")
    apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.embedding_bags.parameters(), {"lr": 0.1})
    sharder = CompositionalEmbeddingBagCollectionSharder()
    units = sharder.shardable_parameters(model.embeddings)
    assert {name: tuple(unit.shape) for name, unit in units.items()} == {
        table.name: (sum(part.num_rows for part in table.lookup_tables()), DIM) for table in tables()
    }
    assert all(unit._optimizer_classes == [RowWiseAdagrad] for unit in units.values())
    assert sharder.compute_kernels("table_wise", "cuda") == ["fused"]  # never host memory unasked


def test_the_planner_sees_one_unit_a_table() -> None:
    check_planner_unit(0, 1)
