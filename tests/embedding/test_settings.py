"""From settings to tables: thresholds, fallbacks and exceptions."""

import pytest

from distembed.data.schema import CategoricalFeature
from distembed.embedding import EmbeddingConfig, TableConfig, TableOverride, build_tables
from distembed.errors import UserError

FEATURES = [CategoricalFeature("tiny", 5), CategoricalFeature("small", 200), CategoricalFeature("large", 10_000)]


def schemes(config: EmbeddingConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {t.name: (t.scheme.name, t.scheme.num_rows) for t in build_tables(FEATURES, config)}


def test_tables_up_to_the_threshold_stay_full() -> None:
    found = schemes(EmbeddingConfig(TableConfig(partition="quotient_remainder", threshold=200)))
    assert found == {
        "tiny": ("naive", (5,)),
        "small": ("naive", (200,)),
        "large": ("quotient_remainder", (2500, 4)),
    }


def test_compression_that_saves_no_rows_falls_back_to_the_full_table() -> None:
    found = schemes(EmbeddingConfig(TableConfig(partition="quotient_remainder", threshold=0, collisions=4)))
    assert found["tiny"] == ("naive", (5,))  # 2 + 4 rows would be more than 5
    assert found["small"] == ("quotient_remainder", (50, 4))


def test_force_applies_the_scheme_everywhere() -> None:
    found = schemes(EmbeddingConfig(TableConfig(partition="quotient_remainder", force=True)))
    assert found["tiny"] == ("quotient_remainder", (2, 4))


def test_exceptions_change_only_what_they_name() -> None:
    config = EmbeddingConfig(
        TableConfig(partition="quotient_remainder", collisions=8, embedding_dim=4),
        {"large": TableOverride(collisions=100), "small": TableOverride(partition="remainder", force=True)},
    )
    found = schemes(config)
    assert found["large"] == ("quotient_remainder", (100, 100))
    assert found["small"] == ("remainder", (25,))
    assert {t.embedding_dim for t in build_tables(FEATURES, config)} == {4}


def test_an_exception_for_no_feature_is_named() -> None:
    with pytest.raises(UserError, match="'larg'.*Did you mean 'large'"):
        build_tables(FEATURES, EmbeddingConfig(tables={"larg": TableOverride(collisions=2)}))
