"""Multi-hash: k keyed hashes that are independent of each other, of the tables, and of the number of ids."""

import hashlib
import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding import CompositionalEmbeddingConfig, EmbeddingConfig, TableConfig, build_tables
from distembed.partitions import MultiHash
from distembed.partitions.hashing import rows_by_keys
from tests.embedding.test_settings import read
from tests.partitions.test_hashing import chi_square, splitmix64

INT64 = st.integers(-(2**63), 2**63 - 1)


def row_of(value: int, key: str, position: int, modulus: int) -> int:
    """The row of a value, on Python's integers: a hash of 63 bits, drawn again in the last, incomplete run."""
    digest = hashlib.blake2b(f"{key}/{position}".encode(), digest_size=8, person=b"multi_hash").digest()
    seed = int.from_bytes(digest, "little") >> 1
    keys = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=16).digest()
    before, after = (int.from_bytes(half, "little") for half in (keys[:8], keys[8:]))
    state = splitmix64((splitmix64((value % 2**64) ^ before) + after) % 2**64)
    while state >> 1 >= 2**63 - 2**63 % modulus:
        state = splitmix64(state)
    return (state >> 1) % modulus


@settings(max_examples=60)
@given(
    values=st.lists(INT64, min_size=1, max_size=10),
    moduli=st.lists(st.sampled_from([1, 2, 7, 1000, 2**20, 2**31, 10**12, 3 * 2**61]), min_size=2, max_size=4),
    key=st.text(max_size=5),
)
def test_rows_of_any_64_bit_value_agree_with_python_integers(values: list[int], moduli: list[int], key: str) -> None:
    partition = MultiHash(2**63 - 1, moduli=moduli, hash_key=key)
    rows = partition.rows(torch.tensor(values))
    assert rows.tolist() == [[row_of(v, key, j, m) for v in values] for j, m in enumerate(moduli)]


@settings(max_examples=40)
@given(
    values=st.lists(INT64, min_size=1, max_size=10),
    moduli=st.lists(st.tuples(st.integers(1, 2**31), st.integers(1, 2**31)), min_size=1, max_size=3),
)
def test_tables_at_once_give_each_tables_rows(values: list[int], moduli: list[tuple[int, int]]) -> None:
    tables = [MultiHash(10**9, moduli=own, hash_key=str(i)) for i, own in enumerate(moduli)]
    assert MultiHash.constants(tables) is not None
    ids = torch.tensor(values).expand(len(tables), -1)
    rows = MultiHash.rows_of_tables(tables, ids)
    for i, table in enumerate(tables):
        assert torch.equal(rows[:, i], table.rows(ids[i]))


def value_that_is_hashed_again() -> tuple[int, int]:
    """A value and a modulus near 2^31, whose first hash by keys of 0 lies in the last, incomplete run: one in 2^32."""
    modulus = next(m for m in range(2**31, 1, -1) if 2**63 % m > m // 2)
    state = 2**64 - 1  # the last of all
    for _ in range(2):  # the inverse of SplitMix64's output function
        for shift, multiplier in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, None)):
            part = state
            for _ in range(3):
                part = state ^ (part >> shift)
            state = part if multiplier is None else part * pow(multiplier, -1, 2**64) % 2**64
        state = (state - 0x9E3779B97F4A7C15) % 2**64
    assert splitmix64(splitmix64(state)) == 2**64 - 1
    return state - 2**64 if state >= 2**63 else state, modulus


def test_the_second_hash_of_tables_at_once_is_that_of_one_table() -> None:
    value, modulus = value_that_is_hashed_again()
    zero = torch.tensor([[0]])
    row = rows_by_keys(torch.tensor([value]), zero, zero, torch.tensor([[modulus]]))
    assert row.tolist() == [[(splitmix64(2**64 - 1) >> 1) % modulus]]


def test_hashes_and_tables_are_independent() -> None:
    ids = torch.arange(100_000)
    rows = [*MultiHash(10**9, moduli=[10, 10, 10], hash_key="C1").rows(ids)]
    rows += [*MultiHash(10**9, moduli=[10, 10], hash_key="C2").rows(ids)]
    for first, second in itertools.combinations(rows, 2):
        assert chi_square(torch.bincount(first * 10 + second, minlength=100).double()) < 99 + 5 * 14


