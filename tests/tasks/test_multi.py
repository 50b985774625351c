"""The task of several labels: masked losses, metrics against scikit-learn, and refused settings."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, mean_absolute_error, roc_auc_score, root_mean_squared_error
from torch import Tensor

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import LabelSummary, Manifest, Split
from distembed.data.dataset.schema import LABELS, WEIGHTS, Label, Schema
from distembed.data.reader import Batch
from distembed.models import ESMMConfig, MMoEConfig
from distembed.reports.comparison import ReportedMetric
from distembed.tasks import TASKS, ClickTask, MultiConfig, MultiTask, batch_schema, build_task
from distembed.tasks.base import TaskContext
from distembed.tasks.multi_config import LabelConfig
from distembed.tasks.reported_metrics import CLICK_METRICS, parse_metrics
from distembed.training.config import load_config
from distembed.training.prediction_columns import PredictionColumns
from tests.models.fake_inputs import FakeInputs

NAN = math.nan
SCHEMA = Schema(None, ("d",), (), labels=(Label("click"), Label("stars", "number"), Label("buy")))
# a row for each combination of known and missing labels, and a row without any
ROWS = [[1, 4, 0], [0, 2.5, NAN], [1, NAN, 1], [0, NAN, NAN], [NAN, -1, 0], [NAN, 3, NAN], [NAN, NAN, 1], [NAN] * 3]
SETTINGS = {"click": LabelConfig(weight=2.0), "stars": LabelConfig(weight=0.5), "buy": LabelConfig(positive_weight=3.0)}


def make_task(labels: dict[str, LabelConfig] | None = None, **settings: Any) -> MultiTask:
    task = build_task(MultiConfig(labels=labels or {}, **settings), SCHEMA)
    assert isinstance(task, MultiTask)
    return task


def prepared(task: MultiTask, labels: Tensor, **fields: Tensor) -> Batch:
    return task.prepare_batch(Batch({LABELS: labels, **fields}, len(labels)), None)


def weighted_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of the settings, label by label and row by row."""
    total = outputs.new_zeros(())
    for (click, stars, buy), (y_click, y_stars, y_buy) in zip(outputs, labels.tolist(), strict=True):
        if not math.isnan(y_click):
            total = total + 2 * ((1 + click.exp()).log() - y_click * click)
        if not math.isnan(y_stars):
            total = total + 0.5 * (stars - y_stars) ** 2
        if not math.isnan(y_buy):
            total = total + ((1 + buy.exp()).log() - y_buy * buy) * (3 if y_buy else 1)
    return total


def test_a_missing_label_is_masked() -> None:
    labels, task = torch.tensor(ROWS), make_task(SETTINGS)
    outputs = torch.randn(len(ROWS), 3, requires_grad=True)
    loss, _ = task.step(outputs, prepared(task, labels))
    expected = weighted_loss(outputs.double(), labels)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)  # a float32 sum: 8 units of rounding
    (found,) = torch.autograd.grad(loss, outputs)
    torch.testing.assert_close(found, torch.autograd.grad(expected, outputs)[0])
    assert not found[labels.isnan()].any()  # exactly 0


def test_the_loss_has_the_settings_of_each_label_and_the_weights_of_rows(tmp_path: Path) -> None:
    schema = dataclasses.replace(SCHEMA, weight="importance")
    summaries = {name: LabelSummary(4, mean) for name, mean in (("click", 0.5), ("stars", 2.5), ("buy", 0.2))}
    Manifest(schema, {"train": Split(8, None, (), 1.6, summaries)}).save(tmp_path)
    labels = {
        "click": LabelConfig(weight=2.0, focal_gamma=1.5),
        "stars": LabelConfig(weight=0.5, clip=(1, 4)),
        "buy": LabelConfig(positive_weight=3.0, label_smoothing=0.2),
    }
    task = build_task(MultiConfig(labels=labels), schema)
    ranks = Ranks(rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    task.start(TaskContext(DataConfig(path=str(tmp_path)), str(tmp_path), schema, ranks, 0, {}))
    weights = torch.tensor([0.0, 1, 2, 3, 0.5, 4, 1, 2])
    rows = task.prepare_batch(Batch({LABELS: torch.tensor(ROWS), WEIGHTS: weights}, 8), None)
    outputs = torch.randn(8, 3, requires_grad=True)
    loss, _ = task.step(outputs, rows)
    expected = torch.zeros((), dtype=torch.float64)
    for (click, stars, buy), row, weight in zip(outputs.double(), ROWS, weights.tolist(), strict=True):
        own = torch.zeros((), dtype=torch.float64)
        if not math.isnan(row[0]):
            p = 1 / (1 + (-click if row[0] else click).exp())
            own = own - 2 * (1 - p) ** 1.5 * p.log()
        if not math.isnan(row[1]):
            own = own + 0.5 * (stars + 2.5 - row[1]) ** 2  # clipped in evaluations alone
        if not math.isnan(row[2]):
            p, share = 1 / (1 + (-buy).exp()), 0.9 if row[2] else 0.1
            own = own - (3 if row[2] else 1) * (share * p.log() + (1 - share) * (1 - p).log())
        expected = expected + own * weight / 1.6
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)  # a float32 sum: 8 units of rounding
    torch.testing.assert_close(*(torch.autograd.grad(each, outputs)[0] for each in (loss, expected)))
    found = task.evaluate(outputs, rows)
    torch.testing.assert_close(found["stars.predictions"], (outputs[:, 1] + 2.5).clamp(1, 4))
    assert set(task.outputs) == set(found) and found[WEIGHTS] is weights


