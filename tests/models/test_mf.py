"""MF against its formula, and a step of it against one written in float64."""

import math

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import LABELS, SPARSE_FEATURES, CategoricalFeature, Schema
from distembed.data.reader.batch import Batch
from distembed.embedding import CompositionalEmbeddingBagCollection, EmbeddingConfig, TableConfig
from distembed.models import MF, MFConfig, ModelInputs
from distembed.tasks import RatingTask

NUM_USERS, NUM_ITEMS = 5, 7
SCHEMA = Schema(
    "rating",
    (),
    (CategoricalFeature("user", NUM_USERS), CategoricalFeature("item", NUM_ITEMS)),
    label_kind="number",
)


def make_inputs(dim: int, schema: Schema = SCHEMA) -> ModelInputs:
    return ModelInputs.from_config(schema, EmbeddingConfig(TableConfig(embedding_dim=dim)))


def make_mf(biases: bool, dim: int = 4, dropout: float = 0.0) -> MF:
    model = MFConfig(biases=biases, dropout=dropout).build(make_inputs(dim))
    assert isinstance(model, MF)
    model.embeddings = CompositionalEmbeddingBagCollection(model.embeddings.tables(), device="cpu")
    return model


def weights(model: MF) -> dict[str, torch.Tensor]:
    return {name.split(".")[-2].removesuffix("__p0"): value for name, value in model.embeddings.named_parameters()}


def batch_of(users: list[int], items: list[int], ratings: list[float]) -> Batch:
    ids = torch.tensor([*users, *items], dtype=torch.int64)
    sparse = KeyedJaggedTensor(["user", "item"], ids, lengths=torch.ones(len(ids), dtype=torch.int32))
    return Batch({SPARSE_FEATURES: sparse, LABELS: torch.tensor(ratings)}, len(users))


@pytest.mark.parametrize("biases", [True, False])
def test_a_step_equals_one_in_float64(biases: bool) -> None:
    users, items, ratings, lambda_ = [0, 3, 3], [6, 2, 2], [4.0, 1.0, 5.0], 0.3
    model, task = make_mf(biases), RatingTask(lambda_, subtract_mean=False)
    batch = batch_of(users, items, ratings)
    loss, rows = task.step(model(batch[SPARSE_FEATURES]), batch)
    loss.backward()

    expected = {name: np.zeros_like(value.detach().numpy(), np.float64) for name, value in weights(model).items()}
    values = {name: value.detach().numpy().astype(np.float64) for name, value in weights(model).items()}
    expected_loss = 0.0
    for row, (user, item, rating) in enumerate(zip(users, items, ratings, strict=True)):
        u, v = values["user"][user], values["item"][item]
        score = u[:-1] @ v[:-1] + u[-1] + v[-1] if biases else u @ v
        error = score - rating
        expected_loss += error**2 + lambda_ * (u @ u + v @ v)
        u_factors, v_factors = (np.r_[u[:-1], 1], np.r_[v[:-1], 1]) if biases else (u, v)
        expected["user"][user] += 2 * error * v_factors + 2 * lambda_ * u
        expected["item"][item] += 2 * error * u_factors + 2 * lambda_ * v
        assert rows["predictions"][row].item() == pytest.approx(score, abs=1e-6)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-6)
    for name, value in weights(model).items():
        np.testing.assert_allclose(value.grad.to_dense().numpy(), expected[name], atol=1e-5)


def test_dropout_leaves_biases_and_evaluations_alone() -> None:
    model = make_mf(biases=True, dim=64, dropout=0.5)
    with torch.no_grad():
        for value in weights(model).values():
            value.fill_(1.0)
    ids = batch_of([0, 1], [2, 3], [0, 0])[SPARSE_FEATURES]
    queries = model(ids)
    assert set(queries.vectors[:, :-1].unique().tolist()) == {0.0, 2.0}
    assert queries.vectors[:, -1].tolist() == queries.offsets.tolist() == [1.0, 1.0]
    assert queries.items["item"].vectors[:, -1].tolist() == [1.0, 1.0]
    model.eval()
    assert model(ids).scores("item").flatten().tolist() == [65.0, 65.0]


def test_a_batch_without_rows_goes_forward_and_back() -> None:
    model, task = make_mf(biases=True), RatingTask(0.1)
    batch = batch_of([], [], [])
    loss, rows = task.step(model(batch[SPARSE_FEATURES]), batch)
    loss.backward()
    assert loss.item() == 0 and rows["predictions"].shape == (0,)
    assert math.isnan(task.metrics({name: value.detach().numpy() for name, value in rows.items()})["rmse"])


def test_what_mf_cannot_be_built_of_is_named() -> None:
    with pytest.raises(
        UserError, match=r"takes the categorical features 'user' and 'item', and this dataset has user;"
    ):
        MFConfig().build(make_inputs(4, Schema(None, (), SCHEMA.categorical[:1])))
    tables = {"item": TableConfig(embedding_dim=4, partition="quotient_remainder", composition="feature", force=True)}
    inputs = ModelInputs.from_config(SCHEMA, EmbeddingConfig(TableConfig(embedding_dim=4), tables))
    with pytest.raises(UserError, match="table 'item' has composition 'feature', with 2 vectors an id"):
        MFConfig().build(inputs)
    with pytest.raises(UserError, match="embedding_dim is 1"):
        MFConfig().build(make_inputs(1))
