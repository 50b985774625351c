"""The step of a network that looks at lengths and ids is followed on fake tensors as on real ones."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.embedding import EmbeddingConfig, TableConfig
from distembed.models import DINConfig, ModelInputs, SASRecConfig
from distembed.planning.fake_batches import KnownIntegers, typical_batch, typical_lengths
from distembed.planning.networks import estimate_network, measure_step
from distembed.tasks import ClickConfig, NextItemConfig, batch_schema

DIM = 8
SCHEMA = Schema(
    None,
    (),
    (
        CategoricalFeature("user", 50),
        CategoricalFeature("item", 40, True, 6.25),
        CategoricalFeature("item_target", 40, True, 6.25, table="item"),
        CategoricalFeature("item_negative", 40, True, 12.5, table="item"),
    ),
    dense_sequences=("price",),
)
CUT = tuple(
    dataclasses.replace(each, max_ids_per_row=10) if each.name == "item" else each for each in SCHEMA.categorical
)


class Attention(nn.Module):
    """Attends within rows of one length at a time, and then to each item once: by values of lengths and of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(DIM, 3 * DIM)

    def forward(self, items: JaggedTensor) -> Tensor:
        lengths, offsets = items.lengths(), items.offsets()
        outputs = []
        for length in sorted(set(lengths.tolist())):
            rows = torch.nonzero(lengths == length).flatten()
            places = torch.from_numpy((offsets[rows].numpy()[:, None] + np.arange(length)).ravel())
            query, key, value = self.projection(items.values()[places]).view(len(rows), length, 3, DIM).unbind(2)
            outputs.append(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).flatten())
        return torch.cat(outputs)


def step(model: Attention, ids: KeyedJaggedTensor, vectors: Tensor) -> int:
    _, places = torch.unique(ids["item"].values(), return_inverse=True)
    items = JaggedTensor(vectors[places], lengths=ids["item"].lengths())
    outputs = model(items)
    outputs.square().sum().backward()
    return outputs.numel()


def test_a_step_on_fake_tensors_is_that_on_real_ones() -> None:
    batch = typical_batch(SCHEMA, 64)
    ids = batch["sparse_features"]
    model = Attention()
    with FlopCounterMode(display=False) as counter:
        num_outputs = step(model, ids, torch.randn(40, DIM, requires_grad=True))
    mode = KnownIntegers()
    fake_ids = mode.fake(ids)
    with mode.active():
        fake_model, vectors = Attention(), torch.randn(40, DIM, requires_grad=True)
        inputs = [vectors, fake_ids.values()]
        estimate = measure_step(fake_model, lambda: step(fake_model, fake_ids, vectors), inputs, 64, "adam", True)
    assert estimate.is_step_known
    assert estimate.flops == counter.get_total_flops() > 0
    assert estimate.output_bytes_per_row == num_outputs / 64
    least = 480 * DIM * 4 * 5  # vectors of the ids, their three projections and the output, at once
    assert least <= estimate.peak <= 4 * least


def test_the_copy_that_logsumexp_makes_of_its_input_counts() -> None:
    with KnownIntegers().active():
        model, scores = nn.Module(), torch.empty(100, 2000)

        def run() -> int:
            scores.mul(2).logsumexp(1)
            return 0

        estimate = measure_step(model, run, [scores], 100, "adam", False)
    assert estimate.peak == 4 * (2 * 100 * 2000 + 100)


def test_only_integers_are_known() -> None:
    mode = KnownIntegers()
    lengths = mode.fake(torch.tensor([3, 0, 2]))
    numbers = mode.fake(torch.tensor([3.0, 0.0, 2.0]))
    with mode.active():
        places = torch.arange(3) + torch.repeat_interleave(lengths > 0, 1)
        assert (lengths.cumsum(0) + places).tolist() == [4, 4, 8]
        assert torch.zeros(2, dtype=torch.int64).tolist() == torch.empty(2, dtype=torch.int64).tolist() == [0, 0]
        written = torch.zeros(3, dtype=torch.int64)
        written[lengths > 0] = 7
        assert written.tolist() == [7, 0, 7]
        with pytest.raises(RuntimeError, match="not known"):
            numbers.numpy()
        for unknown in (numbers, numbers > 1, torch.randint(5, (3,))):
            with pytest.raises(RuntimeError):
                unknown[0].item()
        written[0] = numbers.argmax()  # what was known is not any more
        with pytest.raises(RuntimeError):
            written.tolist()


