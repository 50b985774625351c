"""Checkpoints of tables that lie in host memory hold what the device's cache has and host memory does not yet."""

from pathlib import Path

import pytest
import torch

from distembed.base.ranks import Ranks
from distembed.checkpoints import load_checkpoint, save_checkpoint
from distembed.optim.config import SparseOptimizerConfig
from tests.gpu.models import Head, check_weights, draw, mean_square, shard, tables

ROWS, STEPS = 16, 5
CACHED = {"cache_load_factor": 0.9}
"""Slots for nearly all rows, so that hardly any goes back to host memory by itself."""
ADAGRAD = SparseOptimizerConfig(name="adagrad", learning_rate=0.1, eps=1e-3)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("composition", ["product", "concat", "path_mlp"])
def test_a_checkpoint_of_cached_tables_is_that_of_tables_on_the_device(
    composition: str, ranks: Ranks, tmp_path: Path
) -> None:
    made = []
    for kernel, settings in (("fused", {}), ("fused_uvm_caching", CACHED)):
        head = Head(tables(composition), "meta", ranks.device)
        made.append(shard(head, ranks, sparse=ADAGRAD, kernel=kernel, fused_params=settings))
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        batch = draw(ROWS, "ragged", generator)
        for sharded in made:
            sharded.step(number, batch, mean_square)
    on_device, cached = made
    save_checkpoint(tmp_path / "step-00000005", cached.model, cached.optimizers.combined, {"step": STEPS})

    loaded = Head(tables(composition), "cpu", torch.device("cpu"))
    load_checkpoint(tmp_path / "step-00000005", loaded)
    check_weights(on_device.model, loaded, rtol=1e-5)
    before = Head(tables(composition), "cpu", torch.device("cpu")).state_dict()
    moved = [name for name, weight in loaded.state_dict().items() if not torch.equal(weight, before[name])]
    assert {name for name in before if "embedding_bags" in name} <= set(moved)

    again = shard(
        Head(tables(composition), "meta", ranks.device),
        ranks,
        sparse=ADAGRAD,
        kernel="fused_uvm_caching",
        fused_params=CACHED,
    )
    again.step(0, draw(ROWS, "ragged", generator), mean_square)  # whose cached rows have to give way
    assert load_checkpoint(tmp_path / "step-00000005", again.model, again.optimizers.combined) == {"step": STEPS}
    batch = draw(ROWS, "ragged", generator)
    for number in range(2):  # with the optimizer's states
        outputs = [sharded.step(STEPS + number, batch, mean_square) for sharded in (on_device, cached, again)]
        for output, embedded in outputs[1:]:
            torch.testing.assert_close(output, outputs[0][0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(embedded, outputs[0][1], rtol=1e-4, atol=1e-5)
