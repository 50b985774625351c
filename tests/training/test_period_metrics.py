"""Metrics of a stream by day: those that scikit-learn computes of the rows of each day, on any ranks, after any end."""

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from sklearn.metrics import log_loss, roc_auc_score

from distembed.base.errors import UserError
from distembed.data.dataset.periods import MOST_PERIODS, StepPeriods, rows_by_period
from distembed.data.prepare.table import prepare_table
from distembed.data.table.schema import TableSchema
from distembed.tasks import ClickTask
from distembed.training.metrics_window import MetricsWindow
from distembed.training.period_metrics import PeriodMetrics, sums_by_period
from tests.small_runs import call, config_values, distembed, metrics, stopped_at
from tests.training.stream_runs import SCHEMA, Row, draw_rows, write_file, write_files

DAY, START, NUM_DAYS = 86_400, 1_767_225_600, 5
IDLE = ("--until-idle", "0.4", "data.stream.poll_seconds=0.2", "data.stream.metrics_by=day")
STILL = ("train.sparse_optimizer.learning_rate=1e-30", "train.dense_optimizer.learning_rate=1e-30")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Rows of five days in the order of time, but for a tenth of them, which come up to two days late."""
    rng = np.random.default_rng(5)
    # clicks depend on a number, so that scores differ by far more than the bins of which an area is computed
    rows = [{**row, "click": int(rng.random() < 1 / (1 + np.exp((54 - row["age"]) / 5)))} for row in draw_rows(600)]
    times = np.sort(rng.integers(0, NUM_DAYS * DAY, len(rows)))
    arrivals = times + np.where(rng.random(len(rows)) < 0.1, rng.integers(0, 2 * DAY, len(rows)), 0)
    return [{**rows[row], "at": int(START + times[row])} for row in np.argsort(arrivals)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    write_file(folder / "rows.csv", rows)
    schema = {**SCHEMA, "time": {"column": "at", "format": "seconds"}}
    prepare_table([folder / "rows.csv"], folder / "dataset", TableSchema.from_json(schema, "test"))
    values = config_values(folder / "dataset")
    values["train"] |= {"log_every": 3, "loggers": []}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder / "config.yaml"


def by_day(run: Path) -> dict[str, dict[str, float]]:
    """Returns the rows and metrics of the last line of each day."""
    lines = {line["period"]: line for line in metrics(run, "period")}
    names = ("rows", "auc", "logloss", "normalized_entropy", "calibration")
    return {day: {name: line[name] for name in names} for day, line in lines.items()}


def day_of(row: Row) -> str:
    return datetime.fromtimestamp(row["at"], UTC).date().isoformat()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_each_day_has_the_metrics_of_its_rows(config: Path, rows: list[Row], tmp_path: Path, ranks: int) -> None:
    source, run = write_files(tmp_path / "rows", rows, 3), tmp_path / "run"
    call("train", config, "train.epochs=4", "--run-dir", tmp_path / "before")
    still = (*STILL, "--init-from", tmp_path / "before")  # weights do not change: each row's score is known
    distembed("train", config, *still, "--follow", source, *IDLE, "--run-dir", run, ranks=ranks)
    write_file(tmp_path / "all.parquet", rows)
    call("predict", run, "--input", tmp_path / "all.parquet", "--output", tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")["prediction"].to_numpy().astype(np.float64)
    days, labels = np.array([day_of(row) for row in rows]), np.array([row["click"] for row in rows])
    found = by_day(run)
    assert sorted(found) == sorted(set(days))
    for day, line in found.items():
        own = days == day
        assert line["rows"] == own.sum()
        assert line["auc"] == pytest.approx(roc_auc_score(labels[own], scores[own]), abs=2e-3)
        assert line["logloss"] == pytest.approx(log_loss(labels[own], scores[own]), rel=1e-5)
        assert line["calibration"] == pytest.approx(scores[own].sum() / labels[own].sum(), rel=1e-5)
    # late rows change the line of a day that has ended
    assert len(metrics(run, "period")) > NUM_DAYS
    assert metrics(run, "train")[-1]["rows_without_period"] == 0


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_a_window_may_have_more_days_than_are_open(config: Path, tmp_path: Path, ranks: int) -> None:
    days = np.sort(np.random.default_rng(6).integers(0, MOST_PERIODS + 20, 600))
    rows = [{**row, "at": START + int(day) * DAY} for row, day in zip(draw_rows(600), days, strict=True)]
    source, run = write_files(tmp_path / "rows", rows, 3), tmp_path / "run"
    distembed("train", config, "--follow", source, *IDLE, "train.log_every=100", "--run-dir", run, ranks=ranks)
    found = by_day(run)
    assert {day: line["rows"] for day, line in found.items()} == Counter(map(day_of, rows))
    (last,) = metrics(run, "train")
    total = sum(line["rows"] * line["logloss"] for line in found.values())
    assert last["cumulative_logloss"] == pytest.approx(total / 600, rel=1e-9) and last["rows_without_period"] == 0


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
def test_a_split_is_evaluated_by_day(config: Path, rows: list[Row], tmp_path: Path, ranks: int) -> None:
    call("train", config, "--run-dir", tmp_path / "run")
    # the next days' rows as servers would score them: by the vocabularies of the run
    write_file(tmp_path / "next.csv", rows)
    known = ("--vocabulary", tmp_path / "run", "--split", "test")
    call("prepare", "table", tmp_path / "next.csv", *known, "--output", tmp_path / "next")
    arguments = (tmp_path / "run", "--data", tmp_path / "next")
    found = json.loads(distembed("evaluate", *arguments, "--by", "day", "--json", ranks=ranks).stdout)
    call("predict", *arguments, "--output", tmp_path / "scores.parquet")
    scores = pq.read_table(tmp_path / "scores.parquet")
    days = np.array([day_of(row) for row in rows])
    assert list(found) == sorted(set(days))
    for day, line in found.items():
        labels, predicted = (
            scores[name].to_numpy()[days == day].astype(np.float64) for name in ("label", "prediction")
        )
        assert line["rows"] == len(labels)
        assert line["auc"] == pytest.approx(roc_auc_score(labels, predicted), abs=1e-6)
        assert line["logloss"] == pytest.approx(log_loss(labels, predicted), rel=1e-5)
    with pytest.raises(UserError, match="--by is 'week'"):
        call("evaluate", *arguments, "--by", "week")


@pytest.mark.distributed
@pytest.mark.parametrize("before, now", [(1, 1), (2, 2), (1, 2)])
def test_a_killed_run_has_the_lines_of_an_undisturbed_one(
    config: Path, rows: list[Row], tmp_path: Path, before: int, now: int
) -> None:
    source = write_files(tmp_path / "rows", rows, 3)
    follow = ("train", config, "--follow", source, *IDLE, "train.checkpoint_every=2", "train.keep_checkpoints=99")
    distembed(*follow, "--run-dir", tmp_path / "whole", ranks=before)
    # the fourth step is between two lines, of steps 3 and 6
    distembed(*follow, "--resume", "--run-dir", stopped_at(4, tmp_path / "whole", tmp_path / "killed"), ranks=now)
    whole, killed = by_day(tmp_path / "whole"), by_day(tmp_path / "killed")
    assert killed.keys() == whole.keys()
    for day, line in killed.items():
        assert line == (whole[day] if before == now else pytest.approx(whole[day], rel=1e-3))
    # each row is scored once: days together are the whole stream
    last = metrics(tmp_path / "whole", "train")[-1]
    counts = [line["rows"] for line in whole.values()]
    assert sum(counts) == last["samples"] == len(rows)
    mean = np.average([line["logloss"] for line in whole.values()], weights=counts)
    assert last["cumulative_logloss"] == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("before, now", [("null", "day"), ("hour", "day"), ("day", "null")])
def test_a_resumed_run_may_change_its_periods(
    config: Path, rows: list[Row], tmp_path: Path, before: str, now: str
) -> None:
    source = write_files(tmp_path / "rows", rows, 3)
    follow = ("train", config, "--follow", source, *IDLE, "train.checkpoint_every=2", "train.keep_checkpoints=99")
    call(*follow, f"data.stream.metrics_by={before}", "--run-dir", tmp_path / "whole")
    stopped_at(4, tmp_path / "whole", tmp_path / "killed")  # between two lines, of steps 3 and 6
    call(*follow, f"data.stream.metrics_by={now}", "--resume", "--run-dir", tmp_path / "killed")
    lines = [line for line in metrics(tmp_path / "killed", "period") if line["step"] > 4]
    last = {line["period"]: line["rows"] for line in lines}
    assert last == (Counter(map(day_of, rows[4 * 64 :])) if now == "day" else {})


@pytest.mark.distributed
def test_a_window_is_recorded_on_more_ranks_without_a_further_step(
    config: Path, rows: list[Row], tmp_path: Path
) -> None:
    source, journal = write_files(tmp_path / "rows", rows[:256], 1), tmp_path / "killed" / "stream.jsonl"
    write_file(source / "part-1.parquet", rows[256:])
    follow = ("train", config, "--follow", source, *IDLE, "train.checkpoint_every=2", "train.keep_checkpoints=99")
    distembed(*follow, "--run-dir", tmp_path / "whole")
    stopped_at(4, tmp_path / "whole", tmp_path / "killed")
    # the stream has ended with the fourth step, after the line of the third
    (source / "part-1.parquet").unlink()
    journal.write_text(journal.read_text().splitlines(keepends=True)[0])
    distembed(*follow, "--resume", "--run-dir", tmp_path / "killed", ranks=2)
    lines = metrics(tmp_path / "killed", "train")
    assert [(line["step"], line["samples"]) for line in lines] == [(3, 192), (4, 256)]
    losses = [line["loss"] * rows for line, rows in zip(lines, (192, 64), strict=True)]
    assert lines[-1]["cumulative_loss"] == pytest.approx(sum(losses) / 256, rel=1e-6)
    days = by_day(tmp_path / "killed").values()
    assert sum(day["rows"] * day["logloss"] for day in days) == pytest.approx(sum(losses), rel=1e-5)


def moved(window: MetricsWindow, totals: PeriodMetrics) -> list[dict[str, Any]]:
    """Moves a window's periods to the totals, and returns the lines that are due."""
    num_rows, sums = window.take_periods()
    return totals.add(ClickTask(), num_rows, {name: total.numpy() for name, total in sums.items()})


