"""TorchRec's DLRM and DLRM_DCN over compositional tables, as tools/example_torchrec_dlrm.py makes them, on 2 ranks."""

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingPlan

from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.ranks import free_port, run_on_ranks

EXAMPLE = Path(__file__).parents[2] / "tools" / "example_torchrec_dlrm.py"
MODELS = ("dlrm", "dlrm_dcn")
FEW_STEPS = 10
SHARDING_TYPES = ("table_wise", "column_wise", "table_column_wise", "row_wise", "data_parallel")


@cache
def example(num_steps: int = 40) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_torchrec_dlrm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.NUM_STEPS = num_steps
    return module


def unsharded_losses(name: str, num_steps: int = 40) -> list[float]:
    """The same model on one device, without any of TorchRec's sharding, over the global batches."""
    module = example(num_steps)
    model = module.make_model(name, device="cpu")
    optimizer = torch.optim.Adagrad(model.parameters(), **module.ADAGRAD)
    losses = []
    for batch in module.random_batches(0, 1):
        loss, _ = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plan(model: torch.nn.Module, sharding_type: str) -> ShardingPlan:
    """What TorchRec's planner answers where every table is to be placed in this way."""
    module = example()
    # vectors are cut where they would have fewer than this many columns
    how = ParameterConstraints(sharding_types=[sharding_type], min_partition=module.DIM // 2)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={f"t_{feature}": how for feature in module.NUM_IDS},
    )
    assert dist.group.WORLD is not None
    return planner.collective_plan(model, [CompositionalEmbeddingBagCollectionSharder()], dist.group.WORLD)


def check_losses(rank: int, world_size: int, unsharded: dict[str, list[float]]) -> None:
    module = example(FEW_STEPS)
    for name in MODELS:
        # the models differ in their networks, which know nothing of how tables are placed
        for sharding_type in SHARDING_TYPES if name == "dlrm" else ("row_wise",):
            model = module.make_model(name, device="meta")
            placed = plan(model, sharding_type)
            found = {sharding.sharding_type for tables in placed.plan.values() for sharding in tables.values()}
            assert found == {sharding_type}
            losses = module.train(module.shard(model, placed))
            torch.testing.assert_close(losses, unsharded[name], rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.distributed
def test_losses_are_those_of_one_device_however_the_tables_are_placed() -> None:
    run_on_ranks(2, check_losses, {name: unsharded_losses(name, FEW_STEPS) for name in MODELS})


def start(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_prints_falling_losses_on_one_process_and_on_two() -> None:
    expected = {name: unsharded_losses(name) for name in MODELS}
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    processes = [start(str(EXAMPLE)), start(*launcher, str(EXAMPLE))]
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        lines = [line.split() for line in output.splitlines()]
        printed = {(name, int(step)): float(loss) for name, _, step, _, loss in lines}
        assert len(printed) == len(lines) == len(MODELS) * len(range(0, example().NUM_STEPS, 5))
        for (name, step), loss in printed.items():
            assert loss == pytest.approx(expected[name][step], rel=1e-4, abs=1e-5)
        for name in MODELS:
            of_model = [loss for (model, _), loss in printed.items() if model == name]
            assert of_model[-1] < of_model[0] / 2
