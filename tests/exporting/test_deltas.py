"""Deltas: an export with its deltas is the whole export, to the bit; gaps and damaged files are refused."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

from distembed.base.errors import UserError
from distembed.composition import COMPOSITIONS
from distembed.serving.convert.stock_checkpoint import StockCheckpoint
from distembed.serving.export.export_delta import SavedWeights, changed_rows, export_delta, unequal_rows
from distembed.serving.export.export_run import ExportOptions, config_checksum, export_run
from distembed.serving.export.parity import made_up_batch
from distembed.serving.export.programs import save_program
from distembed.serving.export.table_groups import ExportStorage, Materialise
from distembed.serving.model_folder.deltas import (
    RowChange,
    Weights,
    exchange,
    fitting_changes,
    loaded_weights,
    read_delta,
)
from distembed.serving.model_folder.manifest import Precision
from distembed.serving.model_folder.programs import load_program, load_programs
from distembed.serving.model_folder.reading import read_manifest, read_sample, require_sample
from distembed.serving.model_folder.versions import numbering_versions, read_version
from distembed.training.config import load_config
from distembed.training.trained_run import find_trained_run
from tests.exporting.test_programs import click_model, schema, scored, tables
from tests.exporting.test_recommenders import exported as recommending
from tests.exporting.test_recommenders import inputs as recommender_inputs
from tests.exporting.test_recommenders import recommender, rows
from tests.in_process import in_this_process as command
from tests.server.exported_models import exported, trained_run
from tests.small_runs import config_values, write_dataset

FILE = "network.pt2"


def bits(weights: dict[str, Tensor]) -> dict[str, bytes]:
    """Returns the bytes of each weight, by NumPy."""
    return {name: np.ascontiguousarray(tensor.numpy()).tobytes() for name, tensor in weights.items()}


def loaded(folder: Path) -> dict[str, Tensor]:
    program: Any = load_program(folder / FILE)
    return dict(program.state_dict())


def change_some(model: nn.Module, seed: int) -> None:
    """Changes a few numbers of each weight: one row in five of tables."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            is_changed = torch.rand(len(parameter), generator=generator) < 0.2
            parameter[is_changed] += torch.randn(parameter[is_changed].shape, generator=generator)


def require_law(model: nn.Module, whole: Any, sample: Any, storage: ExportStorage, folder: Path) -> None:
    """Exports a model, changes it three times, and compares the export and its deltas with whole programs."""
    on_demand = ExportStorage(storage.precision, storage.materialise, on_demand=True)
    save_program(whole().whole_program(storage), sample, folder / FILE)
    deltas: list[list[RowChange]] = []
    states: list[dict[str, bytes]] = []
    for number in range(3):
        change_some(model, number)
        states.append(bits(whole().whole_program(storage).state_dict()))
        saved = SavedWeights(folder / FILE, [change for delta in deltas for change in delta])
        deltas.append(list(changed_rows(FILE, whole().whole_program(on_demand), saved)))
    found: Weights = {FILE: loaded(folder)}
    assert bits(dict(found[FILE])) != states[0] != states[1]
    for delta, state in zip(deltas, states, strict=True):
        assert any(change.rows is not None for change in delta)
        exchange(fitting_changes(delta, found, folder), found)
        assert bits(dict(found[FILE])) == state
    exchange(deltas[2], found)  # undone
    assert bits(dict(found[FILE])) == states[1]


