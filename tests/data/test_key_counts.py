"""Counting keys in bounded memory, against a plain count, with limits so small that everything goes to disk."""

import random
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.data.prepare.frequencies import by_frequency
from distembed.data.prepare.key_counts import Counts, KeyCounter, create_mapped, from_ordered_bits, ordered_bits
from distembed.data.prepare.vocabulary import HashMap, VocabularyMap
from distembed.data.table.text_keys import text_keys

KEYS = st.one_of(st.integers(0, 30), st.integers(0, 2**32 - 1), st.just(2**32 - 1))


@settings(max_examples=80)
@given(st.lists(st.lists(KEYS, max_size=40), max_size=12), st.integers(1, 50), st.integers(1, 4))
def test_counts_and_order_do_not_depend_on_the_memory(added: list[list[int]], limit: int, min_count: int) -> None:
    expected = Counter(key for part in added for key in part)
    kept = sorted(key for key, count in expected.items() if count >= min_count)
    with tempfile.TemporaryDirectory() as folder:
        counter = KeyCounter(Path(folder), limit)
        for part in added:
            counter.add(np.array(part, np.uint32), np.ones(len(part), np.int64))
        counted = counter.finish(min_count)
        assert counted.keys.tolist() == kept
        assert counted.counts.tolist() == [expected[key] for key in kept]
        assert counter.num_dropped == len(expected) - len(kept)
        assert counter.rows_dropped == expected.total() - sum(expected[key] for key in kept)

        key_ids = create_mapped(Path(folder) / "ids", np.int64, len(kept))
        parts = list(by_frequency(counted, key_ids, 2, limit))
        ordered = sorted(kept, key=lambda key: (-expected[key], key))
        assert [key for part in parts for key in part.keys.tolist()] == ordered
        assert [count for part in parts for count in part.counts.tolist()] == [expected[key] for key in ordered]
        assert all(len(part.keys) <= max(limit, 1) for part in parts)
        id_map = VocabularyMap(counted.keys, key_ids)
        asked = random.Random(0).sample(kept, len(kept)) + [12345, 2**32 - 1, 0]
        places = {key: place for place, key in enumerate(ordered, start=2)}
        assert id_map.ids(np.array(asked, np.uint32)).tolist() == [places.get(key, 1) for key in asked]
        assert id_map.num_embeddings == 2 + len(kept)


NUMBERS = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-(2**63), 2**63 - 1]))
TEXTS = st.one_of(st.sampled_from(["", " ", "a", "b", "ab"]), st.text(max_size=20))


@settings(max_examples=60)
@given(st.lists(st.lists(NUMBERS, max_size=30), max_size=8), st.integers(1, 40), st.integers(0, 3))
def test_integers_are_counted_in_their_order(added: list[list[int]], limit: int, min_count: int) -> None:
    expected = Counter(key for part in added for key in part)
    with tempfile.TemporaryDirectory() as folder:
        counter = KeyCounter(Path(folder), limit, np.uint64)
        for part in added:
            counter.add(ordered_bits(np.array(part, np.int64)), np.ones(len(part), np.int64))
        counted = counter.finish(min_count)
        kept = sorted(key for key, count in expected.items() if count >= min_count)
        assert from_ordered_bits(np.asarray(counted.keys), np.dtype(np.int64)).tolist() == kept
        assert counted.counts.tolist() == [expected[key] for key in kept]


@settings(max_examples=60)
@given(st.lists(st.lists(TEXTS, max_size=30), max_size=8), st.integers(1, 40), st.integers(1, 3))
def test_texts_stay_beside_their_keys(added: list[list[str]], limit: int, min_count: int) -> None:
    expected = Counter(text for part in added for text in part)
    with tempfile.TemporaryDirectory() as folder:
        counter = KeyCounter(Path(folder), limit, np.uint64, "column")
        for part in added:
            texts = pa.array(part, pa.string())
            counter.add(text_keys(texts), np.ones(len(part), np.int64), texts)
        counted = counter.finish(min_count)
        kept = {text for text, count in expected.items() if count >= min_count}
        found = counted.texts.to_pylist()
        assert sorted(found) == sorted(kept) and counted.counts.tolist() == [expected[text] for text in found]
        assert (
            counted.keys.tolist() == text_keys(pa.array(found, pa.string())).tolist() == sorted(counted.keys.tolist())
        )


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_numbers_have_bits_in_their_order(values: list[float]) -> None:
    numbers = np.array(values, np.float32)
    bits = ordered_bits(numbers)
    assert np.array_equal(from_ordered_bits(bits, np.dtype(np.float32)), numbers)
    for one, its_bits in zip(numbers, bits, strict=True):
        assert np.array_equal(numbers < one, bits < its_bits) and np.array_equal(numbers == one, bits == its_bits)


def test_counts_beyond_32_bits(tmp_path: Path) -> None:
    counter = KeyCounter(tmp_path, 1)
    for _ in range(3):
        counter.add(np.array([7], np.uint32), np.array([2**32 - 1]))
    assert counter.finish(1).counts.tolist() == [3 * (2**32 - 1)]


def test_nothing_to_count(tmp_path: Path) -> None:
    assert len(KeyCounter(tmp_path, 10).finish(2).keys) == 0
    assert list(by_frequency(Counts(np.zeros(0, np.uint32), np.zeros(0, np.int64)), np.zeros(0, np.int64), 2, 10)) == []


@pytest.mark.parametrize("hash_size", [2, 3, 1000, 2**33, 2**62])
def test_hashes_are_spread_over_all_ids_but_the_missing_one(hash_size: int) -> None:
    ids = HashMap(hash_size, seed=3).ids(np.arange(100_000, dtype=np.uint32))
    assert ids.min() >= 1 and ids.max() < hash_size
    assert len(np.unique(ids)) >= min(hash_size - 1, 99_000)
    if hash_size == 1000:
        counts = np.bincount(ids, minlength=hash_size)[1:]
        expected = 100_000 / 999
        # Chi-squared with 998 degrees of freedom: 1,250 lies 5.6 standard deviations above its mean.
        assert ((counts - expected) ** 2 / expected).sum() < 1250
