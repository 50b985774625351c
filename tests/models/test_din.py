"""DIN against its equations, written out row by row in float64, with gradients; histories found in the schema."""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.tracing import as_on_cuda
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingCollection
from distembed.embedding.settings import EmbeddingConfig, TableConfig
from distembed.models import ModelInputs, SoftOneHotConfig
from distembed.models.din import DIN
from distembed.models.din_config import DINConfig

DIM = 4
SITE = CategoricalFeature("site", 6)
ITEM, SHOP = CategoricalFeature("item", 20), CategoricalFeature("shop", 8)
LAST = CategoricalFeature("last", 20, table="item")
CLICKED = CategoricalFeature("clicked", 20, True, 3.0, table="item")
BOUGHT = CategoricalFeature("bought", 20, True, 1.0, table="item")
VISITED = CategoricalFeature("visited", 8, True, 2.0, table="shop")
HISTORIES = {"clicked": "item", "bought": "item", "visited": "shop"}


class OnCPU(ModelInputs):
    """Makes collections that have weights."""

    def _make_pooled(self, tables: Sequence[Any]) -> nn.Module:
        return CompositionalEmbeddingBagCollection(tables, device="cpu")

    def _make_sequences(self, tables: Sequence[Any]) -> nn.Module:
        return CompositionalEmbeddingCollection(tables, device="cpu")


def build(config: DINConfig, schema: Schema, **table: Any) -> DIN:
    settings = EmbeddingConfig(default=TableConfig(embedding_dim=DIM, **table))
    model = config.build(OnCPU.from_config(schema, settings))
    assert isinstance(model, DIN)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double()


def jagged(columns: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    values = [value for column in columns.values() for row in column for value in row]
    lengths = [len(row) for column in columns.values() for row in column]
    return KeyedJaggedTensor(
        list(columns), torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths, dtype=torch.int64)
    )


IDS = {
    "site": [[1], [2], [3]],
    "item": [[4], [5], [6]],
    "shop": [[1], [0], [7]],
    "last": [[2], [9], [0]],
    "clicked": [[4, 7, 7], [], [19]],
    "bought": [[], [], [3, 6]],
    "visited": [[2], [2, 3], []],
}


def summaries(model: DIN) -> list[nn.Module]:
    return [history.summary for history in model.interests.histories]


def network(model: nn.Module, inputs: Tensor) -> Tensor:
    for layer in model.layers:
        inputs = layer(inputs)
    return inputs


@pytest.mark.parametrize("table", [{}, {"partition": "quotient_remainder", "collisions": 3, "threshold": 1}])
def test_din_equals_its_equations(table: dict[str, Any]) -> None:
    schema = Schema(None, ("price",), (SITE, ITEM, SHOP, LAST, CLICKED, BOUGHT, VISITED))
    model = build(DINConfig(attention=[5], deep=[6]), schema, **table)
    prices = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)

    def expected() -> Tensor:
        vectors = {name: model.item_embeddings(jagged(IDS)).get(name) for name in ("item", "shop", "last", *HISTORIES)}
        logits = []
        for row in range(3):
            own = {name: list(jagged_rows(vectors[name].values(), IDS[name])[row]) for name in vectors}
            interests = []
            for summary, (history, target) in zip(summaries(model), HISTORIES.items(), strict=True):
                total = torch.zeros(DIM, dtype=torch.float64)
                (t,) = own[target]
                for e in own[history]:
                    weight = network(summary.network, torch.cat([e, t, e - t, e * t]))
                    total = total + weight * e
                interests.append(total)
            others = [model.soft_one_hot(prices)[row, 0], model.embeddings(jagged(IDS))["site"][row]]
            everything = torch.cat([*others, own["item"][0], own["shop"][0], own["last"][0], *interests])
            logits.append(network(model.deep, everything)[0])
        return torch.stack(logits)

    assert_equal_with_gradients(model, model(prices, jagged(IDS)), expected())


def assert_equal_with_gradients(model: nn.Module, found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted)
    weights, leaves = torch.randn_like(found), list(model.parameters())
    gradients = torch.autograd.grad(found, leaves, weights, allow_unused=True)
    for own, other in zip(gradients, torch.autograd.grad(wanted, leaves, weights, allow_unused=True), strict=True):
        assert (own is None) == (other is None)
        if own is not None:
            torch.testing.assert_close(own, other)


def jagged_rows(values: Tensor, rows: list[list[int]]) -> tuple[Tensor, ...]:
    return values.split([len(row) for row in rows])


