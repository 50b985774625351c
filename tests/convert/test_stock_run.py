from pathlib import Path

import pytest
import torch
import yaml
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from distembed.base.ranks import process_group
from distembed.models import ModelInputs
from distembed.serving.convert.command import convert
from distembed.serving.convert.stock_checkpoint import StockCheckpoint
from distembed.training.config import load_config
from distembed.training.run import train_run
from distembed.training.start import RunOptions
from tests.small_runs import config_values, write_dataset


def stock_pooled(_inputs: ModelInputs, tables: list) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(table.feature_names),
        )
        for table in tables
    ]
    return EmbeddingBagCollection(tables=configs, device=torch.device("meta"))


def test_a_run_with_torchrecs_own_collection_is_converted_with_its_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = config_values(write_dataset(tmp_path / "dataset"))
    values["train"] |= {"max_steps": 3, "sparse_optimizer": {"name": "adagrad", "learning_rate": 0.05}}
    values["data"] |= {"validation": None, "test": None}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    full = ["embedding.default.partition=naive"]
    with monkeypatch.context() as patched, process_group("cpu") as ranks:
        patched.setattr(ModelInputs, "_make_pooled", stock_pooled)
        config = load_config(tmp_path / "config.yaml", full)
        train_run(config, RunOptions(tmp_path / "stock"), ranks, None, lambda _: None)
    errors = convert(tmp_path / "stock", None, full, tmp_path / "ours")
    assert [error.variance_left for error in errors] == [0.0] * len(errors)
    stock, ours = (StockCheckpoint(max((tmp_path / name / "checkpoints").glob("step-*"))) for name in ("stock", "ours"))
    tables = [name for name in stock if ".embedding_bags." in name]
    assert any(name.startswith("optimizer.") for name in tables)
    for name in tables:
        weight, _, rest = name.partition(".weight")
        assert torch.equal(ours[f"{weight}__p0.weight{rest}"], stock[name]), name
