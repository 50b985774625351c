"""The least compression that fits: rows where they are looked up most, and a config that then fits."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distembed.base.errors import InsufficientMemory
from distembed.data.dataset.manifest import Manifest, Split, Vocabulary
from distembed.data.dataset.schema import CRITEO_KAGGLE_CARDINALITIES, CategoricalFeature, Schema
from distembed.embedding import EmbeddingConfig, TableConfig, build_tables
from distembed.optim.declared import TableOptimizers
from distembed.planning.devices import Cluster, find_device
from distembed.reports.plan.assessment import assess_capacity
from distembed.reports.plan.compression import CompressibleTable, CountedIds, ZipfIds, allocate_buckets, compress_config
from distembed.training.config import Config, load_config
from tests.capacity.commands import KAGGLE, NAIVE, cluster

TERABYTE = ["data.schema=criteo_terabyte", "embedding.default={partition: naive, embedding_dim: 1024}"]

PATH = "embedding.default={partition: naive, composition: path_mlp, embedding_dim: 16}"
falling_counts = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(lambda own: sorted(own, reverse=True))
OPTIMIZERS = TableOptimizers("adagrad", "adam", True)


@given(st.lists(falling_counts, min_size=1, max_size=3), st.floats(0, 10))
def test_no_other_allocation_of_the_rows_covers_more(tables: list[list[int]], threshold: float) -> None:
    allocated = [CountedIds(np.array(own)).num_ids_above(threshold) for own in tables]
    covered = sum(sum(own[:m]) for own, m in zip(tables, allocated, strict=True))
    choices = itertools.product(*[range(len(own) + 1) for own in tables])
    best = max(
        sum(sum(own[:m]) for own, m in zip(tables, ms, strict=True)) for ms in choices if sum(ms) == sum(allocated)
    )
    assert covered == best


@given(falling_counts, st.integers(0, 10))
def test_ids_of_one_count_get_rows_by_and_by(own: list[int], count: int) -> None:
    ids = CountedIds(np.array(own))
    assert ids.num_ids_above(count) == sum(other > count for other in own)
    between = [ids.num_ids_above(count + share) for share in np.linspace(0, 1, 50)]
    assert between == sorted(between, reverse=True)
    assert set(between) == set(range(between[-1], between[0] + 1))


@given(st.integers(1, 50), st.floats(0.001, 1000), st.floats(0, 100))
def test_ids_without_counts_follow_zipf(num_ids: int, first_count: float, threshold: float) -> None:
    counts = first_count / np.arange(1, num_ids + 1)
    fewest, most = (counts > threshold * (1 + 1e-9)).sum(), (counts >= threshold * (1 - 1e-9)).sum()
    assert fewest <= ZipfIds(num_ids, first_count).num_ids_above(threshold) <= most


def bytes_of_table(size: int, settings: TableConfig, ranks: int) -> int:
    """Counted from the rows and columns of a real one: Adagrad keeps as many numbers, Adam two, and a step."""
    (table,) = build_tables([CategoricalFeature("C", size)], EmbeddingConfig(default=settings))
    vectors = sum(part.num_rows * part.dim * 2 * 4 for part in table.lookup_tables())
    # gradients too
    return vectors + ranks * sum(part.num_rows * part.dim * 4 * 4 + 4 for part in table.function_tables())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("composition", ["product", "concat", "feature", "path_linear", "path_mlp"])
def test_no_other_buckets_take_fewer_bytes(composition: str, force: bool, ranks: int) -> None:
    for scheme in ("quotient_remainder", "remainder"):
        for size in (1, 2, 3, 40, 97):
            settings = TableConfig(scheme, composition=composition, embedding_dim=4, hidden=[2], threshold=2)
            settings = dataclasses.replace(settings, force=force)
            feature, ids = CategoricalFeature("C", size), ZipfIds(size)
            table = CompressibleTable(feature, settings, OPTIMIZERS, ranks, ids)
            by_buckets = {
                buckets: bytes_of_table(size, dataclasses.replace(settings, num_buckets=buckets), ranks)
                for buckets in range(1, size + 1)
            }
            whole = bytes_of_table(size, TableConfig(embedding_dim=4), ranks)
            assert table.whole_bytes == whole
            assert table.min_bytes == min(whole, *by_buckets.values())
            # and what it is said to take it does, with any number of rows
            for threshold in (1.0, 0.2, 0.02, 0.004, 0.0):
                buckets = table.num_buckets(threshold, stays_compressed=False)
                assert table.num_bytes(buckets) == (whole if buckets is None else by_buckets[buckets])


@pytest.mark.parametrize("composition", ["product", "concat", "path_linear"])
def test_bytes_that_are_left_over_would_not_do_for_more_rows(composition: str) -> None:
    settings = TableConfig("quotient_remainder", composition=composition, embedding_dim=8, threshold=2)
    tables = [
        CompressibleTable(CategoricalFeature(f"C{size}", size), settings, OPTIMIZERS, 1, ZipfIds(size))
        for size in (7, 60, 300, 310, 900)
    ]
    least, whole = sum(table.min_bytes for table in tables), sum(table.whole_bytes for table in tables)
    for there_is in np.linspace(least, whole, 40).astype(int).tolist():
        buckets = allocate_buckets(tables, there_is)
        spent = sum(table.num_bytes(buckets[table.name]) for table in tables)
        assert spent <= there_is
        for table in tables:
            own = buckets[table.name]
            as_whole = spent - table.num_bytes(own) + table.whole_bytes
            assert own is None or as_whole > there_is or table.whole_bytes <= table.num_bytes(own)
        # less than two rows and two of the quotient for each; concat's are held below whole, and may have all there are
        row_bytes, quotient_bytes = 8 * 2 * 4, 8 * 2 * 4 if composition == "product" else (8 * 8 + 8) * 4 * 4
        compressed = sum(own is not None for own in buckets.values())
        assert composition == "concat" or there_is - spent < max(1, 2 * compressed * (row_bytes + quotient_bytes))
    assert set(allocate_buckets(tables, whole).values()) == {None}


def buckets(config: Config) -> dict[str, int | None]:
    return {name: table.num_buckets for name, table in config.embedding.tables.items()}


@pytest.mark.thorough
def test_the_compressed_config_fits_and_uses_what_there_is() -> None:
    config = load_config(KAGGLE, [NAIVE, "embedding.tables.C4.partition=naive"])
    there_is = cluster("1GB")
    assert not assess_capacity(config, there_is).fits
    compressed = compress_config(config, there_is)
    planned = assess_capacity(compressed, there_is)
    assert planned.fits and planned.ranks[0].total_bytes > 0.99 * 10**9
    # the small ones are whole, the large ones have as many rows as each other, and C4 what the config says
    sizes = {f"C{i}": size for i, size in enumerate(CRITEO_KAGGLE_CARDINALITIES, start=1)}
    found = {name: rows for name, rows in buckets(compressed).items() if rows is not None}
    assert len(set(found.values())) == 1
    (rows,) = set(found.values())
    assert found.keys() == {name for name, size in sizes.items() if size > rows and name != "C4"}
    assert compressed.embedding.tables["C4"] == config.embedding.tables["C4"]
    # what fits is left as it is
    assert compress_config(config, cluster("80GB")) is config


@pytest.mark.slow
def test_a_model_of_more_than_a_terabyte_is_made_to_fit_eight_devices() -> None:
    config, there_is = load_config(KAGGLE, TERABYTE), Cluster(find_device("a100-80gb"), 1, 8)
    planned = assess_capacity(config, there_is)
    assert not planned.fits and planned.one_copy.total > 1.3e12
    assert assess_capacity(compress_config(config, there_is), there_is).fits


def test_where_nothing_helps_it_says_so() -> None:
    with pytest.raises(InsufficientMemory, match="no compression of the tables makes the model fit"):
        compress_config(load_config(KAGGLE), cluster("9MB"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("settings", "there_is"),
    [
        pytest.param([PATH], cluster("200MB", gpus=2), marks=pytest.mark.slow),
        pytest.param([NAIVE], cluster("300MB"), marks=pytest.mark.slow),
        pytest.param(
            ["embedding.default.composition=concat", NAIVE],
            cluster("1GB"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["embedding.default={partition: naive, composition: concat, dims: [4, 4, 8]}"],
            cluster("1GB"),
            marks=pytest.mark.slow,
        ),
        (["embedding.default={partition: remainder, hash_seed: 3}"], cluster("100MB")),
        (["embedding.default={partition: naive, composition: tensor_train, rank: [4, 8]}"], cluster("100MB")),
    ],
)
def test_every_kind_of_table_uses_all_but_a_hundredth(settings: list[str], there_is: Cluster) -> None:
    config = load_config(KAGGLE, settings)
    planned = assess_capacity(compress_config(config, there_is), there_is)
    assert planned.fits
    fullest = max(rank.total_bytes for rank in planned.ranks)
    assert fullest > 0.99 * there_is.rank_bytes


def test_counts_of_a_dataset_are_of_use_only_where_ids_are_in_their_order(tmp_path: Path) -> None:
    """Of two tables alike but for their counts; a third has none, and is taken for one like Zipf's."""
    counts = {"even": np.full(998, 50), "steep": np.concatenate([np.full(98, 500), np.full(900, 2)])}
    write_vocabularies(tmp_path, counts, num_ids=1000, num_rows=50_000)
    common = [f"data.path={tmp_path}", "data.schema=null", "train.batch_size=1"]
    table = "partition: naive, embedding_dim: 16, threshold: 0"
    by_count, hashed = (
        load_config(KAGGLE, [*common, f"embedding.default={{{table}{more}}}"]) for more in ("", ", hash_seed: 1")
    )
    whole = assess_capacity(by_count, cluster("1GB"))
    needed = whole.ranks[0].total_bytes - whole.allocator_bytes
    there_is = cluster(f"{round((needed - 80_000) / 0.95)}")
    rows = {name: 1000 if own is None else own for name, own in buckets(compress_config(by_count, there_is)).items()}
    # even ids are all seen more often than most of the steep ones
    assert rows["even"] == 1000 and 100 <= rows["steep"] < rows["even"]
    # Zipf's i-th is looked up 50,000 / i / H times
    assert rows["steep"] < rows["unknown"] == 1000
    alike = buckets(compress_config(hashed, there_is))
    assert len(set(alike.values())) == 1 and None not in alike.values()


def write_vocabularies(folder: Path, counts: dict[str, Any], num_ids: int, num_rows: int) -> None:
    """A dataset of no rows but those that its manifest speaks of."""
    features = tuple(CategoricalFeature(name, num_ids) for name in (*counts, "unknown"))
    vocabularies = {}
    for name, own in counts.items():
        pq.write_table(pa.table({"count": own}), folder / f"{name}.parquet")
        vocabularies[name] = Vocabulary(f"{name}.parquet", len(own), 0, 0, 0)
    schema, train = Schema("label", ("I1",), features), Split(num_rows, None, ())
    Manifest(schema, {"train": train}, {}, vocabularies, tool_version="0").save(folder)
