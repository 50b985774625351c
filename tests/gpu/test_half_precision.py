"""Tables of FP16 on the device: looked up exactly, trained as float32 ones are up to rounding."""

import pytest
import torch
from torchrec.modules.embedding_configs import DataType

from distembed.base.ranks import Ranks
from distembed.composition import COMPOSITIONS
from tests.gpu.models import Head, Reference, draw, mean_square, shard, tables

pytestmark = pytest.mark.gpu

STEPS, ROWS = 3, 6


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_fp16_tables_are_looked_up_and_trained(composition: str, ranks: Ranks) -> None:
    sharded = shard(Head(tables(composition, DataType.FP16), "meta", ranks.device), ranks)
    state = sharded.model.state_dict()
    for name, value in state.items():  # integers: what clustered tables have learned of their ids
        expected_dtype = torch.float16 if "embedding_bags" in name else torch.float32
        assert not value.is_floating_point() or value.dtype == expected_dtype, name
    reference = Reference(tables(composition))  # in float32, from the same rounded weights
    first = Head(tables(composition, DataType.FP16), "cpu", torch.device("cpu")).state_dict()
    reference.model.load_state_dict(
        {name: value.float() if value.is_floating_point() else value for name, value in first.items()}
    )
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        batch = draw(ROWS, "ragged", generator)
        _, embedded = sharded.step(number, batch, mean_square)
        _, expected = reference.step(batch, mean_square)
        if number == 0:
            torch.testing.assert_close(embedded.float(), expected, rtol=1e-3, atol=1e-4)
    for name, trained in reference.model.state_dict().items():
        if "embedding_bags" in name:
            (local,) = sharded.model.state_dict()[name].local_shards()
            before = first[name].float()
            # each step rounds a weight once, by half of the last of its 11 bits or, stochastically, by all of it, and
            # what is rounded moves the gradients of the steps that follow
            rounding = 2 * STEPS * float(trained.abs().max()) * 2**-11
            change, wanted = local.tensor.cpu().float() - before, trained - before
            torch.testing.assert_close(change, wanted, rtol=5e-2, atol=rounding, msg=lambda t, n=name: f"{n}: {t}")
