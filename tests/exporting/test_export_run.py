"""``distembed export`` of click models from end to end: what is in the folder, and that it scores as the run does."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import roc_auc_score

from distembed.base.errors import RunError, UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.reader import BatchOrder, BatchReader
from distembed.data.table.vocabulary import raw_values
from distembed.serving.export import export_run as exporting
from distembed.serving.export.export_run import ExportOptions, export_run
from distembed.serving.export.parity import SplitRows
from distembed.serving.export.table_groups import FloatWeight
from distembed.serving.model_folder.manifest import ExportManifest
from distembed.serving.model_folder.programs import load_programs
from distembed.serving.model_folder.reading import read_manifest, require_sample, require_unchanged, sample_inputs
from distembed.serving.whole_model import load_whole_model
from distembed.training.trained_run import find_trained_run
from tests.in_process import in_this_process as command
from tests.server.exported_models import SERVER_BYTES, exported, trained_run
from tests.serving.arrow_rows import SCHEMA
from tests.small_runs import config_values, train_small

LISTS, HASHED = {"genres", "places"}, {"hashed", "age_bin"}


@pytest.fixture(scope="module")
def predicted(run: Path) -> np.ndarray:
    """What ``distembed predict`` says of the test split."""
    command("predict", run, "--output", run.parent / "predictions.parquet")
    return pq.read_table(run.parent / "predictions.parquet")["prediction"].to_numpy()


def rows_of_test(run: Path) -> Any:
    return next(iter(BatchReader(run.parent / "dataset", "test", BatchOrder(8192, shuffle=False))))


def sample_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sample.json").read_text())


def scores(folder: Path) -> np.ndarray:
    """Scores the sample, which is the whole test split, as whoever serves the folder does."""
    manifest = read_manifest(folder)
    require_unchanged(folder, manifest)
    program = load_programs(folder, manifest)
    assert require_sample(folder, manifest, program) <= 1e-6
    with torch.inference_mode():
        return program(*sample_inputs(sample_of(folder), manifest)).numpy()


@pytest.mark.thorough
def test_the_folder_has_what_the_manifest_says(run: Path, model: Path) -> None:
    files = {str(path.relative_to(model)) for path in model.rglob("*") if path.is_file()}
    manifest = read_manifest(model)
    assert set(manifest.checksums) == files - {"manifest.json"}
    for name, checksum in manifest.checksums.items():
        assert hashlib.sha256((model / name).read_bytes()).hexdigest() == checksum
    assert {"network.pt2", "sample.json", "serving_example.py", "dataset/manifest.json"} < files
    assert (manifest.task, manifest.model, manifest.step, manifest.precision) == ("click", "dlrm", 3, "fp32")
    schema = Manifest.load(str(run.parent / "dataset")).schema
    assert [each.name for each in manifest.features] == list(schema.categorical_names)
    assert {each.name for each in manifest.features if each.is_list} == LISTS
    assert [each.name for each in manifest.numbers] == list(schema.dense) == ["price", "age", "rate"]
    assert manifest.network.bytes == sum(table.bytes for table in manifest.tables)
    assert not list(model.parent.glob(".model*"))


def test_scores_are_those_of_predict(run: Path, model: Path, predicted: np.ndarray) -> None:
    assert len(predicted) == len(sample_of(model)["rows"])
    assert np.abs(scores(model) - predicted).max() <= 1e-6
    parity, labels = read_manifest(model).parity, rows_of_test(run)["labels"].numpy()
    weights = rows_of_test(run)["weights"].numpy()
    auc = roc_auc_score(labels, predicted, sample_weight=weights)
    assert parity.rows == len(labels) and parity.largest_difference <= 1e-6 and parity.split == "test"
    assert parity.metric == "auc" and abs(parity.exported - auc) < 1e-5 and abs(parity.trained - auc) < 1e-5


def test_vocabularies_have_the_raw_values_of_the_datasets_ids(run: Path, model: Path) -> None:
    manifest, dataset = read_manifest(model), Manifest.load(str(run.parent / "dataset"))
    assert {each.name for each in manifest.features if each.vocabulary is None} == HASHED
    for feature in manifest.features:
        if feature.vocabulary is not None:
            wanted = raw_values(run.parent / "dataset", dataset, feature.name).to_pylist()
            lines = (model / feature.vocabulary).read_text().splitlines()
            assert [None, None, *map(json.loads, lines)] == wanted
            assert len(wanted) == feature.num_embeddings


def test_the_manifest_says_how_raw_values_become_ids_and_numbers(model: Path) -> None:
    manifest = read_manifest(model)
    features = {each.name: each for each in manifest.features}
    numbers = {each.name: each.change for each in manifest.numbers}
    assert features["hashed"].change["hash_size"] == 11 and features["hashed"].change["hash_seed"] == 3
    assert features["genres"].change["separator"] == "|" and features["genres"].change["max_length"] == 3
    assert features["age_bin"].num_embeddings == len(features["age_bin"].change["edges"]) + 2
    assert [numbers[name]["transform"] for name in ("price", "age", "rate")] == ["log", "standardize", "none"]
    assert set(numbers["age"]) > {"mean", "std"}


@pytest.mark.thorough
def test_tables_in_fewer_bits(run: Path, shards: Path) -> None:
    manifest, weights = read_manifest(shards), trained_weights(run)
    numbers = full = 0
    for feature, table in zip(manifest.features, manifest.tables, strict=True):
        own = [weight for name, weight in weights if name.startswith(f"{feature.table}__p")]
        numbers += sum(w.numel() + 8 * len(w) for w in own)
        full += sum(w.numel() * 4 for w in own)
        assert table.form == "compositional"
    assert sum(table.bytes for table in manifest.tables) == numbers < full
    parity = manifest.parity
    assert 0 < parity.largest_difference < 0.01
    assert (parity.metric, parity.split, parity.rows) == ("auc", "test", 60)
    scores(shards)


def trained_weights(run: Path) -> list[tuple[str, torch.Tensor]]:
    """Returns the name and weight of each partition table of a run."""
    whole = load_whole_model(find_trained_run(run, None), torch.device("cpu"))
    return [
        (name.split("embedding_bags.")[1], weight)
        for name, weight in whole.module.named_parameters()
        if "embedding_bags." in name
    ]


@pytest.mark.slow
def test_tables_are_materialised_where_that_is_smaller(
    run: Path, model: Path, predicted: np.ndarray, tmp_path: Path
) -> None:
    manifests = {}
    for choice in ("never", "always"):
        folder = exported(run, tmp_path / choice, materialise=choice)
        assert np.abs(scores(folder) - predicted).max() <= 1e-6
        manifests[choice] = read_manifest(folder)
    auto = read_manifest(model)
    for table, parts, full in zip(auto.tables, manifests["never"].tables, manifests["always"].tables, strict=True):
        assert table.bytes == min(parts.bytes, full.bytes)
        assert parts.form == "compositional" and full.form == "materialised"
    for feature, table in zip(manifests["always"].features, manifests["always"].tables, strict=True):
        assert table.bytes == feature.num_embeddings * 8 * 4


@pytest.mark.thorough
def test_shards_score_as_the_whole(shards: Path, predicted: np.ndarray) -> None:
    """As far as int8 goes; :mod:`tests.exporting.test_programs` compares shards of all bits."""
    manifest = read_manifest(shards)
    assert len(manifest.shards) > 1 and all(shard.bytes <= SERVER_BYTES for shard in manifest.shards)
    assert sorted(name for shard in manifest.shards for name in shard.features) == sorted(
        each.name for each in manifest.features
    )
    for number, shard in enumerate(manifest.shards):
        assert shard.file == f"tables/shard-{number:05d}.pt2"
        assert shard.bytes == sum(table.bytes for table in manifest.tables if table.shard == number)
    assert np.abs(scores(shards) - predicted).max() <= 0.01


def test_a_table_larger_than_a_server_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--server-memory is 100 B, and the table '\w+' alone takes .* --precision int8"
    ):
        exported(run, tmp_path / "model", server_bytes=100)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_prints_the_plan(run: Path, model: Path, tmp_path: Path) -> None:
    largest = max(table.bytes for table in read_manifest(model).tables)
    said = command("export", run, "--output", tmp_path / "shards", "--server-memory", f"{largest}B").stdout
    for number, shard in enumerate(read_manifest(tmp_path / "shards").shards):
        assert re.search(rf"server {number}: {shard.file}, .* of tables for {len(shard.features)} features", said)
    assert re.search(r"sample: 60 rows, largest difference .*\ntest: auc 0\.\d+, trained 0\.\d+", said)
    said = command("export", run, "--output", tmp_path / "none", "--server-memory", "100B", code=2).stderr
    assert "--server-memory is 100 B" in " ".join(said.split())


@pytest.fixture
def traced(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of the run take the program of the shared model, which takes seconds to trace."""
    monkeypatch.setattr(exporting, "save_program", lambda *given: shutil.copyfile(model / "network.pt2", given[-1]))