@pytest.mark.parametrize(
    ("composition", "materialise", "precision"),
    [
        *((name, "never", "fp32") for name in COMPOSITIONS),
        ("product", "never", "fp16"),
        ("product", "never", "int8"),
        ("path_linear", "never", "int8"),
        ("sum", "always", "int8"),
    ],
)
def test_an_export_with_deltas_is_the_whole_export(
    composition: str, materialise: Materialise, precision: Precision, tmp_path: Path
) -> None:
    """Over each scheme of partitions, lists, hashes and id policies."""
    model = click_model("dcn", [table for table in tables(composition) if not table.name.endswith("_67")])
    sample = scored(model).inputs(made_up_batch(schema(scored(model).tables), 5))
    require_law(model, lambda: scored(model), sample, ExportStorage(precision, materialise), tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sasrec", "sasrec_untied", "gru", "mf"])
def test_recommenders_with_deltas_are_whole_exports(name: str, tmp_path: Path) -> None:
    """Also where the items of histories and of the catalogue are one table."""
    model = recommender(name, "quotient_remainder", "product")
    sample = recommender_inputs(recommending(model), rows())
    require_law(model, lambda: recommending(model), sample, ExportStorage("int8", "never"), tmp_path)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns exports of a run in shards: whole after 3 steps, deltas after 6 and 9, and whole after 9."""
    folder = tmp_path_factory.mktemp("versions")
    run = trained_run(folder)
    exported(run, folder / "models" / "a", server_bytes=2000, materialise="never")
    for steps, name, since in ((6, "b", "a"), (9, "c", "b")):
        train(folder, steps)
        command("export", run, "--output", folder / "models" / name, "--delta-since", folder / "models" / since)
    exported(run, folder / "models" / "d", server_bytes=2000, materialise="never")
    return folder


def hidden(folder: Path) -> list[str]:
    return [file.name for file in folder.glob(".*")]


def train(folder: Path, steps: int) -> None:
    command(
        "train",
        folder / "config.yaml",
        f"train.max_steps={steps}",
        "train.epochs=9",
        "--run-dir",
        folder / "run",
        "--resume",
    )


def weights_of(folder: Path) -> tuple[Any, Weights]:
    manifest = read_manifest(folder)
    program = load_programs(folder, manifest)
    return program, loaded_weights(program, manifest)


def test_exported_deltas_lead_from_one_whole_export_to_the_next(versions: Path) -> None:
    first, last = versions / "models" / "a", versions / "models" / "d"
    described = [read_version(versions / "models" / name) for name in "abcd"]
    assert [each.sequence for each in described] == [1, 2, 3, 4] and [each.step for each in described] == [3, 6, 9, 9]
    assert [each.base for each in described] == [None, described[0].identity, described[1].identity, None]
    manifest = read_manifest(first)
    assert len(manifest.shards) > 1
    program, weights = weights_of(first)
    for name in "bc":
        delta, changes = read_delta(versions / "models" / name)
        exchange(changes, weights)
        sample = {**read_sample(first), "outputs": delta.outputs}
        assert require_sample(first, manifest, program, sample) < 1e-6
        with pytest.raises(UserError, match="scores otherwise here than where it was exported"):
            require_sample(first, manifest, program)
    whole = weights_of(last)[1]
    assert weights.keys() == whole.keys() and len(whole) == 1 + len(manifest.shards)
    assert all(bits(dict(weights[file])) == bits(dict(whole[file])) for file in whole)


MANAGED = {
    "C3": {"partition": "naive", "ids": {"size": 102, "eviction": {"policy": "lru", "every": 7}}},
    "M": {"ids": {"size": 30, "eviction": {"policy": "lru", "every": 7}}},
}


@pytest.fixture(scope="module")
def managed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run whose tables C3 and M evict ids before the checkpoints of the steps 7, 14 and 21."""
    folder = tmp_path_factory.mktemp("managed")
    values = config_values(write_dataset(folder / "data"))
    values["embedding"]["tables"] = MANAGED
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    kept = ("train.checkpoint_every=7", "train.keep_checkpoints=9", "train.max_steps=21")
    command("train", folder / "config.yaml", *kept, "--run-dir", folder / "run")
    return folder / "run"


@pytest.mark.parametrize(("materialise", "server_bytes"), [("never", None), ("always", 14_000)])
def test_deltas_of_managed_ids_are_whole_exports(
    managed: Path, materialise: Materialise, server_bytes: int | None, tmp_path: Path
) -> None:
    """Also ids that were evicted since the base are unknown, and ids that were admitted have their own vectors."""
    options = ExportOptions("fp32", materialise, server_bytes)
    runs = [find_trained_run(managed, None, checkpoint=str(step)) for step in (7, 14, 21)]
    export_run(runs[0], tmp_path / "deltas" / "1", options)
    program, weights = weights_of(tmp_path / "deltas" / "1")
    manifest = read_manifest(tmp_path / "deltas" / "1")
    assert (len(manifest.shards) > 1) == (server_bytes is not None)
    lookups = [known_ids(each) for each in runs]
    for number, run in enumerate(runs[1:], 2):
        output = tmp_path / "deltas" / str(number)
        export_delta(run, output, tmp_path / "deltas" / str(number - 1))
        delta, changes = read_delta(output)
        num_changed = sum(change.num_rows or 0 for change in delta.weights if change.names[0].endswith("ids_by_slot"))
        before, after = lookups[number - 2 : number]
        assert num_changed == sum(before[name].get(slot) != id for name in MANAGED for slot, id in after[name].items())
        exchange(fitting_changes(changes, weights, output), weights)
        export_run(run, tmp_path / "whole" / str(number), options)
        whole, expected = weights_of(tmp_path / "whole" / str(number))
        assert all(bits(dict(weights[file])) == bits(dict(expected[file])) for file in expected)
        old, now = (set(each["C3"].values()) for each in (before, after))
        asked = [*sorted(old - now), never_seen := -1, *sorted(now - old)]
        scores = dict(zip(asked, scores_of_ids(program, manifest, "C3", asked), strict=True))
        assert old - now and now - old and list(scores.values()) == scores_of_ids(whole, manifest, "C3", asked)
        assert {scores[id] for id in old - now} == {scores[never_seen]} != {scores[id] for id in now - old}


def known_ids(run: Any) -> dict[str, dict[int, int]]:
    """Returns the raw id of each used slot of each managed table, read from the checkpoint."""
    tensors = StockCheckpoint(Path(run.folder) / "checkpoints" / f"step-{int(run.checkpoint_choice):08}")
    known = {}
    for name in MANAGED:
        entries, used = (tensors[f"model.model.embeddings.{name}__{each}"][0] for each in ("entries", "used"))
        known[name] = dict(enumerate(entries[: int(used[0]), 0].tolist()))
    return known


def scores_of_ids(program: Any, manifest: Any, feature: str, ids: list[int]) -> list[float]:
    """Returns the scores of rows that differ in the ids of one feature; all others have one id, 0."""
    values = torch.zeros(len(manifest.features), len(ids), dtype=torch.int64)
    values[[each.name for each in manifest.features].index(feature)] = torch.tensor(ids)
    numbers = [torch.zeros(len(ids), len(manifest.numbers))] if manifest.numbers else []
    with torch.inference_mode():
        return program(values.flatten(), torch.ones_like(values), *numbers).tolist()


@pytest.mark.parametrize("is_removed", [False, True])
def test_the_number_of_a_damaged_or_removed_version_is_not_given_again(
    is_removed: bool, versions: Path, tmp_path: Path
) -> None:
    run, models = find_trained_run(versions / "run", None), tmp_path / "models"
    for each in "abc":
        shutil.copytree(versions / "models" / each, models / each)
    with numbering_versions(models) as highest:
        assert highest == 3
    (models / "c" / "delta.json").write_text("{")
    if is_removed:
        shutil.rmtree(models / "c")
    with numbering_versions(models) as highest:
        assert highest == 3
    with pytest.raises(UserError, match="b, version 2, and version 3 of .* was removed or cannot be read"):
        export_delta(run, models / "d", models)
    (models / ".highest-version").write_text("three")
    with pytest.raises(UserError, match="highest-version, which has the highest number of a version, cannot be read"):
        export_delta(run, models / "d", models)


@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_rows_that_begin_anywhere_are_compared(offset: int) -> None:
    first = torch.arange(90, dtype=torch.uint8)[offset : offset + 80].view(10, 8)
    second = first.clone()
    second[3, 7] += 1
    assert unequal_rows(first, second).nonzero().tolist() == [[3]]


def test_a_delta_of_what_it_cannot_follow_is_refused(versions: Path, tmp_path: Path) -> None:
    run, models = find_trained_run(versions / "run", None), versions / "models"
    for name, text in (
        ("a", "is version . already: give --delta-since .*, or export the run whole"),
        ("missing", "does not exist"),
    ):
        with pytest.raises(UserError, match=text):
            export_delta(run, models / "g", models / name)
        assert not (models / "g").exists() and hidden(models) == [".highest-version"]
    alone = tmp_path / "alone" / "c"
    alone.mkdir(parents=True)
    for file in (models / "c").iterdir():
        (alone / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="changes the version 2-.*, which is not in .*: copy it there"):
        export_delta(run, tmp_path / "e", alone)
    other = tmp_path / "other"
    other.mkdir()
    for file in models.joinpath("a").rglob("*"):
        target = other / file.relative_to(models / "a")
        target.mkdir() if file.is_dir() else target.write_bytes(file.read_bytes())
    values = json.loads((other / "manifest.json").read_text())
    for change, text in (
        ({"config_checksum": "0"}, "from a run with other sections model, embedding or task"),
        ({"versions": {"torch": "1.0"}}, "has programs of torch 1.0; export the run whole"),
    ):
        (other / "manifest.json").write_text(json.dumps({**values, **change}))
        with pytest.raises(UserError, match=text):
            export_delta(run, tmp_path / "e", other)
    done = command(
        "export", versions / "run", "--output", models / "g", "--delta-since", models / "d", "--compile", code=2
    )
    assert "leave --precision" in done.stderr.replace("\n", " ")


def test_rows_of_ids_that_training_changes_are_refused(tmp_path: Path) -> None:
    """Where they are part of the program; the vector of each id is a weight."""
    run = trained_run(tmp_path, embedding={"default": {"partition": "clustered", "threshold": 5}})
    for materialise in ("never", "always"):
        exported(run, tmp_path / materialise / "a", materialise=materialise)
    with pytest.raises(UserError, match=r"partition is clustered: re-clustering changes the rows of its ids"):
        export_delta(find_trained_run(run, None), tmp_path / "never" / "b", tmp_path / "never" / "a")
    with pytest.raises(UserError, match="has not changed since"):  # all vectors were compared
        export_delta(find_trained_run(run, None), tmp_path / "always" / "b", tmp_path / "always" / "a")


def test_an_error_within_a_change_leaves_all_of_its_tensors() -> None:
    weights: Weights = {FILE: {"codes": torch.zeros(3, 2), "scales": torch.zeros(3, 1)}}
    change = RowChange(FILE, torch.tensor([1]), {"codes": torch.ones(1, 2), "scales": torch.ones(1, 7)})
    with pytest.raises(RuntimeError):
        exchange([change], weights)
    assert not weights[FILE]["codes"].any() and change.values["codes"].all()


def test_other_assignments_of_ids_are_another_config(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"1")
    (tmp_path / "config.yaml").write_text("model: {name: dlrm}\nembedding: {default: {partition: naive}}\n")
    explicit = ["embedding.default.partition=explicit", f"embedding.default.assignments={tmp_path / 'rows.parquet'}"]
    config = load_config(tmp_path / "config.yaml", explicit)
    before = config_checksum(config)
    assert config_checksum(config) == before
    (tmp_path / "rows.parquet").write_bytes(b"2")
    assert config_checksum(config) != before


@pytest.mark.parametrize("name", ["rows.npz", "delta.json"])
def test_a_delta_with_another_byte_is_refused(name: str, versions: Path, tmp_path: Path) -> None:
    for file in (versions / "models" / "b").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = (tmp_path / name).read_bytes()
    for place in np.linspace(0, len(content) - 2, 25).astype(int).tolist():
        (tmp_path / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(UserError, match=r"is damaged|cannot be read|is no description|has format"):
            read_delta(tmp_path)
    (tmp_path / name).write_bytes(content[:-20])
    with pytest.raises(UserError):
        read_delta(tmp_path)


def test_of_two_exporters_at_once_one_writes_the_delta(versions: Path) -> None:
    models = versions / "models"
    with pytest.raises(UserError, match="run has not changed since .*d: export after its next checkpoint"):
        export_delta(find_trained_run(versions / "run", None), models / "e", models)
    train(versions, 12)
    run = find_trained_run(versions / "run", None)
    outcomes: dict[str, object] = {}

    def work(name: str) -> None:
        try:
            outcomes[name] = export_delta(run, models / name, models / "d").manifest.sequence
        except UserError as error:
            outcomes[name] = str(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("e", "f")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (late,) = [name for name, outcome in outcomes.items() if outcome != 5]
    assert "is version 5 already: give --delta-since" in str(outcomes[late])
    assert not (models / late).exists() and hidden(models) == [".highest-version"]
