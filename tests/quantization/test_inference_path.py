"""The steps of ``torchrec.inference.dlrm_predict``, from a trained model to its shards, with either collection."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.inference.dlrm_predict import DLRMPredictModule
from torchrec.inference.modules import quantize_dense, set_pruning_data
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from distembed.base.errors import UserError
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from tests.embedding.schemes import make_partition, small_composition
from tests.quantization.inference import quantize, shard, tables_on_the_cpu, take_weights

FEATURES = ["x", "y"]
TABLES = [f"t_{name}" for name in FEATURES]
SIZE, DIM, NUM_DENSE = 60, 16, 3
LAYERS: dict[str, Any] = {
    "dense_in_features": NUM_DENSE,
    "dense_arch_layer_sizes": [8, DIM],
    "over_arch_layer_sizes": [8, 1],
    "id_list_features_keys": FEATURES,
}


def requests(num_rows: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """Returns what a server gives the model: an id of each feature, but for the first row's."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.ones(len(FEATURES) * num_rows, dtype=torch.int32)
    lengths[:1] = 0
    ids = torch.randint(0, SIZE, (int(lengths.sum()),), generator=generator)
    dense = torch.rand(num_rows, NUM_DENSE, generator=generator)
    return {"float_features": dense, "id_list_features.lengths": lengths, "id_list_features.values": ids}


def predictor(tables: nn.Module) -> DLRMPredictModule:
    torch.manual_seed(0)
    return DLRMPredictModule(embedding_bag_collection=tables, dense_device="cpu", **LAYERS)


def stock_tables() -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(name=table, num_embeddings=SIZE, embedding_dim=DIM, feature_names=[name])
        for table, name in zip(TABLES, FEATURES, strict=True)
    ]
    return EmbeddingBagCollection(tables=configs)


def our_tables(partition: str, composition: str) -> CompositionalEmbeddingBagCollection:
    settings = make_partition(partition, SIZE), small_composition(composition)
    made = zip(TABLES, FEATURES, strict=True)
    return CompositionalEmbeddingBagCollection(
        [CompositionalEmbeddingBagConfig(table, SIZE, DIM, [name], *settings) for table, name in made]
    )


def served(quantized: DLRMPredictModule, world_size: int, sharding_type: str = "table_wise") -> DLRMPredictModule:
    """Returns a quantised model in shards that have its weights."""
    with tables_on_the_cpu():
        sharded, _ = shard(quantized, world_size, sharding_type, TABLES)
    take_weights(sharded.predict_module, quantized.predict_module)
    assert isinstance(sharded, DLRMPredictModule)
    return sharded


def require_served_as_quantized(composition: str, dtype: torch.dtype, world_size: int) -> None:
    quantized = quantize(predictor(our_tables("quotient_remainder", composition)), dtype)
    sharded = served(quantized, world_size)
    for num_rows in (1, 6):
        batch = requests(num_rows, seed=num_rows)
        with tables_on_the_cpu():
            predictions = sharded(batch)["default"]
        assert predictions.shape == (num_rows,)
        torch.testing.assert_close(predictions, quantized(batch)["default"], rtol=0, atol=1e-6)


def test_the_sharded_model_gives_the_predictions_of_the_quantized_one() -> None:
    require_served_as_quantized("product", torch.qint8, 2)


def test_full_tables_are_served_as_stock_ones() -> None:
    stock, ours = predictor(stock_tables()), predictor(our_tables("naive", "product"))
    with torch.no_grad():
        for table, embedding in zip(TABLES, tables_of(stock).embedding_bags.values(), strict=True):
            embedding.weight.copy_(tables_of(ours).weights(table)[0])
    with tables_on_the_cpu():
        found = [served(quantize(model), 2)(requests())["default"] for model in (ours, stock)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_a_dense_part_of_half_precision_runs_for_either() -> None:
    for tables in (stock_tables(), our_tables("quotient_remainder", "product")):
        quantized, batch = quantize(predictor(tables)), requests()
        expected = quantized(batch)["default"]
        halved = quantize_dense(quantized, torch.half)
        torch.testing.assert_close(halved(batch)["default"], expected, rtol=0, atol=2e-3)


def test_stock_tables_are_cut_to_their_first_rows_and_compositional_ones_refuse() -> None:
    stock, ours = predictor(stock_tables()), predictor(our_tables("quotient_remainder", "product"))
    set_pruning_data(stock, {"t_x": 30})
    set_pruning_data(ours, {"t_x": 30}, module_types=[CompositionalEmbeddingBagCollection])
    embeddings = tables_of(quantize(stock)).embedding_bags
    assert [len(embeddings[table].weight) for table in TABLES] == [30, SIZE]
    with pytest.raises(UserError, match="set_pruning_data asks for 30 rows of table 't_x'"):
        quantize(ours)


def test_by_default_pruning_reaches_stock_bags_alone() -> None:
    pruned, plain = (predictor(our_tables("quotient_remainder", "product")) for _ in range(2))
    set_pruning_data(pruned, {"t_x": 30})
    assert torch.equal(quantize(pruned)(requests())["default"], quantize(plain)(requests())["default"])


def tables_of(model: DLRMPredictModule) -> Any:
    return model.predict_module.sparse_arch.embedding_bag_collection
