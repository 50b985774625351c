"""Quantised collections give what the float ones do, within the error of their steps."""

import copy
import pickle
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS, TensorTrain
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.partitions import PARTITIONS, KeyedHash
from distembed.serving.quantization import MODULE_MAPPING, QUANTIZATION_MAPPING
from tests.embedding.schemes import make_partition, small_composition

DIM = 16
SIZE = 60
LARGEST_CODE = {torch.qint8: 255, torch.quint4x2: 15}
DTYPES = [torch.qint8, torch.quint4x2, torch.float16, torch.float32]
HALF_UNIT = 2.0**-11
"""The relative error of a number in half precision."""


class Both(nn.Module):
    """A collection of bags and one of sequences, with equal tables."""

    def __init__(self, partition: str = "quotient_remainder", composition: str = "product", **fields: Any) -> None:
        super().__init__()
        fields = {"composition": small_composition(composition), "partition": make_partition(partition, SIZE), **fields}
        table = "t", SIZE, DIM, ["x", "y"]
        self.bags = CompositionalEmbeddingBagCollection([CompositionalEmbeddingBagConfig(*table, **fields)])
        self.sequences = CompositionalEmbeddingCollection([CompositionalEmbeddingConfig(*table, **fields)])

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, Any]:
        return self.bags(features), self.sequences(features)


def quantize(model: nn.Module, dtype: torch.dtype = torch.qint8, **chosen: Any) -> Any:
    return quantize_embeddings(
        copy.deepcopy(model),
        dtype,
        inplace=True,
        additional_qconfig_spec_keys=list(MODULE_MAPPING),
        additional_mapping=MODULE_MAPPING,
        **chosen,
    )