def fed(steps: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], log_every: int) -> dict[str, dict[str, Any]]:
    """Returns the last line of each day, given the logits, labels and days of each step's rows."""
    task, totals, window = ClickTask(), PeriodMetrics("day"), MetricsWindow()
    lines: list[dict[str, Any]] = []
    for number, (logits, labels, days) in enumerate(steps, start=1):
        outputs = {"logits": torch.from_numpy(logits), "labels": torch.from_numpy(labels)}
        sums = task.training_sums(outputs)
        periods = StepPeriods(days, rows_by_period(days))
        if is_full := not window.has_room(periods):
            lines += moved(window, totals)
        window.add_periods(periods)
        window.add(torch.zeros(()), {**sums, **sums_by_period(task, outputs, sums, periods)}, len(days))
        if number % log_every == 0 or number == len(steps):
            lines += moved(window, totals)
            window = MetricsWindow()
        if is_full or number % log_every == 0:
            saved = PeriodMetrics("day")
            values = json.loads(json.dumps(totals.to_json()))
            saved.restore(values, {name: [tensor] for name, tensor in totals.tensors().items()})
            totals = saved
    return {line["period"]: line for line in [*lines, *totals.changed_lines(task)]}


@pytest.mark.parametrize("log_every", [1, 7, 1000])
@pytest.mark.parametrize("wrong_share", [0.0, 0.01, 0.1])
def test_wrong_times_close_days_and_spoil_none(log_every: int, wrong_share: float) -> None:
    rng, steps = np.random.default_rng(0), []
    for step in range(60):
        days = 20_454 + (64 * step + np.arange(64)) // 900  # a day begins within a step, and within a window
        days = np.where(rng.random(64) < wrong_share, rng.integers(0, 2_000_000, 64), days)
        steps.append((rng.normal(size=64).astype(np.float32), (rng.random(64) < 0.3).astype(np.float32), days))
    found = fed(steps, log_every)
    logits, labels, days = (np.concatenate(each) for each in zip(*steps, strict=True))
    assert (len(set(days.tolist())) > MOST_PERIODS) == (wrong_share > 0)
    for number in range(20_454, 20_459):
        line, own = found[str(np.datetime64(number, "D"))], days == number
        assert line["rows"] == own.sum()
        assert line["auc"] == pytest.approx(roc_auc_score(labels[own], logits[own]), abs=1e-3)