def test_the_gradient_of_a_model_is_the_sum_over_batches_of_one_label() -> None:
    """Each batch has the rows with the label, and a task of that label alone."""
    model = MMoEConfig(deep=[6], tower=[4], num_experts=2).build(FakeInputs({"a": torch.randn(8, 4)}, SCHEMA))
    labels, vectors = torch.tensor(ROWS), torch.randn(8, 2, 4)
    networks = [own for name, own in model.named_parameters() if name.startswith("network")]
    task = make_task(SETTINGS)
    loss, _ = task.step(model.logits(vectors), prepared(task, labels))
    found = torch.autograd.grad(loss, networks)
    sums = [torch.zeros_like(weight) for weight in networks]
    for column, (name, settings) in enumerate(SETTINGS.items()):
        alone = make_task({name: settings})
        has_label = ~labels[:, column].isnan()
        outputs = model.logits(vectors[has_label])[:, [column]]
        loss, _ = alone.step(outputs, prepared(alone, labels[has_label]))
        for total, gradient in zip(sums, torch.autograd.grad(loss, networks, allow_unused=True), strict=True):
            total += 0 if gradient is None else gradient
    torch.testing.assert_close(found, tuple(sums))


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_are_over_the_rows_with_the_label(weighted: bool) -> None:
    rng = np.random.default_rng(1)
    labels = np.stack([rng.integers(0, 2, 500), rng.normal(size=500), rng.integers(0, 2, 500)], 1)
    labels[rng.random((500, 3)) < 0.3] = NAN
    outputs, weights = rng.normal(size=(500, 3)), rng.integers(0, 4, 500)
    task = make_task()
    batch = prepared(
        task,
        torch.tensor(labels, dtype=torch.float32),
        **({WEIGHTS: torch.tensor(weights, dtype=torch.float32)} if weighted else {}),
    )
    rows = task.evaluate(torch.tensor(outputs, dtype=torch.float32), batch)
    metrics = task.metrics({name: values.numpy() for name, values in rows.items()})
    assert metrics["rows"] == 500
    assert metrics.get("weight") == (weights.sum() if weighted else None)
    for column, name in enumerate(SCHEMA.label_names):
        is_there = ~np.isnan(labels[:, column])
        own, scores = labels[is_there, column], outputs[is_there, column]
        share = {"sample_weight": weights[is_there]} if weighted else {}
        assert metrics[f"{name}.rows"] == is_there.sum()
        if name == "stars":
            expected = {"rmse": root_mean_squared_error(own, scores, **share)}
            expected["mae"] = mean_absolute_error(own, scores, **share)
        else:
            probabilities = 1 / (1 + np.exp(-scores))
            expected = {"auc": roc_auc_score(own, scores, **share), "logloss": log_loss(own, probabilities, **share)}
        for metric, value in expected.items():
            assert metrics[f"{name}.{metric}"] == pytest.approx(value, rel=1e-5)
    reported = {metric.name for metric in task.reported_metrics}
    assert reported <= metrics.keys() and {"click.auc", "stars.rmse", "buy.logloss"} <= reported


