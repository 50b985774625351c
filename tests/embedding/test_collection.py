"""The collection for sequences against single rows, and against TorchRec's."""

import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS
from distembed.embedding import CompositionalEmbeddingCollection, CompositionalEmbeddingConfig
from tests.embedding.reference import jagged

BAGS = {"f": [[3, 47], [], [0]], "g": [[49], [1, 1, 2], []]}


def table(name: str = "t", features: tuple[str, ...] = ("f",), **settings: object) -> CompositionalEmbeddingConfig:
    return CompositionalEmbeddingConfig(name, 50, 6, features, **settings)  # type: ignore[arg-type]


def test_full_tables_equal_torchrec() -> None:
    features = {"a": ["f", "h"], "b": ["g"]}
    ours = CompositionalEmbeddingCollection([table(name, tuple(names)) for name, names in features.items()])
    theirs = EmbeddingCollection(
        [
            EmbeddingConfig(num_embeddings=50, embedding_dim=6, name=name, feature_names=names)
            for name, names in features.items()
        ]
    )
    theirs.load_state_dict({key.replace("__p0", ""): value for key, value in ours.state_dict().items()})
    batch = jagged({**BAGS, "h": [[7], [8, 8, 9], [49, 0]]})
    expected, found = theirs(batch), ours(batch)
    assert list(found) == list(expected) == ["f", "h", "g"]
    for name, output in expected.items():
        torch.testing.assert_close(found[name].values(), output.values())
        assert torch.equal(found[name].lengths(), output.lengths())
        assert found[name].weights_or_none() is None and output.weights_or_none() is None
    assert ours.embedding_names_by_table() == theirs.embedding_names_by_table()
    assert ours.embedding_dim() == theirs.embedding_dim() and ours.need_indices() == theirs.need_indices()
    assert ours.device == theirs.device
    assert [c.name for c in ours.embedding_configs()] == ["a", "b"]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_gradients_reach_every_parameter(composition: str) -> None:
    config = table(partition="quotient_remainder", composition=composition)
    collection = CompositionalEmbeddingCollection([config])
    outputs = collection(jagged({"f": [list(range(50))]}))
    sum(output.values().square().sum() for output in outputs.values()).backward()
    for name, parameter in collection.named_parameters():
        assert parameter.grad is not None and (parameter.grad != 0).any(dim=1).all(), name


def test_the_ids_that_come_with_the_outputs_are_those_of_the_batch() -> None:
    collection = CompositionalEmbeddingCollection([table(id_policy="modulo")], need_indices=True)
    assert collection(jagged({"f": [[53, -1]]}))["f"].weights().tolist() == [53, -1]


def test_tables_of_several_dimensions_are_refused() -> None:
    other = CompositionalEmbeddingConfig("u", 50, 8, ["g"])
    with pytest.raises(UserError, match="table 'u' is 8 and that of 't' 6"):
        CompositionalEmbeddingCollection([table(), other])
