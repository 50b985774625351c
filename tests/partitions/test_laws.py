"""Laws of every partition scheme, against Python's integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distembed.errors import UserError
from distembed.partitions import PARTITIONS, Partition, QuotientRemainder, Remainder

SIZES = [1, 2, 3, 4, 5, 97, 1024, 2**24 + 1, 40_000_000, 2**31 + 5, 10**12, 2**62]
SETTINGS: dict[str, list[dict[str, int]]] = {
    "naive": [{}],
    "remainder": [{}, {"collisions": 4}, {"num_buckets": 7}],
    "quotient_remainder": [{}, {"collisions": 4}, {"collisions": 60}, {"num_buckets": 10}],
}


def build(name: str, n: int, settings: dict[str, int]) -> Partition:
    return PARTITIONS[name](n, **settings)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", PARTITIONS)
@given(data=st.data())
def test_rows_lie_in_their_tables_and_distinct_ids_stay_distinct(name: str, n: int, data: st.DataObject) -> None:
    partition = build(name, n, data.draw(st.sampled_from(SETTINGS.get(name, [{}]))))
    drawn = data.draw(st.lists(st.integers(0, n - 1), max_size=20)) + [0, n - 1]
    rows = partition.rows(torch.tensor(drawn))
    assert rows.shape == (len(partition.num_rows), len(drawn))
    for row, num_rows in zip(rows.tolist(), partition.num_rows, strict=True):
        assert all(0 <= r < num_rows for r in row)
    tuples = {tuple(column) for column in rows.t().tolist()}
    if partition.is_complementary():
        assert len(tuples) == len(set(drawn))


@given(n=st.integers(1, 400), collisions=st.integers(1, 70))
@pytest.mark.parametrize("name", ["remainder", "quotient_remainder"])
def test_the_claim_of_complementarity_is_true_of_all_ids(name: str, n: int, collisions: int) -> None:
    partition = build(name, n, {"collisions": collisions})
    tuples = {tuple(column) for column in partition.rows(torch.arange(n)).t().tolist()}
    assert partition.is_complementary() == (len(tuples) == n)


@pytest.mark.parametrize("n", [40_000_000, 10**12])
def test_quotient_remainder_agrees_with_python_integers(n: int) -> None:
    partition = QuotientRemainder(n, collisions=4)
    ids = torch.randint(0, n, (100_000,), generator=torch.Generator().manual_seed(0))
    modulus = -(-n // 4)
    remainders, quotients = partition.rows(ids).tolist()
    assert remainders == [i % modulus for i in ids.tolist()]
    assert quotients == [i // modulus for i in ids.tolist()]


def test_the_id_that_float32_gets_wrong() -> None:
    # float32 rounds 16,777,219 / 4 up to the next quotient
    partition = QuotientRemainder(4 * 16_777_219, num_buckets=4)
    assert partition.rows(torch.tensor([16_777_219])).flatten().tolist() == [3, 4_194_304]


def test_sizes_by_collisions_are_the_papers() -> None:
    assert QuotientRemainder(10_131_227, collisions=4).num_rows == (2_532_807, 4)
    assert QuotientRemainder(3, collisions=4).num_rows == (1, 4)
    assert QuotientRemainder(100).num_rows == (10, 10)
    assert Remainder(10_131_227, collisions=4).num_rows == (2_532_807,)


@pytest.mark.parametrize("name", PARTITIONS)
def test_many_tables_at_once_give_the_same_rows(name: str) -> None:
    partitions = [build(name, n, {}) for n in (10, 1000, 10**12)]
    ids = torch.stack([torch.randint(0, p.num_embeddings, (50,)) for p in partitions])
    together = PARTITIONS[name].rows_of_tables(partitions, ids)
    for table, partition in enumerate(partitions):
        assert torch.equal(together[:, table], partition.rows(ids[table]))


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_rows_keep_the_shape_of_the_ids(name: str, shape: tuple[int, ...]) -> None:
    partition = build(name, 100, {})
    assert partition.rows(torch.zeros(shape, dtype=torch.long)).shape == (len(partition.num_rows), *shape)


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
