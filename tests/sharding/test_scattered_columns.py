"""Column ranges out of order: a rank has several of one table that are no neighbours, unequal ones among them."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

from distembed.checkpoints import load_checkpoint, save_checkpoint
from distembed.composition import COMPOSITIONS
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.partitions import MixedRadix, QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
from distembed.sharding.placement import WITHIN_NODES, can_be_placed, place_tables
from distembed.sharding.table_slice import width
from tests.checkpoints.test_checkpoint import require_equal
from tests.layouts import ROWS, Trained, batch, build, gather_numbers
from tests.ranks import run_on_ranks

STEPS = 3


def train(trained: Trained) -> None:
    for number in range(STEPS):
        trained.step(number)


def check_equal(rank: int, world_size: int, folder: Path) -> None:
    for optimizer in ("adagrad", "amsgrad"):  # fused, and torch's
        plain, scattered = build("plain", optimizer), build("scattered", optimizer)
        start, stop = rank * ROWS // world_size, (rank + 1) * ROWS // world_size
        train(plain)
        train(scattered)
        output = scattered.model(batch(STEPS, start, stop))
        torch.testing.assert_close(output, plain.model(batch(STEPS, 0, ROWS))[start:stop])
        expected, found = gather_numbers(plain), gather_numbers(scattered)
        for name, weight in expected.weights.items():
            np.testing.assert_allclose(found.weights[name], weight, rtol=2e-5, atol=1e-6, err_msg=name)
    check_state_dict(scattered)
    check_checkpoints(folder)


def check_state_dict(trained: Trained) -> None:
    """TorchRec's own way back: weights of one scattered model in another, from shards and from whole tensors."""
    state = trained.model.state_dict()
    held = {
        name.split(".")[-2]: [shard.tensor.shape[1] for shard in value.local_shards()]
        for name, value in state.items()
        if isinstance(value, ShardedTensor)
    }
    if dist.get_rank() == dist.get_world_size() - 1:
        assert held["a__p0"] == [4, 4, 4]  # in place of 8 and 4
    expected, other = gather_numbers(trained), build("scattered", "amsgrad")
    for loaded in (dict(state), {name: torch.from_numpy(weight) for name, weight in expected.weights.items()}):
        for weight in other.model.parameters():
            weight.data.zero_()
        other.model.load_state_dict(loaded)
        weights = gather_numbers(other).weights
        assert all(np.array_equal(weights[name], weight) for name, weight in expected.weights.items())


def check_checkpoints(folder: Path) -> None:
    """What a scattered plan saved others load, and the other way round; rows have a number in each range."""
    for before, now in (("scattered", "column_wise"), ("table_wise", "scattered")):
        trained, other = build(before, "row_wise_adagrad"), build(now, "row_wise_adagrad")
        train(trained)
        save_checkpoint(folder / before, trained.model, trained.optimizer, {"step": STEPS})
        load_checkpoint(folder / before, other.model, other.optimizer)
        require_equal(gather_numbers(other), gather_numbers(trained), f"{before} to {now}")


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_together_equal_one_module_and_load_what_others_saved(world_size: int, tmp_path: Path) -> None:
    run_on_ranks(world_size, check_equal, tmp_path)


def draw_tables(draw: random.Random, is_sequence: bool) -> list[CompositionalEmbeddingConfig]:
    dim = draw.choice([32, 64, 128, 192, 256])
    drawn: list[CompositionalEmbeddingConfig] = []
    for i in range(draw.randint(1, 6)):
        name, num_ids = f"t{i}", draw.randint(100, 2_000_000)
        composition = draw.choice([it for it in COMPOSITIONS if not is_sequence or it != "feature"])
        schemes = [QuotientRemainder(num_ids, collisions=draw.choice([4, 60])), MixedRadix(num_ids, num_partitions=3)]
        if is_sequence:
            drawn.append(CompositionalEmbeddingConfig(name, num_ids, dim, [name], schemes[0], composition))
            continue
        scheme = schemes[0] if composition == "concat" else draw.choice(schemes)
        own_dim, pooling = dim // draw.choice([1, 2]), draw.choice(["sum", "mean", "max"])
        drawn.append(
            CompositionalEmbeddingBagConfig(name, num_ids, own_dim, [name], scheme, composition, pooling=pooling)
        )
    return drawn


def require_planned_is_placed(seed: int) -> None:
    """Draws tables, ranks and constraints; what TorchRec's planner makes of them is accepted."""
    draw = random.Random(seed)
    is_sequence, device = draw.random() < 0.3, draw.choice(["cpu", "cuda"])
    num_nodes, ranks_per_node = draw.choice([(1, draw.randint(2, 8)), (2, draw.randint(2, 4)), (4, 8)])
    world_size = num_nodes * ranks_per_node
    drawn = draw_tables(draw, is_sequence)
    collection: nn.Module = (
        CompositionalEmbeddingCollection(drawn, device="meta")
        if is_sequence
        else CompositionalEmbeddingBagCollection(drawn, device="meta")  # type: ignore[arg-type]
    )
    sharder = CompositionalEmbeddingCollectionSharder() if is_sequence else CompositionalEmbeddingBagCollectionSharder()
    favoured, constraints = draw.choice([WITHIN_NODES, ("column_wise", "table_column_wise")]), {}
    for table in drawn:
        possible = [kind for kind in sharder.sharding_types(device) if can_be_placed(table, kind)]
        divided = [kind for kind in possible if kind in favoured]
        chosen = divided if divided and draw.random() < 0.6 else possible
        narrowest = draw.choice([None, 4 * draw.randint(1, width(table) // 8)])
        constraints[table.name] = ParameterConstraints(sharding_types=chosen, min_partition=narrowest)
    topology = Topology(world_size=world_size, local_world_size=ranks_per_node, compute_device=device)
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.plan(nn.ModuleDict({"collection": collection}), [sharder])  # type: ignore[list-item]
    for placement in place_tables(drawn, plan.plan["collection"], world_size):  # type: ignore[arg-type]
        if placement.unit.sharding_type in WITHIN_NODES:
            assert placement.num_row_blocks == ranks_per_node
        # each number of a sharded partition lies on one rank, and on no other
        for part in placement.parts:
            if part.name in placement.sharded:
                shards = placement.sharded[part.name].sharding_spec.shards
                assert sum(shard.shard_sizes[0] * shard.shard_sizes[1] for shard in shards) == part.num_parameters


@pytest.mark.parametrize(
    "seeds", [range(4), pytest.param(range(4, 308), marks=[pytest.mark.slow, pytest.mark.timeout(1800)])], ids=len
)
def test_what_torchrecs_planner_plans_is_placed(seeds: range) -> None:
    for seed in seeds:
        require_planned_is_placed(seed)
