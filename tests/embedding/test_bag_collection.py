"""The unsharded collection against a loop over ids in plain Python."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.composition import COMPOSITIONS
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.errors import UserError
from distembed.partitions import PARTITIONS, QuotientRemainder


def table(name: str = "t", features: tuple[str, ...] = ("f",), **settings: object) -> CompositionalEmbeddingBagConfig:
    return CompositionalEmbeddingBagConfig(name, 50, 6, features, **settings)  # type: ignore[arg-type]


def jagged(bags: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    values = [i for feature in bags.values() for bag in feature for i in bag]
    lengths = [len(bag) for feature in bags.values() for bag in feature]
    return KeyedJaggedTensor(
        list(bags), torch.tensor(values, dtype=torch.long), lengths=torch.tensor(lengths, dtype=torch.long)
    )


BAGS = {"f": [[3, 47], [], [0]], "g": [[49], [1, 1, 2], []]}


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_bags_equal_a_loop_over_ids(partition: str, composition: str, pooling: str) -> None:
    config = table(features=("f", "g"), partition=partition, composition=composition, pooling=pooling)
    collection = CompositionalEmbeddingBagCollection([config])
    output = collection(jagged(BAGS))
    assert output.keys() == ["f", "g"]
    weights = [bag.weight for bag in collection.embedding_bags.values()]
    for feature, bags in BAGS.items():
        for index, bag in enumerate(bags):
            expected = torch.zeros(6)
            for i in bag:
                rows = config.scheme.rows(torch.tensor(i)).tolist()
                expected += config.combine.compose([w[r] for w, r in zip(weights, rows, strict=True)])
            if pooling == "mean" and bag:
                expected /= len(bag)
            torch.testing.assert_close(output[feature][index], expected)


def test_pairs_of_ids_that_share_all_rows_get_distinct_product_vectors() -> None:
    # {3, 47} and {7, 43} use the same remainders and the same quotients at 10 remainder rows
    collection = CompositionalEmbeddingBagCollection([table(partition=QuotientRemainder(50, num_buckets=10))])
    output = collection(jagged({"f": [[3, 47], [7, 43]]}))["f"]
    assert not torch.allclose(output[0], output[1])


@pytest.mark.parametrize("wrong", [-1, 50, 2**62])
def test_an_id_outside_its_table_is_named(wrong: int) -> None:
    collection = CompositionalEmbeddingBagCollection([table(features=("f", "g"))])
    with pytest.raises(UserError, match=rf"feature 'g'.*position 1 .* is {wrong};.*between 0 and 49"):
        collection(jagged({"f": [[1], []], "g": [[2], [wrong]]}))


def test_features_that_no_table_reads_may_hold_anything() -> None:
    collection = CompositionalEmbeddingBagCollection([table()])
    assert collection(jagged({"f": [[1]], "other": [[10**9]]})).keys() == ["f"]


def test_empty_batches_and_empty_bags() -> None:
    collection = CompositionalEmbeddingBagCollection([table(partition="quotient_remainder")])
    assert collection(jagged({"f": []}))["f"].shape == (0, 6)
    assert torch.equal(collection(jagged({"f": [[], []]}))["f"], torch.zeros(2, 6))


def test_a_missing_feature_is_named() -> None:
    with pytest.raises(UserError, match="feature 'f' of table 't'"):
        CompositionalEmbeddingBagCollection([table()])(jagged({"g": [[1]]}))


def test_weights_depend_on_the_seed_and_the_name_alone() -> None:
    first = CompositionalEmbeddingBagCollection([table("a", ("f",)), table("b", ("g",))])
    second = CompositionalEmbeddingBagCollection([table("b", ("g",)), table("a", ("f",))])
    other = CompositionalEmbeddingBagCollection([table("a", ("f",), seed=1)])
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    assert not torch.equal(first.state_dict()["embedding_bags.a__p0.weight"], next(iter(other.state_dict().values())))


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_initial_vectors_have_a_full_tables_variance(composition: str) -> None:
    config = CompositionalEmbeddingBagConfig("t", 40_000, 16, ["f"], QuotientRemainder(40_000), composition)
    collection = CompositionalEmbeddingBagCollection([config])
    output = collection(jagged({"f": [[i] for i in range(40_000)]}))["f"]
    assert output.var().item() == pytest.approx(1 / (3 * 40_000), rel=0.1)


def test_a_collection_on_the_meta_device_takes_no_memory() -> None:
    huge = CompositionalEmbeddingBagConfig("t", 10**12, 16, ["f"], "naive")
    collection = CompositionalEmbeddingBagCollection([huge], device="meta")
    assert collection.embedding_bags["t__p0"].weight.shape == (10**12, 16)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "quotient_remainer"}, "Did you mean 'quotient_remainder'"),
        ({"composition": "add"}, "composition is 'add'"),
        ({"pooling": "max"}, "pooling is 'max'"),
        ({"partition": QuotientRemainder(51)}, "made for 51 ids"),
        ({"features": ()}, "feature_names"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        table(**settings)  # type: ignore[arg-type]


def test_repeated_names_and_features_are_refused() -> None:
    with pytest.raises(UserError, match="the name 't'"):
        CompositionalEmbeddingBagCollection([table("t", ("f",)), table("t", ("g",))])
    with pytest.raises(UserError, match="the feature 'f'"):
        CompositionalEmbeddingBagCollection([table("t", ("f",)), table("u", ("f",))])
    with pytest.raises(UserError, match="at least one table"):
        CompositionalEmbeddingBagCollection([])