@pytest.mark.parametrize("on_cuda", [False, True])
def test_histories_have_kinds_and_lengths_of_their_own(on_cuda: bool) -> None:
    histories = [CategoricalFeature(name, 20, True, 3.0, table="item") for name in ("seen", "liked", "bought", "read")]
    config = DINConfig(
        history={"liked": "mean", "bought": "sum", "read": "transformer"},
        history_length={"seen": 2, "liked": 3, "bought": 1},
        attention=[5],
        deep=[6],
    )
    model = build(config, Schema(None, (), (ITEM, *histories))).eval()
    ids = {"item": [[4], [5], [6]]} | dict.fromkeys(("seen", "liked", "bought", "read"), [[4, 7, 7, 1, 2], [], [19, 3]])

    def expected() -> Tensor:
        vectors = {name: model.item_embeddings(jagged(ids)).get(name).values() for name in ids}
        logits = []
        for row in range(3):
            own = {name: jagged_rows(vectors[name], ids[name])[row] for name in ids}
            t = own["item"][0]
            attention, _, _, last_state = summaries(model)
            seen = torch.zeros(DIM, dtype=torch.float64)
            for e in own["seen"][-2:]:
                seen = seen + network(attention.network, torch.cat([e, t, e - t, e * t])) * e
            liked = own["liked"][-3:].mean(0) if len(own["liked"]) else torch.zeros(DIM, dtype=torch.float64)
            lengths = torch.tensor([len(own["read"])])
            read = last_state(own["read"], lengths, t.unsqueeze(0))[0]
            logits.append(network(model.deep, torch.cat([t, seen, liked, own["bought"][-1:].sum(0), read]))[0])
        return torch.stack(logits)

    with as_on_cuda() if on_cuda else nullcontext():
        found = model(torch.empty(3, 0), jagged(ids))
    assert_equal_with_gradients(model, found, expected())


NUMBERS = {
    "gap": [[0.5, 3.0, float("nan")], [], [7.0]],
    "stars": [[4.0, 5.0, 1.0], [], [2.0]],
    "price": [[], [], [1, float("nan")]],
}


@pytest.mark.parametrize("kind", ["attention", "mean", "transformer"])
@pytest.mark.parametrize("on_cuda", [False, True])
def test_vectors_of_numbers_are_added_to_those_of_items(kind: Any, on_cuda: bool) -> None:
    schema = Schema(
        None,
        (),
        (ITEM, CLICKED, BOUGHT),
        dense_sequences=("gap", "stars", "price"),
        beside=("clicked", "clicked", "bought"),
        missing_dense=True,
    )
    soft_one_hot = SoftOneHotConfig(bins=3, value_range=[0, 4])
    config = DINConfig(history=kind, history_length=2, attention=[5], deep=[6], side_soft_one_hot=soft_one_hot)
    model = build(config, schema).eval()
    assert "dense_sequences" in model.batch_fields
    names = {"clicked": ["gap", "stars"], "bought": ["price"]}
    ids = {name: IDS[name] for name in ("item", *names)}

    def encoded(encode: nn.Module, place: int, number: float) -> Tensor:
        if number != number:
            return encode.missing[place]
        shares = torch.softmax(number * encode.weights[place] + encode.biases[place], 0)
        return shares @ encode.vectors[place]

    def expected() -> Tensor:
        vectors = {name: model.item_embeddings(jagged(ids)).get(name).values() for name in ids}
        logits = []
        for row in range(3):
            (t,) = jagged_rows(vectors["item"], ids["item"])[row]
            parts = [t]
            for history in model.interests.histories:
                own = list(jagged_rows(vectors[history.name], ids[history.name])[row])
                for place, name in enumerate(names[history.name]):
                    for j, number in enumerate(NUMBERS[name][row]):
                        own[j] = own[j] + encoded(history.encode, place, number)
                own = own[-2:]
                tokens = torch.stack(own) if own else torch.zeros(0, DIM, dtype=torch.float64)
                parts.append(history.summary(tokens, torch.tensor([len(own)]), t.unsqueeze(0))[0])
            logits.append(network(model.deep, torch.cat(parts))[0])
        return torch.stack(logits)

    with as_on_cuda() if on_cuda else nullcontext():
        found = model(torch.empty(3, 0), jagged(ids), jagged_numbers(NUMBERS))
    assert_equal_with_gradients(model, found, expected())
    with pytest.raises(AssertionError, match="given their batch field"):
        model(torch.empty(3, 0), jagged(ids))
    plain = build(dataclasses.replace(config, side_features=False), schema)
    assert "dense_sequences" not in plain.batch_fields and all(
        each.encode is None for each in plain.interests.histories
    )


