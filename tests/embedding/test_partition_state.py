"""A state dict carries the rows of ids that training has changed, unsharded, sharded, quantised and by torch.save."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.inference.modules import quantize_embeddings
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.partitions import Clustered
from distembed.serving.convert import to_stock
from distembed.serving.quantization import MODULE_MAPPING
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
from tests.placing import shard_as
from tests.ranks import run_on_ranks

N, DIM, NUM_BUCKETS = 300, 8, 10
SHARDERS = [CompositionalEmbeddingBagCollectionSharder(), CompositionalEmbeddingCollectionSharder()]


class Both(nn.Module):
    """A table of bags and one of sequences."""

    def __init__(self, device: str = "cpu", num_ids: int = N) -> None:
        super().__init__()
        made = [Clustered(num_ids, num_buckets=NUM_BUCKETS, num_partitions=4) for _ in range(2)]
        bag = CompositionalEmbeddingBagConfig("bag", num_ids, DIM, ["x"], made[0], "concat_sum")
        sequence = CompositionalEmbeddingConfig("sequence", num_ids, DIM, ["x"], made[1], "concat_sum")
        self.bags = CompositionalEmbeddingBagCollection([bag], device=device)
        self.sequences = CompositionalEmbeddingCollection([sequence], device=device)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        bags, sequences = self.bags(features), self.sequences(features)
        return torch.stack([bags.values(), sequences["x"].values()])


def trained() -> Both:
    """A model with weights and rows of ids that no other one starts with."""
    model, generator = Both(), torch.Generator().manual_seed(5)
    for module in (model.bags, model.sequences):
        (table,) = module.tables()
        assert isinstance(table.scheme, Clustered)
        table.scheme.reassign([torch.randint(NUM_BUCKETS, (N,), generator=generator) for _ in range(2)])
        for weight in module.weights(table.name):
            weight.data.normal_(generator=generator)
    return model


def all_ids() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["x"], torch.arange(N), lengths=torch.ones(N, dtype=torch.long))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


def quantized(model: nn.Module) -> nn.Module:
    keywords: dict[str, Any] = {"additional_qconfig_spec_keys": list(MODULE_MAPPING)}
    made: nn.Module = quantize_embeddings(
        copy.deepcopy(model), torch.qint8, inplace=True, additional_mapping=MODULE_MAPPING, **keywords
    )
    return made


@pytest.mark.parametrize("change", [lambda model: model, quantized])
def test_a_loaded_model_gives_the_vectors_of_the_saved_one(change: Any) -> None:
    saved, live = change(trained()), change(Both())
    assert not torch.equal(live(all_ids()), saved(all_ids()))
    live.load_state_dict(through_a_file(saved.state_dict()))
    assert torch.equal(live(all_ids()), saved(all_ids()))
    names = {f"{path}__{state}" for path in ("bags.bag", "sequences.sequence") for state in ("assignment", "keys")}
    assert names <= saved.state_dict().keys()


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        ({key: value for key, value in trained().state_dict().items() if "__keys" not in key}, "Missing.*bag__keys"),
        (trained().state_dict() | {"bags.more": torch.ones(1)}, "Unexpected key.*bags.more"),
        (
            trained().state_dict() | {"bags.bag__assignment": torch.ones(7)},
            r"size mismatch for bags.bag__assignment: the shape is \(7,\).*give table 'bag' the partition settings",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused(saved: dict[str, Tensor], problem: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s){problem}"):
        Both().load_state_dict(saved)


def test_a_stock_model_has_no_rows_of_ids() -> None:
    model = trained()
    full = to_stock(model)
    assert full.keys() == {"bags.embedding_bags.bag.weight", "sequences.embeddings.sequence.weight"}
    expected = model(all_ids())
    for weight, vectors in zip(full.values(), expected, strict=True):
        torch.testing.assert_close(weight, vectors)


def sharded(kind: str) -> nn.Module:
    return shard_as(Both("meta"), SHARDERS, {"bag": kind, "sequence": kind})


def check_sharded(rank: int, world_size: int, kinds: list[str]) -> None:
    saved = trained()
    expected = saved(all_ids()).detach()
    for kind in kinds:
        first, second = sharded(kind), sharded(kind)
        assert not torch.equal(first(all_ids()), expected)
        first.load_state_dict(saved.state_dict())
        second.load_state_dict(first.state_dict())
        for model in (first, second):
            torch.testing.assert_close(model(all_ids()), expected, msg=kind)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_models_give_the_vectors_of_the_saved_one(world_size: int) -> None:
    kinds = ["table_wise", "row_wise", "column_wise", "data_parallel"]
    run_on_ranks(world_size, check_sharded, kinds)
