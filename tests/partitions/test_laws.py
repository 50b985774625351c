"""Laws of every partition scheme, against Python's integers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.partitions import (
    PARTITIONS,
    ChineseRemainder,
    Explicit,
    MixedRadix,
    Naive,
    Partition,
    QuotientRemainder,
    Remainder,
)
from distembed.partitions.settings import setting_names

SIZES = [1, 2, 3, 4, 5, 97, 1024, 2**24 + 1, 40_000_000, 2**31 + 5, 10**12, 2**62, 2**63 - 1]
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "naive": [{}],
    "remainder": [{}, {"collisions": 4}, {"num_buckets": 7}, {"num_buckets": 2**63 - 1}],
    "quotient_remainder": [{}, {"collisions": 4}, {"collisions": 60}, {"num_buckets": 10}],
    "mixed_radix": [{}, {"num_partitions": 3}, {"num_partitions": 10}, {"moduli": [7, 2**60, 9]}],
    "chinese_remainder": [{}, {"num_partitions": 3}, {"num_partitions": 7}, {"moduli": [8, 2**61 - 1, 11]}],
    "explicit": [{}],
    "multi_hash": [{}, {"collisions": 4}, {"num_buckets": 7}, {"num_partitions": 3}, {"moduli": [7, 2**60, 9]}],
    "clustered": [{}, {"collisions": 4}, {"num_buckets": 7}, {"num_partitions": 3}, {"moduli": [7, 2**31, 9, 5]}],
    "truncated": [{}, {"bounds": [2, 1]}, {"bounds": [2**62]}, {"bounds": [1000, 2**63 - 1, 7]}],
}
UNPROVED = ("remainder", "multi_hash", "clustered", "truncated")
"""Schemes that are not complementary in general."""
STORED = ("explicit", "clustered")
STORED_SIZE = 10**5
"""Stored schemes have numbers for each id; above this size they are left out."""


def build(name: str, n: int, settings: dict[str, Any]) -> Partition:
    if name != "explicit":
        return PARTITIONS[name](n, **settings)
    # ids in a random order, numbered by two digits, and a third assignment at random
    rng = np.random.default_rng(n)
    side = int(np.ceil(np.sqrt(n)))
    order = rng.permutation(n)
    return Explicit(n, assignments=[order % side, order // side, rng.integers(0, 3, n)])


def draw_partition(name: str, n: int, data: st.DataObject) -> Partition:
    if name in STORED and n > STORED_SIZE:
        pytest.skip("stored schemes store every id")
    return build(name, n, data.draw(st.sampled_from(SETTINGS[name])))


def tuples_of(rows: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(column) for column in rows.flatten(1).t().tolist()]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=8)
@given(data=st.data())
def test_rows_are_digits_in_their_tables_and_the_inverse_finds_every_id(name: str, n: int, data: st.DataObject) -> None:
    partition = draw_partition(name, n, data)
    drawn = data.draw(st.lists(st.integers(0, n - 1), max_size=20)) + [0, n - 1]
    ids = torch.tensor(drawn)
    rows, digits = partition.rows(ids), partition.digits()
    assert rows.shape == (len(partition.num_rows), len(drawn)) and rows.dtype == torch.int64
    for row, num_rows in zip(rows.tolist(), partition.num_rows, strict=True):
        assert all(0 <= r < num_rows for r in row)
    if name == "multi_hash":  # in tests/partitions/test_multi_hash.py
        assert (digits is None) == (max(partition.num_rows) > 2**31)
    elif digits is not None:
        by_digits = [
            [min(x // d if m is None else x // d % m, n if last is None else last) for x in drawn]
            for d, m, _, last in digits
        ]
        assert rows.tolist() == by_digits
    assert (digits is None) == (name in STORED) or name == "multi_hash"  # stored rows are no digits
    if name == "remainder":
        assert partition.is_complementary() == (partition.num_rows[0] >= n)
    assert partition.is_complementary() or name in UNPROVED
    if partition.is_complementary():
        assert len(set(tuples_of(rows))) == len(set(drawn))
        assert torch.equal(partition.inverse(rows), ids)
    else:
        with pytest.raises(UserError, match="no inverse"):
            partition.inverse(rows)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=8)
@given(data=st.data())
def test_the_inverse_of_rows_is_an_id_that_has_them_or_none(name: str, n: int, data: st.DataObject) -> None:
    partition = draw_partition(name, n, data)
    if not partition.is_complementary():
        return
    # also rows that no table has
    rows = torch.tensor([data.draw(st.integers(-1, m)) for m in partition.num_rows[:-1]] + [partition.num_rows[-1] - 1])
    rows = torch.stack([rows, torch.tensor(partition.num_rows).clamp(max=2**63 - 1)], dim=1)
    first, outside = partition.inverse(rows).tolist()
    assert outside == -1
    if first != -1:
        assert 0 <= first < n and torch.equal(partition.rows(torch.tensor([first])), rows[:, :1])


@pytest.mark.parametrize("n", [1, 2, 3, 6, 13, 60])
@pytest.mark.parametrize("name", PARTITIONS)
def test_the_inverse_of_every_tuple_of_rows(name: str, n: int) -> None:
    for choice in SETTINGS[name]:
        partition = build(name, n, choice)
        if not partition.is_complementary() or any(m > 1000 for m in partition.num_rows):
            continue
        ids_by_rows = {t: x for x, t in enumerate(tuples_of(partition.rows(torch.arange(n))))}
        every = torch.cartesian_prod(*[torch.arange(m) for m in partition.num_rows]).view(-1, len(partition.num_rows))
        assert partition.inverse(every.t()).tolist() == [ids_by_rows.get(tuple(t), -1) for t in every.tolist()]


@given(n=st.integers(1, 400), data=st.data())
@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=25)
def test_the_claim_of_complementarity_is_true_of_all_ids(name: str, n: int, data: st.DataObject) -> None:
    choices = SETTINGS[name]
    if "collisions" in setting_names(PARTITIONS[name].settings):
        choices = choices + [{"collisions": c} for c in (1, 2, 70)]
    partition = build(name, n, data.draw(st.sampled_from(choices)))
    tuples = tuples_of(partition.rows(torch.arange(n)))
    assert partition.is_complementary() == (len(set(tuples)) == n)
    assert partition.ids_per_row == pytest.approx(n / len(set(tuples)))
    pair = partition.colliding_ids()
    if pair is not None:
        assert pair[0] != pair[1] and tuples[pair[0]] == tuples[pair[1]]


def digit(place: int, moduli: tuple[int, ...]) -> Callable[[int], int]:
    below = 1
    for modulus in moduli[:place]:
        below *= modulus
    return lambda x: x // below % moduli[place]


@pytest.mark.parametrize("n", [40_000_000, 10**12])
@pytest.mark.parametrize(
    "name, choice",
    [
        ("naive", {}),
        ("remainder", {"collisions": 4}),
        ("quotient_remainder", {"collisions": 4}),
        ("quotient_remainder", {}),
        ("mixed_radix", {"num_partitions": 3}),
        ("chinese_remainder", {"num_partitions": 3}),
    ],
)
def test_many_ids_agree_with_python_integers(name: str, choice: dict[str, int], n: int) -> None:
    partition = build(name, n, choice)
    m = partition.num_rows
    equations: list[Callable[[int], int]] = {
        "naive": [lambda x: x],
        "remainder": [lambda x: x % m[0]],
        "quotient_remainder": [lambda x: x % m[0], lambda x: x // m[0]],
        "mixed_radix": [digit(j, m) for j in range(len(m))],
        "chinese_remainder": [lambda x, j=j: x % m[j] for j in range(len(m))],
    }[name]
    ids = torch.randint(0, n, (50_000,), generator=torch.Generator().manual_seed(0))
    values = ids.tolist()
    rows = partition.rows(ids)
    for row, equation in zip(rows, equations, strict=True):
        assert row.tolist() == [equation(x) for x in values]
    if partition.is_complementary():
        assert torch.equal(partition.inverse(rows), ids)


def test_the_id_that_float32_gets_wrong() -> None:
    # float32 rounds 16,777,219 / 4 up to the next quotient
    partition = QuotientRemainder(4 * 16_777_219, num_buckets=4)
    assert partition.rows(torch.tensor([16_777_219])).flatten().tolist() == [3, 4_194_304]
    assert MixedRadix(4 * 16_777_219, moduli=[4, 16_777_219]).rows(torch.tensor([16_777_219])).flatten().tolist() == [
        3,
        4_194_304,
    ]


def test_sizes_by_collisions_are_the_papers() -> None:
    assert QuotientRemainder(10_131_227, collisions=4).num_rows == (2_532_807, 4)
    assert QuotientRemainder(3, collisions=4).num_rows == (1, 4)
    assert QuotientRemainder(100).num_rows == (10, 10)
    assert Remainder(10_131_227, collisions=4).num_rows == (2_532_807,)


def test_distinct_ids_keep_distinct_embeddings_under_concatenation() -> None:
    # theorem 1 of the paper
    for name in PARTITIONS:
        partition = build(name, 500, {})
        tables = [torch.randn(m, 2, generator=torch.Generator().manual_seed(m)) for m in partition.num_rows]
        rows = partition.rows(torch.arange(500))
        vectors = torch.cat([table[row] for table, row in zip(tables, rows, strict=True)], dim=1)
        assert (len(vectors.unique(dim=0)) == 500) == partition.is_complementary()


@pytest.mark.parametrize(
    "partition, description",
    [
        (Naive(100), "p_1(x) = x"),
        (Remainder(100), "p_1(x) = x mod 25, about 4.0 ids a row (not complementary)"),
        (Remainder(100, num_buckets=100), "p_1(x) = x mod 100"),
        (QuotientRemainder(100, collisions=4), r"p_1(x) = x mod 25, p_2(x) = x \ 25"),
        (MixedRadix(990, moduli=[11, 10, 9]), r"p_1(x) = x mod 11, p_2(x) = (x \ 11) mod 10, p_3(x) = (x \ 110) mod 9"),
        (ChineseRemainder(100, moduli=[10, 11]), "p_1(x) = x mod 10, p_2(x) = x mod 11"),
        (
            PARTITIONS["truncated"](100, bounds=[50, 3]),
            "p_1(x) = min(x, 50), p_2(x) = min(x, 3), ids from 50 on share all rows (not complementary)",
        ),
        (PARTITIONS["truncated"](100, bounds=[7, 99]), "p_1(x) = min(x, 7), p_2(x) = min(x, 99)"),
        (Explicit(2, [[0, 1], [0, 2]]), "p_1(x) = a_1[x] of 2 rows, p_2(x) = a_2[x] of 3 rows"),
        (
            Explicit(3, [[0, 1, 1]], allow_collisions=True),
            "p_1(x) = a_1[x] of 2 rows, about 1.5 ids a row (not complementary)",
        ),
    ],
)
def test_a_scheme_describes_itself_in_the_papers_equation(partition: Partition, description: str) -> None:
    assert partition.description == description


@pytest.mark.parametrize("name", PARTITIONS)
def test_many_tables_at_once_give_the_same_rows(name: str) -> None:
    sizes = (10, 1000, STORED_SIZE if name in STORED else 10**12)
    partitions = [build(name, n, {}) for n in sizes]
    ids = torch.stack([torch.randint(0, p.num_embeddings, (50,)) for p in partitions])
    batched = PARTITIONS[name].rows_of_tables(partitions, ids)
    for table, partition in enumerate(partitions):
        assert torch.equal(batched[:, table], partition.rows(ids[table]))


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_rows_keep_the_shape_of_the_ids(name: str, shape: tuple[int, ...]) -> None:
    large = {"bounds": [10**6]} if name == "truncated" else {"num_buckets": 10**6}
    partition = build(name, 100, large if name in UNPROVED else {})
    rows = partition.rows(torch.zeros(shape, dtype=torch.long))
    assert rows.shape == (len(partition.num_rows), *shape)
    assert partition.inverse(rows).shape == shape


@pytest.mark.gpu
@pytest.mark.parametrize("name", PARTITIONS)
def test_a_gpu_gives_the_same_rows(name: str) -> None:
    for n in (1000, STORED_SIZE) if name in STORED else (1000, 10**12, 2**63 - 1):
        partition = build(name, n, {})
        ids = torch.randint(0, n, (10_000,))
        rows = partition.rows(ids.cuda())
        assert rows.is_cuda and torch.equal(rows.cpu(), partition.rows(ids))
        if partition.is_complementary():
            assert torch.equal(partition.inverse(rows).cpu(), ids)


@pytest.mark.parametrize("name", PARTITIONS)
def test_the_settings_are_the_constructors_keywords(name: str) -> None:
    for choice in SETTINGS[name]:
        assert set(choice) <= set(setting_names(PARTITIONS[name].settings))


@pytest.mark.parametrize("wrong", [0, -1, 2**63, 1.5, "7", True, None])
@pytest.mark.parametrize("name", PARTITIONS)
def test_impossible_sizes_are_refused_by_value(name: str, wrong: object) -> None:
    with pytest.raises(UserError, match="num_embeddings"):
        PARTITIONS[name](wrong)


def test_two_ways_of_sizing_at_once_are_refused() -> None:
    with pytest.raises(UserError, match="collisions=4 and num_buckets=3"):
        QuotientRemainder(100, collisions=4, num_buckets=3)
    with pytest.raises(UserError, match="collisions is 0"):
        Remainder(100, collisions=0)
