"""``distembed compress``: runs of codes hold to their size, and are used as any run is."""

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import CategoricalFeature
from distembed.serving.convert import StockCheckpoint, code_run, code_search
from distembed.serving.convert.code_options import CodedRun, CodeOptions
from distembed.serving.convert.code_run import compress_to_codes
from distembed.serving.convert.run_start import convert
from distembed.serving.model_folder.reading import read_manifest
from distembed.training.config import load_config
from distembed.training.trained_run import find_trained_run
from tests.criteo_runs import criteo_run
from tests.serving.test_recommender_rows import session_datasets, session_run
from tests.small_runs import call, config_values, distembed, train_small, write_dataset
from tests.training.test_click_models import with_history
from tests.training.test_multi_label_runs import write_labelled
from tests.training.test_recommenders import write_config

NAIVE = "embedding.default.partition=naive"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with quotient-remainder tables; its dataset has no vocabularies."""
    folder = tmp_path_factory.mktemp("compress")
    return train_small(folder, write_dataset(folder / "dataset"), 3)


@pytest.fixture(scope="module")
def full_run(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with full tables, whose vectors differ."""
    folder = tmp_path_factory.mktemp("full")
    return train_small(folder, run.parent / "dataset", 31, NAIVE)


def compressed(run: Path, output: Path, **options: Any) -> CodedRun:
    return compress_to_codes(find_trained_run(run, None), output, CodeOptions(**options))


def saved(run: Path) -> StockCheckpoint:
    return StockCheckpoint(max((run / "checkpoints").glob("step-*")))


def metrics(run: Path, split: str = "test") -> dict[str, float]:
    found = json.loads(call("evaluate", run, "--split", split, "--json"))
    return {name: found[name] for name in ("auc", "logloss")}


def predictions(run: Path, file: Path) -> np.ndarray:
    call("predict", run, "--output", file)
    return pq.read_table(file)["prediction"].to_numpy()


@pytest.mark.thorough
def test_as_many_codes_as_vectors_predict_the_same_to_the_bit(run: Path, tmp_path: Path) -> None:
    call("train", run.parent / "config.yaml", "train.max_steps=2", "embedding.default.partition=remainder",
         "embedding.default.collisions=100", "--run-dir", tmp_path / "hashed")  # fmt: skip
    call("convert", tmp_path / "hashed", NAIVE, "--output", tmp_path / "full")
    coded = compressed(tmp_path / "full", tmp_path / "codes", bits_per_id=4, scheme="one")
    assert set(coded.shapes) == {"C2", "C3", "M"} and all(error.variance_left == 0.0 for error in coded.errors)
    expected = predictions(tmp_path / "full", tmp_path / "full.parquet")
    assert (predictions(tmp_path / "codes", tmp_path / "codes.parquet") == expected).all()


@pytest.mark.thorough
@pytest.mark.parametrize("budget", [4000, 12_000])
def test_a_budget_holds_in_the_bytes_that_are_exported(full_run: Path, tmp_path: Path, budget: int) -> None:
    coded = compressed(full_run, tmp_path / "codes", budget_bytes=budget)
    assert coded.table_bytes <= budget
    call("export", tmp_path / "codes", "--output", tmp_path / "model", "--materialise", "never")
    manifest = read_manifest(tmp_path / "model")
    assert sum(table.bytes for table in manifest.tables) == coded.table_bytes
    program = torch.export.load(tmp_path / "model" / "network.pt2")
    codes = sum(own.nbytes for own in program.constants.values() if own.dtype == torch.int32)
    books = sum(own.nbytes for name, own in program.state_dict.items() if ".embeddings.groups." in name)
    assert codes > 0 and codes + books == coded.table_bytes
    assert manifest.parity.largest_difference < 1e-5
    described = json.loads(call("describe", tmp_path / "codes" / "config.yaml", "--json"))
    assert described["embedding_bytes"] == coded.table_bytes
    record = json.loads((tmp_path / "codes" / "run.json").read_text())
    assert record["embedding_bytes"] == coded.table_bytes and record["name"] == "codes"