def batch(num_rows: int = 7, longest: int = 3, weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(num_rows)
    lengths = torch.randint(0, longest + 1, (2 * num_rows,), generator=generator)
    num_ids = int(lengths.sum())
    ids = torch.randint(0, SIZE, (num_ids,), generator=generator)
    weights = torch.rand(num_ids, generator=generator) if weighted else None
    return KeyedJaggedTensor(["x", "y"], ids, weights=weights, lengths=lengths)


def steps_bound(weight: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Returns the largest error of each number of a weight when its rows are quantised to a dtype.

    A number is rounded to half a step, a row's range over the largest code; scale and offset are kept in half
    precision themselves, so that a number moves by their errors as well, and rounds to a code of the moved ones.
    """
    if dtype == torch.float32:
        return np.zeros_like(weight)
    if dtype == torch.float16:
        return np.abs(weight) * HALF_UNIT + 2.0**-25
    low, high = weight.min(axis=1, keepdims=True), weight.max(axis=1, keepdims=True)
    step = (high - low) / LARGEST_CODE[dtype]
    moved = 2 * HALF_UNIT * ((high - low) + np.abs(low)) + 2.0**-24 * LARGEST_CODE[dtype]
    return np.broadcast_to(step / 2 + moved, weight.shape)


def composed_bound(composition: str, vectors: Sequence[np.ndarray], errors: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the largest error of composed vectors, given those of the vectors of each partition."""
    if composition == "product":
        largest = reduce(np.multiply, [np.abs(v) + e for v, e in zip(vectors, errors, strict=True)])
        return largest - reduce(np.multiply, [np.abs(v) for v in vectors])
    if composition == "weighted_sum" and len(vectors) > 1:
        pairs = list(zip(vectors[:-1], errors[:-1], vectors[-1].T, errors[-1].T, strict=False))
        return sum((np.abs(v) + e) * (np.abs(p) + d)[:, None] - np.abs(v) * np.abs(p)[:, None] for v, e, p, d in pairs)
    if composition == "tensor_train" and len(vectors) > 1:
        # every number of the vector is a sum of products of one number of each row, so that magnitudes bound it
        def composed(*parts: np.ndarray) -> np.ndarray:
            return TensorTrain().compose([torch.from_numpy(part.astype(np.float64)) for part in parts]).numpy()

        magnitudes = [np.abs(vector) for vector in vectors]
        return composed(*map(np.add, magnitudes, errors)) - composed(*magnitudes)
    return np.concatenate(errors, axis=1) if composition in ("concat", "feature") else np.sum(errors, axis=0)


@pytest.mark.parametrize("composition", [name for name in COMPOSITIONS if not name.startswith("path")])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_error_stays_within_that_of_the_steps(partition: str, composition: str) -> None:
    model, ids = Both(partition, composition), torch.arange(SIZE)
    features = KeyedJaggedTensor(["x", "y"], torch.cat([ids, ids]), lengths=torch.ones(2 * SIZE, dtype=torch.long))
    (table,) = model.bags.tables()
    rows, (float_bags, _) = table.scheme.rows(ids).numpy(), model(features)
    weights = [weight.detach().numpy() for weight in model.bags.weights("t")]
    vectors = [weight[row] for weight, row in zip(weights, rows, strict=True)]
    for dtype in DTYPES:
        errors = [steps_bound(weight, dtype)[row] for weight, row in zip(weights, rows, strict=True)]
        bound = composed_bound(composition, vectors, errors)
        bags, _ = quantize(model, dtype)(features)
        assert bags.keys() == float_bags.keys()
        for feature in ("x", "y"):
            keys = table.vector_names(feature)
            error = torch.cat([bags[key] - float_bags[key] for key in keys], dim=1).abs().detach().numpy()
            assert (error <= bound + 1e-7).all(), (dtype, (error - bound).max())
            assert (error > 0).any() == (dtype != torch.float32)


def rounded_weights(quantized: Any) -> dict[str, Tensor]:
    """Returns the weight of every partition as its quantised rows have it."""
    found = {}
    for lookups in quantized.lookups.values():
        configs = lookups.embedding_configs()
        keys = [key for config in configs for key in config.feature_names]
        sizes = [config.num_embeddings for config in configs for _ in config.feature_names]
        rows = KeyedJaggedTensor(keys, torch.cat([torch.arange(size) for size in sizes]), lengths=torch.tensor(sizes))
        outputs = lookups(rows)
        found |= {config.name: outputs[config.feature_names[0]].values() for config in configs}
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_outputs_are_those_of_a_float_collection_with_the_rounded_weights(composition: str, dtype: torch.dtype) -> None:
    """Functions of paths are float32, and composing and pooling are those of the float collections."""
    model = Both("quotient_remainder", composition)
    quantized, rounded = quantize(model, dtype), copy.deepcopy(model)
    for collection, source in ((rounded.bags, quantized.bags), (rounded.sequences, quantized.sequences)):
        for name, weight in rounded_weights(source).items():
            collection._lookups[name].weight.data.copy_(weight)
    features = batch()
    bags, sequences = quantized(features)
    expected_bags, expected_sequences = rounded(features)
    assert bags.keys() == expected_bags.keys() and list(sequences) == list(expected_sequences)
    torch.testing.assert_close(bags.values(), expected_bags.values(), rtol=1e-6, atol=1e-7)
    for key, expected in expected_sequences.items():
        torch.testing.assert_close(sequences[key].values(), expected.values(), rtol=1e-6, atol=1e-7)
        assert torch.equal(sequences[key].lengths(), expected.lengths())


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
def test_bags_of_any_size_are_pooled_as_float_ones(pooling: str) -> None:
    table = CompositionalEmbeddingBagConfig("t", SIZE, DIM, ["x", "y"], pooling=pooling)
    model = nn.Sequential(CompositionalEmbeddingBagCollection([table]))
    quantized = quantize(model, torch.float32)
    for num_rows in (0, 1, 7):
        outputs = quantized(batch(num_rows))
        assert outputs.values().shape == (num_rows, 2 * DIM)
        torch.testing.assert_close(outputs.values(), model(batch(num_rows)).values(), rtol=0, atol=0)


def test_weights_are_applied_to_composed_vectors() -> None:
    table = CompositionalEmbeddingBagConfig("t", SIZE, DIM, ["x", "y"])
    model = nn.Sequential(CompositionalEmbeddingBagCollection([table], is_weighted=True))
    features = batch(weighted=True)
    torch.testing.assert_close(quantize(model, torch.float32)(features).values(), model(features).values())
    with pytest.raises(UserError, match="has no weights"):
        quantize(model)(batch())


@pytest.mark.parametrize(
    "fields", [{"id_policy": "modulo"}, {"id_policy": "clip_to_oov", "oov_id": 3}, {"pre_hash": KeyedHash(7)}]
)
def test_ids_outside_of_the_table_follow_its_settings(fields: dict[str, Any]) -> None:
    model = Both(**fields)
    features = KeyedJaggedTensor(["x", "y"], torch.tensor([5, -2, 2**62, 77]), lengths=torch.ones(4, dtype=torch.long))
    bags, sequences = quantize(model, torch.float32)(features)
    expected_bags, expected_sequences = model(features)
    torch.testing.assert_close(bags.values(), expected_bags.values(), rtol=0, atol=0)
    assert all(torch.equal(sequences[key].values(), own.values()) for key, own in expected_sequences.items())


def test_an_id_outside_of_the_table_is_an_error() -> None:
    features = KeyedJaggedTensor(["x", "y"], torch.tensor([5, SIZE]), lengths=torch.ones(2, dtype=torch.long))
    with pytest.raises(UserError, match="ids lie between 0 and 59"):
        quantize(Both())(features)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copies_and_state_dicts_give_the_same(dtype: torch.dtype, make_copy: Any) -> None:
    quantized, features = quantize(Both(composition="path_mlp"), dtype), batch()
    expected = quantized(features)[0].values()
    assert torch.equal(make_copy(quantized)(features)[0].values(), expected)
    other = Both(composition="path_mlp", seed=9)
    loaded = quantize(other, dtype)
    assert not torch.equal(loaded(features)[0].values(), expected)
    loaded.load_state_dict(quantized.state_dict())
    assert torch.equal(loaded(features)[0].values(), expected)


def test_tables_may_have_dtypes_and_outputs_one_of_their_own() -> None:
    tables = [CompositionalEmbeddingBagConfig(name, SIZE, DIM, [name]) for name in ("x", "y")]
    model = nn.Sequential(CompositionalEmbeddingBagCollection(tables))
    features = batch()
    chosen = {"per_table_weight_dtype": {"y": torch.float32}, "output_dtype": torch.float16}
    one, other = quantize(model)(features), quantize(model, **chosen)(features)
    assert other.values().dtype == torch.float16
    torch.testing.assert_close(other["x"], one["x"].half())
    torch.testing.assert_close(other["y"], model(features)["y"].half(), rtol=1e-3, atol=1e-4)


def test_bytes_are_those_of_aligned_rows() -> None:
    table = CompositionalEmbeddingBagConfig("t", 4096, 32, ["x"])
    model = nn.Sequential(CompositionalEmbeddingBagCollection([table]))
    num_rows = sum(part.num_rows for part in table.partition_tables())
    row_bytes = {torch.float32: 4 * 32, torch.float16: 2 * 32, torch.qint8: 48, torch.quint4x2: 32}
    for dtype, expected in row_bytes.items():
        assert abs(quantize(model, dtype)[0].memory_bytes() - num_rows * expected) < 256, dtype


def test_columns_that_share_bytes_have_to_fill_them() -> None:
    table = CompositionalEmbeddingBagConfig("t", SIZE, 5, ["x"])
    with pytest.raises(UserError, match="5 columns, and 2 of"):
        quantize(nn.Sequential(CompositionalEmbeddingBagCollection([table])), torch.quint4x2)


def test_tables_of_half_precision_are_quantized() -> None:
    model = Both(data_type="FP16")
    features = batch()
    torch.testing.assert_close(quantize(model)(features)[0].values(), model(features)[0].values(), rtol=0.05, atol=0.01)


def test_functions_without_our_mappings_refuse_and_leave_the_model_as_it_is() -> None:
    model, features = Both(), batch()
    for call in (quantize_inference_model, lambda model: quantize_embeddings(model, torch.qint8, inplace=False)):
        with pytest.raises(UserError, match="QUANTIZATION_MAPPING"):
            call(model)
    expected = model(features)[0].values()
    assert not torch.equal(
        quantize_inference_model(copy.deepcopy(model), quantization_mapping=QUANTIZATION_MAPPING)(features)[0].values(),
        expected,
    )


def test_other_quantising_leaves_collections_alone() -> None:
    model = nn.ModuleDict({"tables": Both(), "linear": nn.Linear(DIM, 1)})
    quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    assert not isinstance(quantized["linear"], nn.Linear)
    assert torch.equal(quantized["tables"](batch())[0].values(), model["tables"](batch())[0].values())
