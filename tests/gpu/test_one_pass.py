"""Tables in one pass, by Triton's kernels on a card, against the unsharded module on the CPU that torch trains."""

from dataclasses import replace

import pytest
import torch

from distembed.base.ranks import Ranks
from distembed.embedding import CompositionalEmbeddingBagConfig
from distembed.optim.config import SparseOptimizerConfig
from distembed.sharding.groups.fused import FusedGroup
from distembed.sharding.lookup import sharded_lookups
from tests.gpu.models import Head, draw, mean_square, require_equal_steps, shard, tables

STEPS, ROWS = 3, 300
SHARDINGS = ("table_wise", "column_wise", "row_wise", "data_parallel")
OPTIMIZERS = ("adagrad", "row_wise_adagrad")

pytestmark = pytest.mark.gpu


def in_one_pass(composition: str) -> list[CompositionalEmbeddingBagConfig]:
    """The tables, of which those that can be are looked up in one pass."""
    return [
        own
        if any(digit is None or digit.keys or digit.last_row for digit in own.scheme.digits() or [None])
        or own.combine.columns(own.embedding_dim, len(own.scheme.num_rows)) is None
        else replace(own, kernel="fused")
        for own in tables(composition)
    ]


@pytest.mark.parametrize("sharding_type", SHARDINGS)
@pytest.mark.parametrize("composition", ["product", "sum", "concat"])
def test_one_pass_computes_what_the_unsharded_module_does(composition: str, sharding_type: str, ranks: Ranks) -> None:
    model = require_equal_steps(in_one_pass(composition), composition, sharding_type, ranks, ROWS)
    groups = [own for lookup in sharded_lookups(model) for own in lookup._groups]
    assert any(isinstance(own, FusedGroup) for own in groups)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_pass_updates_as_fbgemm_does(name: str, ranks: Ranks) -> None:
    sparse = SparseOptimizerConfig(name=name, learning_rate=0.1)  # type: ignore[arg-type]
    both = [
        shard(Head(own, "meta", ranks.device), ranks, sparse=sparse)
        for own in (in_one_pass("product"), [replace(own, kernel="fbgemm") for own in tables("product")])
    ]
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        batch = draw(ROWS, "ragged", generator)
        found, expected = (own.step(number, batch, mean_square) for own in both)
        for one, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)


def test_two_runs_on_a_card_give_the_same_bits(ranks: Ranks) -> None:
    both = [shard(Head(in_one_pass("product"), "meta", ranks.device), ranks) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    batches = [draw(ROWS, "ragged", generator) for _ in range(STEPS)]
    for number, batch in enumerate(batches):
        for one, other in zip(*(own.step(number, batch, mean_square) for own in both), strict=True):
            assert torch.equal(one, other)
