"""``distembed materialise`` on a run of one epoch."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from typer.testing import CliRunner

from distembed.base.errors import UserError
from distembed.commands.cli import app
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import CategoricalFeature, Schema
from distembed.embedding import CompositionalEmbeddingBagConfig, EmbeddingConfig, TableConfig, build_tables
from distembed.training.config import Config, load_config
from distembed.training.materialise import materialise_run
from tests.embedding.reference import vector_of
from tests.small_runs import SIZES, distembed, write_dataset

# the command keeps what torch says of itself out of its output


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run in which C1 is full, C2 is path-based, C3 hashes its ids, and M is a product."""
    folder = tmp_path_factory.mktemp("run")
    values: dict[str, Any] = {
        "data": {"path": str(write_dataset(folder / "dataset"))},
        "model": {"bottom": [16], "top": [16]},
        "embedding": {
            "default": {"partition": "quotient_remainder", "embedding_dim": 8, "threshold": 10, "force": True},
            "tables": {"C1": {"partition": "naive"}, "C2": {"composition": "path_mlp"}, "C3": {"hash_seed": 5}},
        },
        "train": {"batch_size": 256, "precision": "fp32", "device": "cpu"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    distembed("train", folder / "config.yaml", "--run-dir", folder / "run")
    return folder / "run"


def expected(run: Path, name: str, ids: list[int]) -> torch.Tensor:
    """Returns vectors composed id by id from the checkpoint, whose files are read by NumPy alone."""
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    model = {}
    for key, entry in json.loads((checkpoint / "index.json").read_text()).items():
        whole = np.empty(entry["size"], entry["dtype"])
        for file, start, length, _, offsets, sizes in entry["blocks"]:
            data = (checkpoint / file).read_bytes()[start : start + length]
            place = tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))
            whole[place] = np.frombuffer(data, entry["dtype"]).reshape(sizes)
        if key.startswith("model."):
            model[key] = torch.from_numpy(whole)
    table = table_of(run, name)
    weights = []
    for part in table.partition_tables():
        (key,) = (key for key in model if f".{part.name}" in key)
        assert (".functions." if part.is_function else ".embedding_bags.") in key
        weights.append(model[key])
    return torch.stack([vector_of(table, weights, i) for i in ids])


def table_of(run: Path, name: str) -> CompositionalEmbeddingBagConfig:
    config = load_config(run / "config.yaml")
    tables = build_tables(Manifest.load(config.data.require_path()).schema.categorical, config.embedding)
    return next(table for table in tables if table.name == name)


def materialise(run: Path, output: Path, *arguments: object) -> str:
    """Runs the command in this process and returns what it prints."""
    invoked = CliRunner().invoke(app, ["materialise", str(run), "--output", str(output), *map(str, arguments)])
    if invoked.exception is not None:
        raise invoked.exception
    return invoked.stdout


def test_vectors_are_those_of_the_checkpoint(run: Path, tmp_path: Path) -> None:
    names = ["C1", "C2", "M"]
    done = materialise(run, tmp_path / "vectors", *[argument for name in names for argument in ("--table", name)])
    for name in names:
        path = tmp_path / "vectors" / f"{name}.parquet"
        assert f"{path.name}: {SIZES[name]:,} vectors" in done
        found = pq.read_table(path)
        assert found["id"].to_pylist() == list(range(SIZES[name]))
        vectors = torch.tensor(found["vector"].to_pylist())
        torch.testing.assert_close(vectors, expected(run, name, list(range(SIZES[name]))))
    with pytest.raises(UserError, match="M.parquet exists already; .*add --overwrite"):
        materialise(run, tmp_path / "vectors", "--table", "M")
    materialise(run, tmp_path / "vectors", "--table", "M", "--overwrite")


def test_a_few_of_the_tables_that_can_be_written_are_named(tmp_path: Path) -> None:
    names = ["H", *(f"C{i}" for i in range(8))]
    schema = Schema("label", (), tuple(CategoricalFeature(name, 9) for name in names))
    config = Config(embedding=EmbeddingConfig(tables={"H": TableConfig(hash_seed=1)}))
    with pytest.raises(UserError, match="'H' hashes its ids.* others: C0, C1, C2, C3, C4 and 3 more"):
        next(materialise_run(tmp_path, config, schema, tmp_path))
    with pytest.raises(UserError, match="for one --table.$"):
        next(materialise_run(tmp_path, config, schema, tmp_path, names=["H"]))


def test_given_ids_are_hashed_as_in_training(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'C3' hashes its ids.*--table takes any of the others: C1, C2, M"):
        materialise(run, tmp_path)
    ids = [5, 2**62, -1]
    pq.write_table(pa.table({"name": ["a", "b", "c"], "key": ids}), tmp_path / "ids.parquet")
    materialise(run, tmp_path, "--table", "C3", "--ids", tmp_path / "ids.parquet")
    found = pq.read_table(tmp_path / "C3.parquet")
    assert found["id"].to_pylist() == ids
    pre_hash = table_of(run, "C3").pre_hash
    assert pre_hash is not None
    hashed = pre_hash.ids(torch.tensor(ids), SIZES["C3"]).tolist()
    torch.testing.assert_close(torch.tensor(found["vector"].to_pylist()), expected(run, "C3", hashed))


@pytest.mark.parametrize(
    ("columns", "arguments", "message"),
    [
        ({"id": [1, 5]}, ["--table", "C1"], "table 'C1', ids: the id at position 1 is 5"),
        ({"id": [1, None]}, ["--table", "C1"], "ids holds None"),
        ({"id": [1.5]}, ["--table", "C1"], r"it has id \(double\)"),
        ({"a": [1], "b": [2]}, ["--table", "C1"], "needs a column 'id'"),
        ({"id": [1]}, [], "name it with --table"),
        ({"id": [1]}, ["--table", "C11"], "Did you mean 'C1'"),
        (None, ["--table", "C1"], "cannot be read as a Parquet file"),
    ],
)
def test_what_is_wrong_is_named(
    run: Path, tmp_path: Path, columns: dict[str, list[Any]] | None, arguments: list[str], message: str
) -> None:
    if columns is None:
        (tmp_path / "ids.parquet").write_text("no Parquet")
    else:
        pq.write_table(pa.table(columns), tmp_path / "ids.parquet")
    with pytest.raises(UserError, match=message):
        materialise(run, tmp_path / "out", *arguments, "--ids", tmp_path / "ids.parquet")
    assert not list(tmp_path.glob("out/*"))


def test_a_run_without_a_checkpoint_is_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "run.json"):
        shutil.copy(run / name, tmp_path / "run")
    with pytest.raises(UserError, match="has no checkpoint"):
        materialise(tmp_path / "run", tmp_path / "out", "--table", "C1")
