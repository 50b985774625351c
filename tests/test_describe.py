"""Counts of the paper's models, without making them."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distembed.base.units import format_bytes
from distembed.composition import COMPOSITIONS
from distembed.data.dataset.manifest import Manifest, Split
from distembed.data.dataset.schema import CRITEO_KAGGLE_CARDINALITIES, CategoricalFeature, Schema
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    EmbeddingConfig,
    TableConfig,
)
from distembed.models import MODELS, DCNConfig, DLRMConfig, ModelInputs, SoftOneHotConfig
from distembed.models.config import CountedModelConfig
from distembed.models.dlrm_config import LowRankCrossConfig
from distembed.optim.declared import TableOptimizers
from distembed.optim.table_storage import TableSize, whole_table_storage
from distembed.partitions import PARTITIONS, Explicit
from distembed.serving.export.table_groups import ExportStorage
from distembed.training.config import load_config
from distembed.training.describe import DescribedTable, describe
from tests.in_process import in_this_process

KAGGLE = Path(__file__).parents[1] / "configs" / "criteo_kaggle.yaml"
SIZES = [16, 32, 64, 128]
FORCED = ["embedding.default.partition=quotient_remainder", "embedding.default.force=true"]


@pytest.mark.parametrize(
    ("overrides", "parameters"),
    [(["embedding.default.partition=naive"], 540_677_217), (FORCED, 135_528_113)],
    ids=["full", "quotient_remainder"],
)
def test_parameters_of_the_papers_dlrm(overrides: list[str], parameters: int) -> None:
    assert describe(load_config(KAGGLE, overrides)).num_parameters == parameters


def test_path_based_tables_grow_by_what_the_paper_says() -> None:
    # 26 features of 4 functions of 33 h + 16 numbers
    path = [*FORCED, "embedding.default.composition=path_mlp"]
    counts = [describe(load_config(KAGGLE, [*path, f"embedding.default.hidden=[{h}]"])).num_parameters for h in SIZES]
    assert [b - a for a, b in itertools.pairwise(counts)] == [3_432 * (b - a) for a, b in itertools.pairwise(SIZES)]
    first_tables = sum(16 * -(-n // 4) for n in CRITEO_KAGGLE_CARDINALITIES)
    dense = describe(load_config(KAGGLE, path)).num_dense_parameters
    assert counts[0] == dense + first_tables + 26 * 4 * (33 * SIZES[0] + 16)


COUNTED = [
    DLRMConfig(bottom=[5, 3], top=[7]),
    DLRMConfig(bottom=[9], top=[6, 4, 2]),
    DCNConfig(deep=[3], num_cross_layers=1),
    DCNConfig(),
    DLRMConfig(dense="soft_one_hot"),
    DLRMConfig(bottom=[5], top=[7], cross=LowRankCrossConfig(2, 3)),
    DLRMConfig(dense="soft_one_hot", cross=LowRankCrossConfig()),
    DLRMConfig(bottom=[5], dense="both", soft_one_hot=SoftOneHotConfig(bins=3, layer_norm=True)),
    DCNConfig(dense="soft_one_hot", soft_one_hot=SoftOneHotConfig(bins=1)),
    DCNConfig(dense="both", soft_one_hot=SoftOneHotConfig(layer_norm=True)),
]


@pytest.mark.parametrize("composition", ["product", "feature"])
@pytest.mark.parametrize(("num_dense", "num_features"), [(0, 1), (1, 1), (13, 3)])
@pytest.mark.parametrize("model", COUNTED)
def test_a_model_counts_itself_as_it_is_built(
    model: CountedModelConfig, num_dense: int, num_features: int, composition: str
) -> None:
    features = tuple(CategoricalFeature(f"C{number}", 1000 + number) for number in range(num_features))
    schema = Schema("label", tuple(f"I{number}" for number in range(num_dense)), features)
    table = TableConfig(partition="quotient_remainder", composition=composition, force=True)
    inputs = ModelInputs.from_config(schema, EmbeddingConfig(table))
    built = model.build(inputs)
    weights = {id(weight) for weight in built.embeddings.parameters()}
    dense = {name: tuple(own.shape) for name, own in built.named_parameters() if id(own) not in weights}
    assert list(model.dense_shapes(inputs).items()) == list(dense.items())
    assert built.embeddings.tables() == list(inputs.tables.values())


def test_every_model_of_clicks_counts_itself() -> None:
    """Others, of which not all columns have a table, are built to be described."""
    counted = {name for name, config in MODELS.items() if isinstance(config(), CountedModelConfig)}
    assert counted == {"dlrm", "dcn"}


def test_stored_rows_of_ids_count_as_bytes_wherever_bytes_are_counted() -> None:
    scheme = Explicit(1000, [np.arange(1000) % 64, np.arange(1000) % 15], allow_collisions=True)
    table = CompositionalEmbeddingBagConfig("t", 1000, 8, ["f"], scheme, "concat")
    codes = sum(4 * (-(-1000 * bits // 32) + 1) for bits in (6, 4))
    size = TableSize.of(table, TableOptimizers())
    described = DescribedTable(table, size).as_json()
    assert described["assignment_bytes"] == codes
    assert table.memory_bytes == described["bytes"] == (64 * 4 + 15 * 4) * 4 + codes
    assert described["serving_compression"] == 1000 * 8 * 4 / described["bytes"]
    assert described["training_bytes"] == described["bytes"] + (64 + 15) * 4  # row-wise Adagrad
    assert described["compression"] == 1000 * (8 + 1) * 4 / described["training_bytes"]
    assert ExportStorage().bytes(table) == table.memory_bytes
    assert whole_table_storage(table, TableOptimizers()).weights == table.memory_bytes


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("partition", [name for name in PARTITIONS if name != "explicit"])
def test_counts_equal_those_of_the_modules(partition: str, composition: str) -> None:
    settings = [f"embedding.default.{key}" for key in (f"partition={partition}", f"composition={composition}")]
    config = load_config(KAGGLE, [*settings, "embedding.default.force=true"])
    found = describe(config)
    model = config.model.build(ModelInputs.from_config(config.data.load_schema(), config.embedding))
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    tables = {name: weight.numel() for name, weight in model.embeddings.named_parameters()}
    for table in found.tables:
        counts = [count for name, count in tables.items() if f".{table.config.name}__p" in name]
        assert table.as_json()["parameters"] == sum(counts)
        assert len(counts) == len(table.as_json()["rows"])


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "naive": [{}],
    "remainder": [{}, {"collisions": 60}],
    "quotient_remainder": [{"collisions": 4}, {"collisions": 60}, {"num_buckets": 10}],
    "mixed_radix": [{}, {"num_partitions": 3}],
    "chinese_remainder": [{}, {"num_partitions": 4}],
}


@settings(deadline=None)
@given(
    name=st.sampled_from(list(SETTINGS)),
    composition=st.sampled_from(list(COMPOSITIONS)),
    n=st.sampled_from([1, 2, 3, 97, 1024, 2**24 + 1, 40_000_000, 2**31 + 5, 10**12]),
    data=st.data(),
)
def test_a_tables_counts_equal_its_modules(name: str, composition: str, n: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sampled_from(SETTINGS[name]))
    partition = PARTITIONS[name](n, **chosen)
    table = CompositionalEmbeddingBagConfig("t", n, 16, ["f"], partition, composition)
    weights = list(CompositionalEmbeddingBagCollection([table], device="meta").parameters())
    found = DescribedTable(table, TableSize.of(table, TableOptimizers())).as_json()
    assert found["parameters"] == sum(weight.numel() for weight in weights)
    assert found["bytes"] == sum(weight.numel() * weight.element_size() for weight in weights)
    assert sorted(found["rows"]) == sorted(len(weight) for weight in weights)
    assert found["complementary"] == (found["ids_per_row"] == 1.0)


def test_feature_generation_widens_the_model() -> None:
    def dense(overrides: list[str]) -> int:
        return describe(load_config(KAGGLE, [*FORCED, *overrides])).num_dense_parameters

    # 52 vectors and the dense one have 1378 pairs, where 27 had 351; the first top layer is 512 wide
    assert dense(["embedding.default.composition=feature"]) - dense([]) == (1378 - 351) * 512


def test_tables_that_stay_full_are_listed_by_reason() -> None:
    settings = ["embedding.default.composition=path_mlp", "embedding.default.hidden=[64]"]
    assert describe(load_config(KAGGLE, settings)).full_table_lines() == [
        "full tables: C2, C5, C8 (quotient_remainder with path_mlp would save no parameters)",
        "full tables: C6, C9, C14, C17, C20, C22, C23, C25 (no more than 200 ids)",
    ]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_totals_are_the_sums_of_the_parts(composition: str) -> None:
    found = describe(load_config(KAGGLE, [*FORCED, f"embedding.default.composition={composition}"])).as_json()
    tables = sum(table["parameters"] for table in found["tables"])
    assert found["embedding_parameters"] == tables
    assert found["embedding_bytes"] == 4 * tables
    assert found["parameters"] == tables + sum(layer["parameters"] for layer in found["dense"])


@pytest.mark.parametrize("data_type", ["fp32", "fp16"])
@pytest.mark.parametrize("composition", ["product", "path_mlp"])
@pytest.mark.parametrize(("optimizer", "states"), [("adagrad", 16), ("row_wise_adagrad", 1), ("adam", 32), ("sgd", 0)])
def test_full_tables_are_fp32_with_the_same_optimizer(
    composition: str, data_type: str, optimizer: str, states: int
) -> None:
    """Full tables have no functions; they keep 16 numbers an id and the states of it."""
    settings = [f"embedding.default.composition={composition}", f"embedding.default.data_type={data_type}"]
    described = describe(load_config(KAGGLE, [*FORCED, *settings, f"train.sparse_optimizer.name={optimizer}"]))
    ids = sum(CRITEO_KAGGLE_CARDINALITIES)
    assert described.size.full_serving == ids * 16 * 4
    assert described.size.full_training == ids * (16 + states) * 4


def test_json_has_the_promised_keys() -> None:
    found = json.loads(in_this_process("describe", KAGGLE, *FORCED, "--json").stdout)
    assert (
        found["tables"][2].items()
        >= {
            "name": "C3",
            "scheme": "quotient_remainder",
            "composition": "product",
            "num_embeddings": 10_131_227,
            "rows": [2_532_807, 4],
            "dim": 16,
            "parameters": 40_524_976,
            "bytes": 162_099_904,
        }.items()
    )


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**41, "2.00 TiB")])
def test_bytes_are_readable(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_a_tied_output_is_counted_once_and_says_what_it_saves(tmp_path: Path) -> None:
    sequences = Schema(None, (), (CategoricalFeature("user", 50), CategoricalFeature("item", 1_002, True, 8.0)))
    Manifest(sequences, {"train": Split(9, None, ())}).save(tmp_path)
    learnt = ["model.name=sasrec", "task.name=next_item", "embedding.default.embedding_dim=16"]
    overrides = [f"data.path={tmp_path}", *learnt]
    for scheme, parameters in (("naive", 1_002 * 16), ("quotient_remainder", (251 + 4) * 16)):
        table = [f"embedding.default.partition={scheme}", "embedding.default.force=true"]
        found = describe(load_config(None, [*overrides, *table])).as_json()
        (tied,) = found["tied_outputs"]
        assert tied == {"table": "item", "untied_parameters": parameters, "untied_bytes": 4 * parameters}
        assert found["embedding_parameters"] == parameters
        untied = describe(load_config(None, [*overrides, *table, "model.tied=false"])).as_json()
        assert untied["tied_outputs"] == [] and untied["parameters"] == found["parameters"] + parameters
        assert {"name": "network.catalogue.bias", "shape": [1_002], "parameters": 1_002} in found["dense"]
    (tmp_path / "config.yaml").write_text("")
    said = in_this_process("describe", tmp_path / "config.yaml", *overrides).stdout
    assert "tied: the output reuses table 'item'; untied it would add 16,032 parameters" in said
