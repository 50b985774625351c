"""Ids of either dtype on ranks of which one alone has some outside of the tables: the unsharded module's numbers."""

import pytest
import torch

from tests.ranks import run_cases
from tests.sharding.id_cases import RUNS, WORLD_SIZE, draw_case, train_sharded, train_unsharded
from tests.sharding.test_sharded_equals_unsharded import check_weights

SAMPLE = 14


def check_case(rank: int, world_size: int, number: int) -> None:
    """Requires outputs and trained weights of the unsharded module; to the bit the same of int32 ids or mixed ones."""
    case = draw_case(number)
    expected, reference = train_unsharded(case, RUNS[0])
    first = None
    for dtypes in (RUNS[0], RUNS[1 + number // 2 % 2]):
        steps, model = train_sharded(case, dtypes, rank)
        for own, by_rank in zip(steps, expected, strict=True):
            torch.testing.assert_close(own, by_rank[rank])
        check_weights(model, reference)
        local = [
            shard.tensor for value in model.state_dict().values() for shard in getattr(value, "local_shards", list)()
        ]
        if first is None:
            first = steps, local
        for one, other in zip((first[0], first[1]), (steps, local), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_sample_of_drawn_cases_equals_the_unsharded_module_in_either_dtype() -> None:
    run_cases(WORLD_SIZE, check_case, range(SAMPLE))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.distributed
def test_drawn_cases_equal_the_unsharded_module_in_either_dtype(pytestconfig: pytest.Config) -> None:
    run_cases(WORLD_SIZE, check_case, range(SAMPLE, SAMPLE + pytestconfig.getoption("cases")))
