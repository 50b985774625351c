"""The unsharded collection against a loop over ids in plain Python, and against TorchRec's."""

import pytest
import torch
from tensordict import TensorDict
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import PARTITIONS, QuotientRemainder
from tests.embedding.reference import jagged
from tests.embedding.schemes import make_partition, small_composition


def table(name: str = "t", features: tuple[str, ...] = ("f",), **settings: object) -> CompositionalEmbeddingBagConfig:
    return CompositionalEmbeddingBagConfig(name, 50, 6, features, **settings)  # type: ignore[arg-type]


BAGS = {"f": [[3, 47], [], [0]], "g": [[49], [1, 1, 2], []]}
WEIGHTS = {"f": [[0.5, -2.0], [], [3.0]], "g": [[0.0], [1.5, 0.25, -1.0], []]}


@pytest.mark.parametrize(
    ("pooling", "is_weighted"), [(PoolingType.SUM, False), (PoolingType.SUM, True), (PoolingType.MEAN, False)]
)
def test_full_tables_equal_torchrec(pooling: PoolingType, is_weighted: bool) -> None:
    features = {"a": ["f", "h"], "b": ["g"]}
    ours = CompositionalEmbeddingBagCollection(
        [table(name, tuple(names), pooling=pooling) for name, names in features.items()], is_weighted=is_weighted
    )
    configs = [
        EmbeddingBagConfig(num_embeddings=50, embedding_dim=6, name=name, feature_names=names, pooling=pooling)
        for name, names in features.items()
    ]
    theirs = EmbeddingBagCollection(configs, is_weighted=is_weighted)
    theirs.load_state_dict({key.replace("__p0", ""): value for key, value in ours.state_dict().items()})
    batch = jagged({**BAGS, "h": [[7], [8, 8, 9], [49, 0]]}, {**WEIGHTS, "h": [[1.0], [2.0, 0.5, 1.0], [-1.0, 4.0]]})
    expected, found = theirs(batch), ours(batch)
    assert found.keys() == expected.keys() == ["f", "h", "g"]
    assert found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values())
    assert {c.name: c.num_embeddings for c in ours.embedding_bag_configs()} == {"a": 50, "b": 50}
    assert ours.is_weighted() == theirs.is_weighted() and ours.device == theirs.device


