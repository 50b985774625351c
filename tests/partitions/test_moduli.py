"""Moduli of mixed radix and Chinese remainder: the smallest sums, and what is said of moduli that do not do."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.partitions import ChineseRemainder, MixedRadix

LARGE = [40_000_000, 2**31 + 5, 10**12, 2**62, 2**63 - 1]


def smallest_sums(num_partitions: int, coprime: bool, limit: int) -> list[int]:
    """By trying all: the smallest sum of k moduli whose product reaches n, for each n up to a limit."""
    highest = limit if num_partitions == 2 else 40
    best = [num_partitions * limit] * (limit + 1)
    for moduli in itertools.combinations_with_replacement(range(1, highest + 1), num_partitions):
        if coprime and any(math.gcd(a, b) > 1 for a, b in itertools.combinations(moduli, 2)):
            continue
        product = min(math.prod(moduli), limit)
        best[product] = min(best[product], sum(moduli))
    for n in range(limit - 1, 0, -1):
        best[n] = min(best[n], best[n + 1])
    return best


@pytest.mark.parametrize("num_partitions, limit", [(2, 300), (3, 1000), (4, 1500)])
def test_balanced_moduli_have_the_smallest_sum(num_partitions: int, limit: int) -> None:
    best = smallest_sums(num_partitions, False, limit)
    for n in range(1, limit + 1):
        assert MixedRadix(n, num_partitions=num_partitions).total_rows == best[n]


@pytest.mark.parametrize("num_partitions, limit", [(2, 300), (3, 1000), (4, 1500)])
def test_coprime_moduli_have_the_smallest_sum(num_partitions: int, limit: int) -> None:
    best = smallest_sums(num_partitions, True, limit)
    for n in range(1, limit + 1):
        assert ChineseRemainder(n, num_partitions=num_partitions).total_rows == best[n]


@pytest.mark.parametrize("n", LARGE)
@pytest.mark.parametrize("num_partitions", [2, 3, 5, 8, 10, 20, 63])
def test_balanced_moduli_reach_large_n_and_none_can_be_spared(n: int, num_partitions: int) -> None:
    moduli = MixedRadix(n, num_partitions=num_partitions).num_rows
    assert len(moduli) == num_partitions and math.prod(moduli) >= n
    # the most that one row fewer could tell apart: the largest product of k numbers with that sum
    share, rest = divmod(sum(moduli) - 1, num_partitions)
    assert (share + 1) ** rest * share ** (num_partitions - rest) < n


@pytest.mark.parametrize("n", LARGE)
@pytest.mark.parametrize("num_partitions", [2, 3, 5, 8, 10])
def test_coprime_moduli_reach_large_n(n: int, num_partitions: int) -> None:
    moduli = ChineseRemainder(n, num_partitions=num_partitions).num_rows
    assert len(moduli) == num_partitions and math.prod(moduli) >= n
    assert all(math.gcd(a, b) == 1 for a, b in itertools.combinations(moduli, 2))
    assert sum(moduli) >= MixedRadix(n, num_partitions=num_partitions).total_rows


def test_more_partitions_than_an_id_has_bits_have_one_row() -> None:
    assert MixedRadix(1).num_rows == (1, 1)
    assert sorted(MixedRadix(5, num_partitions=6).num_rows) == [1, 1, 1, 2, 2, 2]
    assert sorted(ChineseRemainder(6, num_partitions=30).num_rows) == [1] * 28 + [2, 3]


def test_a_partition_has_no_rows_that_no_id_has() -> None:
    assert MixedRadix(95, moduli=[10, 50, 7]).num_rows == (10, 10, 1)


@settings(max_examples=60)
@given(n=st.integers(1, 300), moduli=st.lists(st.integers(1, 30), min_size=2, max_size=4))
@pytest.mark.parametrize("scheme", [MixedRadix, ChineseRemainder])
def test_moduli_are_refused_exactly_where_they_do_not_do(
    scheme: type[MixedRadix] | type[ChineseRemainder], n: int, moduli: list[int]
) -> None:
    def row(x: int, j: int) -> int:
        return x % moduli[j] if scheme is ChineseRemainder else x // math.prod(moduli[:j]) % moduli[j]

    tuples = [tuple(row(x, j) for j in range(len(moduli))) for x in range(n)]
    coprime = all(math.gcd(a, b) == 1 for a, b in itertools.combinations(moduli, 2))
    if len(set(tuples)) == n and (coprime or scheme is MixedRadix):
        partition = scheme(n, moduli=moduli)
        assert list(zip(*partition.rows(torch.arange(n)).tolist(), strict=True)) == tuples
        return
    with pytest.raises(UserError) as error:
        scheme(n, moduli=moduli)
    message = str(error.value)
    named = re.search(r"ids (\d+) and (\d+) have the same rows", message)
    if named:
        first, second = int(named[1]), int(named[2])
        assert first < second < n and tuples[first] == tuples[second]
    else:
        assert len(set(tuples)) == n
    suggested = re.search(r"(\[[\d, ]+\]) do\.", message)
    assert suggested
    scheme(n, moduli=[int(m) for m in suggested[1][1:-1].split(", ")])


def test_the_error_names_what_is_wrong_and_what_would_do() -> None:
    with pytest.raises(UserError, match=r"product 90, below num_embeddings=100, so ids 0 and 90 .*: \[10, 10\] do"):
        MixedRadix(100, moduli=[9, 10])
    with pytest.raises(UserError, match=r"4 and 6 share the factor 2, so ids 0 and 12 .*: \[4, 7\] do"):
        ChineseRemainder(20, moduli=[4, 6])
    with pytest.raises(
        UserError, match=r"product 90, below num_embeddings=100, so ids 0 and 90 .*: \[9, 13\]|\[11, 10\]"
    ):
        ChineseRemainder(100, moduli=[9, 10])


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"num_partitions": 1}, "num_partitions is 1"),
        ({"num_partitions": 64}, "num_partitions is 64"),
        ({"num_partitions": 2.0}, "num_partitions is 2.0"),
        ({"num_partitions": 3, "moduli": [10, 11]}, "num_partitions=3 and 2 moduli"),
        ({"moduli": [100]}, "moduli holds 1 numbers"),
        ({"moduli": "10, 11"}, "moduli is '10, 11'"),
        ({"moduli": 10}, "moduli is 10"),
        ({"moduli": [10, 0]}, r"moduli\[1\] is 0"),
        ({"moduli": [10, 2.5]}, r"moduli\[1\] is 2.5"),
    ],
)
@pytest.mark.parametrize("scheme", [MixedRadix, ChineseRemainder])
def test_impossible_settings_are_refused_by_value(
    scheme: type[MixedRadix] | type[ChineseRemainder], choice: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        scheme(100, **choice)  # type: ignore[arg-type]


def test_as_many_moduli_as_partitions_are_taken() -> None:
    assert MixedRadix(100, num_partitions=2, moduli=[10, 10]).num_rows == (10, 10)


@pytest.mark.parametrize("moduli", [[2**62 - 1, 4], [2**61 - 1, 2**31 - 1], [3, 5, 2**60 + 1], [2**63 - 1, 2]])
def test_the_chinese_inverse_is_exact_where_products_pass_int64(moduli: list[int]) -> None:
    n = 2**63 - 1
    partition = ChineseRemainder(n, moduli=moduli)
    ids = torch.randint(0, n, (1000,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(partition.inverse(partition.rows(ids)), ids)
