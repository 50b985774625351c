"""Weights of ids: how often each occurs in the training rows, and how much the model depends on a table."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from distembed.data.dataset.manifest import Manifest, Split
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.data.prepare import CriteoOptions, prepare_criteo
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.occurrences import id_occurrences
from distembed.partitions import Explicit
from distembed.serving.convert.code_weights import IdWeights
from distembed.serving.convert.run_source import RunAsStock
from tests.criteo_runs import write_lines
from tests.serving.test_recommender_rows import session_datasets


def table_of(feature: str, num_ids: int) -> CompositionalEmbeddingConfig:
    scheme = Explicit(num_ids, [torch.arange(num_ids)])
    return CompositionalEmbeddingConfig(f"t_{feature}", num_ids, 4, [feature], scheme)


def test_all_ids_occur_as_often_as_in_the_training_rows(tmp_path: Path) -> None:
    prepare_criteo([write_lines(tmp_path / "rows.tsv")], tmp_path / "dataset", CriteoOptions(min_count=2))
    manifest = Manifest.load(tmp_path / "dataset")
    sizes = {feature.name: feature.num_embeddings for feature in manifest.schema.categorical}
    tables = [table_of(name, size) for name, size in sizes.items()]
    found = id_occurrences(str(tmp_path / "dataset"), manifest, manifest.schema, tables)
    rows = pq.read_table(tmp_path / "dataset" / "train", columns=list(sizes)).to_pydict()
    expected = {name: np.bincount(rows[name], minlength=size) for name, size in sizes.items()}
    for name in sizes:
        assert (found[f"t_{name}"].numpy() == expected[name]).all(), name
    assert any(own[0] > 0 for own in expected.values()) and any(own[1] > 0 for own in expected.values())
    # a feature that a task adds, such as the items to predict, has the ids of another one
    added = CategoricalFeature("added", sizes["C3"], table="C3")
    schema = replace(manifest.schema, categorical=(*manifest.schema.categorical, added))
    counts = id_occurrences(str(tmp_path / "dataset"), manifest, schema, [table_of("added", sizes["C3"])])["t_added"]
    assert (counts.numpy()[1:] == expected["C3"][1:]).all()


@pytest.mark.parametrize("kind", ["ratings", "sequences"])
def test_counts_of_interactions_are_of_the_training_split(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    dataset = session_datasets(tmp_path_factory)[kind]
    manifest = Manifest.load(dataset)
    sizes = {feature.name: feature.num_embeddings for feature in manifest.schema.categorical}
    tables = [table_of(name, size) for name, size in sizes.items()]
    rows = pq.read_table(dataset / "train", columns=["user", "item"]).to_pydict()
    items = [item for own in rows["item"] for item in own] if kind == "sequences" else rows["item"]
    found = id_occurrences(str(dataset), manifest, manifest.schema, tables)
    assert (found["t_item"].numpy() == np.bincount(items, minlength=sizes["item"])).all()
    # the part of a dataset that a run keeps has no rows, and the vocabulary's counts stand for them
    shutil.copytree(dataset, tmp_path / "kept", ignore=shutil.ignore_patterns("train"))
    kept = id_occurrences(str(tmp_path / "kept"), manifest.without_rows(), manifest.schema, tables)["t_item"]
    vocabulary = pq.read_table(dataset / "vocabulary" / "item.parquet")["count"].to_numpy()
    assert (kept[2:].numpy() == vocabulary).all() and kept.sum() > found["t_item"].sum()


@dataclass
class Gradients:
    """A run that keeps sums of squared gradients of some weights."""

    sums: dict[str, torch.Tensor]

    def optimizer_state(self, name: str, state: str) -> torch.Tensor | None:
        return self.sums.get(f"{name}.{state}")


@pytest.mark.parametrize("keeps", ["all", "by row", "some"])
def test_squared_weights_are_counts_that_sum_to_squared_gradients(keeps: str) -> None:
    rng = np.random.default_rng(0)
    groups = [{"a": table_of("A", 5)}, {"b": table_of("B", 7), "b2": table_of("B2", 7)}, {"c": table_of("C", 3)}]
    counts = {"t_A": torch.tensor([4, 0, 9, 2, 1]), "t_B": torch.arange(1, 8)}
    sums = {name: rng.random((len(table.scheme.rows(torch.arange(table.num_embeddings))[0]), 4))
            for group in groups for name, table in group.items()}  # fmt: skip
    saved = {f"{name}.sum": torch.from_numpy(own) for name, own in sums.items()}
    if keeps == "by row":
        saved["a.sum[0:4]"] = saved.pop("a.sum").mean(1)
    if keeps == "some":
        del saved["b2.sum"]
    split = Split(30, None, ())
    manifest = Manifest(Schema("label", (), ()), {"train": split})
    weights = IdWeights(cast(RunAsStock, Gradients(saved)), groups, counts, manifest)
    own_counts = [np.array([4, 1e-3, 9, 2, 1]), np.arange(1, 8), np.ones(3)]
    totals = [own.sum() for own in (sums["a"], np.concatenate([sums["b"], sums["b2"]]), sums["c"])]
    if keeps == "some":  # no table is scaled, and one without counts has as many lookups as rows
        totals = [own_counts[0].sum(), own_counts[1].sum(), 30]
    assert weights.by_gradient == (keeps != "some")
    for group, count, total in zip(groups, own_counts, totals, strict=True):
        assert weights.of(group).numpy() == pytest.approx(np.sqrt(count / count.sum() * total), rel=1e-6)
