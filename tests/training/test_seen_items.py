"""Runs on data in which users repeat items: metrics, predictions and exported programs have the same candidates."""

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

import distembed
from distembed.base.errors import UserError
from distembed.commands.cli import app
from distembed.data.dataset.schema import ITEM, USER
from distembed.serving.export.export_run import ExportOptions, export_run
from distembed.serving.model_folder.programs import load_programs
from distembed.training.config import load_config
from distembed.training.trained_run import find_trained_run
from tests.exporting.test_recommender_runs import recommend
from tests.serving.test_recommender_rows import rows_of
from tests.serving.test_recommender_rows import values as raw_values
from tests.small_runs import call
from tests.training.test_recommenders import write_config

KINDS = ["softmax", "ranking"]
BEST = 10


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Datasets of users who have six of 25 items each and go on among them; one user has every item."""
    folder, rng = tmp_path_factory.mktemp("repeats"), np.random.default_rng(0)
    lines = ["user,item,time"]
    for user in range(40):
        own = range(25) if user == 3 else rng.permutation(25)[:6]
        items = [*own, *rng.choice(own, 6)]
        lines += [f"u{user},i{item},{time}" for time, item in enumerate(items)]
    (folder / "rows.csv").write_text("\n".join(lines) + "\n")
    shared = [str(folder / "rows.csv"), "--time", "time", "--split", "last-two"]
    app(["prepare", "sequences", *shared, "-o", str(folder / "sequences")], standalone_mode=False)
    ratings = ["--implicit", "--duplicates", "keep", "-o", str(folder / "ratings")]
    app(["prepare", "ratings", *shared, *ratings], standalone_mode=False)
    return {"sequences": folder / "sequences", "ratings": folder / "ratings"}


def train(kind: str, datasets: dict[str, Path], folder: Path, *overrides: str) -> Path:
    config = write_config(folder / "config.yaml", kind, datasets)
    said = call("train", config, "train.max_steps=3", *overrides, "--run-dir", folder / "run")
    (folder / "said").write_text(" ".join(said.split()))
    return folder / "run"


def recommended(table: Any) -> list[list[str | None]]:
    columns = [table[f"item_{place + 1}"].to_pylist() for place in range(BEST)]
    return [list(row) for row in zip(*columns, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "exclude_seen"),
    [
        ("softmax", "true"),
        ("ranking", "auto"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("softmax", "auto"), ("ranking", "true"))),
    ],
)
def test_everything_that_ranks_has_the_candidates_of_the_metric(
    kind: str, exclude_seen: str, datasets: dict[str, Path], tmp_path: Path
) -> None:
    run, excluded = train(kind, datasets, tmp_path, f"task.exclude_seen={exclude_seen}"), exclude_seen == "true"
    said = (tmp_path / "said").read_text()
    assert ("seen items are excluded" if excluded else "seen items are candidates (task.exclude_seen=false") in said
    assert ("1 user(s) have every item" in said and "against negatives: u3 " in said) == (kind == "ranking")
    assert yaml.safe_load((run / "config.yaml").read_text())["task"]["exclude_seen"] is excluded
    record = json.loads((run / "run.json").read_text())["seen_items"]
    assert record["excluded"] is excluded and record["decided_by"] == ("config" if excluded else "auto")
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["exclude_seen"] is excluded and (evaluation["excluded_targets"] > 0) == excluded
    assert evaluation["hr@10"] <= 1 - evaluation["excluded_targets"] / evaluation["rows"] + 1e-9

    dataset = datasets["sequences" if kind == "softmax" else "ratings"]
    items, users = raw_values(dataset, ITEM), raw_values(dataset, USER)
    call("predict", run, "--output", tmp_path / "split.parquet")
    split = pq.read_table(tmp_path / "split.parquet")
    asked = split["user"].to_pylist()
    test = {users[row["user"]]: row["item"] for row in rows_of(dataset, "test")}
    targets = {user: items[own[-1] if kind == "softmax" else own] for user, own in test.items()}
    best = recommended(split)
    hits = [targets[user] in own for user, own in zip(asked, best, strict=True)]
    assert evaluation["hr@10"] == pytest.approx(np.mean(hits), abs=1e-6)
    assert distembed.load(run).evaluate("test")["hr@10"] == pytest.approx(evaluation["hr@10"], abs=1e-6)

    earlier = {user: {i for s in ("train", "validation") for i in seen_in(dataset, s, users, user)} for user in asked}
    histories = [test[user][:-1] if kind == "softmax" else sorted(earlier[user]) for user in asked]
    assert any(set(own) & {items[i] for i in seen} for own, seen in zip(best, histories, strict=True)) != excluded
    column = ITEM if kind == "softmax" else USER
    raw = [
        {column: [items[each] for each in seen] if kind == "softmax" else user}
        for user, seen in zip(asked, histories, strict=True)
    ]
    (tmp_path / "raw.jsonl").write_text("".join(json.dumps(row) + "\n" for row in raw))
    call("predict", run, "--input", tmp_path / "raw.jsonl", "--output", tmp_path / "raw.parquet")
    assert recommended(pq.read_table(tmp_path / "raw.parquet")) == best
    assert recommended(distembed.load(run).predict(raw)) == best

    manifest = export_run(find_trained_run(run, None), tmp_path / "model", ExportOptions(num_best=BEST))
    assert manifest.recommends is not None and manifest.recommends.excludes_seen is excluded
    assert manifest.parity.trained == pytest.approx(evaluation["ndcg@10"], abs=1e-6)
    lists = [histories] if kind == "softmax" else [[[users.index(user)] for user in asked], histories]
    if kind == "ranking" and not excluded:
        lists[1] = [[] for _ in asked]
    found, _ = recommend(load_programs(tmp_path / "model", manifest), lists)
    assert [[items[each] if each >= 0 else None for each in row] for row in found.tolist()] == best


def seen_in(dataset: Path, split: str, users: list[str | None], user: str) -> list[int]:
    own = [row["item"] for row in rows_of(dataset, split) if users[row["user"]] == user]
    return [item for each in own for item in (each if isinstance(each, list) else [each])]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_decision_is_kept_on_resume_and_old_runs_exclude_seen_items(
    kind: str, datasets: dict[str, Path], tmp_path: Path
) -> None:
    run = train(kind, datasets, tmp_path)
    config, arguments = tmp_path / "config.yaml", ("train.max_steps=3", "--run-dir", run, "--resume")
    before = (run / "config.yaml").read_text()
    with pytest.raises(UserError, match="task.exclude_seen: False before, True now"):
        call("train", config, "task.exclude_seen=true", *arguments)
    call("train", config, *arguments)
    assert (run / "config.yaml").read_text() == before
    record = json.loads((run / "run.json").read_text())
    assert record.pop("seen_items")["repeats"] > 0

    started_with = load_config(run / "config.yaml")
    assert dataclasses.is_dataclass(started_with.task)
    values = yaml.safe_load(before)
    del values["task"]["exclude_seen"]
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    (run / "run.json").write_text(json.dumps(record))
    for command in ("resume", "evaluate"):
        if command == "resume":
            call("train", config, *arguments)
        found = json.loads(call("evaluate", run, "--json"))
        assert found["exclude_seen"] is True and found["excluded_targets"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("exclude_seen", ["true", "false"])
def test_a_ranking_without_its_dataset_says_that_seen_items_are_not_left_out(
    exclude_seen: str, datasets: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "ratings"
    shutil.copytree(datasets["ratings"], copy)
    run = train("ranking", {**datasets, "ratings": copy}, tmp_path, f"task.exclude_seen={exclude_seen}")
    (tmp_path / "rows.csv").write_text("user\nu1\nu3\n")
    arguments = ("predict", run, "--input", tmp_path / "rows.csv", "--overwrite", "--output", tmp_path / "best.csv")

    def notes(*options: Any) -> list[str]:
        capsys.readouterr()
        call(*arguments, *options)
        printed = [line for line in capsys.readouterr().err.splitlines() if "not here" in line]
        model = distembed.load(run, data=options[1] if options else None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                model.predict([{"user": "u1"}])
        warned = [str(each.message) for each in caught if "not here" in str(each.message)]
        assert printed == [f"note: {text}" for text in warned]
        return warned

    assert notes() == []
    copy.rename(tmp_path / "away")
    found = notes()
    assert len(found) == (exclude_seen == "true") and all(f"the dataset {copy} is not here" in each for each in found)
    assert notes("--data", str(tmp_path / "away")) == []