def test_training_metrics_of_several_steps_leave_missing_labels_out() -> None:
    rng, task = np.random.default_rng(2), make_task(SETTINGS)
    labels = np.stack([rng.integers(0, 2, 400), rng.normal(size=400), np.full(400, NAN)], 1)
    labels[rng.random(400) < 0.5, 0] = NAN
    outputs = rng.normal(size=(400, 3))
    totals: dict[str, np.ndarray] = {}
    for part in (slice(0, 150), slice(150, 400)):
        own = torch.tensor(outputs[part], dtype=torch.float32)
        _, rows = task.step(own, prepared(task, torch.tensor(labels[part], dtype=torch.float32)))
        sums = {name: value.numpy() for name, value in task.training_sums(rows).items()}
        totals = {name: totals[name] + value if totals else value for name, value in sums.items()}
    metrics = task.training_metrics(totals)
    is_there = ~np.isnan(labels[:, 0])
    exact = roc_auc_score(labels[is_there, 0], outputs[is_there, 0])
    assert metrics["click.auc"] == pytest.approx(exact, abs=0.003)
    assert metrics["stars.rmse"] == pytest.approx(root_mean_squared_error(labels[:, 1], outputs[:, 1]), rel=1e-5)
    assert math.isnan(metrics["buy.auc"])


def test_a_label_that_no_row_has_gives_nan_and_no_rows() -> None:
    task = make_task()
    for num_rows in (0, 3):
        labels = torch.full((num_rows, 3), NAN)
        loss, _ = task.step(torch.randn(num_rows, 3), prepared(task, labels))
        assert float(loss) == 0
        rows = task.evaluate(torch.randn(num_rows, 3), prepared(task, labels))
        metrics = task.metrics({name: values.numpy() for name, values in rows.items()})
        assert metrics["rows"] == num_rows
        assert all(metrics[f"{name}.rows"] == 0 for name in SCHEMA.label_names)
        assert all(math.isnan(metrics[name]) for name in ("click.auc", "click.logloss", "stars.rmse", "buy.auc"))
        assert "click: " in task.describe(metrics)


def test_a_label_after_another_is_0_where_the_other_is_0() -> None:
    task = make_task({"click": LabelConfig(), "buy": LabelConfig(after="click")})
    both = [[0, 0, NAN], [0, 0, 1], [1, 0, 1], [1, 0, 0], [1, 0, NAN], [NAN, 0, 1]]
    batch = prepared(task, torch.tensor(both))
    expected = torch.tensor([[0, 0], [0, 0], [1, 1], [1, 0], [1, NAN], [NAN, NAN]])
    torch.testing.assert_close(batch[LABELS], expected, rtol=0, atol=0, equal_nan=True)


def test_a_chain_of_labels_is_masked_link_by_link() -> None:
    labels = {"a": LabelConfig(), "b": LabelConfig(after="a"), "c": LabelConfig(after="b")}
    task = build_task(MultiConfig(labels=labels), Schema(None, (), (), labels=tuple(map(Label, "abc"))))
    values = [0, 1, NAN]
    rows = torch.tensor([[a, b, c] for a in values for b in values for c in values])
    found = task.prepare_batch(Batch({LABELS: rows}, len(rows)), None)[LABELS]
    for (a, b, c), (_, found_b, found_c) in zip(rows.tolist(), found.tolist(), strict=True):
        # the first label of the chain that is not 1 decides
        expected = [next((value for value in chain if value != 1), 1.0) for chain in ([a, b], [a, b, c])]
        assert [found_b, found_c] == pytest.approx(expected, abs=0, nan_ok=True)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_conversion_rate_is_ranked_among_clicked_rows(weighted: bool) -> None:
    rng = np.random.default_rng(4)
    click, buy, outputs = rng.integers(0, 2, 400), rng.integers(0, 2, 400).astype(float), rng.normal(size=(400, 3))
    buy[rng.random(400) < 0.3] = NAN
    labels = np.stack([np.where(rng.random(400) < 0.2, NAN, click), np.zeros(400), buy], 1)
    weights = rng.integers(0, 4, 400)
    task = make_task({"click": LabelConfig(), "stars": LabelConfig(), "buy": LabelConfig(after="click")})
    fields = {WEIGHTS: torch.tensor(weights, dtype=torch.float32)} if weighted else {}
    batch = prepared(task, torch.tensor(labels, dtype=torch.float32), **fields)
    evaluated = task.evaluate(torch.tensor(outputs, dtype=torch.float32), batch)
    rows = {name: values.numpy() for name, values in evaluated.items()}
    metrics = task.metrics(rows)
    is_counted = (labels[:, 0] == 1) & ~np.isnan(buy)
    both, clicked = (1 / (1 + np.exp(-outputs[is_counted, column])) for column in (2, 0))
    share = {"sample_weight": weights[is_counted]} if weighted else {}
    assert metrics["buy.cvr_auc"] == pytest.approx(roc_auc_score(buy[is_counted], both / clicked, **share), abs=1e-6)
    assert metrics["buy.cvr_auc"] != pytest.approx(roc_auc_score(buy[is_counted], both, **share), abs=1e-3)
    assert metrics["buy.cvr_rows"] == is_counted.sum()
    reported = {metric.name: metric.heading for metric in task.reported_metrics}
    assert reported["buy.cvr_auc"] == "buy CVR AUC" and "click.cvr_auc" not in reported
    assert f"buy: CVR AUC {metrics['buy.cvr_auc']:.4f} ({is_counted.sum()} rows)" in task.describe(metrics)
    no_rows = task.metrics({name: values[:0] for name, values in rows.items()})
    assert math.isnan(no_rows["buy.cvr_auc"]) and no_rows["buy.cvr_rows"] == 0