@pytest.mark.thorough
def test_centroids_of_half_precision_hold_the_budget(full_run: Path, tmp_path: Path) -> None:
    coded = compressed(full_run, tmp_path / "codes", budget_bytes=4000, data_type="fp16")
    books = {name: own for name, own in saved(tmp_path / "codes").items() if "C3__p" in name and "model." in name[:6]}
    assert {own.dtype for own in books.values()} == {torch.float16}
    assert coded.table_bytes <= 4000
    described = json.loads(call("describe", tmp_path / "codes" / "config.yaml", "--json"))
    assert described["embedding_bytes"] == coded.table_bytes
    whole = compressed(full_run, tmp_path / "whole", budget_bytes=4000)
    left, of_whole = ({error.table: error.variance_left for error in own.errors} for own in (coded, whole))
    assert left["C3"] < of_whole["C3"]  # twice as many centroids in the same bytes
    assert metrics(tmp_path / "codes")["logloss"] == pytest.approx(metrics(full_run)["logloss"], abs=0.1)


@pytest.mark.thorough
def test_more_bytes_are_nearer_and_a_budget_too_small_names_the_smallest(full_run: Path, tmp_path: Path) -> None:
    left = []
    for budget in (3000, 9000, 20_000):
        errors = compressed(full_run, tmp_path / str(budget), budget_bytes=budget).errors
        left.append(sum(error.variance_left for error in errors))
    assert left[0] > left[1] > left[2]
    with pytest.raises(UserError, match="smallest sizes of all tables take ") as failure:
        compressed(full_run, tmp_path / "no", budget_bytes=10)
    smallest = int(str(failure.value).split("take ")[1].split(" ")[0].replace(",", ""))
    assert compressed(full_run, tmp_path / "least", budget_bytes=smallest).table_bytes <= smallest
    assert not (tmp_path / "no").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("scheme", ["one", "product", "residual"])
def test_a_compositional_run_is_coded_and_smaller_tables_stay(run: Path, tmp_path: Path, scheme: str) -> None:
    coded = compressed(run, tmp_path / "codes", bits_per_id=6, scheme=scheme)
    assert "C3" in coded.shapes and "C1" not in coded.shapes
    before, after = saved(run), saved(tmp_path / "codes")
    for name in (name for name in before if "C1__p" in name and name.startswith("model.")):
        assert after[name].equal(before[name])
    assert metrics(tmp_path / "codes")["logloss"] == pytest.approx(metrics(run)["logloss"], abs=0.1)


@pytest.mark.thorough
def test_equal_seeds_give_equal_runs_and_a_run_of_codes_may_move(full_run: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        compressed(full_run, tmp_path / name, bits_per_id=6, seed=3)
    for name in saved(tmp_path / "one"):
        assert saved(tmp_path / "one")[name].equal(saved(tmp_path / "two")[name]), name
    codes = (tmp_path / name / "codes" / "C3.parquet" for name in ("one", "two"))
    first, second = (pq.read_table(file) for file in codes)
    assert first.equals(second)
    expected = metrics(tmp_path / "one")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "one", tmp_path / "elsewhere" / "one")
    assert metrics(tmp_path / "elsewhere" / "one") == expected
    (tmp_path / "elsewhere" / "one" / "codes" / "C3.parquet").write_bytes(b"other")
    with pytest.raises(UserError, match=r"C3.parquet, which says which rows"):
        metrics(tmp_path / "elsewhere" / "one")


@pytest.mark.thorough
def test_training_goes_on_from_codes(full_run: Path, tmp_path: Path) -> None:
    compressed(full_run, tmp_path / "codes", bits_per_id=5)
    config = tmp_path / "codes" / "config.yaml"
    call("train", config, "train.max_steps=2", "--init-from", tmp_path / "codes", "--run-dir", tmp_path / "more")
    expected = metrics(tmp_path / "more")
    assert np.isfinite(expected["logloss"])
    with pytest.raises(UserError, match="is a run that `distembed compress` did not make"):
        compressed(full_run, tmp_path / "more", bits_per_id=5, overwrite=True)
    call("train", config, "train.max_steps=3", "--init-from", tmp_path / "codes", "--run-dir", tmp_path / "more",
         "--resume")  # fmt: skip
    shutil.rmtree(tmp_path / "codes")  # the new run has codes of its own, and may be moved
    shutil.move(tmp_path / "more", tmp_path / "moved")
    assert metrics(tmp_path / "moved") != expected
    call("train", tmp_path / "moved" / "config.yaml", "train.max_steps=4", "--run-dir", tmp_path / "moved", "--resume")


