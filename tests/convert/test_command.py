import functools
import json
from pathlib import Path

import pytest
import torch
import yaml
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from distembed.base.ranks import process_group
from distembed.embedding.config import CompositionalEmbeddingBagConfig
from distembed.models import ModelInputs
from distembed.serving.convert import StockCheckpoint, fit_table
from distembed.serving.convert.run_start import convert
from distembed.training.config import load_config
from distembed.training.run import train_run
from distembed.training.start import RunOptions
from tests.small_runs import config_values, distembed, write_dataset

FULL = "embedding.default.partition=naive"
HALVED = "embedding.default.partition=quotient_remainder"


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with full tables, trained by Adagrad, beside ``config.yaml`` and its dataset."""
    folder = tmp_path_factory.mktemp("convert")
    values = config_values(write_dataset(folder / "dataset"))
    values["train"] |= {"max_steps": 6, "sparse_optimizer": {"name": "adagrad", "learning_rate": 0.05}}
    values["train"]["dense_optimizer"] = {"name": "adam", "learning_rate": 0.001}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    distembed("train", folder / "config.yaml", FULL, "--run-dir", folder / "full")
    return folder / "full"


def saved(run: Path) -> StockCheckpoint:
    return StockCheckpoint(max((run / "checkpoints").glob("step-*")))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@functools.cache
def metrics(run: Path) -> dict[str, float]:
    return json.loads(distembed("evaluate", run, "--json").stdout)


@pytest.mark.thorough
def test_full_tables_stay_what_they_are_with_their_optimizer_states(full_run: Path, tmp_path: Path) -> None:
    distembed("convert", full_run, FULL, "--output", tmp_path / "same")
    before, after = saved(full_run), saved(tmp_path / "same")
    kept = [name for name in before if name.startswith(("model.", "optimizer."))]
    assert sorted(after) == sorted(kept)
    assert all(same_bits(before[name], after[name]) for name in kept)
    assert metrics(tmp_path / "same") == metrics(full_run)


@pytest.mark.parametrize(
    "composition", ["product", *[pytest.param(name, marks=pytest.mark.slow) for name in ("sum", "concat")]]
)
def test_a_full_run_is_fitted_and_trained_on(full_run: Path, tmp_path: Path, composition: str) -> None:
    tables = [HALVED, f"embedding.default.composition={composition}"]
    done = distembed("convert", full_run, *tables, "--output", tmp_path / "start", "--json")
    errors = {error["table"]: error for error in json.loads(done.stdout)}
    assert json.loads((tmp_path / "start" / "fit.json").read_text()) == list(errors.values())
    assert errors["C1"]["variance_left"] == 0.0  # below the threshold, and full
    before, after = saved(full_run), saved(tmp_path / "start")
    for name in (name for name in before if ".embeddings." not in name and name.startswith(("model.", "optimizer."))):
        assert same_bits(before[name], after[name]), name
    (full_name,) = [name for name in before if name.startswith("model.") and "C3__p0" in name]
    table = CompositionalEmbeddingBagConfig("C3", 1000, 8, ["C3"], HALVED.partition("=")[2], composition)
    assert 0.0 < errors["C3"]["variance_left"] <= fit_table(table, before[full_name]).error.variance_left * 1.1
    config = full_run.parent / "config.yaml"
    trained = distembed(
        "train", config, *tables, "train.max_steps=2", "--init-from", tmp_path / "start", "--run-dir", tmp_path / "run"
    )
    assert "run" in trained.stdout
    assert metrics(tmp_path / "run")["logloss"] < 1.0


def test_sums_of_squared_gradients_go_over_to_the_rows_that_had_them(full_run: Path, tmp_path: Path) -> None:
    distembed("convert", full_run, "embedding.default.partition=remainder", "--output", tmp_path / "hashed")
    before, after = saved(full_run), saved(tmp_path / "hashed")
    (name,) = [name for name in after if name.startswith("optimizer.") and "C3__p0" in name]
    full, hashed = before[name], after[name]
    expected = torch.zeros_like(hashed).double().index_add_(0, torch.arange(1000) % len(hashed), full.double())
    assert full.sum() > 0 and torch.allclose(hashed.double(), expected, rtol=1e-5)


def test_a_compositional_run_is_written_out_as_a_full_one_that_scores_the_same(full_run: Path, tmp_path: Path) -> None:
    config = full_run.parent / "config.yaml"
    distembed("train", config, HALVED, "--run-dir", tmp_path / "halved")
    distembed("convert", tmp_path / "halved", FULL, "--output", tmp_path / "full")
    ours, full = metrics(tmp_path / "halved"), metrics(tmp_path / "full")
    assert full["logloss"] == pytest.approx(ours["logloss"], abs=1e-6)


def test_a_stock_checkpoint_becomes_a_run(full_run: Path, tmp_path: Path) -> None:
    source = saved(full_run)
    prefix = "model.model."
    state = {
        name.removeprefix(prefix).replace("__p0", "").replace("top.", "over_arch."): source[name]
        for name in source
        if name.startswith(prefix)
    }
    torch.save(state, tmp_path / "stock.pt")
    config = full_run.parent / "config.yaml"
    distembed(
        "convert", tmp_path / "stock.pt", FULL, "--config", config, "--name", "top=over_arch", "-o", tmp_path / "start"
    )
    assert metrics(tmp_path / "start") == metrics(full_run)
    failed = distembed("convert", tmp_path / "stock.pt", FULL, "--config", config, "-o", tmp_path / "no", code=2)
    assert "the stock model has no" in failed.stderr and not (tmp_path / "no").exists()


def test_what_cannot_be_converted_is_refused_before_anything_is_written(full_run: Path, tmp_path: Path) -> None:
    for arguments, text in (
        ((full_run, HALVED, "embedding.default.composition=feature"), "composition 'feature'"),
        ((tmp_path / "absent", FULL), "--config"),
        ((full_run, FULL, "--name", "a=b"), "--name is for checkpoints of stock models"),
        ((full_run, "embedding.default.embedding_dim=4"), "other shapes"),
    ):
        failed = distembed("convert", *arguments, "--output", tmp_path / "out", code=2)
        assert text in failed.stderr
        assert not (tmp_path / "out").exists()


def stock_pooled(_inputs: ModelInputs, tables: list) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(own.num_embeddings, own.embedding_dim, own.name, feature_names=list(own.feature_names))
        for own in tables
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