@pytest.mark.parametrize("after", [{"click": "buy", "buy": "click"}, {"a": "b", "b": "c", "c": "a", "d": "a"}])
def test_a_circle_of_labels_is_refused(after: dict[str, str]) -> None:
    labels = {name: {"after": other} for name, other in after.items()}
    with pytest.raises(UserError, match="labels are after one another in a circle"):
        load_config(None, [f"task={json.dumps({'name': 'multi', 'labels': labels})}", "model.name=mmoe"])


def test_scores_are_the_predictions() -> None:
    task = make_task(SETTINGS)
    outputs = torch.tensor([[0.0, 3.0, -80.0], [2.0, -1.0, 80.0]])
    rows = task.evaluate(outputs, prepared(task, torch.tensor(ROWS[:2])))
    predicted = task.predictions({name: values.numpy() for name, values in rows.items()})
    assert tuple(predicted) == task.prediction_columns
    assert task.prediction_columns == ("click", "stars", "buy", "click.label", "stars.label", "buy.label")
    scores = task.score(outputs).numpy()
    np.testing.assert_allclose(np.stack([predicted[name] for name in task.scores], 1), scores, rtol=1e-6)
    np.testing.assert_allclose(scores[:, 0], 1 / (1 + np.exp([0, -2])), rtol=1e-6)
    again = task.predictions({**{n: v.numpy() for n, v in rows.items()}, **task.rows_of_scores(scores)})
    for name in task.scores:
        np.testing.assert_allclose(again[name], predicted[name], rtol=1e-5, atol=1e-7)


def test_a_subset_of_the_labels_keeps_the_datasets_order() -> None:
    config = MultiConfig(labels={"buy": LabelConfig(), "click": LabelConfig()})
    schema = batch_schema(config, SCHEMA)
    assert [label.name for label in schema.labels] == ["click", "buy"]
    one = batch_schema(MultiConfig(labels={"stars": LabelConfig()}), SCHEMA)
    assert (one.label, one.label_kind, one.labels) == ("stars", "number", ())
    task = build_task(MultiConfig(), one)
    assert task.scores == ("stars",)
    # the labels of a dataset with one label are a vector
    batch = task.prepare_batch(Batch({LABELS: torch.tensor([1.0, 2.0])}, 2), None)
    torch.testing.assert_close(batch[LABELS], torch.tensor([[1.0], [2.0]]))


def test_all_labels_are_named_with_their_settings() -> None:
    assert MultiConfig().with_labels(SCHEMA).labels == dict.fromkeys(SCHEMA.label_names, LabelConfig())
    chosen = {"buy": LabelConfig(weight=2.0), "click": LabelConfig()}
    assert MultiConfig(labels=chosen).with_labels(SCHEMA).labels == chosen


def test_a_section_that_builds_no_task_is_refused() -> None:
    @dataclasses.dataclass
    class NoTaskConfig:
        name: str = "none"

    with pytest.raises(UserError, match="NoTaskConfig builds no task"):
        build_task(NoTaskConfig(), SCHEMA)


