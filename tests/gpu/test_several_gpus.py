"""Ranks of nccl, a card each, against the unsharded module on the CPU; in a dry run two ranks of gloo."""

import os
import sys
from itertools import product

import pytest
import torch
import torch.distributed as dist

from distembed.base.ranks import Ranks, process_group
from distembed.data.single_ids import carry_single_ids
from tests.gpu.models import Head, Reference, check_weights, draw, mean_square, shard, tables
from tests.processes import run_processes
from tests.ranks import free_port
from tests.sharding.test_sharded_equals_unsharded import part

MOST_RANKS, ROWS, STEPS = 8, 6, 3
SHARDINGS = ("table_wise", "column_wise", "row_wise", "data_parallel")
CASES = (("product", "single"), ("concat", "ragged"), ("path_mlp", "ragged"))


@pytest.mark.gpu
@pytest.mark.distributed
def test_ranks_together_equal_the_unsharded_module(device: torch.device) -> None:
    world_size = min(torch.cuda.device_count(), MOST_RANKS) if device.type == "cuda" else 2
    if world_size < 2:
        pytest.skip("there is one CUDA device, and nccl needs one for each rank")
    run_processes(world_size, _start, world_size, free_port(), device.type)


def _start(rank: int, world_size: int, port: int, device: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo", RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    with process_group(device) as ranks:
        for sharding_type, (composition, bags) in product(SHARDINGS, CASES):
            try:
                check_equal(ranks, sharding_type, composition, bags)
            except AssertionError as error:
                raise AssertionError(f"{sharding_type}, {composition}, {bags}, rank {rank}: {error}") from error
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # as tests.ranks ends, for the sake of gloo's threads


def check_equal(ranks: Ranks, sharding_type: str, composition: str, bags: str) -> None:
    """Ranks have unequally many rows, and those beyond the sixth have none."""
    world_size = ranks.world_size
    sharded = shard(Head(tables(composition), "meta", ranks.device), ranks, sharding_type)
    reference = Reference(tables(composition))
    bounds = [0, 1, ROWS] if world_size == 2 else [*(min(i, ROWS) for i in range(world_size)), ROWS]
    start, stop = bounds[ranks.rank], bounds[ranks.rank + 1]
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        batch = draw(ROWS, bags, generator)
        own = carry_single_ids(batch, part(batch, start, stop))
        # the sum over all ranks, as the trainer takes it
        output, _ = sharded.step(number, own, lambda out: out.square().sum() * world_size / ROWS)
        expected, _ = reference.step(batch, mean_square)
        torch.testing.assert_close(output, expected[start:stop])
    check_weights(sharded.model, reference.model)
