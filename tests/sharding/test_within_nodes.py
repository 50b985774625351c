"""Tables that are divided over two levels, on four gloo ranks as two nodes of two, against the unsharded module."""

import itertools
import os

import pytest

from tests.ranks import run_on_ranks
from tests.sharding.test_sharded_equals_unsharded import OPTIMIZERS, check_all_equal

RANKS_PER_NODE = 2
SHARDING_TYPES = ("table_row_wise", "grid_shard")
ALL = list(itertools.product(SHARDING_TYPES, OPTIMIZERS, ["single", "ragged", "weighted"]))


def check_on_two_nodes(rank: int, world_size: int, cases: list[tuple[str, str, str]]) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_PER_NODE)
    check_all_equal(rank, world_size, cases)


@pytest.mark.distributed
@pytest.mark.parametrize("cases", [ALL[1::7], pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_two_nodes_together_equal_one_module(cases: list[tuple[str, str, str]]) -> None:
    run_on_ranks(4, check_on_two_nodes, cases)