@pytest.mark.thorough
def test_the_smallest_codes_within_a_loss_are_found(full_run: Path, tmp_path: Path) -> None:
    loose = compressed(full_run, tmp_path / "loose", max_loss=0.03)
    assert loose.metric is not None
    before, after = loose.metric.before, loose.metric.after
    assert loose.metric.name == "auc" and before == pytest.approx(metrics(full_run, "validation")["auc"])
    assert after == pytest.approx(metrics(tmp_path / "loose", "validation")["auc"]) and before - after <= 0.03
    made = json.loads((tmp_path / "loose" / "run.json").read_text())["codes"]
    assert made["metric"] == {"split": "validation", "name": "auc", "before": before, "after": after}
    tight = compressed(full_run, tmp_path / "tight", max_loss=0.001)
    assert tight.table_bytes >= loose.table_bytes and not list(tmp_path.glob(".*"))


@pytest.mark.thorough
def test_rare_and_never_seen_values_share_their_codes(tmp_path: Path) -> None:
    run = criteo_run(tmp_path)
    compressed(run, tmp_path / "codes", bits_per_id=3, min_count=6)
    counts = pq.read_table(tmp_path / "dataset" / "vocabulary" / "C3.parquet")["count"].to_numpy()
    codes = pq.read_table(tmp_path / "codes" / "codes" / "C3.parquet").to_pandas().to_numpy()
    rare = codes[2:][counts < 6]
    assert len(rare) and (rare == rare[0]).all()
    assert len({tuple(row) for row in codes[2:][counts >= 6].tolist()}) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["untied", "ranking", "rating"])
