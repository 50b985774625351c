"""Whole models of sequences, made from configs: what stands beside items, tied and untied outputs, what is refused."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.embedding import CompositionalEmbeddingCollection
from distembed.embedding.settings import EmbeddingConfig, TableConfig
from distembed.models import GRUConfig, ModelInputs, SASRecConfig
from distembed.models.hstu_config import HSTUConfig
from distembed.tasks import NextItemConfig, batch_schema

DIM = 4
SCHEMA = Schema(
    None,
    (),
    (
        CategoricalFeature("user", 5),
        CategoricalFeature("item", 20, True, 3.0),
        CategoricalFeature("genre", 6, True, 3.0),
    ),
    dense_sequences=("hour", "price"),
)


class OnCPU(ModelInputs):
    """Makes collections that have weights."""

    def _make_sequences(self, tables: Sequence[Any]) -> nn.Module:
        return CompositionalEmbeddingCollection(tables, device="cpu")


def make_inputs(schema: Schema = SCHEMA, table: TableConfig | None = None, **task: Any) -> OnCPU:
    settings = EmbeddingConfig(default=table or TableConfig(embedding_dim=DIM))
    return OnCPU.from_config(batch_schema(NextItemConfig(**task), schema), settings)  # type: ignore[return-value]


def batch(**columns: list[list[Any]]) -> KeyedJaggedTensor:
    values = [value for column in columns.values() for row in column for value in row]
    lengths = [len(row) for column in columns.values() for row in column]
    return KeyedJaggedTensor(list(columns), torch.tensor(values), lengths=torch.tensor(lengths))


ITEMS, GENRES, TARGETS = [[3, 4, 5], [], [6]], [[1, 2, 0], [], [5]], [[4, 5, 7], [], [8]]


def test_a_gru_with_what_stands_beside_items_equals_a_loop() -> None:
    model = GRUConfig(hidden=5, dropout=0.0).build(make_inputs())
    hours, prices = [[0.1, float("nan"), 9.0], [], [3.0]], [[1.0, 2.0, 3.0], [], [4.0]]
    queries = model(
        batch(user=[[1], [2], [3]], item=ITEMS, genre=GENRES, item_target=TARGETS), batch(hour=hours, price=prices)
    )
    weights = {name: model.embeddings.weights(name)[0] * DIM**0.5 for name in ("item", "genre")}
    network, cell = model.network, nn.GRUCell(DIM, 5)
    for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        setattr(cell, name, getattr(network.states.gru, f"{name}_l0"))
    expected = []
    for row in range(3):
        state = torch.zeros(5)
        for place, item in enumerate(ITEMS[row]):
            numbers = network.tokens.encode(torch.tensor([[hours[row][place], prices[row][place]]]))
            beside = [weights["item"][item], weights["genre"][GENRES[row][place]], numbers.flatten()]
            state = cell(network.tokens.project(torch.cat(beside)), state)
            expected.append(network.states.output(state))
    torch.testing.assert_close(queries.vectors, torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert queries.items == {} and queries.catalogue.table.name == "item"


@pytest.mark.parametrize(
    "config", [SASRecConfig(dropout=0.0), GRUConfig(dropout=0.0, side_features=False), HSTUConfig(dropout=0.0)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_candidates_are_scored_by_the_table_of_outputs(config: Any, tied: bool) -> None:
    model = dataclasses.replace(config, tied=tied).build(make_inputs(loss="binary"))
    nn.init.normal_(model.network.catalogue.bias)
    negatives = [[9, 10, 11], [], [12]]
    queries = model(batch(user=[[1], [2], [3]], item=ITEMS, genre=GENRES, item_target=TARGETS, item_negative=negatives))
    outputs = model.embeddings.weights("item")[0] if tied else model.outputs.weights("item_output")[0]
    bias = model.network.catalogue.bias
    for feature, rows in (("item_target", TARGETS), ("item_negative", negatives)):
        ids = torch.tensor([item for row in rows for item in row])
        expected = (queries.vectors * outputs[ids]).sum(1) + bias[ids]
        torch.testing.assert_close(queries.scores(feature).squeeze(1), expected)
    shared = queries.catalogue.share()
    assert shared.table.name == ("item" if tied else "item_output")
    num_tables = sum(parameter.numel() == 20 * DIM for parameter in model.parameters())
    assert num_tables == (1 if tied else 2)


def test_clusters_of_the_table_of_outputs_leave_the_table_of_items() -> None:
    table = TableConfig(embedding_dim=DIM, partition="clustered", composition="concat_sum", num_buckets=3, threshold=1)
    model = SASRecConfig(tied=False).build(make_inputs(table=table))
    (items,), (outputs,) = (own.tables() for own in (model.embeddings, model.outputs))
    ids = torch.arange(20)
    before = items.scheme.rows(ids)
    assert torch.equal(outputs.scheme.rows(ids), before)
    outputs.scheme.reassign([torch.zeros(20, dtype=torch.int64)] * outputs.scheme.num_stored)
    assert torch.equal(items.scheme.rows(ids), before) and not torch.equal(outputs.scheme.rows(ids), before)


def test_hstu_takes_times() -> None:
    model = HSTUConfig(dropout=0.0, times="hour").build(make_inputs())
    for parameter in model.network.states.layers.parameters():
        nn.init.normal_(parameter)
    ids = batch(user=[[1], [2], [3]], item=ITEMS, genre=GENRES, item_target=TARGETS)
    prices = [[1.0, 2.0, 3.0], [], [4.0]]
    early, late = (model(ids, batch(hour=[[0.0, 1.0, own], [], [7.0]], price=prices)) for own in (2.0, 200.0))
    torch.testing.assert_close(early.vectors[[0, 1, 3]], late.vectors[[0, 1, 3]])
    assert not torch.equal(early.vectors[2], late.vectors[2])
    unknown = model(ids, batch(hour=[[0.0, 1.0, math.nan], [], [7.0]], price=prices))
    torch.testing.assert_close(early.vectors[[0, 1, 3]], unknown.vectors[[0, 1, 3]])
    assert unknown.vectors.isfinite().all() and not torch.equal(early.vectors[2], unknown.vectors[2])
    with pytest.raises(UserError, match="model.times is 'hours', which is not known. Did you mean 'hour'"):
        HSTUConfig(times="hours").build(make_inputs())


def test_what_a_model_cannot_be_built_from_is_refused() -> None:
    with pytest.raises(UserError, match=r"num_heads is 3.*embedding_dim=4"):
        SASRecConfig(num_heads=3).build(make_inputs())
    clicks = OnCPU.from_config(SCHEMA, EmbeddingConfig(default=TableConfig(embedding_dim=DIM)))
    with pytest.raises(UserError, match="needs sequences of the feature 'item'.*next_item"):
        SASRecConfig().build(clicks)
    several = TableConfig(embedding_dim=DIM, partition="quotient_remainder", composition="feature", threshold=1)
    with pytest.raises(UserError, match="'item'.*feature"):
        SASRecConfig().build(make_inputs(table=several))
