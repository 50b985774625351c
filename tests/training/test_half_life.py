"""Rows weighted by their age in training: equal to a dataset with these weights, computed by NumPy."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pydantic.dataclasses
import pytest
import yaml
from numpy.typing import NDArray

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import CHECKSUMS_NAME, PIECE
from distembed.data.dataset.row_groups import read_times
from distembed.data.reader import BatchOrder, BatchReader
from distembed.data.reader.age import AgeWeights
from distembed.data.reader.decode import Decoding
from distembed.tasks import TASKS
from distembed.training.config import load_config
from tests.data.test_damage import flip_a_bit
from tests.small_runs import ROWS, config_values, distembed, losses, metrics, write_dataset

HALF_LIFE = 2.5
DAY = 86_400


def numbers_of(split: str) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns times within ten days of 2026, and weights of which a tenth are 0."""
    rng = np.random.default_rng(len(split))
    rows = ROWS[split]
    times = 1_767_225_600 + rng.integers(0, 10 * DAY, rows)
    return times, (rng.gamma(2.0, 3.0, rows) * (rng.random(rows) < 0.9)).astype(np.float32)


def expected_weights(is_weighted: bool) -> NDArray[np.float64]:
    times, own = numbers_of("train")
    own = own.astype(np.float64) if is_weighted else np.ones(len(times))
    weights = 0.5 ** ((times.max() - times) / (HALF_LIFE * DAY))
    return own * weights / np.average(weights, weights=own)


def write(folder: Path, is_weighted: bool, computed: bool = False) -> Path:
    """Writes the small dataset with times, and weights where asked; if ``computed``, the final ones of training."""

    def change(split: str, table: pa.Table) -> pa.Table:
        times, own = numbers_of(split)
        if computed:
            own = np.ones(len(times), np.float32) if split != "train" else expected_weights(is_weighted)
        return table.append_column("at", pa.array(times)).append_column("own", pa.array(own.astype(np.float32)))

    return write_dataset(folder, change=change, time="at", weight="own" if is_weighted or computed else None)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_have_the_weights_of_the_ages(tmp_path: Path, is_weighted: bool, world_size: int) -> None:
    dataset = write(tmp_path / "data", is_weighted)
    ages = AgeWeights.of_split(dataset, "train", HALF_LIFE, skip_unreadable=0)
    found = []
    for rank in range(world_size):
        reader = BatchReader(
            dataset, "train", BatchOrder(64), rank=rank, world_size=world_size, decoding=Decoding(ages=ages)
        )
        found += [batch["weights"].numpy() for batch in reader]
    expected = expected_weights(is_weighted)
    assert ages.effective_rows == pytest.approx(expected.sum() ** 2 / (expected**2).sum(), rel=1e-9)
    assert np.sort(np.concatenate(found)) == pytest.approx(np.sort(expected), rel=1e-6)
    assert np.average(expected) == pytest.approx(np.average(numbers_of("train")[1]) if is_weighted else 1.0)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.distributed)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_run_equals_one_on_weights_that_numpy_computes(tmp_path: Path, is_weighted: bool, ranks: int) -> None:
    half_life = f"train.half_life_days={HALF_LIFE}"
    runs = {}
    for name, computed, settings in (("aged", False, (half_life,)), ("weighted", True, ())):
        dataset = write(tmp_path / name, is_weighted, computed)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config_values(dataset)))
        runs[name] = tmp_path / f"{name}-run"
        distembed("train", tmp_path / f"{name}.yaml", *settings, "--run-dir", runs[name], ranks=ranks)
    assert losses(runs["aged"]) == pytest.approx(losses(runs["weighted"]), rel=1e-5)
    if not is_weighted:  # evaluations count all rows alike
        (line,), (other,) = (metrics(run, "eval")[-1:] for run in runs.values())
        assert "weight" not in line and line["auc"] == pytest.approx(other["auc"], abs=1e-6)


