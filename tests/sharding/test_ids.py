"""Ids of either dtype on ranks of which one alone has some outside of the tables: the unsharded module's numbers."""

import pytest
import torch

from tests.ranks import run_on_ranks
from tests.sharding.id_cases import RUNS, WORLD_SIZE, draw_case, train_sharded, train_unsharded
from tests.sharding.test_sharded_equals_unsharded import check_weights

SAMPLE = 14


def check_case(rank: int, number: int) -> None:
    """Sharded as unsharded, in outputs and trained weights; and to the bit the same whatever the ids' dtypes."""
    case = draw_case(number)
    expected, reference = train_unsharded(case, RUNS[0])
    first = None
    for dtypes in RUNS:
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


def check_cases(rank: int, world_size: int, numbers: range) -> None:
    for number in numbers:
        try:
            check_case(rank, number)
        except BaseException as error:
            raise AssertionError(f"case {number} on rank {rank} ({draw_case(number)}): {error}") from error


@pytest.mark.distributed
def test_a_sample_of_drawn_cases_equals_the_unsharded_module_in_either_dtype() -> None:
    run_on_ranks(WORLD_SIZE, check_cases, range(SAMPLE))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.distributed
def test_drawn_cases_equal_the_unsharded_module_in_either_dtype(pytestconfig: pytest.Config) -> None:
    run_on_ranks(WORLD_SIZE, check_cases, range(SAMPLE, SAMPLE + pytestconfig.getoption("cases")))