def test_items_of_recommenders_are_coded(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    if kind == "untied":  # a table of items for the input, and another one for the output
        datasets, model = session_datasets(tmp_path_factory), {"name": "sasrec", "dropout": 0.0, "tied": False}
        call(
            "train", write_config(tmp_path / "c.yaml", "softmax", datasets, model=model), "--run-dir", tmp_path / "run"
        )
        run = tmp_path / "run"
    else:
        run = session_run(tmp_path_factory, kind)
    coded = compressed(run, tmp_path / "codes", bits_per_id=4, scheme="product", min_count=2)
    assert set(coded.shapes) == ({"item", "item_output"} if kind == "untied" else {"user", "item"})
    counted = json.loads(call("describe", tmp_path / "codes" / "config.yaml", "--json"))["embedding_bytes"]
    assert counted == coded.table_bytes
    found = json.loads(call("evaluate", tmp_path / "codes", "--json"))
    call("export", tmp_path / "codes", "--output", tmp_path / "model")
    parity = read_manifest(tmp_path / "model").parity
    assert parity.metric is not None and parity.exported == pytest.approx(parity.trained, abs=1e-5)
    if kind != "ranking":  # so many items have equal scores there that a list of the best is one of many
        assert parity.exported == pytest.approx(found[parity.metric], abs=1e-5)


def shared_vocabulary(folder: Path) -> Path:
    """A config whose feature H, a list, is looked up in the table of C2."""
    history = CategoricalFeature("H", 400, True, 2.0, table="C2")
    columns: dict[str, Any] = {"dense_sequences": ("G",), "beside": ("H",), "missing_dense": True}
    values = config_values(write_dataset(folder / "dataset", change=with_history, more=[history], **columns))
    values["model"] = {"name": "din", "attention": [8], "deep": [16]}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def several_labels(folder: Path) -> Path:
    """A config of three labels with a network each."""
    values: dict[str, Any] = config_values(write_labelled(folder / "dataset"))
    values |= {"task": {"name": "multi", "labels": {}}}
    values["model"] = {"name": "mmoe", "num_experts": 2, "deep": [16], "tower": [8]}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


@pytest.mark.thorough
@pytest.mark.parametrize("write", [shared_vocabulary, several_labels])
def test_models_of_any_kind_predict_by_the_vectors_of_their_codes(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    call("train", write(tmp_path), "train.max_steps=3", NAIVE, "--run-dir", tmp_path / "run")
    coded = compressed(tmp_path / "run", tmp_path / "codes", bits_per_id=4)
    assert set(coded.shapes) == {"C2", "C3", "M"}  # one table for C2 and H
    call("convert", tmp_path / "codes", NAIVE, "--output", tmp_path / "full")  # vectors of codes, as full tables
    tables = {}
    for name in ("codes", "full"):
        call("predict", tmp_path / name, "--output", tmp_path / f"{name}.parquet")
        read = pq.read_table(tmp_path / f"{name}.parquet")
        predicted = [column for column in read.column_names if column in ("prediction", "click", "stars", "buy")]
        tables[name] = {column: read[column].to_numpy() for column in predicted}
    assert len(tables["codes"]) == (3 if write is several_labels else 1)
    for column, values in tables["codes"].items():
        np.testing.assert_allclose(values, tables["full"][column], rtol=1e-5, err_msg=column)
    call("export", tmp_path / "codes", "--output", tmp_path / "model")  # which compares predictions with the run's


@pytest.mark.parametrize("fails", [KeyboardInterrupt, UserError("no")])
def test_an_interrupted_command_leaves_nothing(
    full_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: BaseException
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise fails

    monkeypatch.setattr(code_run, "write_converted", interrupted)
    with pytest.raises((KeyboardInterrupt, UserError)):
        compressed(full_run, tmp_path / "codes", bits_per_id=5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "0 of --budget, --bits-per-id and --max-loss are given"),
        (["--budget", "1MB", "--max-loss", "0.1"], "2 of --budget"),
        (["--budget", "much"], "--budget is 'much'"),
        (["--bits-per-id", "0"], "--bits-per-id is 0"),
        (["--bits-per-id", "13"], "--bits-per-id is 13, which --scheme auto.*; give 12 or 14, or another scheme"),
        (["--bits-per-id", "6", "--data-type", "fp8"], "--data-type is 'fp8'.*fp32, fp16"),
        (["--bits-per-id", "6", "--scheme", "tree"], "--scheme is 'tree'.*auto, one, product, residual"),
        (["--bits-per-id", "6", "--min-count", "-1"], "--min-count is -1"),
        (["--bits-per-id", "6", "--to", "bits"], "--to is 'bits'"),
        (["--max-loss", "nan"], "--max-loss is nan"),
        (["--budget", "1GB"], "for which no codes are needed: the tables of .* as they are; give less"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        call("compress", run, tmp_path / "codes", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_codes_and_a_folder_that_is_there_are_refused(full_run: Path, tmp_path: Path) -> None:
    call("compress", full_run, tmp_path / "codes", "--bits-per-id", "5")
    with pytest.raises(UserError, match=f"is of codes already; compress the run that it was made of, {full_run}"):
        call("compress", tmp_path / "codes", tmp_path / "again", "--bits-per-id", "4")
    with pytest.raises(UserError, match="exists already"):
        call("compress", full_run, tmp_path / "codes", "--bits-per-id", "4")
    found = json.loads(call("compress", full_run, tmp_path / "codes", "--bits-per-id", "4", "--overwrite", "--json"))
    assert found["bytes"] == sum(table["compositional_bytes"] for table in found["tables"])
    assert {table["codes"] for table in found["tables"]} <= {"one 1 x 16", None}


def test_no_trained_run_is_overwritten(run: Path, full_run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "outer" / "run")
    shutil.copy(run / "run.json", tmp_path / "outer" / "run.json")
    shutil.copytree(full_run, tmp_path / "other")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "outer" / "run")
    refusals = {
        tmp_path / "outer" / "run": "is an input too",
        link: "is an input too",
        tmp_path / "outer": "lies inside the output",
        tmp_path / "other": "is a run that `distembed compress` did not make",
    }
    before = sorted(file for file in tmp_path.rglob("*") if file.name != ".lock")
    for output, message in refusals.items():
        with pytest.raises(UserError, match=message):
            compressed(tmp_path / "outer" / "run", output, bits_per_id=5, overwrite=True)
    assert sorted(file for file in tmp_path.rglob("*") if file.name != ".lock") == before


def with_dataset(run: Path, copy: Path, dataset: Path) -> Path:
    """Copies a run whose config names another dataset."""
    shutil.copytree(run, copy)
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(config.replace(str(run.parent / "dataset"), str(dataset)))
    return copy


def test_codes_are_of_the_given_dataset_or_of_one_with_equal_ids(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run.parent / "dataset", tmp_path / "moved")
    trained = find_trained_run(run, str(tmp_path / "moved"))
    compress_to_codes(trained, tmp_path / "given", CodeOptions(bits_per_id=4))
    assert load_config(tmp_path / "given" / "config.yaml").data.path == str(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved")
    for name, other in (
        ("gone", tmp_path / "not_there"),
        ("new", write_dataset(tmp_path / "new_dataset", num_ids=500)),
    ):
        moved = with_dataset(run, tmp_path / f"{name}_run", other)
        compressed(moved, tmp_path / name, bits_per_id=4)
        assert load_config(tmp_path / name / "config.yaml").data.path == str(other)
        kept = Manifest.load(tmp_path / name / "dataset")
        assert [own.num_embeddings for own in kept.schema.categorical] == [5, 400, 1000, 50]
    with pytest.raises(UserError, match="stand for other values"):
        compressed(tmp_path / "new_run", tmp_path / "no", max_loss=0.1)
    with pytest.raises(UserError, match="stand for other values"):
        convert(run, None, [f"data.path={tmp_path / 'new_dataset'}"], tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_metric_that_is_undefined_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def only_clicks(split: str, table: pa.Table) -> pa.Table:
        labels = pa.array(np.ones(len(table), np.int8))
        return table if split != "validation" else table.set_column(0, "label", labels)

    dataset = write_dataset(tmp_path / "clicks", change=only_clicks)
    with pytest.raises(UserError, match="--max-loss compares the codes by .* it has only rows whose label is 1. Use"):
        compressed(with_dataset(run, tmp_path / "run", dataset), tmp_path / "no", max_loss=0.1)
    monkeypatch.setattr(code_search, "evaluate_split", lambda *_: {"auc": math.nan})
    with pytest.raises(UserError, match="'auc', which is nan for .* on the split 'validation'"):
        compressed(run, tmp_path / "no", max_loss=0.1)
    assert not (tmp_path / "no").exists()


def test_run_json_says_how_the_codes_were_made(run: Path, tmp_path: Path) -> None:
    coded = compressed(run, tmp_path / "codes", bits_per_id=6)
    made = json.loads((tmp_path / "codes" / "run.json").read_text())["codes"]
    assert made["source"] == str(run) and made["checkpoint"] == "step-00000003" and made["bits_per_id"] == 6
    assert made["tables"] == {name: str(shape) for name, shape in coded.shapes.items()} and made["tables"]
    assert made["kept"]["C1"] == "codes are no smaller" and coded.codes_of("C1") == "kept: codes are no smaller"
    assert made["counts"]["dataset"] == str(run.parent / "dataset") and len(made["counts"]["id_fingerprint"]) == 64


def fails_at(call_number: int, function: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """Returns a function that calls another one, and then raises an error in a call of this number."""
    calls = itertools.count(1)

    def failing(*arguments: Any, **named: Any) -> Any:
        returned = function(*arguments, **named)
        if next(calls) == call_number:
            raise error
        return returned

    return failing


@pytest.mark.parametrize("call_number, size", [(1, {"bits_per_id": 5}), (2, {"max_loss": 1.0, "scheme": "one"})])
def test_an_interruption_after_a_checkpoint_or_in_a_trial_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_number: int, size: dict[str, Any]
) -> None:
    failing = fails_at(call_number, code_run.write_converted, KeyboardInterrupt())
    monkeypatch.setattr(code_run, "write_converted", failing)
    monkeypatch.setattr(code_search, "evaluate_split", lambda *_: {"auc": 0.5})
    with pytest.raises(KeyboardInterrupt):
        compressed(run, tmp_path / "codes", **size)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("optimizer", ["adagrad", "row_wise_adagrad"])
def test_kept_tables_keep_their_optimizer_states(run: Path, tmp_path: Path, optimizer: str) -> None:
    call("train", run.parent / "config.yaml", "train.max_steps=2", f"train.sparse_optimizer.name={optimizer}",
         "embedding.tables.C2.composition=feature", "--run-dir", tmp_path / "run")  # fmt: skip
    coded = compressed(tmp_path / "run", tmp_path / "codes", bits_per_id=4)
    before, after = saved(tmp_path / "run"), saved(tmp_path / "codes")
    states = [name for name in before if name.startswith("optimizer.") and ("C1__p" in name or "C2__p" in name)]
    assert len(states) == 3 and coded.kept["C2"] == "several vectors an id"
    for name in states:
        assert before[name].count_nonzero() and after[name].equal(before[name]), name
    assert set(coded.without_states) == set(coded.shapes)


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_run_of_ranks_with_cut_columns_is_coded_and_keeps_its_states(run: Path, tmp_path: Path) -> None:
    optimizer, plan = "train.sparse_optimizer.name=row_wise_adagrad", "plan.sharding_types=[column_wise]"
    settings = (NAIVE, "train.max_steps=2", optimizer, plan, "plan.min_partition=4")
    distembed("train", run.parent / "config.yaml", *settings, "--run-dir", tmp_path / "run", ranks=2)
    before = saved(tmp_path / "run")
    slices = {name: [before[f"{name}[{start}:{start + 4}]"] for start in (0, 4)]
              for name in {own.partition("[")[0] for own in before if "C1__p" in own and "sum[" in own}}  # fmt: skip
    assert slices and all(not left.equal(right) for left, right in slices.values())
    coded = compressed(tmp_path / "run", tmp_path / "codes", bits_per_id=4)
    assert "C1" in coded.kept and "C3" in coded.shapes and "C1" not in coded.without_states
    after = saved(tmp_path / "codes")
    for name, (left, right) in slices.items():
        assert torch.allclose(after[f"{name}[0:8]"], (left + right) / 2, rtol=1e-6)
    assert metrics(tmp_path / "codes")["logloss"] == pytest.approx(metrics(tmp_path / "run")["logloss"], abs=0.1)


@pytest.mark.thorough
def test_explicit_averaged_and_hashed_tables_of_a_chosen_checkpoint_are_coded(run: Path, tmp_path: Path) -> None:
    """A source of explicit tables, with averaged weights; its ids are hashed before they are looked up."""
    rows = np.random.default_rng(0).integers(0, 300, (2, 400))
    pq.write_table(pa.table({"a": rows[0], "b": rows[1]}), tmp_path / "rows.parquet")
    explicit = f"{{partition: explicit, assignments: {tmp_path}/rows.parquet, columns: [a, b], allow_collisions: true}}"
    settings = (f"embedding.tables.C2={explicit}", "embedding.tables.M.hash_seed=3", "train.ema={decay: 0.9}")
    steps = ("train.max_steps=4", "train.checkpoint_every=2", "--run-dir", tmp_path / "run")
    call("train", run.parent / "config.yaml", *settings, *steps)
    for step in ("2", "4"):
        trained = find_trained_run(tmp_path / "run", None, checkpoint=step)
        compress_to_codes(trained, tmp_path / step, CodeOptions(bits_per_id=8))
        made = json.loads((tmp_path / step / "run.json").read_text())["codes"]
        assert made["checkpoint"] == f"step-0000000{step}" and "C2" in made["tables"]
        expected = json.loads(call("evaluate", tmp_path / "run", "--checkpoint", step, "--json"))
        assert metrics(tmp_path / step)["logloss"] == pytest.approx(expected["logloss"], abs=0.02)


@pytest.mark.thorough
def test_a_metric_where_lower_is_better_loses_no_more(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    run = session_run(tmp_path_factory, "rating")
    metric = compressed(run, tmp_path / "codes", max_loss=0.01, scheme="one").metric
    assert metric is not None and metric.name == "rmse" and metric.after - metric.before <= 0.01
    found = json.loads(call("evaluate", tmp_path / "codes", "--split", "validation", "--json"))
    assert found["rmse"] == pytest.approx(metric.after)