@pytest.mark.parametrize("read", [read_times, partial(AgeWeights.of_split, half_life_days=2.5, skip_unreadable=0)])
def test_rows_without_times_are_refused(tmp_path: Path, read: Callable[[Path, str], object]) -> None:
    def change(split: str, table: pa.Table) -> pa.Table:
        times = numbers_of(split)[0].tolist()
        if split == "train":
            times[300] = None  # the second row group begins with row 256
        return table.append_column("at", pa.array(times))

    dataset = write_dataset(tmp_path / "data", change=change, time="at")
    with pytest.raises(UserError, match=r"part-0.parquet, row group 1, column 'at': row 44 has no time"):
        read(dataset, "train")
    with pytest.raises(UserError, match="lacks the columns at"):
        write_dataset(tmp_path / "without", time="at")
    with pytest.raises(UserError, match=r"column 'I1': its type is float; a time is an integer"):
        write_dataset(tmp_path / "floats", time="I1", dense=("I2",))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_time_in_the_far_future_is_refused(tmp_path: Path, is_weighted: bool) -> None:
    def change(split: str, table: pa.Table) -> pa.Table:
        times, own = numbers_of(split)
        times[np.flatnonzero(own)[7]] = 4_102_444_800
        return table.append_column("at", pa.array(times)).append_column("own", pa.array(own))

    dataset = write_dataset(tmp_path / "data", change=change, time="at", weight="own" if is_weighted else None)
    with pytest.raises(UserError, match=r"count as 1.0 rows of equal weight, .* 'at' is 2100-01-01T00:00:00"):
        AgeWeights.of_split(dataset, "train", HALF_LIFE, skip_unreadable=0)


def test_unreadable_row_groups_are_counted_and_reported(tmp_path: Path) -> None:
    dataset = write(tmp_path / "data", is_weighted=False)
    ends = np.cumsum(np.fromfile(dataset / CHECKSUMS_NAME, PIECE)["bytes"])  # the training split's row groups are first
    for group in (1, 3):
        flip_a_bit(dataset / "train" / "part-0.parquet", int(ends[group]) - 100)
    for most in (0, 1):
        with pytest.raises(UserError, match="row group 1" if most == 0 else "2 row groups cannot be read"):
            AgeWeights.of_split(dataset, "train", HALF_LIFE, skip_unreadable=most)
    ages = AgeWeights.of_split(dataset, "train", HALF_LIFE, skip_unreadable=2)
    reader = BatchReader(dataset, "train", BatchOrder(64), decoding=Decoding(skip_unreadable=2, ages=ages))
    assert [name[-1] for name in reader.unreadable] == ["1", "3"]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data")
    with pytest.raises(UserError, match=r"half_life_days is 2.5, and the dataset has no times .* `time:"):
        AgeWeights.of_split(dataset, "train", HALF_LIFE, skip_unreadable=0)
    for settings in (['data.stream={"source": "rows"}'], ["task={name: ranking}", "model={name: mf}"]):
        with pytest.raises(UserError, match=r"half_life_days is 2.5, and .*leave it out"):
            load_config(None, ["train.half_life_days=2.5", *settings])


@pytest.mark.parametrize("weighs_rows", [True, False])
def test_a_task_of_ones_own_has_to_say_that_it_weighs_rows(monkeypatch: pytest.MonkeyPatch, weighs_rows: bool) -> None:
    @pydantic.dataclasses.dataclass(frozen=True)
    class Own:
        name: str = "own"

    if weighs_rows:
        Own.weighs_rows = True  # type: ignore[attr-defined]
    monkeypatch.setitem(TASKS, "own", Own)
    stream = 'data.stream={"source": "rows", "metrics_by": "day"}'
    for setting, problem in (("train.half_life_days=2.5", "no loss of single"), (stream, "no metrics of single")):
        with nullcontext() if weighs_rows else pytest.raises(UserError, match=f"the task 'own' has {problem} rows"):
            load_config(None, ["task={name: own}", "data.path=rows", setting])
