"""Which labels clicks take: 0 and 1 alone, in the dataset before anything is built and in every batch that is read."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import create_manifest
from distembed.data.dataset.schema import CategoricalFeature, LabelKind, Schema
from distembed.data.reader import BatchOrder, BatchReader
from distembed.tasks import ClickConfig, ClickTask, RatingConfig
from distembed.training.start import require_labels
from tests.small_runs import distembed

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


@pytest.mark.distributed
def test_ranks_end_at_a_wrong_label(tmp_path: Path) -> None:
    settings = ["model={bottom: [4], top: [4]}", "train={batch_size: 8, device: cpu}"]
    (tmp_path / "config.yaml").write_text("{}")
    for name, labels in (("many", [1.0, 3.0] * 60), ("one", [*[0.0, 1.0] * 10, 0.25, *[0.0, 1.0] * 50])):
        data = write(tmp_path / name, labels)
        run = tmp_path / f"run of {name}"
        arguments = ["train", tmp_path / "config.yaml", f"data.path={data}", *settings, "--run-dir", run]
        done = distembed(*arguments, ranks=2, code=2)
        assert "task.name is 'click'" in done.stderr
        assert run.exists() == (name == "one")