@pytest.mark.usefixtures("traced")
def test_what_is_there_is_replaced_only_on_demand(run: Path, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    with pytest.raises(UserError, match="exists already.*--overwrite"):
        exported(run, folder)
    exported(run, folder, overwrite=True, precision="fp16")
    assert read_manifest(folder).precision == "fp16"
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="is no exported model"):
        exported(run, tmp_path / "other", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]


@pytest.mark.usefixtures("traced")
def test_a_full_disk_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_sample", full)
    with pytest.raises(RunError, match=r"model could not be written \(No space left.*Nothing was left behind"):
        exported(run, tmp_path / "model")
    monkeypatch.setattr("distembed.base.files.free_bytes", lambda _: 10)
    with pytest.raises(RunError, match="model would not fit on its disk.*its tables take so much"):
        exported(run, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_without_rows_the_sample_is_made_up(run: Path, tmp_path: Path) -> None:
    moved = run.parent / "elsewhere"
    (run.parent / "dataset").rename(moved)
    try:
        said = command("export", run, "--output", tmp_path / "model")
    finally:
        moved.rename(run.parent / "dataset")
    assert "the sample is of made-up rows; see --data" in " ".join((said.stdout + said.stderr).split())
    parity = read_manifest(tmp_path / "model").parity
    assert (parity.metric, parity.split, parity.rows) == (None, None, 256) and parity.largest_difference <= 1e-6
    scores(tmp_path / "model")
    given = exported_with_data(run, run.parent / "dataset", tmp_path / "given")
    assert given.parity.split == "test"


def exported_with_data(run: Path, data: Path, folder: Path) -> ExportManifest:
    return export_run(find_trained_run(run, str(data)), folder, ExportOptions(), str(data))


@pytest.mark.usefixtures("traced")
def test_a_model_that_scores_otherwise_is_not_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(*given: Any) -> Any:
        program = load_programs(*given)
        return lambda *inputs: program(*inputs) + 0.01

    monkeypatch.setattr(exporting, "load_programs", changed)
    with pytest.raises(RunError, match=r"scores otherwise than the trained one: row \d+ of the sample .*Nothing was"):
        exported(run, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_precisions_that_do_not_do_are_not_written(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take = FloatWeight.__init__

    def broken(self: Any, weight: torch.Tensor, dtype: torch.dtype) -> None:
        take(self, weight.flip(0) * 300, dtype)

    monkeypatch.setattr(FloatWeight, "__init__", broken)
    with pytest.raises(RunError, match="AUC on test is .*more than 0.0005 apart.*another --precision than fp16"):
        exported(run, tmp_path / "model", precision="fp16")

    def infinite(self: Any, weight: torch.Tensor, dtype: torch.dtype) -> None:
        take(self, weight * 1e30, dtype)

    monkeypatch.setattr(FloatWeight, "__init__", infinite)
    with pytest.raises(RunError, match="scores of the exported model are no numbers.*--precision fp32"):
        exported(run, tmp_path / "model", precision="fp16")
    assert not list(tmp_path.iterdir())


def test_unknown_names_are_refused_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match="--precision is 'int3'.*fp32, fp16, int8"):
        ExportOptions(precision="int3")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--materialise is 'some'.*auto, never, always"):
        ExportOptions(materialise="some")  # type: ignore[arg-type]


def damage(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(bytes(content))


def test_damaged_folders_are_found(model: Path, tmp_path: Path) -> None:
    for name in ("network.pt2", "sample.json", "vocabularies/site.jsonl", "serving_example.py"):
        folder = tmp_path / name.replace("/", "-")
        shutil.copytree(model, folder)
        damage(folder, name)
        with pytest.raises(UserError, match=f"{name} is damaged: its checksum .*copy the folder again, or export"):
            require_unchanged(folder, read_manifest(folder))
        (folder / name).unlink()
        with pytest.raises(UserError, match=f"{name} of the exported model cannot be read.*export the run again"):
            require_unchanged(folder, read_manifest(folder))


def edited(model: Path, folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    values = json.loads((model / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**values, **changes}))
    return folder


def test_manifests_that_are_none_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="format 2, and this distembed knows 1: install a later one"):
        read_manifest(edited(model, tmp_path / "later", format=2))
    with pytest.raises(UserError, match="precision.*copy the folder again"):
        read_manifest(edited(model, tmp_path / "precision", precision="int3"))
    with pytest.raises(UserError, match="no checksum of network.pt2"):
        read_manifest(edited(model, tmp_path / "checksums", checksums={}))
    network = json.loads((model / "manifest.json").read_text())["network"]
    with pytest.raises(UserError, match="must be a path inside"):
        read_manifest(edited(model, tmp_path / "outside", network={**network, "file": "../network.pt2"}))
    outside = edited(model, tmp_path / "checksum", checksums={"network.pt2": "", "/etc/passwd": ""})
    (outside / "network.pt2").write_bytes(b"")
    with pytest.raises(UserError, match="is damaged|must be a path inside"):
        require_unchanged(outside, read_manifest(outside))
    with pytest.raises(UserError, match="does not exist; make it with `distembed export"):
        read_manifest(tmp_path / "missing")
    with pytest.raises(UserError, match="is no exported model: it has no manifest.json"):
        read_manifest(model / "dataset" / "vocabulary")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_manifest(tmp_path / "text")


def test_a_machine_that_scores_otherwise_is_found(model: Path) -> None:
    manifest = read_manifest(model)
    program = load_programs(model, manifest)
    with pytest.raises(UserError, match="scores otherwise here than where it was exported.*Use torch"):
        require_sample(model, manifest, lambda *inputs: program(*inputs) + 0.01)
    with pytest.raises(UserError, match="scores otherwise"):
        require_sample(model, replace(manifest), lambda *inputs: program(*inputs) * float("nan"))


VARIANTS: dict[str, dict[str, Any]] = {
    "dcn": {"model": {"name": "dcn", "deep": [16], "num_cross_layers": 2}},
    "sse": {"sse": {"default": {"p0": 0.2}}},
    "soft one-hot": {
        "model": {"name": "dlrm", "dense": "both", "bottom": [8], "top": [8], "soft_one_hot": {"bins": 5}}
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*VARIANTS, "bf16", "missing numbers kept"])
def test_every_kind_of_run_scores_as_predict(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sections, schema = dict(VARIANTS.get(name, {})), SCHEMA
    if name == "bf16":
        sections["train"] = {**config_values(tmp_path)["train"], "precision": "bf16"}
    if name == "missing numbers kept":
        schema = {**SCHEMA, "dense": {each: {**own, "missing": "keep"} for each, own in SCHEMA["dense"].items()}}
        sections["model"] = {"name": "dlrm", "dense": "soft_one_hot", "top": [8]}
    run = trained_run(tmp_path, schema, **sections)
    folder = exported(run, tmp_path / "model")
    assert read_manifest(folder).parity.largest_difference <= 1e-6
    command("predict", run, "--output", tmp_path / "predictions.parquet")
    wanted = pq.read_table(tmp_path / "predictions.parquet")["prediction"].to_numpy()
    assert np.abs(scores(folder) - wanted).max() <= (5e-3 if name == "bf16" else 1e-6)
    monkeypatch.setattr(SplitRows, "find", lambda _: None)  # of so few rows the AUC jumps by more than is allowed
    for precision in ("fp16", "int8"):
        folder = exported(run, tmp_path / precision, precision=precision)
        assert read_manifest(folder).parity.largest_difference < 0.05
        scores(folder)


@pytest.mark.slow
def test_a_dataset_that_was_made_elsewhere_has_ids_and_no_raw_values(dataset: Path, tmp_path: Path) -> None:
    run = train_small(tmp_path, dataset, max_steps=2)
    folder = exported(run, tmp_path / "model")
    manifest = read_manifest(folder)
    assert all(each.vocabulary is None and not each.change for each in manifest.features)
    assert all(not each.change for each in manifest.numbers)
    assert not (folder / "vocabularies").exists()
    sample = sample_of(folder)
    assert {type(row["C1"]) for row in sample["rows"]} == {int}
    command("predict", run, "--output", tmp_path / "predictions.parquet")
    wanted = pq.read_table(tmp_path / "predictions.parquet")["prediction"].to_numpy()
    assert np.abs(scores(folder) - wanted[: len(sample["rows"])]).max() <= 1e-6
