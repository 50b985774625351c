"""Counting keys and giving them ids, against a plain count, with values that exceed the memory of the database."""

import random
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.data.prepare import feature_ids
from distembed.data.prepare.count import Database, count_distinct, values_at_ranks
from distembed.data.prepare.table.preparation import prepare_table
from distembed.data.table.schema import TableSchema
from distembed.data.table.vocabulary import HashMap, VocabularyMap, write_vocabulary
from tests.data.reference import folder_bytes

SCHEMA = pa.schema([("key", pa.string()), ("count", pa.int64())])
NUMBERS = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1), st.sampled_from([-(2**63), 2**63 - 1]))


@settings(max_examples=15)
@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=30), min_size=1, max_size=8), st.integers(1, 4))
def test_values_at_ranks_are_those_of_the_sorted_values(parts: list[list[int]], num_ranks: int) -> None:
    values = sorted(value for part in parts for value in part)
    ranks = sorted(random.Random(0).choices(range(len(values)), k=num_ranks))
    with tempfile.TemporaryDirectory() as folder, Database(Path(folder), 1) as database:
        assert count_distinct(database, (np.array(part, np.int64) for part in parts), pa.int64()) == len(values)
        assert values_at_ranks(database, ranks, pa.int64()).tolist() == [values[rank] for rank in ranks]


def test_more_values_than_fit_in_memory(tmp_path: Path) -> None:
    """1.2 million texts of 48 letters take more than the least memory of 64 MiB."""

    def batches():
        for start in range(0, 1_200_000, 100_000):
            texts = pc.utf8_lpad(pa.array(np.arange(start, start + 100_000)).cast(pa.string()), 48, "0")
            yield pa.record_batch([texts, pa.array(np.full(100_000, 2**40))], schema=SCHEMA)

    with Database(tmp_path / "spilt", 1) as database:
        database.add("counted", batches(), SCHEMA, "select key, sum(count)::bigint as count from given group by key")
        assert database.row("select count(*), sum(count) from counted") == (1_200_000, 1_200_000 * 2**40)
        keys = (batch.column(0) for batch in database.batches("select key from counted order by count desc, key"))
        numbers = np.concatenate([key.cast(pa.int64()).to_numpy() for key in keys])
    assert np.array_equal(numbers, np.arange(1_200_000))


def test_the_error_of_a_stream_is_raised_as_it_is(tmp_path: Path) -> None:
    def batches():
        yield pa.record_batch([pa.array(["a"]), pa.array([1])], schema=SCHEMA)
        raise ValueError("the stream is damaged")

    with Database(tmp_path, 1) as database, pytest.raises(ValueError, match="^the stream is damaged$"):
        database.add("counted", batches(), SCHEMA)


@pytest.mark.parametrize("sizes", [[], [0], [5], [16_384], [16_383, 1, 16_384], [40_000]])
def test_row_groups_of_vocabularies_do_not_depend_on_batches(tmp_path: Path, sizes: list[int]) -> None:
    total, start, batches = sum(sizes), 0, []
    for size in sizes:
        keys = pa.array([str(number) for number in range(start, start + size)], pa.string())
        batches.append(pa.record_batch([keys, pa.array(np.arange(size))], schema=SCHEMA))
        start += size
    assert write_vocabulary(tmp_path / "batches", batches, "string") == total
    whole = pa.Table.from_batches(batches, SCHEMA).combine_chunks().to_batches()
    assert write_vocabulary(tmp_path / "whole", whole, "string") == total
    assert (tmp_path / "batches").read_bytes() == (tmp_path / "whole").read_bytes()
    assert pq.read_table(tmp_path / "whole")["id"].to_pylist() == list(range(2, 2 + total))


def test_vocabularies_larger_than_memory_give_the_same_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their sorted keys lie in files."""
    lines = [f"{place % 2},{place % 37},t{place % 23},{place % 31:x}" for place in range(300)]
    (tmp_path / "rows.csv").write_text("\n".join(["label,number,text,code", *lines, ""]))
    kinds = {"number": {"kind": "integer"}, "text": {}, "code": {"kind": "hexadecimal"}}
    schema = TableSchema.from_json({"label": {"column": "label"}, "categorical": kinds}, "the schema")
    prepare_table([tmp_path / "rows.csv"], tmp_path / "memory", schema)
    monkeypatch.setattr(feature_ids, "_SORTED_KEY_BYTES", 1 << 60)
    prepare_table([tmp_path / "rows.csv"], tmp_path / "files", schema)
    assert folder_bytes(tmp_path / "memory") == folder_bytes(tmp_path / "files")


@given(st.dictionaries(st.integers(0, 2**32 - 1), st.integers(2, 1000)), st.lists(st.integers(0, 2**32 - 1)))
@pytest.mark.parametrize("dtype", [np.uint32, np.int64, np.uint64])
def test_a_vocabulary_gives_each_key_its_id(dtype: type, ids: dict[int, int], others: list[int]) -> None:
    keys = sorted(ids)
    id_map = VocabularyMap(np.array(keys, dtype), np.array([ids[key] for key in keys], np.int64))
    asked = random.Random(0).sample([*keys, *others], len(keys) + len(others))
    assert id_map.ids(np.array(asked, dtype)).tolist() == [ids.get(key, 1) for key in asked]
    assert id_map.num_embeddings == 2 + len(keys)


@pytest.mark.parametrize("hash_size", [2, 3, 1000, 2**33, 2**62])
def test_hashes_are_spread_over_all_ids_but_the_missing_one(hash_size: int) -> None:
    ids = HashMap(hash_size, seed=3).ids(np.arange(100_000, dtype=np.uint32))
    assert ids.min() >= 1 and ids.max() < hash_size
    assert len(np.unique(ids)) >= min(hash_size - 1, 99_000)
    if hash_size == 1000:
        assert (HashMap(hash_size, seed=4).ids(np.arange(100_000, dtype=np.uint32)) != ids).mean() > 0.5
        counts = np.bincount(ids, minlength=hash_size)[1:]
        expected = 100_000 / 999
        # Chi-squared with 998 degrees of freedom: 1,250 lies 5.6 standard deviations above its mean.
        assert ((counts - expected) ** 2 / expected).sum() < 1250