@pytest.mark.parametrize(("n", "moduli"), [(2000, [300, 300]), (9000, [7000, 7000]), (8000, [100, 90, 80])])
def test_as_many_pairs_collide_as_are_expected(n: int, moduli: list[int]) -> None:
    found, partition = 0, MultiHash(n, moduli=moduli)
    num_keys = 10
    for key in range(num_keys):
        rows = MultiHash(n, moduli=moduli, hash_key=str(key)).rows(torch.arange(n))
        counts = Counter(zip(*rows.tolist(), strict=True)).values()
        found += sum(count * (count - 1) // 2 for count in counts)
    assert partition.expected_colliding_pairs == pytest.approx(n * (n - 1) / 2 / math.prod(moduli))
    expected = num_keys * partition.expected_colliding_pairs
    assert abs(found - expected) < 5 * expected**0.5 + 1  # Poisson


def test_complementarity_is_claimed_only_where_all_ids_were_compared() -> None:
    few, many = MultiHash(1000, num_buckets=10**6), MultiHash(2**14 + 1, num_buckets=2**60)
    assert few.is_complementary() and few.ids_per_row == 1.0 and "not complementary" not in few.description
    assert not many.is_complementary() and many.colliding_ids() is None and many.ids_per_row == pytest.approx(1.0)
    assert "about 1.01e-28 pairs of ids share all rows (not complementary)" in many.description
    with pytest.raises(UserError, match="no inverse.*ids, some may have the same rows"):
        many.inverse(torch.zeros(2, 1, dtype=torch.int64))
    crowded = MultiHash(10**9, num_buckets=1000)
    pair = crowded.colliding_ids()
    assert pair is not None and crowded.ids_per_row == pytest.approx(1000)
    assert torch.equal(*crowded.rows(torch.tensor(pair)).unbind(1))


@pytest.mark.parametrize("n", [10, 1000])
def test_the_expected_ids_per_row_are_those_counted(n: int) -> None:
    # far above the ids that are counted, the formula speaks: it must continue what is counted below
    partition = MultiHash(16_384, moduli=[n, 7])
    assert partition.ids_per_row == pytest.approx(MultiHash(16_385, moduli=[n, 7]).ids_per_row, rel=0.01)


FEATURES = [CategoricalFeature("C1", 10_000), CategoricalFeature("C2", 10_000)]


def built(**settings: object) -> list[MultiHash]:
    default = TableConfig(partition="multi_hash", **settings)  # type: ignore[arg-type]
    schemes = [table.scheme for table in build_tables(FEATURES, EmbeddingConfig(default))]
    assert all(isinstance(scheme, MultiHash) for scheme in schemes)
    return schemes  # type: ignore[return-value]


def test_a_config_gives_each_table_its_own_seeds_and_sizes() -> None:
    first, second = built(collisions=10)
    assert first.num_rows == second.num_rows == (1000, 1000)
    assert first.hash_key == "C1" and first.hashes != second.hashes and first != second
    assert "keyed by 'C1'" in first.description
    same = built(num_buckets=1000, hash_key="user")
    assert same[0].hashes == same[1].hashes == MultiHash(5, hash_key="user").hashes
    assert built(num_partitions=3, num_buckets=50)[0].num_rows == (50, 50, 50)
    assert built(moduli=[50, 2000])[0].num_rows == (50, 2000)
    table = CompositionalEmbeddingConfig("C1", 10_000, 8, ["f"], "multi_hash")
    assert isinstance(table.scheme, MultiHash) and table.scheme.hashes == first.hashes


def test_an_exceptions_moduli_replace_the_defaults_collisions() -> None:
    config = read("{default: {partition: multi_hash, collisions: 4}, tables: {C2: {moduli: [30, 20]}}}")
    tables = build_tables(FEATURES, config)
    assert [table.scheme.num_rows for table in tables] == [(2500, 2500), (30, 20)]


def test_sizes_given_twice_are_refused_by_value() -> None:
    with pytest.raises(UserError, match=r"multi_hash was given collisions=4 and moduli=\[5, 6\]; give one of them"):
        MultiHash(100, collisions=4, moduli=[5, 6])
    with pytest.raises(UserError, match="num_buckets is 0"):
        MultiHash(100, num_buckets=0)
    with pytest.raises(UserError, match="num_partitions is 1"):
        MultiHash(100, num_partitions=1)
