"""Settings of tables that grow: what follows from the number of ids is written down; what cannot grow is refused."""

from typing import Any

import pytest

from distembed.base.errors import UserError
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding import EmbeddingConfig, TableConfig, build_tables
from distembed.embedding.build import grown_embedding


def grow(before: int, now: int, **settings: Any) -> TableConfig:
    embedding = EmbeddingConfig(TableConfig(**settings))
    features = ([CategoricalFeature("C", size)] for size in (before, now))
    grown = grown_embedding(embedding, next(features), embedding, next(features))
    (table,) = build_tables([CategoricalFeature("C", now)], grown)
    assert table.num_embeddings == now
    return grown.for_table("C")


@pytest.mark.parametrize(
    ("settings", "pinned"),
    [
        ({"partition": "quotient_remainder"}, {"num_buckets": 250}),
        ({"partition": "quotient_remainder", "num_buckets": 9}, {"num_buckets": 9}),
        ({"partition": "remainder", "collisions": 10}, {"num_buckets": 100, "collisions": None}),
        ({"partition": "mixed_radix"}, {"moduli": [32, 41]}),
        ({"partition": "chinese_remainder", "moduli": [64, 63]}, {"moduli": [64, 63]}),
        ({"partition": "quotient_remainder", "threshold": 1000}, {"partition": "naive"}),
        ({}, {"partition": "naive"}),
    ],
)
def test_what_is_computed_from_the_number_of_ids_is_written_down(
    settings: dict[str, Any], pinned: dict[str, Any]
) -> None:
    table = grow(1000, 1300, **settings)
    assert {key: getattr(table, key) for key in pinned} == pinned
    assert grow(1000, 1000, **settings) == TableConfig(**settings)  # nothing is pinned of what did not grow


def test_what_cannot_grow_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="table 'C' has 9 ids and had 10"):
        grow(10, 9)
    with pytest.raises(UserError, match=r"table 'C' hashes its ids \(hash_seed 3\) into 10"):
        grow(10, 11, hash_seed=3)
    with pytest.raises(UserError, match="table 'C': chinese_remainder with moduli"):
        grow(1000, 99999, partition="chinese_remainder")
    features = [CategoricalFeature("C", 10)], [CategoricalFeature("D", 10)]
    with pytest.raises(UserError, match="tables differ from the earlier run's tables: C, D"):
        grown_embedding(EmbeddingConfig(), features[0], EmbeddingConfig(), features[1])
