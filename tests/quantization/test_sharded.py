"""``shard_quant_model`` divides quantised compositional collections as it does stock ones, on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.distributed.fused_params import FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS
from torchrec.distributed.quant_embedding import QuantEmbeddingCollectionSharder, ShardedQuantEmbeddingCollection
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.fx.tracer import Tracer
from torchrec.inference.modules import DEFAULT_FUSED_PARAMS, quantize_inference_model
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import PARTITIONS, KeyedHash, QuotientRemainder
from distembed.serving.quantization import QUANTIZATION_MAPPING
from tests.quantization.inference import quantize, shard, tables_on_the_cpu, take_weights
from tests.quantization.test_collections import DIM, SIZE, Both, batch

POLICIES: list[dict[str, Any]] = [
    {"id_policy": "modulo"},
    {"id_policy": "clip_to_oov", "oov_id": 3},
    {"pre_hash": KeyedHash(7)},
]
KINDS = ["table_wise", "row_wise"]
SAMPLE = [
    (KINDS[i % 2], partition, list(COMPOSITIONS)[i % len(COMPOSITIONS)], {}) for i, partition in enumerate(PARTITIONS)
] + [(KINDS[i % 2], "quotient_remainder", "product", fields) for i, fields in enumerate(POLICIES)]
"""Every partition scheme and every composition once, and every way to map ids."""


class StockBoth(nn.Module):
    """The stock collections of bags and of sequences, with equal full tables."""

    def __init__(self) -> None:
        super().__init__()
        table = {"name": "t", "num_embeddings": SIZE, "embedding_dim": DIM, "feature_names": ["x", "y"]}
        self.bags = EmbeddingBagCollection(tables=[EmbeddingBagConfig(**table)])
        self.sequences = EmbeddingCollection(tables=[EmbeddingConfig(**table)])

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, Any]:
        return self.bags(features), self.sequences(features)


class Plain(nn.Module):
    """A model of ids and lengths in place of a batch, as the inference path takes it."""

    def __init__(self, model: Any, sequence_keys: list[str]) -> None:
        super().__init__()
        self.model, self._keys = model, sequence_keys

    def forward(self, values: Tensor, lengths: Tensor) -> list[Tensor]:
        bags, sequences = self.model(KeyedJaggedTensor(keys=["x", "y"], values=values, lengths=lengths))
        return [bags.values(), *[sequences[key].values() for key in self._keys]]


def plain(model: Both | StockBoth) -> Plain:
    if isinstance(model, StockBoth):
        return Plain(quantize(model), ["x", "y"])
    (table,) = model.sequences.tables()
    return Plain(quantize(model), [key for name in ("x", "y") for key in table.vector_names(name)])


def require_equal(found: list[Tensor], expected: list[Tensor], tolerance: float = 0.0) -> None:
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


def require_sharded_as_unsharded(partition: str, composition: str, fields: dict[str, Any], kind: str) -> None:
    quantized = plain(Both(partition, composition, **fields))
    features = batch()
    arguments = (features.values(), features.lengths())
    expected = quantized(*arguments)
    with tables_on_the_cpu():
        sharded, plan = shard(quantized, 2, kind)
        take_weights(sharded, quantized)
        require_equal(sharded(*arguments), expected)
    assert {own.sharding_type for module in plan.plan.values() for own in module.values()} == {kind}
    for collection in (sharded.model.bags, sharded.model.sequences):
        assert all(isinstance(own, ShardedQuantEmbeddingCollection) for own in collection.lookups.values())
        assert 0 < collection.memory_bytes() <= quantized.model.bags.memory_bytes()
        assert collection.device == torch.device("cpu")


@pytest.mark.parametrize(("kind", "partition", "composition", "fields"), SAMPLE)
def test_shards_give_the_outputs_of_the_unsharded_collections(
    kind: str, partition: str, composition: str, fields: dict[str, Any]
) -> None:
    require_sharded_as_unsharded(partition, composition, fields, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_full_tables_give_what_stock_ones_do(kind: str) -> None:
    ours, stock, features = Both("naive"), StockBoth(), batch()
    (full,) = ours.bags.weights("t")
    with torch.no_grad():
        stock.bags.embedding_bags["t"].weight.copy_(full)
        stock.sequences.embeddings["t"].weight.copy_(full)
    outputs = []
    for model in (ours, stock):
        quantized = plain(model)
        with tables_on_the_cpu():
            sharded, _ = shard(quantized, 2, kind)
            take_weights(sharded, quantized)
            outputs.append(sharded(features.values(), features.lengths()))
    require_equal(*outputs, tolerance=1e-6)


def test_int4_is_sharded_as_int8_is() -> None:
    quantized, features = quantize(Both(), torch.quint4x2), batch()
    with tables_on_the_cpu():
        sharded, _ = shard(quantized, 3, "row_wise")
        take_weights(sharded, quantized)
        require_equal([sharded(features)[0].values()], [quantized(features)[0].values()])


def test_stock_sequences_and_all_compositional_tables_cannot_be_divided_by_columns_on_the_cpu() -> None:
    with tables_on_the_cpu():
        shard(quantize(nn.Sequential(StockBoth().bags)), 2, "column_wise")
        for model in (StockBoth().sequences, Both().bags, Both().sequences):
            with pytest.raises(ValueError, match="not supported column_wise for cpu"):
                shard(quantize(nn.Sequential(model)), 2, "column_wise")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_without_scales_are_sharded_by_table_where_sharders_do_not_ask_for_them(dtype: torch.dtype) -> None:
    """TorchRec's default sharders keep scales apart from rows, and rows of these dtypes have none."""
    fused_params = {**DEFAULT_FUSED_PARAMS, FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: False}
    sharders = [
        QuantEmbeddingBagCollectionSharder(fused_params=fused_params),
        QuantEmbeddingCollectionSharder(fused_params=fused_params),
    ]
    features = batch()
    with tables_on_the_cpu():
        for model in (StockBoth(), Both()):
            with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'shape'"):
                shard(quantize(model, dtype), 2, "table_wise")
            quantized = quantize_inference_model(
                model, quantization_mapping=QUANTIZATION_MAPPING, quantization_dtype=dtype
            )
            with pytest.raises(AssertionError, match="can be used only in 'quant_state_dict_split_scale_bias' mode"):
                shard(quantized, 2, "row_wise", sharders=sharders)
            sharded, _ = shard(quantized, 2, "table_wise", sharders=sharders)
            take_weights(sharded, quantized)
            expected = quantized(features)[0].values()
            assert expected.abs().max() > 0
            require_equal([sharded(features)[0].values()], [expected])