def test_a_tensor_dict_is_taken_as_by_torchrec() -> None:
    nested = torch.nested.nested_tensor_from_jagged(torch.tensor([3, 47, 0]), torch.tensor([0, 2, 2, 3]))
    collection = CompositionalEmbeddingBagCollection([table()])
    expected = collection(jagged({"f": BAGS["f"]})).values()
    assert torch.equal(collection(TensorDict({"f": nested}, batch_size=3)).values(), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_gradients_are_those_of_the_outputs(composition: str, pooling: str) -> None:
    config = CompositionalEmbeddingBagConfig(
        "t", 12, 4, ["f", "g"], "quotient_remainder", small_composition(composition), pooling=pooling
    )
    collection = CompositionalEmbeddingBagCollection([config], is_weighted=pooling != "max").double()
    batch = jagged({"f": [[3, 11], [], [0]], "g": [[9], [1, 1, 2], []]}, WEIGHTS)
    names, values = zip(*collection.named_parameters(), strict=True)
    sample_weights = batch.weights().double().requires_grad_(pooling != "max")

    def output(sample_weights: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        weighted = KeyedJaggedTensor(batch.keys(), batch.values(), sample_weights, batch.lengths())
        return torch.func.functional_call(collection, dict(zip(names, values, strict=True)), (weighted,)).values()

    assert torch.autograd.gradcheck(output, (sample_weights, *values))


def test_features_that_no_table_reads_are_left_out() -> None:
    collection = CompositionalEmbeddingBagCollection([table()])
    assert collection(jagged({"other": [[-(10**9)]], "f": [[1]]})).keys() == ["f"]


def test_a_missing_feature_is_named() -> None:
    with pytest.raises(UserError, match="feature 'f' of table 't'"):
        CompositionalEmbeddingBagCollection([table()])(jagged({"g": [[1]]}))


def test_missing_weights_are_named() -> None:
    with pytest.raises(UserError, match="is_weighted=True, but the KeyedJaggedTensor has no weights"):
        CompositionalEmbeddingBagCollection([table()], is_weighted=True)(jagged({"f": [[1]]}))
    # weights that were not asked for are left alone
    collection = CompositionalEmbeddingBagCollection([table()])
    assert torch.equal(
        collection(jagged({"f": [[1]]}, {"f": [[9.0]]})).values(), collection(jagged({"f": [[1]]})).values()
    )


def test_weights_depend_on_the_seed_and_the_name_alone() -> None:
    settings = {"partition": "quotient_remainder", "composition": "path_mlp"}
    first = CompositionalEmbeddingBagCollection([table("a", ("f",), **settings), table("b", ("g",))])
    second = CompositionalEmbeddingBagCollection([table("b", ("g",)), table("a", ("f",), **settings)])
    other = CompositionalEmbeddingBagCollection([table("a", ("f",), seed=1, **settings)])
    assert first.state_dict().keys() == {
        "embedding_bags.a__p0.weight",
        "functions.a__p1",
        "embedding_bags.b__p0.weight",
    }
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    drawn_later = CompositionalEmbeddingBagCollection(second.tables(), device="meta").to_empty(device="cpu")
    drawn_later.reset_parameters()
    for name, weight in drawn_later.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name])
    assert not torch.equal(
        first.state_dict()["embedding_bags.a__p0.weight"], other.state_dict()["embedding_bags.a__p0.weight"]
    )


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_initial_vectors_have_a_full_tables_variance(composition: str) -> None:
    config = CompositionalEmbeddingBagConfig("t", 40_000, 16, ["f"], QuotientRemainder(40_000), composition)
    collection = CompositionalEmbeddingBagCollection([config])
    output = collection(jagged({"f": [[i] for i in range(40_000)]})).values()
    assert output.var().item() == pytest.approx(1 / (3 * 40_000), rel=0.1)


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_config_counts_what_a_module_has(partition: str, composition: str) -> None:
    num_embeddings = {"explicit": 50, "clustered": 10**9}.get(partition, 10**12)
    config = CompositionalEmbeddingBagConfig(
        "t", num_embeddings, 16, ["f"], make_partition(partition, num_embeddings), composition
    )
    collection = CompositionalEmbeddingBagCollection([config], device="meta")
    parameters = list(collection.parameters())
    assert all(parameter.is_meta for parameter in parameters)
    assert config.num_parameters == sum(parameter.numel() for parameter in parameters)
    assert config.memory_bytes == sum(parameter.nbytes for parameter in parameters) + config.scheme.assignment_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "quotient_remainer"}, "Did you mean 'quotient_remainder'"),
        ({"composition": "add"}, "composition is 'add'"),
        ({"pooling": "median"}, "pooling is 'median'"),
        ({"partition": QuotientRemainder(51)}, "made for 51 ids"),
        ({"features": ()}, "feature_names"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        table(**settings)  # type: ignore[arg-type]


def test_a_feature_with_the_name_of_a_partitions_vector_is_refused() -> None:
    several = table("t", ("f",), partition="quotient_remainder", composition="feature")
    CompositionalEmbeddingBagCollection([several, table("u", ("f__p2",))])
    for name in ("f__p0", "f__p1"):
        with pytest.raises(UserError, match=f"feature '{name}' has the name of a vector that feature 'f' gives"):
            CompositionalEmbeddingBagCollection([several, table("u", (name,))])


def test_repeated_names_and_features_are_refused() -> None:
    with pytest.raises(UserError, match="the name 't'"):
        CompositionalEmbeddingBagCollection([table("t", ("f",)), table("t", ("g",))])
    with pytest.raises(UserError, match="the feature 'f'"):
        CompositionalEmbeddingBagCollection([table("t", ("f",)), table("u", ("f",))])
    with pytest.raises(UserError, match="at least one table"):
        CompositionalEmbeddingBagCollection([])
