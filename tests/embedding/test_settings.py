"""From settings to tables: thresholds, fallbacks and exceptions."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distembed.base.errors import UserError
from distembed.composition import Product
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding import (
    CompositionalEmbeddingConfig,
    EmbeddingConfig,
    TableConfig,
    build_tables,
    reason_to_stay_full,
)
from distembed.partitions import KeyedHash, QuotientRemainder
from distembed.training.config import load_config

FEATURES = [CategoricalFeature("tiny", 5), CategoricalFeature("small", 200), CategoricalFeature("large", 10_000)]


def schemes(config: EmbeddingConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {t.name: (t.scheme.name, t.scheme.num_rows) for t in build_tables(FEATURES, config)}


def test_tables_up_to_the_threshold_stay_full() -> None:
    found = schemes(EmbeddingConfig(TableConfig(partition="quotient_remainder", threshold=200)))
    assert found == {"tiny": ("naive", (5,)), "small": ("naive", (200,)), "large": ("quotient_remainder", (2500, 4))}


def test_compression_that_saves_no_rows_falls_back_to_the_full_table() -> None:
    found = schemes(EmbeddingConfig(TableConfig(partition="quotient_remainder", threshold=0, collisions=4)))
    assert found["tiny"] == ("naive", (5,))  # 2 + 4 rows would be more than 5
    assert found["small"] == ("quotient_remainder", (50, 4))


def test_force_applies_the_scheme_everywhere() -> None:
    found = schemes(EmbeddingConfig(TableConfig(partition="quotient_remainder", force=True)))
    assert found["tiny"] == ("quotient_remainder", (2, 4))


def read(text: str) -> EmbeddingConfig:
    return load_config(None, [f"embedding={text}"]).embedding


def test_exceptions_change_only_what_they_name() -> None:
    config = read(
        "{default: {partition: quotient_remainder, collisions: 8, embedding_dim: 4},"
        " tables: {large: {collisions: 100}, small: {partition: remainder, force: true}}}"
    )
    found = schemes(config)
    assert found["large"] == ("quotient_remainder", (100, 100))
    assert found["small"] == ("remainder", (25,))
    assert {t.embedding_dim for t in build_tables(FEATURES, config)} == {4}


def test_an_exception_can_set_back_to_nothing() -> None:
    config = read(
        "{default: {partition: quotient_remainder, num_buckets: 50, hash_seed: 1}, tables: {large: {hash_seed: null}}}"
    )
    assert [table.pre_hash for table in build_tables(FEATURES, config)] == [KeyedHash(1), KeyedHash(1), None]


def test_naming_one_of_two_alternatives_takes_the_other_away() -> None:
    config = read(
        "{default: {partition: quotient_remainder, num_buckets: 50, num_partitions: 3}, tables:"
        " {large: {collisions: 5}, small: {partition: mixed_radix, moduli: [10, 20], force: true}}}"
    )
    assert schemes(config)["large"] == ("quotient_remainder", (2000, 5))
    assert schemes(config)["small"] == ("mixed_radix", (10, 20))
    with pytest.raises(UserError, match="'large'.*collisions=4 and num_buckets=50; give one of the two"):
        schemes(read("{default: {partition: quotient_remainder, collisions: 4, num_buckets: 50}}"))


def test_a_mistake_of_the_default_is_reported_once() -> None:
    with pytest.raises(UserError, match="1 mistake in") as error:
        read("{default: {partition: modulo}, tables: {large: {collisions: 2}, small: {collisions: 3}}}")
    assert str(error.value).count("modulo") == 1


def test_an_exception_for_no_feature_is_named() -> None:
    with pytest.raises(UserError, match="'larg'.*Did you mean 'large'"):
        build_tables(FEATURES, EmbeddingConfig(tables={"larg": TableConfig(collisions=2)}))


def test_one_dimension_for_all_tables() -> None:
    with pytest.raises(UserError, match="embedding_dim of table 'large' is 8 and that of the default 16"):
        read("{default: {}, tables: {large: {embedding_dim: 8}}}")


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ("{partition: remainder, num_buckets: 77}", (77,)),
        ("{partition: quotient_remainder, num_buckets: 10}", (10, 1000)),
        ("{partition: mixed_radix, num_partitions: 4}", (10, 10, 10, 10)),
        ("{partition: mixed_radix, moduli: [20, 500]}", (20, 500)),
        ("{partition: chinese_remainder, moduli: [101, 100]}", (101, 100)),
    ],
)
def test_every_scheme_gets_its_settings(settings: str, rows: tuple[int, ...]) -> None:
    assert schemes(read(f"{{default: {settings}}}"))["large"][1] == rows


def test_every_composition_gets_its_settings() -> None:
    base = "partition: quotient_remainder, embedding_dim: 10"
    for settings, dims in (
        ("composition: concat, dims: [7, 3]", (7, 3)),
        ("composition: path_linear", (10, 110)),
        ("composition: path_mlp, hidden: [5, 6], activation: tanh", (10, 10 * 5 + 5 + 5 * 6 + 6 + 6 * 10 + 10)),
        ("composition: feature", (10, 10)),
    ):
        table = build_tables(FEATURES, read(f"{{default: {{{base}, {settings}}}}}"))[2]
        assert tuple(part.dim for part in table.partition_tables()) == dims
        assert table.num_vectors == (2 if "feature" in settings else 1)


def test_compression_that_saves_no_parameters_falls_back_and_says_so() -> None:
    large = read("{default: {partition: quotient_remainder, composition: path_mlp, hidden: [64]}}")
    assert schemes(large)["large"] == ("quotient_remainder", (2500, 4))
    # 4 functions of 4096-4096 are more than the whole table
    wide = read("{default: {partition: quotient_remainder, composition: path_mlp, hidden: [4096]}}")
    assert schemes(wide)["large"] == ("naive", (10_000,))
    reason = "quotient_remainder with path_mlp would save no parameters"
    assert reason_to_stay_full(FEATURES[2], wide.default) == reason
    forced = read("{default: {partition: quotient_remainder, composition: path_mlp, hidden: [4096], force: true}}")
    assert schemes(forced)["large"] == ("quotient_remainder", (2500, 4))
    assert reason_to_stay_full(FEATURES[2], forced.default) is None


def test_an_explicit_scheme_is_read_from_parquet(tmp_path: Path) -> None:
    ids = range(10_000)
    columns = {"make": [f"make {i % 100}" for i in ids], "type": [i // 100 for i in ids]}
    pq.write_table(pa.table(columns), tmp_path / "cars.parquet")
    table = f"{{partition: explicit, assignments: {tmp_path}/cars.parquet, columns: [make, type]}}"
    config = read(f"{{default: {{}}, tables: {{large: {table}}}}}")
    assert schemes(config)["large"] == ("explicit", (100, 100))
    assert schemes(config)["small"] == ("naive", (200,))
    pq.write_table(pa.table({"make": columns["make"]}), tmp_path / "cars.parquet")
    table = f"partition: explicit, assignments: {tmp_path}/cars.parquet, columns: [make]"
    with pytest.raises(UserError, match="'large'.*ids 0 and 100 have the same rows.*allow_collisions"):
        schemes(read(f"{{default: {{}}, tables: {{large: {{{table}}}}}}}"))
    (_, _, shared) = build_tables(
        FEATURES, read(f"{{default: {{}}, tables: {{large: {{{table}, allow_collisions: true}}}}}}")
    )
    assert shared.scheme.ids_per_row == 100 and not shared.scheme.is_complementary()
    with pytest.raises(UserError, match="'large'.*assignments.*columns"):
        schemes(read("{default: {}, tables: {large: {partition: explicit}}}"))


def test_id_policies_and_hashes_reach_the_tables() -> None:
    config = read("{default: {id_policy: modulo}, tables: {large: {hash_seed: 7}}}")
    tables = build_tables(FEATURES, config)
    assert [t.id_policy for t in tables] == ["modulo"] * 3
    assert [t.pre_hash for t in tables] == [None, None, KeyedHash(7)]


@pytest.mark.parametrize("wrong", [{"partition": QuotientRemainder}, {"composition": Product}, {"oov_id": 1.5}])
def test_what_is_no_name_and_no_instance_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"table 't': {next(iter(wrong))}"):
        CompositionalEmbeddingConfig("t", 10, 4, ["f"], **wrong)  # type: ignore[arg-type]


def test_numpy_integers_are_integers() -> None:
    table = CompositionalEmbeddingConfig("t", np.int64(10), 4, ["f"])  # type: ignore[arg-type]
    assert table.num_embeddings == 10 and type(table.num_embeddings) is int
