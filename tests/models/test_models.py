"""DLRM and DCN against their papers' formulas, written out again, with numbers and with soft one-hot vectors."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.models.dlrm import DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.data.dataset.schema import SCHEMAS, Schema
from distembed.models import DCN, DLRM, MODELS, DCNConfig, DLRMConfig, SoftOneHot, SoftOneHotConfig
from distembed.models.config import plan_values
from distembed.models.dcn import CrossLayers
from distembed.models.dlrm_config import LowRankCrossConfig
from distembed.models.layers import CrossLayersV2
from distembed.training.config import load_config
from tests.models.fake_inputs import FakeEmbeddings, FakeInputs, ids

TWO_NUMBERS = Schema(None, ("d0", "d1"), ())
# din needs a history, see test_din.py
LOGIT_MODELS = [
    name for name, config in MODELS.items() if getattr(config, "returns", None) == "logits" and name != "din"
]


@pytest.mark.parametrize("batch", [1, 3])
def test_dlrm_with_cross_layers_equals_torchrecs_dlrm_dcn(batch: int) -> None:
    tables = [
        EmbeddingBagConfig(name=f"t{key}", embedding_dim=4, num_embeddings=9, feature_names=[key]) for key in "abc"
    ]
    theirs = DLRM_DCN(EmbeddingBagCollection(tables=tables), 2, [8, 4], [6, 1], dcn_num_layers=2, dcn_low_rank_dim=3)
    collection, crossnet = theirs.sparse_arch.embedding_bag_collection, theirs.inter_arch.crossnet
    ours = DLRM(collection, list("abc"), 4, 2, bottom=[8], top=[6], cross=CrossLayersV2(16, 2, 3))
    assert sum(own.numel() for own in ours.parameters()) == sum(own.numel() for own in theirs.parameters())
    for own in crossnet.bias:
        nn.init.normal_(own)
    kernels = [
        *crossnet.V_kernels,
        *(each for pair in zip(crossnet.W_kernels, crossnet.bias, strict=True) for each in pair),
    ]
    weights = [*theirs.dense_arch.parameters(), *kernels, *theirs.over_arch.parameters()]
    networks = [own for name, own in ours.named_parameters() if not name.startswith("embeddings.")]
    for own, weight in zip(networks, weights, strict=True):
        own.data.copy_(weight)
    features = KeyedJaggedTensor(list("abc"), torch.arange(6 * batch) % 9, lengths=torch.full([3 * batch], 2))
    dense = torch.randn(batch, 2)
    torch.testing.assert_close(ours(dense, features), theirs(dense, features).squeeze(1))


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_dlrm_equals_its_formula(batch: int) -> None:
    vectors = {key: torch.randn(batch, 4) for key in "abc"}
    model = DLRM(FakeEmbeddings(vectors), list("abc"), 4, 2, bottom=[8], top=[8])
    dense = torch.randn(batch, 2)
    bottom = model.bottom(dense)
    stacked = torch.stack([bottom, *vectors.values()], dim=1)
    dots = [(stacked[:, i] * stacked[:, j]).sum(1, keepdim=True) for i in range(4) for j in range(i + 1, 4)]
    torch.testing.assert_close(model(dense, ids(batch)), model.top(torch.cat([bottom, *dots], dim=1)).squeeze(1))


@pytest.mark.parametrize("name", LOGIT_MODELS)
def test_a_batch_without_rows_goes_forward_and_back(name: str) -> None:
    vectors = {key: torch.randn(0, 4, requires_grad=True) for key in "abc"}
    model = MODELS[name]().build(FakeInputs(vectors, TWO_NUMBERS))
    model(torch.randn(0, 2), ids(0)).sum().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters() if p.grad is not None)
    assert vectors["a"].grad.shape == (0, 4)


@pytest.mark.parametrize("name", LOGIT_MODELS)
def test_the_order_of_keys_does_not_matter(name: str) -> None:
    vectors = {key: torch.randn(3, 4) for key in "abc"}
    model = MODELS[name]().build(FakeInputs(vectors, TWO_NUMBERS))
    dense = torch.randn(3, 2)
    before = model(dense, ids(3))
    model.embeddings.keys = list("cab")
    torch.testing.assert_close(model(dense, ids(3)), before)


def test_cross_layers_equal_equation_3() -> None:
    layers = CrossLayers(5, 3)
    nn.init.normal_(layers.biases)
    inputs = torch.randn(4, 5)
    expected = inputs
    for weight, bias in zip(layers.weights, layers.biases, strict=True):
        expected = inputs * (expected * weight).sum(1, keepdim=True) + bias + expected
    torch.testing.assert_close(layers(inputs), expected)


def test_paper_sizes() -> None:
    names = list(SCHEMAS["criteo_kaggle"].categorical_names)
    dlrm = DLRM(nn.Identity(), names, 16, 13)
    assert dlrm.top.layers[0].in_features == 367
    # 13-512-256-64-16, 367-512-256-1 with all biases
    sizes = [(13, 512), (512, 256), (256, 64), (64, 16), (367, 512), (512, 256), (256, 1)]
    assert sum(p.numel() for p in dlrm.parameters()) == sum(a * b + b for a, b in sizes)
    dcn = DCN(nn.Identity(), names, 16, 13)
    deep = sum(a * b + b for a, b in [(429, 512), (512, 256), (256, 64)])
    assert sum(p.numel() for p in dcn.parameters()) == deep + 6 * 2 * 429 + (64 + 429) + 1


@pytest.mark.parametrize("num_dense", [0, 2])
@pytest.mark.parametrize("name", LOGIT_MODELS)
def test_models_take_datasets_without_dense_features(name: str, num_dense: int) -> None:
    schema = Schema(None, ("d0", "d1")[:num_dense], ())
    model = MODELS[name]().build(FakeInputs({k: torch.randn(3, 4) for k in "abc"}, schema))
    assert model(torch.randn(3, num_dense), ids(3)).shape == (3,)


def test_a_model_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="at least one"):
        DLRM(nn.Identity(), [], 16, 0)


def test_dlrm_warns_where_it_has_no_pair_to_multiply() -> None:
    vectors = {"a": torch.randn(3, 4)}
    with pytest.warns(UserWarning, match="DLRM multiplies pairs of vectors.*model={name: dcn}"):
        model = DLRM(FakeEmbeddings(vectors), ["a"], 4, 0)
    assert len(model(torch.empty(3, 0), ids(3)).unique()) == 1


NUMBERS = torch.tensor([[1.0, 2.0], [math.nan, 0.5], [7.0, math.nan]])
SETTINGS = SoftOneHotConfig(bins=4, value_range=[0.0, 3.0])


def soft_inputs(missing_dense: bool = True) -> FakeInputs:
    vectors = {key: torch.randn(3, 4) for key in "abc"}
    return FakeInputs(vectors, replace(TWO_NUMBERS, missing_dense=missing_dense))


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("dense", ["soft_one_hot", "both"])
def test_dlrm_takes_the_sum_of_soft_one_hot_vectors(dense: str, layer_norm: bool) -> None:
    inputs = soft_inputs()
    model = DLRMConfig(bottom=[8], top=[8], dense=dense, soft_one_hot=replace(SETTINGS, layer_norm=layer_norm)).build(
        inputs
    )
    layer = SoftOneHot(2, 4, 4, layer_norm)
    layer.load_state_dict(model.soft_one_hot.state_dict())
    vector = layer(NUMBERS).sum(1)
    if dense == "both":
        vector = vector + model.bottom(torch.tensor([[1.0, 2.0], [0.0, 0.5], [7.0, 0.0]]))
    stacked = torch.stack([vector, *inputs.embeddings.vectors.values()], dim=1)
    dots = [(stacked[:, i] * stacked[:, j]).sum(1, keepdim=True) for i in range(4) for j in range(i + 1, 4)]
    expected = model.top(torch.cat([vector, *dots], dim=1)).squeeze(1)
    torch.testing.assert_close(model(NUMBERS, ids(3)), expected)
    assert (model.bottom is None) == (dense == "soft_one_hot")


@pytest.mark.parametrize("dense", ["soft_one_hot", "both"])
def test_dcn_takes_soft_one_hot_vectors_side_by_side(dense: str) -> None:
    inputs = soft_inputs()
    model = DCNConfig(deep=[8], dense=dense, soft_one_hot=SETTINGS).build(inputs)
    numbers = [torch.tensor([[1.0, 2.0], [0.0, 0.5], [7.0, 0.0]])] if dense == "both" else []
    given = torch.cat([*numbers, model.soft_one_hot(NUMBERS).flatten(1), *inputs.embeddings.vectors.values()], dim=1)
    expected = model.output(torch.cat([model.deep(given), model.cross(given)], dim=1)).squeeze(1)
    torch.testing.assert_close(model(NUMBERS, ids(3)), expected)


@pytest.mark.parametrize("config", [DLRMConfig(), DCNConfig()])
def test_missing_numbers_need_soft_one_hot_vectors(config: DLRMConfig | DCNConfig) -> None:
    with pytest.raises(UserError, match=f"model.dense is '{config.dense}', .* set model.dense to soft_one_hot or both"):
        config.build(soft_inputs())
    with pytest.raises(UserError, match="model.dense is"):
        config.dense_shapes(soft_inputs())
    assert config.build(soft_inputs(missing_dense=False)) is not None


@pytest.mark.parametrize("name", ["dlrm", "dcn"])
@pytest.mark.parametrize("dense", ["soft_one_hot", "both"])
def test_soft_one_hot_vectors_of_datasets_without_dense_features(name: str, dense: str) -> None:
    inputs = FakeInputs({k: torch.randn(3, 4) for k in "abc"}, Schema(None, (), ()))
    model = MODELS[name](dense=dense).build(inputs)
    assert model(torch.empty(3, 0), ids(3)).shape == (3,) and model.soft_one_hot is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["model.soft_one_hot.bins=4"],
            "soft_one_hot is set, and dense is 'bottom', .* set dense to soft_one_hot or both",
        ),
        (["model={name: dcn, soft_one_hot: {}}"], "soft_one_hot is set, and dense is 'numbers'"),
        (["model.dense=numbers"], "model.dense"),
        (["model={dense: both, soft_one_hot: {bins: 0}}"], "model.soft_one_hot.bins"),
        (["model={dense: both, soft_one_hot: {value_range: [1, 1]}}"], r"\[1.0, 1.0\] is no range"),
        (["model={dense: both, soft_one_hot: {value_range: [1]}}"], "model.soft_one_hot.value_range"),
    ],
)
def test_settings_that_do_not_go_together(settings: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(None, settings)


def test_settings_survive_a_dump(tmp_path: Path) -> None:
    config = load_config(None, ["model={dense: both, soft_one_hot: {bins: 7, value_range: [-1, 2.5]}}"])
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "config.yaml") == config


def test_saved_plans_know_nothing_of_dense_features_as_models_always_had_them() -> None:
    assert plan_values(DLRMConfig(bottom=[4], top=[3])) == {"name": "dlrm", "bottom": [4], "top": [3]}
    assert plan_values(DCNConfig(dense="both"))["dense"] == "both"
    assert plan_values(DLRMConfig(cross=LowRankCrossConfig(2, 8)))["cross"] == {"num_layers": 2, "rank": 8}
    assert plan_values(DLRMConfig(dense="both", soft_one_hot=SETTINGS))["soft_one_hot"]["bins"] == 4
