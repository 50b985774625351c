"""Unified tables: features with ids of their own in one table, against sums by hand, and their settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    EmbeddingConfig,
    build_tables,
)
from distembed.embedding.build import grown_embedding, require_same_settings
from distembed.embedding.config import meaning_of_weights, perturbation
from distembed.embedding.ids import map_ids
from distembed.partitions import KeyedHash, MultiHash, QuotientRemainder
from distembed.sse import SSE
from distembed.training.config import load_config

SIZES = {"a": 10, "b": 15, "c": 5}
FIRST_IDS = {"a": 0, "b": 10, "c": 25}
FEATURES = [CategoricalFeature("x", 7), *(CategoricalFeature(name, size) for name, size in SIZES.items())]
MORE = [*FEATURES, CategoricalFeature("bs", 15, multi_hot=True, mean_ids_per_row=2.0, table="b")]


def unified(**settings: Any) -> CompositionalEmbeddingBagConfig:
    given = {"partition": "multi_hash", "composition": "concat", "first_ids": FIRST_IDS, **settings}
    return CompositionalEmbeddingBagConfig("store", 30, 4, list(SIZES), **given)


def batch(ids: Mapping[str, list[int]]) -> KeyedJaggedTensor:
    values = torch.tensor([each for own in ids.values() for each in own])
    return KeyedJaggedTensor(list(ids), values, lengths=torch.ones(len(values), dtype=torch.int32))


def test_outputs_and_gradients_are_those_by_hand() -> None:
    """Id x of feature f has the remainder and quotient of first_f + x; gradients add up over all features."""
    table = unified(partition=QuotientRemainder(30, num_buckets=7), composition="product", pooling="sum")
    collection = CompositionalEmbeddingBagCollection([table]).double()
    bags = {"a": [[3, 3], [9]], "b": [[], [3]], "c": [[4], [0, 3]]}
    values = [each for rows in bags.values() for row in rows for each in row]
    lengths = [len(row) for rows in bags.values() for row in rows]
    output = collection(KeyedJaggedTensor(list(bags), torch.tensor(values), lengths=torch.tensor(lengths))).values()
    factor = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 12)))
    (output * factor).sum().backward()
    remainders, quotients = (weight.detach().numpy() for weight in collection.weights("store"))
    expected, gradients = np.zeros((2, 12)), [np.zeros_like(remainders), np.zeros_like(quotients)]
    for number, (feature, rows) in enumerate(bags.items()):
        columns = slice(4 * number, 4 * number + 4)
        for row, ids in enumerate(rows):
            for own in ids:
                quotient, remainder = divmod({"a": 0, "b": 10, "c": 25}[feature] + own, 7)
                expected[row, columns] += remainders[remainder] * quotients[quotient]
                gradients[0][remainder] += factor[row, columns].numpy() * quotients[quotient]
                gradients[1][quotient] += factor[row, columns].numpy() * remainders[remainder]
    assert np.allclose(output.detach(), expected, rtol=1e-12, atol=0)
    for weight, gradient in zip(collection.weights("store"), gradients, strict=True):
        assert np.allclose(weight.grad, gradient, rtol=1e-12, atol=1e-15)


def test_equal_ids_of_two_features_have_other_rows_and_an_equal_id_of_one_vocabulary_the_same() -> None:
    scheme = MultiHash(3000, num_buckets=1000)
    ids = torch.arange(1000)
    first, second = (scheme.rows(ids + start) for start in (0, 1000))
    assert (first == second).float().mean() < 0.01  # independent rows agree once in a thousand
    table = unified(first_ids={**FIRST_IDS, "bs": 10}, partition="naive")
    table = dataclasses.replace(table, feature_names=[*SIZES, "bs"])
    mapped = CompositionalEmbeddingBagCollection([table]).map_ids(batch({"b": [3], "bs": [3], "a": [3]}))
    assert mapped.values().tolist() == [13, 13, 3]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_policies_act_within_the_ids_of_a_feature(dtype: torch.dtype) -> None:
    ids = torch.tensor([0, 4, 5, 16, -1], dtype=dtype)
    assert map_ids(unified(id_policy="modulo"), ids, feature="c").tolist() == [25, 29, 25, 26, 29]
    assert map_ids(unified(id_policy="clip_to_oov"), ids, feature="c").tolist() == [25, 29, 26, 26, 26]
    with pytest.raises(UserError, match=r"'store', feature 'c': the id at position 2 is 5.*between 0 and 4"):
        map_ids(unified(), ids, feature="c")
    single = unified(first_ids={"a": 0, "b": 1, "c": 25}, id_policy="clip_to_oov")
    assert map_ids(single, ids, feature="a").tolist() == [0] * 5  # a single id is that of unknown values too
    for policy, mapped in (("modulo", [9, 12, 28]), ("clip_to_oov", [9, 12, 26])):
        collection = CompositionalEmbeddingBagCollection([unified(id_policy=policy)])
        found = collection.map_ids(batch({"a": [9], "b": [2], "c": [8]})).values()
        assert found.tolist() == mapped


def test_values_are_hashed_into_the_ids_of_their_feature() -> None:
    table, values = unified(pre_hash=KeyedHash(3)), torch.tensor([-(2**63), 5, 2**63 - 1, 10**12])
    for feature, first in FIRST_IDS.items():
        expected = KeyedHash(3).ids(values, SIZES[feature]) + first
        assert torch.equal(map_ids(table, values, feature=feature), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_replaced_ids_are_of_the_same_feature_and_evenly_drawn(dtype: torch.dtype) -> None:
    table = unified(sse={"b": SSE(1.0, reserved=[0, 1], keep_reserved=True), "c": SSE(1.0)})
    count = 40_000
    ids = {name: torch.arange(count) % SIZES[name] + FIRST_IDS[name] for name in SIZES}
    values = torch.cat(list(ids.values())).to(dtype)
    given = KeyedJaggedTensor(list(SIZES), values, lengths=torch.ones(3 * count, dtype=torch.int32))
    new = dict(zip(SIZES, perturbation([table], rank=0).train()(given).values().long().split(count), strict=True))
    assert torch.equal(new["a"], ids["a"])
    kept = ids["b"] < 12
    assert torch.equal(new["b"][kept], ids["b"][kept]) and (new["b"] != ids["b"])[~kept].all()
    assert (new["c"] != ids["c"]).all()
    for name, drawn in (("b", range(12, 25)), ("c", range(25, 30))):
        found = new[name][~kept] if name == "b" else new[name]
        counts = torch.bincount(found, minlength=30)
        assert counts.nonzero().flatten().tolist() == list(drawn)
        expected = len(found) / len(drawn)  # each id is as often drawn as any other, over all old ids
        assert (counts[list(drawn)] - expected).abs().max() < 5 * expected**0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"first_ids": {"a": 0, "b": 10}}, r"first_ids lacks feature 'c', and has a, b; give the table's id"),
        ({"first_ids": {"a": 0, "b": 10, "c": 30}}, r"first_ids is .*below num_embeddings=30"),
        ({"first_ids": {"a": 1, "b": 10, "c": 25}}, r"first_ids is .*the least is 0"),
        ({"first_ids": {"a": 0, "b": 1.5, "c": 25}}, r"first_ids is .*1\.5.*such as \{'a': 0"),
        ({"first_ids": [0, 10, 25]}, r"first_ids is \[0, 10, 25\]"),
        ({"oov_id": 5}, r"oov_id is 5, and feature 'c' has 5 ids"),
        ({"sse": {"c": SSE(0.1, reserved=[7])}}, r"the reserved id 7 lies outside"),
    ],
)
def test_wrong_first_ids_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        unified(**settings)


def test_a_table_keeps_its_first_ids_and_has_a_hash() -> None:
    given = dict(FIRST_IDS)
    table = unified(first_ids=given)
    given["c"] = 20
    assert table.first_ids == FIRST_IDS
    same = unified(partition=table.partition, composition=table.composition)
    assert table == same and hash(table) == hash(same)


def read(text: str) -> EmbeddingConfig:
    return load_config(None, [f"embedding={text}"]).embedding


STORE = "{tables: {store: {features: [c, b], partition: multi_hash, num_buckets: 5, composition: concat, force: true}}}"


def test_a_config_puts_features_into_one_table() -> None:
    x, a, store = build_tables(MORE, read(STORE), sse={"bs": SSE(0.5), "a": SSE(0.1)})
    assert [(table.name, table.feature_names, table.first_ids) for table in (x, a)] == [
        ("x", ("x",), None),
        ("a", ("a",), None),
    ]
    assert store.feature_names == ("b", "c", "bs")
    assert store.first_ids == {"c": 0, "b": 5, "bs": 5}  # in the order of the setting
    assert (store.num_embeddings, store.scheme.num_rows) == (20, (5, 5))
    assert store.rules == {"bs": SSE(0.5)}
    renamed = dataclasses.replace(store, first_ids={"b": 0, "c": 15, "bs": 0})
    assert meaning_of_weights(store) != meaning_of_weights(renamed)


def test_hashed_features_of_huge_ids_get_equal_shares() -> None:
    raw = [CategoricalFeature("u", 2**62), CategoricalFeature("v", 2**62)]
    text = "{tables: {store: {features: [u, v], partition: multi_hash, num_buckets: 50%s}}}"
    with pytest.raises(UserError, match=r"store\.features have 9223372036854775808 ids in all.*hash_seed.*hash_size"):
        build_tables(raw, read(text % ""))
    (store,) = build_tables(raw, read(text % ", hash_seed: 1"))
    assert store.first_ids == {"u": 0, "v": 2**62 - 1} and store.num_embeddings == 2**63 - 2
    ids = map_ids(store, torch.tensor([7, -7]), feature="v")
    assert ((ids >= 2**62 - 1) & (ids < 2**63 - 2)).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{tables: {store: {features: [a, d]}}}", r"embedding\.tables\.store\.features is 'd', which is not known"),
        ("{tables: {store: {features: [a, bs]}}}", r"embedding\.tables\.store\.features is 'bs', which is not known"),
        ("{tables: {store: {features: [a]}, y: {features: [b, a]}}}", r"'a' is in tables\.store\.features and in .*y"),
        ("{tables: {store: {features: [a, a]}}}", r"'a' is in tables\.store\.features twice"),
        ("{tables: {store: {features: [a]}, a: {}}}", r"'a' is in tables\.store\.features and in tables\.a"),
        ("{tables: {store: {features: []}}}", r"tables\.store\.features is empty; name the features"),
        ("{default: {features: [a]}}", r"default\.features is a; .*tables\.unified\.features"),
        ("{tables: {b: {features: [a]}}}", r"tables\.b has features.*give the table another name"),
        ("{tables: {bs: {features: [a, b]}}}", r"tables\.bs has features.*give the table another name"),
        ("{tables: {store: {features: [a], embedding_dim: 4}}}", r"embedding_dim of table 'store' is 4"),
    ],
)
def test_wrong_features_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_tables(MORE, read(text))


def test_a_unified_table_neither_grows_nor_changes_its_features() -> None:
    now = [CategoricalFeature("x", 9), *FEATURES[1:]]
    grown = grown_embedding(read(STORE), FEATURES, read(STORE), now)  # the others grow
    tables = {table.name: table for table in build_tables(now, grown)}
    assert (tables["x"].num_embeddings, tables["store"].first_ids) == (9, {"c": 0, "b": 5})
    more = [*FEATURES[:3], CategoricalFeature("c", 6)]
    with pytest.raises(UserError, match=r"'store' is unified: the ids of c, b follow.*cannot grow from 20 ids to 21"):
        grown_embedding(read(STORE), FEATURES, read(STORE), more)
    for other in ("{}", STORE.replace("[c, b]", "[b, c]")):
        with pytest.raises(UserError, match=r"table 'store': features was \['c', 'b'\]"):
            require_same_settings(read(STORE), read(other), FEATURES, "runs/one")
