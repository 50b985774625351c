"""Every scheme x composition, sharded on the device, against the unsharded module on the CPU that torch trains."""

import pytest
import torch

from distembed.base.ranks import Ranks
from distembed.composition import COMPOSITIONS
from tests.gpu.models import Head, Reference, check_weights, draw, mean_square, shard, tables

STEPS, ROWS = 3, 6
SHARDINGS = ("table_wise", "column_wise", "row_wise", "data_parallel")

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("sharding_type", SHARDINGS)
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_device_computes_what_the_unsharded_module_does(composition: str, sharding_type: str, ranks: Ranks) -> None:
    for bags in ("single", "ragged", "weighted"):
        weighted = bags == "weighted"
        sharded = shard(Head(tables(composition), "meta", ranks.device, weighted), ranks, sharding_type)
        reference = Reference(tables(composition), weighted)
        generator = torch.Generator().manual_seed(1)
        for number in range(STEPS):
            batch = draw(ROWS, bags, generator)
            found = sharded.step(number, batch, mean_square)
            expected = reference.step(batch, mean_square)
            for own, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(own, wanted, msg=lambda text, bags=bags: f"{bags}: {text}")
        check_weights(sharded.model, reference.model)