def test_the_closed_periods_of_most_rows_are_remembered() -> None:
    totals, task = PeriodMetrics("hour"), ClickTask()
    outputs = {"logits": torch.zeros(2), "labels": torch.tensor([0.0, 1.0])}
    large = {number: 10 for number in range(MOST_PERIODS)}
    sums = {name: total.numpy() for name, total in task.training_sums(outputs).items()}

    def add(num_rows: dict[int, int]) -> list[str]:
        named = {f"period:{number}:{name}": total for number in num_rows for name, total in sums.items()}
        return [line["period"] for line in totals.add(task, num_rows, named)]

    add(large)
    for start in range(1000, 30_000, MOST_PERIODS):
        add({number: 2 for number in range(start, start + MOST_PERIODS)})
    assert len(totals.to_json()["closed"]) <= 20_000
    assert add(large) == [] and totals.rows_without_period == 10 * MOST_PERIODS


def test_errors_say_what_to_do(config: Path, tmp_path: Path) -> None:
    write_file(tmp_path / "rows.csv", draw_rows(100))
    prepare_table([tmp_path / "rows.csv"], tmp_path / "dataset", TableSchema.from_json(SCHEMA, "test"))
    follow = ("--follow", tmp_path, *IDLE, "--run-dir", tmp_path / "run")
    with pytest.raises(UserError, match=r"metrics_by is 'day', and the schema .* has no times .* `time:"):
        call("train", config, *follow, f"data.path={tmp_path / 'dataset'}")
    with pytest.raises(UserError, match=r"metrics_by is 'day', and the task 'ranking' has no metrics of single rows"):
        call("train", config, *follow, "task={name: ranking}", "model={name: mf}")