@given(st.floats(0, 40), st.integers(1, 5), st.integers(0, 70))
def test_typical_rows_are_even_and_as_long_as_on_average(mean: float, factor: int, num_rows: int) -> None:
    lengths = typical_lengths({"item": mean, "target": mean, "negative": mean * factor}, num_rows)
    item = lengths["item"]
    assert len(item) == num_rows and (item >= 0).all()
    assert abs(int(item.sum()) - num_rows * mean) <= 1 + 1e-6 * mean * num_rows
    assert not num_rows or int(item.max() - item.min()) <= 1
    assert torch.equal(lengths["target"], item) and torch.equal(lengths["negative"], item * factor)


def test_a_typical_batch_has_ids_of_every_table_and_numbers_beside_lists_a_fifth_longer_than_on_average() -> None:
    batch = typical_batch(SCHEMA, 8)
    ids, prices = batch["sparse_features"], batch["dense_sequences"]
    assert ids.keys() == ["user", "item", "item_target", "item_negative"] and ids.stride() == prices.stride() == 8
    assert ids.length_per_key() == [8, 60, 60, 120]
    assert all(0 <= int(ids[name].values().min()) <= int(ids[name].values().max()) < 50 for name in ids.keys())
    assert len(prices.values()) == math.ceil(1.2 * SCHEMA.mean_list_length * 8)
    assert typical_batch(SCHEMA, 0)["sparse_features"].length_per_key() == [0, 0, 0, 0]
    padded = typical_batch(dataclasses.replace(SCHEMA, categorical=CUT), 8, pads_lists=True)
    assert padded["sparse_features"].length_per_key() == [8, 80, 60, 120]
    assert padded["dense_sequences"].length_per_key() == [80]


@pytest.mark.thorough
def test_histories_are_counted_up_to_their_length_limit_and_padded_to_it_on_cuda() -> None:
    history = CategoricalFeature("clicked", 40, True, 10.0, table="item")
    inputs = ModelInputs.from_config(
        Schema("label", (), (CategoricalFeature("item", 40), history)), EmbeddingConfig(TableConfig(embedding_dim=16))
    )

    def flops(kind: Any, length: int, pads_lists: bool) -> int:
        config = DINConfig(history=kind, history_length={"clicked": length}, deep=[8])
        estimate = estimate_network(config, inputs, ClickConfig().build(), 32, "adam", False, 1, pads_lists)
        assert estimate.is_step_known and estimate.peak > 0
        return estimate.flops

    assert flops("attention", 100, False) > 1.5 * flops("attention", 5, False)
    # lengths are not read on CUDA: older items become zeros, and a transformer's rows have the greatest length
    assert flops("attention", 100, True) == flops("attention", 5, True)
    assert flops("transformer", 100, False) < 1.5 * flops("transformer", 13, False)
    assert flops("transformer", 100, True) > 6 * flops("transformer", 13, True)


@pytest.mark.thorough
def test_a_softmax_is_counted_over_all_items_and_the_queries_of_all_ranks() -> None:
    model, task = SASRecConfig(dropout=0.0), NextItemConfig(max_length=8)
    estimates = {}
    for num_items, world_size in ((5_000, 1), (50_000, 1), (50_000, 4)):
        item = CategoricalFeature("item", num_items, True, 9.0)
        schema = batch_schema(task, Schema(None, (), (CategoricalFeature("user", 50), item)))
        inputs = ModelInputs.from_config(schema, EmbeddingConfig(TableConfig(embedding_dim=16)), dense_tables=["item"])
        found = estimate_network(model, inputs, task.build(), 32, "adam", False, world_size)
        assert found.is_step_known
        estimates[num_items, world_size] = found
    few, many, ranks = estimates.values()
    num_queries = 32 * 8 * 1.2
    # forward once, backward the scores again and both gradients
    expected = 8 * num_queries * 16 * 45_000
    assert many.flops - few.flops == pytest.approx(expected, rel=0.15)
    # four times the queries, a quarter of the items
    assert ranks.flops == pytest.approx(many.flops, rel=0.1) and ranks.peak > few.peak
    assert many.peak - few.peak < 4 * 45_000 * 4  # the bias and its gradient, and no scores
