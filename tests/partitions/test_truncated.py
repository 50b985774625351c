"""Truncated: rows of one's own for frequent ids, and vectors of mixed lengths under ``concat``."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import CategoricalFeature
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    EmbeddingConfig,
    TableConfig,
    build_tables,
)
from distembed.partitions import KeyedHash, Truncated
from distembed.training.config import load_config
from distembed.training.start import require_trainable
from tests.data import reference
from tests.embedding.test_settings import read

FEATURES = [CategoricalFeature("C1", 10_000), CategoricalFeature("C2", 500)]


def test_rows_by_hand() -> None:
    partition = Truncated(100, bounds=[50, 3])
    assert partition.num_rows == (51, 4)
    assert partition.rows(torch.tensor([0, 2, 3, 49, 50, 99])).tolist() == [[0, 2, 3, 49, 50, 50], [0, 2, 3, 3, 3, 3]]
    assert partition.colliding_ids() == (50, 51) and partition.ids_per_row == pytest.approx(100 / 51)
    every = Truncated(100, bounds=[3, 99])
    assert every.num_rows == (4, 100) and every.is_complementary()
    assert every.inverse(every.rows(torch.arange(100))).tolist() == list(range(100))


def test_a_bag_is_the_sum_of_vectors_of_mixed_lengths_with_its_gradients() -> None:
    """In numpy's float64: columns of an id's own where it is below the bound, and else of the shared row."""
    bounds, dims, rng = (40, 7), (4, 12), np.random.default_rng(0)
    config = read(f"{{default: {{partition: truncated, bounds: {list(bounds)}, composition: concat, dims: [4, 12]}}}}")
    (table,) = build_tables([CategoricalFeature("f", 300, multi_hot=True, mean_ids_per_row=3.0)], config)
    collection = CompositionalEmbeddingBagCollection([table])
    tables = [rng.normal(size=(bound + 1, dim)).astype(np.float32) for bound, dim in zip(bounds, dims, strict=True)]
    weights = collection.weights("f")
    with torch.no_grad():
        for weight, values in zip(weights, tables, strict=True):
            weight.copy_(torch.from_numpy(values))
    lengths, upstream = rng.integers(0, 6, 50), rng.normal(size=(50, 16))
    ids = np.concatenate([rng.integers(0, 300, lengths.sum() - 90), np.repeat([0, 7, 39, 40, 41, 299], 15)])
    batch = KeyedJaggedTensor(["f"], torch.from_numpy(ids), lengths=torch.from_numpy(lengths))
    pooled = collection(batch)["f"]
    pooled.backward(torch.from_numpy(upstream).float())
    expected, gradients = np.zeros((50, 16)), [np.zeros_like(values, dtype=np.float64) for values in tables]
    for x, bag in zip(ids.tolist(), np.repeat(np.arange(50), lengths), strict=True):
        rows = [x if x < bound else bound for bound in bounds]
        expected[bag] += np.concatenate([values[row] for values, row in zip(tables, rows, strict=True)])
        for gradient, row, own in zip(gradients, rows, np.split(upstream[bag], [4]), strict=True):
            gradient[row] += own
    np.testing.assert_allclose(pooled.detach().numpy(), expected, atol=1e-5)
    for weight, gradient in zip(weights, gradients, strict=True):
        np.testing.assert_allclose(weight.grad.numpy(), gradient, atol=1e-5)


def test_bytes_are_those_of_all_rows() -> None:
    default = TableConfig(partition="truncated", bounds=[4000, 200], composition="concat", dims=[4, 12])
    first, second = build_tables(FEATURES, EmbeddingConfig(default))
    assert first.memory_bytes == 4 * (4001 * 4 + 201 * 12)
    assert second.memory_bytes == 4 * (500 * 4 + 201 * 12)  # a bound above all ids
    assert [table.scheme.is_complementary() for table in (first, second)] == [False, True]
    (unset, _) = build_tables(FEATURES, EmbeddingConfig(TableConfig(partition="truncated", composition="concat")))
    assert unset.scheme.num_rows == (4001, 1001)
    assert unset.full_bytes / unset.memory_bytes == pytest.approx(4, rel=0.001)


def test_an_exception_has_bounds_of_its_own() -> None:
    config = read(
        "{default: {partition: truncated, bounds: [4000, 200], composition: sum}, tables: {C2: {bounds: [9]}}}"
    )
    assert [table.scheme.num_rows for table in build_tables(FEATURES, config)] == [(4001, 201), (10,)]


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ("C1: {partition: truncated, hash_seed: 7}", "hash_seed is 7"),
        ("u: {partition: truncated, features: [C1, C2]}", r"features is \['C1', 'C2'\]"),
    ],
)
def test_ids_that_are_not_numbered_by_frequency_are_refused(table: str, field: str) -> None:
    config = read(f"{{tables: {{{table}}}}}")
    with pytest.raises(UserError, match=f"partition is truncated and {field}, so that ids are not numbered by falling"):
        build_tables(FEATURES, config)


def test_a_run_on_ids_that_were_hashed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_bytes(reference.content(600, 1))
    prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "hashed", CriteoOptions(hash_size=300))
    prepare_criteo([tmp_path / "rows.tsv"], tmp_path / "counted", CriteoOptions(min_count=1))
    truncated = "embedding: {default: {partition: truncated, composition: sum}}"
    for dataset in ("hashed", "counted"):
        (tmp_path / dataset / "config.yaml").write_text(f"{truncated}\ndata: {{path: {tmp_path / dataset}}}")
    require_trainable(load_config(tmp_path / "counted" / "config.yaml"), str(tmp_path / "counted"))
    message = "embedding.tables.C1: partition is truncated.*no vocabulary of 'C1'.*without hash_size, or use quotient"
    with pytest.raises(UserError, match=message):
        require_trainable(load_config(tmp_path / "hashed" / "config.yaml"), str(tmp_path / "hashed"))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [([], "bounds is .*a list of one bound or more"), (7, "bounds is 7"), ([5, 0], r"bounds\[1\] is 0")],
)
def test_bounds_that_are_none_are_refused_by_value(bounds: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Truncated(100, bounds=bounds)  # type: ignore[arg-type]


def test_hashed_and_unified_ids_are_refused_in_python_too() -> None:
    for hashed in ({"pre_hash": KeyedHash(0)}, {"first_ids": {"a": 0}}):
        with pytest.raises(UserError, match=f"partition is truncated and {next(iter(hashed))} is given"):
            CompositionalEmbeddingBagConfig("t", 9, 4, ["a"], Truncated(9, [4]), **hashed)
