"""The best checkpoint and early stopping: which evaluation is the best, and that no interruption changes it."""

import contextlib
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from distembed.base.checksums import with_checksum
from distembed.base.errors import UserError
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.store import (
    CheckpointStore,
    checkpoint_name,
    checkpoint_names,
    checkpoint_place,
    chosen_checkpoint,
    read_last_file,
)
from distembed.data.dataset.manifest import Manifest, create_manifest
from distembed.data.dataset.schema import CategoricalFeature, Label, Schema
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training import trainer
from distembed.training.config import load_config
from distembed.training.inference import read_newest
from distembed.training.start import require_trainable
from distembed.training.train_config import BestEvaluation, TrainConfig
from tests.small_runs import call, config_values, distembed, metrics, write_dataset

LOGLOSS, AUC = ReportedMetric("logloss", "", better="lower"), ReportedMetric("auc", "", better="higher")


def follow(values: list[float], metric: ReportedMetric, min_improvement: float = 0.0) -> BestEvaluation:
    best = BestEvaluation()
    for step, value in enumerate(values, start=1):
        best = best.after(10 * step, value, metric, min_improvement)
    return best


@pytest.mark.parametrize(
    ("values", "metric", "min_improvement", "step", "since"),
    [
        ([], LOGLOSS, 0.0, None, 0),
        ([0.5], LOGLOSS, 0.0, 10, 0),
        ([0.5, 0.4, 0.45, 0.41], LOGLOSS, 0.0, 20, 2),
        ([0.5, 0.4, 0.45, 0.41], AUC, 0.0, 10, 3),
        ([0.5, 0.5], LOGLOSS, 0.0, 10, 1),  # as good is not better
        ([0.5, 0.45, 0.39], LOGLOSS, 0.1, 30, 0),  # the best of all counts, not the one before
        ([math.nan, math.nan], AUC, 0.0, None, 0),  # what is not defined counts neither way
        ([math.nan, 0.5, math.nan, 0.4, math.nan], AUC, 0.0, 20, 1),
        ([math.inf, 0.5, math.nan, 0.4], LOGLOSS, 0.0, 40, 0),
    ],
)
def test_the_best_of_some_evaluations(
    values: list[float], metric: ReportedMetric, min_improvement: float, step: int | None, since: int
) -> None:
    best = follow(values, metric, min_improvement)
    assert (best.step, best.evaluations_since) == (step, since)
    assert best.value == (None if step is None else values[step // 10 - 1])
    assert BestEvaluation.from_json(json.loads(json.dumps(best.to_json()))) == best
    # what a resumed run evaluates again is not counted again
    assert not values or best.after(10 * len(values), 0.0, metric, 0.0) == best


def test_when_to_stop() -> None:
    best = follow([0.5, 0.6, 0.7], LOGLOSS)
    stops = [best.is_reason_to_stop(TrainConfig(stop_after_evaluations=n)) for n in (1, 2, 3, None)]
    assert stops == [True, True, False, False]
    undefined = BestEvaluation(last_step=20, evaluations_since=2)  # as earlier versions counted
    assert not undefined.is_reason_to_stop(TrainConfig(stop_after_evaluations=1))


def write_checkpoint(store: CheckpointStore, name: str, best: int | None) -> None:
    """Writes what the store looks at: the last file."""
    store.start(name)
    values: dict[str, Any] = {"world_size": 1, "tables": {}, "optimizers": {}}
    store.finish(name, values | {"progress": {} if best is None else {"best": {"step": best}}})


def test_the_best_checkpoint_stays_beside_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    best_at = {2: 2, 4: 2, 6: 2, 8: 8, 10: 8, 12: 8}
    kept = {}
    for step, best in best_at.items():
        write_checkpoint(store, checkpoint_name(step), best)
        store.keep_newest(2, and_best=True)
        kept[step] = [int(name[5:]) for name in store.names()]
    # step 6 may have to be gone on from as long as it is kept, and with it what was the best then
    assert kept == {2: [2], 4: [2, 4], 6: [2, 4, 6], 8: [2, 6, 8], 10: [8, 10], 12: [8, 10, 12]}
    store.keep_newest(2)
    assert store.names() == [checkpoint_name(10), checkpoint_name(12)]


def test_an_interrupted_checkpoint_is_older_than_that_of_the_same_step(tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    for name in (checkpoint_name(4), checkpoint_name(4, interrupted=True), checkpoint_name(2)):
        write_checkpoint(store, name, None)
    assert store.names() == [checkpoint_name(2), checkpoint_name(4, interrupted=True), checkpoint_name(4)]


@pytest.mark.parametrize("place", ["checkpoints", "memory://best-checkpoint"])
def test_which_checkpoint_is_chosen(place: str, tmp_path: Path) -> None:
    store = CheckpointStore(checkpoint_place(tmp_path, place))
    for step, best in ((2, 2), (4, 2)):
        write_checkpoint(store, checkpoint_name(step), best)
    choices = {choice: chosen_checkpoint(tmp_path, place, choice, True)[-1] for choice in (None, "best", "newest", "4")}
    assert choices == {None: "2", "best": "2", "newest": "4", "4": "4"}
    assert chosen_checkpoint(tmp_path, place, None, keeps_best=False)[-1] == "4"
    for choice, message in (("3", "has step-00000002, step-00000004"), ("last", "give newest, best, or the number")):
        with pytest.raises(UserError, match=message):
            chosen_checkpoint(tmp_path, place, choice, True)
    with store._files.open(f"{store._root}/{checkpoint_name(4)}/progress.json", "ab") as file:
        file.write(b"}")  # damaged, which is said when it is read
    assert chosen_checkpoint(tmp_path, place, None, True)[-1] == "4"
    write_checkpoint(store, checkpoint_name(6), None)
    assert chosen_checkpoint(tmp_path, place, None, True)[-1] == "6"  # killed before its first evaluation
    with pytest.raises(UserError, match="keeps none"):
        chosen_checkpoint(tmp_path, place, "best", True)


def test_evaluations_are_compared_only_where_there_are_some() -> None:
    for override in ("train.keep_best=true", "train.stop_after_evaluations=2"):
        with pytest.raises(UserError, match="compare evaluations on the validation split"):
            load_config(None, ["data.validation=null", override])


@pytest.mark.parametrize("labels", [[], [0] * 20, [1] * 20])
def test_a_split_that_defines_no_headline_metric_is_refused(labels: list[int], tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, own in (("train", [0, 1] * 20), ("validation", labels)):
        columns = {"label": pa.array(own, pa.int8()), "C1": pa.array([0] * len(own), pa.int32())}
        pq.write_table(pa.table(columns), data / f"{name}.parquet")
    schema = Schema("label", (), (CategoricalFeature("C1", 1),))
    create_manifest(data, schema, {name: [f"{name}.parquet"] for name in ("train", "validation")})
    shared = [f"data.path={data}", "data.test=null"]
    found = "it has only rows whose label is [01]" if labels else "it has no rows"
    for compared in ("train.keep_best=true", "train.stop_after_evaluations=2"):
        with pytest.raises(UserError, match=f"not defined where data.validation is 'validation': {found}"):
            require_trainable(load_config(None, [*shared, compared]), str(data))
        with_logloss = load_config(None, [*shared, compared, "task.headline=logloss"])
        if labels:
            require_trainable(with_logloss, str(data))  # which one class defines
        else:
            with pytest.raises(UserError, match=found):
                require_trainable(with_logloss, str(data))
        require_trainable(load_config(None, [*shared, compared]), str(data), resume=True)
    require_trainable(load_config(None, shared), str(data))


LABEL_COLUMNS: dict[str, list[int | None]] = {
    "both": [0, 1, None],
    "zeros": [0, 0, None],
    "ones": [None, 1, 1],
    "none": [None, None, None],
    "stars": [3, 3, None],
    "unrated": [None, None, None],
}


@pytest.mark.parametrize(
    ("labels", "headline", "fault"),
    [
        (["both", "none"], None, None),
        (["none", "both"], None, "has no rows with the label 'none'"),
        (["none", "both"], "both.auc", None),
        (["both", "zeros"], "zeros.auc", "has only rows whose label 'zeros' is 0"),
        (["both", "zeros"], "zeros.logloss", None),
        (["both", "ones"], "ones.normalized_entropy", "has only rows whose label 'ones' is 1"),
        (["both", "stars"], "stars.rmse", None),  # of equal numbers
        (["unrated", "both"], None, "has no rows with the label 'unrated'"),
        # after another label, it is 0 where the other is 0
        (["both", "ones after both"], "ones.auc", None),
        (["both", "zeros after both"], "zeros.auc", "has only rows whose label 'zeros' is 0"),
        (["both", "none after both"], "none.auc", "has no rows with the label 'none'"),
        (["both", "none after both"], "none.logloss", None),
    ],
)
def test_a_split_that_does_not_define_the_headline_of_several_labels_is_refused(
    labels: list[str], headline: str | None, fault: str | None, tmp_path: Path
) -> None:
    columns = {name: pa.array(values, pa.float32()) for name, values in LABEL_COLUMNS.items()}
    for name in ("train", "validation"):
        pq.write_table(pa.table({**columns, "C1": [0] * 3}), tmp_path / f"{name}.parquet")
    kinds = tuple(Label(name, "number" if name in ("stars", "unrated") else "binary") for name in columns)
    # the default headline is of the first label in the dataset's order
    kinds = tuple(sorted(kinds, key=lambda label: not labels[0].startswith(label.name)))
    schema = Schema(None, (), (CategoricalFeature("C1", 1),), labels=kinds)
    create_manifest(tmp_path, schema, {name: [f"{name}.parquet"] for name in ("train", "validation")})
    chosen = {name: {"after": "both"} if after else {} for name, after, _ in (each.partition(" ") for each in labels)}
    task = json.dumps({"name": "multi", "labels": chosen, "headline": headline})
    settings = [f"data.path={tmp_path}", "data.test=null", "model.name=mmoe", "train.keep_best=true", f"task={task}"]
    with pytest.raises(UserError, match=fault) if fault else contextlib.nullcontext():
        require_trainable(load_config(None, settings), str(tmp_path))


def test_a_split_of_no_weight_defines_no_metric(tmp_path: Path) -> None:
    for name, weight in (("train", 1.0), ("validation", 0.0)):
        columns = {"label": [0, 1] * 5, "weight": [weight] * 10, "C1": [0] * 10}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    schema = Schema("label", (), (CategoricalFeature("C1", 1),), weight="weight")
    create_manifest(tmp_path, schema, {name: [f"{name}.parquet"] for name in ("train", "validation")})
    for headline in ("auc", "logloss"):
        settings = [f"data.path={tmp_path}", "data.test=null", "train.keep_best=true", f"task.headline={headline}"]
        with pytest.raises(UserError, match="it has only rows of weight 0"):
            require_trainable(load_config(None, settings), str(tmp_path))


@pytest.mark.parametrize("compared", ["train.keep_best=true", "train.stop_after_evaluations=2"])
def test_a_headline_metric_among_more_items_than_there_are_is_refused(compared: str, tmp_path: Path) -> None:
    """Of 30 ids two stand for no item, and one is the target's: 27 are left."""
    rows = "".join(f"u{user},i{item},{time}\n" for user in range(4) for time, item in enumerate(range(user, 28)))
    (tmp_path / "rows.csv").write_text("user,item,time\n" + rows)
    arguments = ["--time", "time", "--split", "last-two", "-o", str(tmp_path / "data")]
    call("prepare", "sequences", tmp_path / "rows.csv", *arguments)
    manifest = Manifest.load(tmp_path / "data")
    assert next(each for each in manifest.schema.categorical if each.name == "item").num_embeddings == 30

    def require(num_sampled: int, headline: str, *settings: str, resume: bool = False) -> None:
        task = f"task={{name: next_item, sampled_candidates: {num_sampled}, headline: {headline}}}"
        config = load_config(None, [f"data.path={tmp_path / 'data'}", task, "model={name: sasrec}", *settings])
        require_trainable(config, str(tmp_path / "data"), resume=resume)

    for num_sampled in (100, 28):
        name = f"ndcg@10_of_{num_sampled + 1}"
        with pytest.raises(UserError, match=f"={num_sampled} other items, but this dataset has 27.*at most 27"):
            require(num_sampled, name, compared)
        require(num_sampled, name, compared, resume=True)
        require(num_sampled, name)
        require(num_sampled, "ndcg@10", compared)
    require(27, "ndcg@10_of_28", compared)


def test_evaluations_without_a_headline_metric_are_passed_over(config: Path, tmp_path: Path) -> None:
    """Every row is a group of its own, so that GAUC is never defined: all steps are trained, and the last is used."""

    def with_numbers(split: str, table: pa.Table) -> pa.Table:
        return table.append_column("M1", pa.array(range(len(table)), pa.int32()))

    data = write_dataset(tmp_path / "data", change=with_numbers, more=[CategoricalFeature("M1", 2000)])
    settings = [f"data.path={data}", "task={group: M1, headline: gauc}", "train.max_steps=8", "train.evaluate_every=2"]
    settings += ["train.keep_best=true", "train.stop_after_evaluations=1"]
    run = tmp_path / "run"
    said = call("train", config, *settings, "--run-dir", run)
    assert said.count("note: gauc is not defined on validation; the evaluation is not compared") == 4
    assert "stopped" not in said
    assert said.count("note: gauc was not defined in any evaluation, so train.keep_best kept no best") == 1
    record = json.loads((run / "run.json").read_text())
    assert record["steps"] == 8 and record["best"]["step"] is None and record["best"]["evaluations_since"] == 0
    final = json.loads((run / "evaluation.json").read_text())
    assert final["gauc"] is None and final["gauc_groups"] == 0 and "checkpoint_step" not in final
    assert [line["gauc"] for line in lines(run) if line.get("split") == "validation"] == [None] * 4
    for text in [(run / "metrics.jsonl").read_text(), (run / "evaluation.json").read_text()]:
        assert "NaN" not in text
    # what is done with the run later takes the newest checkpoint
    assert f"AUC {final['auc']:.4f}" in call("evaluate", run)
    call("train", config, *settings, "--run-dir", run, "--resume")
    assert json.loads((run / "evaluation.json").read_text())["auc"] == final["auc"]


def test_the_last_evaluation_is_no_time_of_training(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps since the last line of metrics are recorded after it, and it takes 1,000 s by the clock."""
    clock, score_split, passed = time.perf_counter, trainer.score_split, [0.0]

    def score_slowly(*arguments: Any) -> Any:
        passed[0] += 1000
        return score_split(*arguments)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + passed[0])
    monkeypatch.setattr(trainer, "score_split", score_slowly)
    settings = ["train.evaluate_every=2", "train.stop_after_evaluations=1", "train.min_improvement=1.0"]
    call("train", config, *settings, "train.log_every=50", "--run-dir", tmp_path / "run")
    (line,) = metrics(tmp_path / "run", "train")
    assert line["step"] == 4 and line["seconds"] < 1000
    assert line["samples_per_second"] == pytest.approx(4 * 64 / line["seconds"])


@pytest.fixture(scope="module")
def overfitting(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The config and the run of a model that learns its rows by heart, so that it soon gets worse on others."""
    folder = tmp_path_factory.mktemp("best")
    values = config_values(dataset)
    values["train"] |= {"epochs": 3, "evaluate_every": 4, "checkpoint_every": 6, "keep_checkpoints": 99}
    values["train"] |= {"keep_best": True, "stop_after_evaluations": 3}
    values["train"]["sparse_optimizer"]["learning_rate"] = 30.0
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    distembed("train", folder / "config.yaml", "--run-dir", folder / "run", ranks=2)
    return folder / "config.yaml", folder / "run"


def lines(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics without what depends on the time."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: v for key, v in line.items() if "second" not in key} for line in found]


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_run_stops_when_it_gets_worse_and_is_evaluated_at_its_best(overfitting: tuple[Path, Path]) -> None:
    _, run = overfitting
    evaluations = json.loads((run / "run.json").read_text())
    best, steps = evaluations["best"], evaluations["steps"]
    values = [(line["step"], line["auc"]) for line in lines(run) if line.get("split") == "validation"]
    expected = max(values, key=lambda each: (each[1], -each[0]))
    assert (best["step"], best["value"]) == expected
    assert [step for step, _ in values][-4] == best["step"] and values[-1][0] == steps < 93
    assert lines(run)[-2]["step"] == steps  # the last line of training is whole
    assert checkpoint_name(best["step"]) in checkpoint_names(str(run / "checkpoints"))
    at_best, at_end = (call("evaluate", run, *options) for options in ([], ["--checkpoint", "newest"]))
    final = json.loads((run / "evaluation.json").read_text())
    assert final["checkpoint_step"] == best["step"]
    assert f"{final['auc']:.4f}" in at_best and at_best != at_end


@pytest.mark.distributed
@pytest.mark.parametrize("last", [0, *(pytest.param(last, marks=pytest.mark.slow) for last in (1, 2))])
def test_a_killed_run_ends_as_it_would_have(last: int, overfitting: tuple[Path, Path], tmp_path: Path) -> None:
    """Of the three last checkpoints, those after one are removed, as where the run was killed before them."""
    config, whole = overfitting
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    names = checkpoint_names(str(run / "checkpoints"))
    for name in names[len(names) - 2 + last :]:
        shutil.rmtree(run / "checkpoints" / name)
    distembed("train", config, "--run-dir", run, "--resume", ranks=2)
    assert lines(run) == lines(whole)
    assert checkpoint_names(str(run / "checkpoints")) == names
    before, now = (json.loads((each / "run.json").read_text()) for each in (whole, run))
    assert (before["best"], before["steps"]) == (now["best"], now["steps"])


@pytest.mark.thorough
@pytest.mark.distributed
def test_a_run_interrupted_before_an_evaluation_ends_as_it_would_have(
    overfitting: tuple[Path, Path], tmp_path: Path
) -> None:
    """After step 12 both a checkpoint and an evaluation are due, and an interruption does not wait for the latter."""
    config, whole = overfitting
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    place = run / "checkpoints"
    for name in checkpoint_names(str(place)):
        if name >= checkpoint_name(12):
            (place / name).rename(tmp_path / name)
    interrupted = place / checkpoint_name(12, interrupted=True)
    (tmp_path / checkpoint_name(12)).rename(interrupted)
    values = read_last_file(str(interrupted))
    best = values["progress"]["best"]
    assert best["last_step"] == 12 and best["evaluations_since"] > 0
    best |= {"last_step": 8, "evaluations_since": best["evaluations_since"] - 1}
    values.pop("checksum")
    (interrupted / "progress.json").write_text(json.dumps(with_checksum(values)))
    distembed("train", config, "--run-dir", run, "--resume", ranks=2)
    assert lines(run) == lines(whole)
    assert checkpoint_names(str(place)) == checkpoint_names(str(whole / "checkpoints"))


CONFIG = load_config(None, ["data.path=x"])


def make_checkpoint(run: Path, step: int) -> Path:
    """Makes what a reader takes for a whole checkpoint until it looks into it."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text("{}")
    return checkpoint


def test_where_a_checkpoint_is_removed_while_it_is_read_the_newest_by_then_is_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    read = list[str]()

    def read_and_remove(checkpoint: str) -> str:
        read.append(Path(checkpoint).name)
        if len(read) < 3:
            make_checkpoint(tmp_path, len(read) + 1)
            shutil.rmtree(checkpoint)
            raise UserError("it is not there")
        return checkpoint

    returned = read_newest(tmp_path, CONFIG, read_and_remove)
    assert read == ["step-00000001", "step-00000002", "step-00000003"] and returned.endswith(read[-1])


def test_a_checkpoint_that_is_damaged_and_not_removed_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)
    damaged = make_checkpoint(tmp_path, 2)

    def read(checkpoint: str) -> None:
        assert checkpoint == str(damaged)
        raise UserError("it is damaged")

    with pytest.raises(UserError, match="it is damaged"):
        read_newest(tmp_path, CONFIG, read)
    assert damaged.exists()


def test_where_each_is_removed_the_user_is_told_to_try_again_and_to_remove_nothing(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 1)

    def read_and_remove(checkpoint: str) -> None:
        make_checkpoint(tmp_path, int(checkpoint[-8:]) + 1)
        shutil.rmtree(checkpoint)
        SavedCheckpoint.read(checkpoint)

    with pytest.raises(UserError) as error:
        read_newest(tmp_path, CONFIG, read_and_remove)
    assert "since its run trains on" in str(error.value) and "try again" in str(error.value)
    assert "remove it" not in str(error.value)


def test_a_run_without_checkpoints_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} has no checkpoint"):
        read_newest(tmp_path, CONFIG, lambda checkpoint: pytest.fail(checkpoint))