def test_without_loading_them_a_sharded_model_has_no_weights_for_either() -> None:
    """``shard_quant_model`` makes tables anew; nothing of the quantised model's goes over."""
    features = batch()
    with tables_on_the_cpu():
        for model in (StockBoth(), Both()):
            quantized = quantize(model)
            sharded, _ = shard(quantized, 2, "table_wise")
            assert not torch.equal(sharded(features)[0].values(), quantized(features)[0].values())


@pytest.mark.parametrize(("pooling", "is_weighted"), [("sum", True), ("mean", True), ("mean", False), ("max", False)])
def test_shards_pool_weighted_and_empty_bags(pooling: str, is_weighted: bool) -> None:
    table = CompositionalEmbeddingBagConfig("t", SIZE, DIM, ["x", "y"], "quotient_remainder", pooling=pooling)
    model = nn.Sequential(CompositionalEmbeddingBagCollection([table], is_weighted=is_weighted))
    quantized = quantize(model)
    with tables_on_the_cpu():
        sharded, _ = shard(quantized, 2, "row_wise")
        take_weights(sharded, quantized)
        for num_rows in (0, 1, 7):
            features = batch(num_rows, weighted=True)
            found = sharded(features).values()
            assert found.shape == (num_rows, 2 * DIM)
            require_equal([found], [quantized(features).values()], 1e-6)


def test_torchscript_and_traces_are_refused_with_the_way_that_works() -> None:
    for collection in quantize(Both()).children():
        with pytest.raises(UserError, match=r"torch.jit.script does not compile a Quantized\w+; use torch.export"):
            torch.jit.script(collection)
        with pytest.raises(UserError, match=r"torch.fx does not trace a Quantized\w+; use torch.export of the float"):
            Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]).trace(collection)


@pytest.mark.parametrize("num_ids", [1, 2, 5])
def test_partitions_of_fewer_rows_than_devices_are_divided(num_ids: int) -> None:
    partition = QuotientRemainder(num_ids, num_buckets=num_ids)
    table = CompositionalEmbeddingBagConfig("t", num_ids, DIM, ["x"], partition)
    quantized = quantize(nn.Sequential(CompositionalEmbeddingBagCollection([table])))
    features = KeyedJaggedTensor(["x"], torch.arange(num_ids), lengths=torch.ones(num_ids, dtype=torch.long))
    with tables_on_the_cpu():
        sharded, _ = shard(quantized, 4, "row_wise")
        take_weights(sharded, quantized)
        require_equal([sharded(features).values()], [quantized(features).values()])