def test_lists_of_numbers_have_ranges_of_their_own() -> None:
    """A list's bins are those that a model with this range for all lists has."""
    schema = Schema(None, (), (ITEM, CLICKED), dense_sequences=("gap", "stars"), beside=("clicked", "clicked"))
    settings = EmbeddingConfig(default=TableConfig(embedding_dim=DIM))

    def encoder(**config: Any) -> nn.Module:
        model = DINConfig(**config).build(OnCPU.from_config(schema, settings))
        return model.interests.histories[0].encode

    own, other = encoder(side_value_ranges={"stars": [1.0, 5.0]}), encoder()
    everywhere = encoder(side_soft_one_hot=SoftOneHotConfig(bins=20, value_range=[1.0, 5.0]))
    for name in ("weights", "biases"):
        assert torch.equal(getattr(own, name)[0], getattr(other, name)[0])
        assert torch.equal(getattr(own, name)[1], getattr(everywhere, name)[1])
    with pytest.raises(UserError, match="a list of model.side_value_ranges is 'star'.*Did you mean 'stars'"):
        encoder(side_value_ranges={"star": [1.0, 5.0]})


def jagged_numbers(columns: dict[str, list[list[float]]]) -> KeyedJaggedTensor:
    values = [value for column in columns.values() for row in column for value in row]
    lengths = [len(row) for column in columns.values() for row in column]
    return KeyedJaggedTensor(list(columns), torch.tensor(values, dtype=torch.float64), lengths=torch.tensor(lengths))


def test_a_transformer_is_as_long_as_the_config_the_dataset_or_fifty() -> None:
    short = CategoricalFeature("short", 20, True, 3.0, table="item", max_ids_per_row=7)
    for length, sizes in ((None, [50, 7]), (9, [9, 9]), ({"short": 3}, [50, 3])):
        model = build(
            DINConfig(history="transformer", history_length=length, deep=[6]), Schema(None, (), (ITEM, CLICKED, short))
        )
        assert [len(summary.transformer.positions) for summary in summaries(model)] == sizes


@pytest.mark.parametrize("setting", ["history", "history_length"])
def test_settings_of_unknown_histories_are_refused(setting: str) -> None:
    config = DINConfig(**{setting: {"click": "mean" if setting == "history" else 3}})
    with pytest.raises(UserError, match=f"history of model.{setting} is 'click'.*Did you mean 'clicked'"):
        build(config, Schema(None, (), (ITEM, CLICKED)))


def test_a_transformer_takes_the_last_items_in_their_order() -> None:
    schema = Schema(None, (), (ITEM, CLICKED))
    model = build(DINConfig(history="transformer", history_length=2, num_heads=2, deep=[6]), schema).eval()
    ids = {"item": [[4], [5]], "clicked": [[1, 2, 3], [2, 3]]}
    found = model(torch.empty(2, 0), jagged(ids | {"item": [[4], [4]]}))
    torch.testing.assert_close(found[0], found[1])
    swapped = model(torch.empty(2, 0), jagged({"item": [[4], [4]], "clicked": [[1, 3, 2], [2, 3]]}))
    assert not torch.isclose(swapped[0], found[0])


@pytest.mark.parametrize("history", ["attention", "transformer", "mean"])
def test_batches_without_rows_or_histories_go_forward_and_back(history: Any) -> None:
    model = build(DINConfig(history=history, deep=[6]), Schema(None, (), (ITEM, CLICKED)))
    for num_rows in (0, 2):
        logits = model(torch.empty(num_rows, 0), jagged({"item": [[1]] * num_rows, "clicked": [[]] * num_rows}))
        assert logits.shape == (num_rows,)
        logits.sum().backward()


def test_datasets_without_a_history_and_several_vectors_an_id_are_refused() -> None:
    with pytest.raises(UserError, match="no list feature of this dataset shares the table"):
        build(DINConfig(), Schema(None, (), (ITEM, SITE)))
    with pytest.raises(UserError, match="'item'.*feature"):
        build(
            DINConfig(),
            Schema(None, (), (ITEM, CLICKED)),
            partition="quotient_remainder",
            composition="feature",
            threshold=1,
        )
    with pytest.raises(UserError, match="num_heads is 3"):
        build(DINConfig(num_heads=3), Schema(None, (), (ITEM, CLICKED)))
