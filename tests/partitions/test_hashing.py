"""The keyed pre-hash: uniform, seeded, and the same for every shape."""

import hashlib
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.partitions import KeyedHash, hash_strings
from distembed.partitions.hashing import mix64

SIZES = [1, 2, 3, 1000, 2**24 + 1, 10**12, 2**62, 2**62 + 1, 3 * 2**61, 2**63 - 1]
INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix64(value: int) -> int:
    """The published function, on Python's integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@given(st.lists(INT64, max_size=20))
def test_the_mixing_is_splitmix64(values: list[int]) -> None:
    mixed = mix64(torch.tensor(values, dtype=torch.int64))
    assert [m % 2**64 for m in mixed.tolist()] == [splitmix64(v) for v in values]


def test_the_first_numbers_of_splitmix64() -> None:
    # of the published generator, seeded with 1234567
    state, gamma = 1234567, 0x9E3779B97F4A7C15
    numbers = [
        int(mix64(torch.tensor(state + i * gamma - (2**64 if state + i * gamma >= 2**63 else 0)))) for i in (0, 1)
    ]
    assert [n % 2**64 for n in numbers] == [6457827717110365317, 3203168211198807973]


@given(values=st.lists(INT64, min_size=1, max_size=20), n=st.sampled_from(SIZES), seed=st.integers(0, 2**63 - 1))
def test_ids_lie_in_the_table_and_depend_on_value_size_and_seed_alone(values: list[int], n: int, seed: int) -> None:
    tensor = torch.tensor(values)
    ids = KeyedHash(seed).ids(tensor, n)
    assert ids.dtype == torch.int64 and ids.shape == tensor.shape
    assert bool(((ids >= 0) & (ids < n)).all())
    assert [int(KeyedHash(seed).ids(torch.tensor(v), n)) for v in values] == ids.tolist()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 4)])
def test_ids_keep_the_shape(shape: tuple[int, ...]) -> None:
    assert KeyedHash(0).ids(torch.zeros(shape, dtype=torch.int64), 10).shape == shape


def chi_square(counts: torch.Tensor) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


TABLES_AND_STEPS = itertools.product([100, 10**12 + 39, 2**62 + 1, 3 * 2**61, 2**63 - 1], [1, -1, 2**20, 3**39])


@pytest.mark.parametrize(
    ("n", "step", "seed"), [(*own, seed) for own, seed in zip(TABLES_AND_STEPS, itertools.cycle([0, 1, 2**63 - 1]))]
)
def test_ids_are_uniform(n: int, step: int, seed: int) -> None:
    # 100 equal parts of the table; chi-square of 99 degrees has mean 99 and standard deviation 14
    values = torch.arange(100_000) * step
    ids = KeyedHash(seed).ids(values, n)
    parts = torch.tensor([i * 100 // n for i in ids.tolist()])
    assert chi_square(torch.bincount(parts, minlength=100).double()) < 99 + 5 * 14
    # and the remainders, which a biased reduction would bend first
    assert chi_square(torch.bincount(ids % 97, minlength=97).double()) < 99 + 5 * 14 or n == 100


def test_seeds_are_independent() -> None:
    values = torch.arange(100_000)
    seeds = [0, 1, 2, 2**32, 2**63 - 1]
    ids = [KeyedHash(seed).ids(values, 10) for seed in seeds]
    for i in range(len(seeds)):
        for j in range(i):
            # the two ids of a value fall into each of 100 cells equally often
            cells = torch.bincount(ids[i] * 10 + ids[j], minlength=100).double()
            assert chi_square(cells) < 99 + 5 * 14


def test_values_collide_as_often_as_chance_has_it() -> None:
    n, num_values = 10**6, 100_000
    for seed in range(5):
        distinct = len(KeyedHash(seed).ids(torch.arange(num_values), n).unique())
        expected = n * (1 - (1 - 1 / n) ** num_values)
        # the standard deviation is below sqrt(num_values^2 / 2n), about 70
        assert abs(distinct - expected) < 5 * 70


@settings(max_examples=30)
@given(st.lists(st.text() | st.binary(), max_size=20), st.integers(0, 2**63 - 1))
def test_strings_hash_by_keyed_blake2b(values: list[str | bytes], seed: int) -> None:
    hashes = hash_strings(values, seed)
    assert hashes.dtype == torch.int64 and hashes.shape == (len(values),)
    for value, hashed in zip(values, hashes.tolist(), strict=True):
        data = value if isinstance(value, bytes) else value.encode()
        digest = hashlib.blake2b(data, digest_size=8, key=seed.to_bytes(8, "little")).digest()
        assert hashed.to_bytes(8, "little", signed=True) == digest


def test_strings_become_ids() -> None:
    words = [f"user-{i}" for i in range(20_000)]
    ids = KeyedHash(3).ids(hash_strings(words, seed=3), 100)
    assert chi_square(torch.bincount(ids, minlength=100).double()) < 99 + 5 * 14
    assert not torch.equal(hash_strings(words, seed=3), hash_strings(words, seed=4))
    assert hash_strings(["\ud800"], seed=0).shape == (1,)  # half of a surrogate pair, as broken logs have it


@pytest.mark.parametrize("wrong", [None, 7, 1.5, ["a"]])
def test_what_is_no_string_is_refused_by_position(wrong: object) -> None:
    with pytest.raises(UserError, match=r"values\[1\] is"):
        hash_strings(["a", wrong], seed=0)  # type: ignore[list-item]


def test_a_single_string_is_no_list_of_them() -> None:
    with pytest.raises(UserError, match="single string 'abc'"):
        hash_strings("abc", seed=0)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, None, True, "1"])
def test_impossible_seeds_are_refused_by_value(seed: object) -> None:
    with pytest.raises(UserError, match="seed is"):
        KeyedHash(seed)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="seed is"):
        hash_strings([], seed)  # type: ignore[arg-type]


def test_values_of_another_type_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="torch.int32"):
        KeyedHash(0).ids(torch.zeros(3, dtype=torch.int32), 10)
    with pytest.raises(UserError, match="num_embeddings is 0"):
        KeyedHash(0).ids(torch.zeros(3, dtype=torch.int64), 0)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_ids() -> None:
    values = torch.randint(-(2**63), 2**63 - 1, (10_000,))
    for n in SIZES:
        assert torch.equal(KeyedHash(5).ids(values.cuda(), n).cpu(), KeyedHash(5).ids(values, n))
