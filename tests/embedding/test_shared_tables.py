"""Several features that are looked up in one table, each with its own rule by which its ids are replaced."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.embedding import EmbeddingConfig, build_tables
from distembed.embedding.collections import CompositionalEmbeddingCollection
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.sse import SSE

FEATURES = (
    CategoricalFeature("user", 7),
    CategoricalFeature("item", 50, multi_hot=True, mean_ids_per_row=3.0),
    CategoricalFeature("item_target", 50, multi_hot=True, mean_ids_per_row=3.0, table="item"),
)


def test_features_of_one_table_are_looked_up_in_it() -> None:
    user, item = build_tables(FEATURES, EmbeddingConfig(), sse={"item": SSE(p0=1.0)})
    assert (user.name, user.feature_names, user.rules) == ("user", ("user",), {})
    assert (item.name, item.feature_names) == ("item", ("item", "item_target"))
    assert item.rules == {"item": SSE(p0=1.0)}


def test_each_feature_is_replaced_by_its_own_rule() -> None:
    torch.manual_seed(0)
    rules = {"item": SSE(p0=1.0)}
    table = CompositionalEmbeddingConfig("item", 50, 4, ["item", "item_target"], sse=rules)
    collection = CompositionalEmbeddingCollection([table]).train()
    ids = torch.arange(50).repeat(2)
    batch = KeyedJaggedTensor(["item", "item_target"], ids, lengths=torch.ones(100, dtype=torch.int32), stride=50)
    vectors = collection(batch)
    weight = collection.weights("item")[0]
    assert torch.equal(vectors["item_target"].values(), weight)
    replaced = vectors["item"].values()
    assert (replaced != weight).any(1).all()  # p0 of 1: each id becomes another one of the table
    assert all(any(torch.equal(vector, row) for row in weight) for vector in replaced)
    assert collection.sse.take_counts() == {"item": (50, 50)}


def test_one_rule_is_that_of_all_features_of_a_table() -> None:
    table = CompositionalEmbeddingConfig("item", 50, 4, ["item", "item_target"], sse=SSE(p0=0.5))
    assert table.rules == {"item": SSE(p0=0.5), "item_target": SSE(p0=0.5)}


@pytest.mark.parametrize("sse", [{"nothing": SSE(p0=0.5)}, {"item": 0.5}, 0.5])
def test_a_rule_of_no_feature_is_refused(sse: object) -> None:
    with pytest.raises(UserError, match="table 'item': sse is .*item"):
        CompositionalEmbeddingConfig("item", 50, 4, ["item"], sse=sse)  # type: ignore[arg-type]


def test_a_feature_of_a_table_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="'a' has 5 ids and the table 'b', whose feature has none"):
        Schema(None, (), (CategoricalFeature("a", 5, table="b"),))
    with pytest.raises(UserError, match="'a' has 5 ids and the table 'b', whose feature has 6"):
        Schema(None, (), (CategoricalFeature("b", 6), CategoricalFeature("a", 5, table="b")))


def test_a_schema_reads_back() -> None:
    plain = Schema("label", ("x",), FEATURES[:1])
    assert plain.to_json() == {"label": "label", "dense": ["x"], "categorical": [{"name": "user", "num_embeddings": 7}]}
    whole = Schema(None, (), FEATURES, ("hour",), missing_dense=True)
    numbers = Schema("rating", (), FEATURES, label_kind="number")
    assert [Schema.from_json(each.to_json()) for each in (plain, whole, numbers)] == [plain, whole, numbers]
    assert [field.name for field in whole.fields] == ["dense_features", "sparse_features", "dense_sequences"]
