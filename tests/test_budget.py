"""The least compression that fits: rows where they are looked up most, and a config that then fits."""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distembed.budget import fit_config, rows_alike, rows_by_count
from distembed.config import Config, load_config
from distembed.data.schema import CRITEO_KAGGLE_CARDINALITIES
from distembed.errors import RunError
from distembed.fit import find_fit
from distembed.planning.cluster import Cluster
from distembed.planning.devices import find_device

KAGGLE = Path(__file__).parents[1] / "configs" / "criteo_kaggle.yaml"
TERABYTE = ["data.schema=criteo_terabyte", "embedding.default={partition: naive, embedding_dim: 1024}"]

falling_counts = st.lists(st.integers(1, 9), min_size=1, max_size=5).map(lambda own: sorted(own, reverse=True))


@given(st.lists(falling_counts, min_size=1, max_size=3), st.integers(1, 15))
def test_no_other_way_to_give_out_the_rows_covers_more(tables: list[list[int]], total: int) -> None:
    total = min(total, sum(map(len, tables)))
    rows = rows_by_count({str(i): np.array(own) for i, own in enumerate(tables)}, total)
    given_out = [rows[str(i)] for i in range(len(tables))]
    # ids of one count are shared out in whole numbers, so that less than one row a table may be left over
    assert total - len(tables) < sum(given_out) <= total
    covered = sum(sum(own[:m]) for own, m in zip(tables, given_out, strict=True))
    choices = itertools.product(*[range(len(own) + 1) for own in tables])
    best = max(
        sum(sum(own[:m]) for own, m in zip(tables, ms, strict=True)) for ms in choices if sum(ms) == sum(given_out)
    )
    assert covered == best


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(1, 400))
def test_alike_all_have_as_many_rows_or_all_that_they_need(sizes: list[int], total: int) -> None:
    rows = rows_alike({str(i): size for i, size in enumerate(sizes)}, total)
    most = max(rows.values())
    assert all(rows[str(i)] == min(size, most) for i, size in enumerate(sizes))
    assert sum(rows.values()) <= max(total, 0)
    assert sum(min(size, most + 1) for size in sizes) > total or most == max(sizes)


def cluster(memory_bytes: int, gpus: int = 1) -> Cluster:
    return Cluster(dataclasses.replace(find_device("a100-80gb"), memory_bytes=memory_bytes), 1, gpus)


def buckets(config: Config) -> dict[str, int | None]:
    return {name: table.num_buckets for name, table in config.embedding.tables.items()}


def test_the_fitted_config_fits_and_uses_what_there_is() -> None:
    config = load_config(KAGGLE, ["embedding.default.partition=naive", "embedding.tables.C4.partition=naive"])
    there_is = cluster(10**9)
    assert not find_fit(config, there_is).fits
    fitted = fit_config(config, there_is)
    fit = find_fit(fitted, there_is)
    assert fit.fits and fit.rank_total(0) > 0.97 * 10**9
    # the small ones are whole, the large ones have as many rows as each other, and C4 what the config says
    sizes = {f"C{i}": size for i, size in enumerate(CRITEO_KAGGLE_CARDINALITIES, start=1)}
    found = {name: rows for name, rows in buckets(fitted).items() if rows is not None}
    assert len(set(found.values())) == 1
    (rows,) = set(found.values())
    assert found.keys() == {name for name, size in sizes.items() if size > rows and name != "C4"}
    assert fitted.embedding.tables["C4"] == config.embedding.tables["C4"]
    # what fits is left as it is
    assert fit_config(config, cluster(80 * 10**9)) is config


def test_a_model_of_more_than_a_terabyte_is_made_to_fit_eight_devices() -> None:
    config, there_is = load_config(KAGGLE, TERABYTE), Cluster(find_device("a100-80gb"), 1, 8)
    fit = find_fit(config, there_is)
    assert not fit.fits and fit.needed.total > 1.3e12
    assert find_fit(fit_config(config, there_is), there_is).fits


def test_where_nothing_helps_it_says_so() -> None:
    with pytest.raises(RunError, match="no compression of the tables makes the model fit"):
        fit_config(load_config(KAGGLE), cluster(9_000_000))