def test_labels_whose_columns_of_predictions_collide_are_refused() -> None:
    schema = Schema(None, (), (), labels=(Label("a"), Label("a.label"), Label("b")))
    with pytest.raises(UserError, match="'a' and 'a.label' cannot be learned together"):
        build_task(MultiConfig(), schema)
    task = build_task(MultiConfig(labels={"a.label": LabelConfig(), "b": LabelConfig()}), schema)
    assert task.prediction_columns == ("a.label", "b", "a.label.label", "b.label")


def test_a_missing_label_is_null_among_predictions() -> None:
    task = make_task(SETTINGS)
    rows = task.evaluate(torch.full((2, 3), NAN), prepared(task, torch.tensor(ROWS[1:3])))
    table = PredictionColumns(task).table(task.predictions({name: value.numpy() for name, value in rows.items()}))
    assert table["buy.label"].to_pylist() == [None, 1]
    assert table["stars.label"].to_pylist() == [2.5, None]
    assert all(math.isnan(value) for name in task.scores for value in table[name].to_pylist())


def test_the_headline_tells_the_metrics_of_its_label() -> None:
    metrics = make_task(headline="buy.auc").reported_metrics
    found = {kind: metrics[0].of_same_label(kind, metrics) for kind in ("logloss", "calibration", "rmse")}
    assert [metric and metric.name for metric in found.values()] == ["buy.logloss", "buy.calibration", None]
    stars = make_task(headline="stars.rmse").headline
    assert stars.of_same_label("calibration", metrics) is None
    alone = ClickTask().headline
    assert alone.of_same_label("logloss", CLICK_METRICS) == CLICK_METRICS[1]
    assert alone.of_same_label("logloss", metrics) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MultiConfig(labels={"clik": LabelConfig()}), "task.labels is 'clik'.*'click'"),
        (MultiConfig(labels={"stars": LabelConfig(focal_gamma=1.0)}), "task.labels.stars has focal_gamma.*'number'"),
        (MultiConfig(labels={"buy": LabelConfig(clip=(1, 5))}), "task.labels.buy has clip.*'binary'"),
        (MultiConfig(labels={"buy": LabelConfig(after="stars")}), "task.labels.buy.after.*is 'stars'.*Known: click"),
        (MultiConfig(labels={"stars": LabelConfig(after="click")}), "task.labels.stars has after"),
        (MultiConfig(headline="click.auk"), "task.headline is 'click.auk'.*click.auc"),
        (MultiConfig(headline="click.calibration"), "task.headline is 'click.calibration'"),
    ],
)
def test_settings_that_do_not_fit_the_dataset_are_refused(config: MultiConfig, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_task(config, SCHEMA)


def test_a_dataset_without_labels_is_refused() -> None:
    with pytest.raises(UserError, match="no label"):
        batch_schema(MultiConfig(), Schema(None, ("d",), ()))


def test_the_headline_comes_first_and_survives_a_report() -> None:
    assert make_task().headline.name == "click.auc"
    task = make_task(headline="stars.mae")
    assert task.headline == ReportedMetric("stars.mae", "stars MAE", better="lower")
    assert parse_metrics([vars(metric) for metric in task.reported_metrics]) == task.reported_metrics


def test_models_and_tasks_of_several_labels_go_together() -> None:
    for overrides in (["task.name=multi"], ["model.name=ple"]):
        with pytest.raises(UserError, match="do not go together"):
            load_config(None, overrides)
    with pytest.raises(UserError, match="the task takes the models mmoe, ple, esmm"):
        load_config(None, ["task.name=multi"])
    load_config(None, ["task.name=multi", "model.name=mmoe", "task.labels.click.weight=2.0"])
    assert "multi" in TASKS


@pytest.mark.parametrize(
    ("labels", "click"),
    [
        ("{}", None),
        ("{click: {}, buy: {}}", None),
        ("{buy: {after: click}}", None),
        ("{click: {}, buy: {after: view}}", None),
        ("{view: {}, click: {after: view}, buy: {after: click}}", None),
        ("{click: {}, buy: {after: click}}", "buy"),
    ],
)
def test_esmm_takes_a_click_and_a_conversion_after_it(labels: str, click: str | None) -> None:
    settings = ["task.name=multi", "model.name=esmm"]
    with pytest.raises(UserError, match="task.labels"):
        load_config(None, [*settings, f"task.labels={labels}", f"model.click={click or 'null'}"])
    # of the labels in either order
    for right in ("{click: {}, buy: {after: click}}", "{buy: {after: click}, click: {}}"):
        config = load_config(None, [*settings, f"task.labels={right}"])
        assert config.model == ESMMConfig(click="click")
