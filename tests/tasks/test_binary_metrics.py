"""Metrics against scikit-learn."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import CategoricalFeature, LabelKind, Schema
from distembed.data.reader import BatchOrder, BatchReader
from distembed.tasks import ClickConfig, ClickTask, RatingConfig
from distembed.tasks.binary_metrics import BinaryMetrics, calibration_bins
from distembed.training.start import require_labels
from tests.small_runs import distembed

LOGITS = st.lists(st.sampled_from([-30.0, -2.5, -0.1, 0.1, 1.0, 1.5, 20.0]) | st.floats(-8, 8), min_size=2, max_size=60)


@settings(max_examples=25)
@given(logits=LOGITS, seed=st.integers(0, 2**32 - 1))
def test_metrics_equal_scikit_learn(logits: list[float], seed: int) -> None:
    scores = np.array(logits, np.float32)
    labels = np.random.default_rng(seed).integers(0, 2, len(scores)).astype(np.float32)
    labels[:2] = [0, 1]
    found = BinaryMetrics.from_logits(scores, labels)
    probabilities = 1 / (1 + np.exp(-scores.astype(np.float64)))
    assert found.rows == len(scores)
    assert found.auc == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert found.logloss == pytest.approx(log_loss(labels, probabilities), rel=1e-7)  # 1 - p rounds at large p
    assert found.accuracy == pytest.approx(accuracy_score(labels, scores > 0))
    assert found.calibration == pytest.approx(probabilities.sum() / labels.sum())
    rate = labels.astype(np.float64).mean()
    assert found.normalized_entropy == pytest.approx(found.logloss / log_loss(labels, np.full(len(labels), rate)))


def test_extreme_logits_stay_finite_and_what_cannot_be_computed_is_nan() -> None:
    found = BinaryMetrics.from_logits(np.array([1e4, -1e4], np.float32), np.array([0.0, 1.0], np.float32))
    assert (found.logloss, found.auc) == (1e4, 0.0)
    one_class = BinaryMetrics.from_logits(np.zeros(3, np.float32), np.zeros(3, np.float32))
    assert math.isnan(one_class.auc) and math.isnan(one_class.calibration) and math.isnan(one_class.normalized_entropy)
    assert one_class.logloss == pytest.approx(math.log(2))
    assert math.isnan(BinaryMetrics.from_logits(np.empty(0, np.float32), np.empty(0, np.float32)).logloss)


@settings(max_examples=25)
@given(num_rows=st.integers(1, 100))
def test_calibration_bins_hold_every_row_once(num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    logits, labels = rng.normal(size=num_rows), rng.integers(0, 2, num_rows).astype(np.float64)
    bins = calibration_bins(logits, labels)
    assert sum(b["rows"] for b in bins) == num_rows
    assert sum(b["rows"] * b["observed"] for b in bins) == pytest.approx(labels.sum())
    assert [b["predicted"] for b in bins] == sorted(b["predicted"] for b in bins)


LABELS = st.sampled_from([0.0, 1.0, math.nan, 0.5, 2.0, -1.0, 1e-30, float(np.nextafter(np.float32(1), 0))])


def write(folder: Path, labels: Sequence[float], kind: LabelKind = "number", group_rows: int = 4) -> Path:
    """Writes all splits with these labels, in row groups of so many rows."""
    folder.mkdir()
    columns = {"label": pa.array(labels, pa.float32()), "C1": pa.array([0] * len(labels), pa.int32())}
    pq.write_table(pa.table(columns), folder / "rows.parquet", row_group_size=group_rows)
    schema = Schema("label", (), (CategoricalFeature("C1", 1),), label_kind=kind)
    create_manifest(folder, schema, {name: ["rows.parquet"] for name in ("train", "validation", "test")})
    return folder


@given(labels=st.lists(LABELS, max_size=20))
def test_labels_are_0_or_1_or_not_known(labels: list[float]) -> None:
    wrong = {label for label in labels if label not in (0.0, 1.0) and not math.isnan(label)}
    check = ClickConfig().check_labels
    if not wrong:
        check(np.array(labels, np.float32), "here")
        return
    with pytest.raises(UserError, match=r"task.name is 'click', .* 0 and 1, and here has .*task=\{name: rating\}"):
        check(np.array(labels, np.float32), "here")


@pytest.mark.parametrize("kind", ["binary", "number"])
def test_a_dataset_with_other_labels_is_refused_with_the_values(kind: LabelKind, tmp_path: Path) -> None:
    ratings = str(write(tmp_path / "ratings", [1, 2, 5, 4, 3, 1], kind))
    with pytest.raises(UserError, match=r"column 'label' of .*row group 0 has 2, 4, 5\. Prepare"):
        require_labels(ClickConfig(), ratings, ["train"])
    require_labels(RatingConfig(), ratings, ["train"])
    require_labels(ClickConfig(), str(write(tmp_path / "clicks", [0, 1, 1, 0], kind)), ["train", "test"])


def test_a_single_wrong_label_is_found_when_its_batch_is_read(tmp_path: Path) -> None:
    """Row groups that are not looked at before training have one label that is neither 0 nor 1."""
    labels = [0.0, 1.0] * 60
    labels[4 * 4] = 0.25  # of 30 row groups, every third is looked at
    folder = write(tmp_path / "soft", labels)
    require_labels(ClickConfig(), str(folder), ["train"])
    task, num_read = ClickTask(), 0
    with pytest.raises(UserError, match="a batch of rows has 0.25"):
        for batch in BatchReader(folder, "train", BatchOrder(4, shuffle=False)):
            assert task.prepare_batch(batch, None) is batch
            num_read += 1
    assert num_read == 4


@pytest.mark.parametrize("label", [math.nan, math.inf, -math.inf])
def test_labels_that_are_not_finite_leave_the_manifest_readable(label: float, tmp_path: Path) -> None:
    """The reader refuses them, for every task."""
    folder = write(tmp_path / "data", [1.0, label, 0.0])
    manifest = json.loads((folder / "manifest.json").read_text(), parse_constant=pytest.fail)
    assert manifest["splits"]["train"]["label_rate"] is None
    with pytest.raises(UserError, match="row 1 is .*every value must be a finite number"):
        list(BatchReader(folder, "train", BatchOrder(4)))


@pytest.mark.thorough
@pytest.mark.distributed
def test_ranks_end_at_a_wrong_label(tmp_path: Path) -> None:
    settings = ["model={bottom: [4], top: [4]}", "train={batch_size: 8, device: cpu}"]
    (tmp_path / "config.yaml").write_text("{}")
    for name, labels in (("many", [1.0, 3.0] * 60), ("one", [*[0.0, 1.0] * 10, 0.25, *[0.0, 1.0] * 50])):
        data = write(tmp_path / name, labels)
        run = tmp_path / f"run of {name}"
        arguments = ["train", tmp_path / "config.yaml", f"data.path={data}", *settings, "--run-dir", run]
        done = distembed(*arguments, ranks=1 if name == "many" else 2, code=2)
        assert "task.name is 'click'" in done.stderr
        assert run.exists() == (name == "one")
