"""A table is trained as one: partitions that declare different optimizers are refused, not ignored."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from distembed.base.errors import UserError
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.optim.declared import declared_optimizers
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder

SHARDERS: list[Any] = [CompositionalEmbeddingBagCollectionSharder(), CompositionalEmbeddingCollectionSharder()]
Declared = tuple[Any, dict[str, float]]
"""An optimizer's class and its settings."""
ADAGRAD: Declared = (torch.optim.Adagrad, {"lr": 0.1})


def bags(composition: str = "product") -> nn.Module:
    table = CompositionalEmbeddingBagConfig("t", 99, 4, ["t"], "quotient_remainder", composition)
    return CompositionalEmbeddingBagCollection([table], device="meta")


def sequences(composition: str = "product") -> nn.Module:
    table = CompositionalEmbeddingConfig("t", 99, 4, ["t"], "quotient_remainder", composition)
    return CompositionalEmbeddingCollection([table], device="meta")


def declare(module: Any, *optimizers: Declared | None) -> nn.ModuleDict:
    """A model of the module whose partitions declare these optimizers, one each."""
    for weight, optimizer in zip(module.weights("t"), optimizers, strict=True):
        if optimizer is not None:
            apply_optimizer_in_backward(optimizer[0], [weight], dict(optimizer[1]))
    return nn.ModuleDict({"embeddings": module})


@pytest.mark.parametrize("make", [bags, sequences])
@pytest.mark.parametrize(
    ("other", "text"),
    [
        ((torch.optim.SGD, {"lr": 0.1}), "SGD(lr=0.1)"),
        ((torch.optim.Adagrad, {"lr": 0.2}), "Adagrad(lr=0.2)"),
        ((torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}), "Adagrad(eps=0.001, lr=0.1)"),
        (None, "none"),
    ],
)
def test_partitions_with_different_optimizers_are_refused(make: Any, other: Declared | None, text: str) -> None:
    for first, second in ((ADAGRAD, other), (other, ADAGRAD)):
        model = declare(make(), first, second)
        texts = ["Adagrad(lr=0.1)", text] if first is ADAGRAD else [text, "Adagrad(lr=0.1)"]
        found = re.escape(f"different optimizers: t__p0: {texts[0]}; t__p1: {texts[1]}. Give all vectors")
        with pytest.raises(UserError, match=f"table 't' .* {found}"):
            declared_optimizers(model, SHARDERS)
        with pytest.raises(UserError, match=f"table 't' .* {found}"):
            planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
            planner.plan(model, SHARDERS)


@pytest.mark.parametrize("make", [bags, sequences])
def test_one_optimizer_with_one_setting_is_taken_however_often_it_is_said(make: Any) -> None:
    assert declared_optimizers(declare(make(), ADAGRAD, ADAGRAD), SHARDERS) == {"t": "adagrad"}
    assert declared_optimizers(declare(make(), None, None), SHARDERS) == {"t": None}


def test_a_function_declares_no_other_optimizer_than_its_tables_vectors() -> None:
    sgd: Declared = (torch.optim.SGD, {"lr": 0.1})
    for function in (None, ADAGRAD):
        assert declared_optimizers(declare(bags("path_linear"), ADAGRAD, function), SHARDERS) == {"t": "adagrad"}
    with pytest.raises(UserError, match=r"t__p0: Adagrad\(lr=0.1\); t__p1: SGD\(lr=0.1\)\. .*functions.*none"):
        declared_optimizers(declare(bags("path_linear"), ADAGRAD, sgd), SHARDERS)
