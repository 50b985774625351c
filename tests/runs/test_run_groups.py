"""Means over seeds and differences to a baseline, against numbers computed by hand and by scipy."""

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from scipy.stats import ttest_ind

from distembed.base.errors import UserError
from distembed.reports.comparison import Sample, group_runs, without_seed
from distembed.reports.report import print_comparison, write_run_report
from distembed.tasks.reported_metrics import ReportedMetric
from distembed.training.config import load_config

METRICS = ReportedMetric("rmse", "RMSE", better="lower"), ReportedMetric("mae", "MAE", in_terminal=False)


def make_run(
    folder: Path, rate: float, seed: int, rmse: float | None, split: str = "test", fingerprint: str | None = None
) -> Path:
    folder.mkdir(parents=True)
    config = {"model": {"seed": rate}, "train": {"epochs": 3, "seed": seed, "sparse_optimizer": {"rate": rate}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    info = {"name": folder.name, "seed": seed, "status": "finished", "metrics": [asdict(metric) for metric in METRICS]}
    info["id_fingerprint"] = fingerprint
    (folder / "run.json").write_text(json.dumps(info))
    if rmse is not None:
        (folder / "evaluation.json").write_text(json.dumps({"split": split, "rmse": rmse, "mae": rmse / 2}))
    return folder


def terminal(tmp_path: Path, runs: list[Path], baseline: str | None) -> list[str]:
    summaries = write_run_report(runs, tmp_path / "report.html", baseline=baseline)
    with Console(width=120, file=(tmp_path / "terminal.txt").open("w")) as console:
        print_comparison(summaries, console, baseline)
    return (tmp_path / "terminal.txt").read_text().splitlines()


def runs_of_two_rates(tmp_path: Path) -> list[Path]:
    values = {("full", 0.1): [1.0, 1.2, 1.4], ("sse", 0.2): [0.9, 1.0], ("alone", 0.3): [0.5]}
    return [
        make_run(tmp_path / f"{name}-seed{seed}", rate, seed, rmse)
        for (name, rate), found in values.items()
        for seed, rmse in enumerate(found)
    ]


def test_a_difference_is_told_in_standard_errors() -> None:
    # variances 0.04 of 3 runs and 0.005 of 2: sqrt(0.04 / 3 + 0.005 / 2) = sqrt(0.0158333) = 0.1258306
    first, second = Sample.of([0.9, math.nan, 1.0]), Sample.of([1.0, 1.2, 1.4])
    assert (first.number, first.mean, second.mean) == (2, pytest.approx(0.95), pytest.approx(1.2))
    assert second.standard_deviation == pytest.approx(0.2)
    assert first.standard_errors_from(second) == pytest.approx(-0.25 / 0.1258306, rel=1e-6)
    expected = ttest_ind([0.9, 1.0], [1.0, 1.2, 1.4], equal_var=False).statistic
    assert first.standard_errors_from(second) == pytest.approx(expected)


def test_without_a_spread_no_standard_error_is_known() -> None:
    several = Sample.of([1.0, 2.0])
    for other in ([], [1.0], [math.nan, 3.0]):
        assert math.isnan(Sample.of(other).standard_errors_from(several))
        assert math.isnan(several.standard_errors_from(Sample.of(other)))
    assert math.isnan(Sample.of([1.0, 1.0]).standard_errors_from(Sample.of([2.0, 2.0])))


@pytest.mark.parametrize("baseline", ["full", "full-seed2"])
def test_runs_that_differ_in_their_seed_are_one_row(tmp_path: Path, baseline: str) -> None:
    lines = terminal(tmp_path, runs_of_two_rates(tmp_path / "runs"), baseline)
    table = lines[lines.index("") + 1 :]
    assert table[0].split() == ["runs", "seeds", "split", "RMSE", "RMSE", "difference"]
    assert table[1].split() == ["full", "3", "test", "1.2000", "±", "0.2000", "baseline"]
    assert table[2].split() == ["sse", "2", "test", "0.9500", "±", "0.0707", "-0.2500", "±", "0.1258", "(-2.0", "s.e.)"]
    assert table[3].split() == ["alone-seed0", "1", "test", "0.5000", "-0.7000", "(no", "s.e.)"]
    page = (tmp_path / "report.html").read_text()
    assert "Means over seeds" in page and "MAE difference" in page and "-0.1250 ± 0.0629 (-2.0 s.e.)" in page


def test_a_table_of_means_is_shown_without_a_baseline_where_there_are_seeds(tmp_path: Path) -> None:
    runs = runs_of_two_rates(tmp_path / "runs")
    assert "1.2000 ± 0.2000" in "\n".join(terminal(tmp_path, runs, None))
    assert "difference" not in (tmp_path / "report.html").read_text()
    lines = terminal(tmp_path, runs[-2:], None)
    assert len(lines) == 3 and "Means over seeds" not in (tmp_path / "report.html").read_text()


def test_what_was_evaluated_on_another_split_is_not_compared(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "runs" / "a", 0.1, 0, 1.0),
        make_run(tmp_path / "runs" / "b", 0.1, 1, 2.0, "validation"),
        make_run(tmp_path / "runs" / "c", 0.1, 2, None),
    ]
    lines = terminal(tmp_path, runs, "a")
    table = lines[lines.index("") + 2 :]
    assert [line.split()[:5] for line in table[:3]] == [
        ["a", "1", "test", "1.0000", "baseline"],
        ["b", "1", "validation", "2.0000", "–"],
        ["c", "1", "–", "–", "–"],
    ]


def test_an_unknown_baseline_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    runs = runs_of_two_rates(tmp_path / "runs")
    with pytest.raises(UserError, match="--baseline is 'fall', which is not known. Did you mean 'full'"):
        write_run_report(runs, tmp_path / "report.html", baseline="fall")
    assert not (tmp_path / "report.html").exists()


def test_only_the_seed_of_training_is_left_out_of_a_config() -> None:
    configs = [load_config(None, ["data.path=somewhere", f"train.seed={seed}"]).to_yaml() for seed in (3, 12)]
    assert configs[0] != configs[1]
    others = "data:\n  seed: 1\ntrain:\n  a:\n    seed: 2"
    assert without_seed(f"{others}\n  seed: 3\n") == others


def test_places_of_checkpoints_are_left_out_too() -> None:
    """Since a sweep gives each of its runs one of its own."""
    settings = (["data.path=somewhere", f"train.seed={i}", f"train.checkpoint_dir=/shared/{i}"] for i in range(2))
    first, second = (without_seed(load_config(None, each).to_yaml()) for each in settings)
    assert first == second and "somewhere" in first


@pytest.mark.parametrize(("prints", "said"), [(("a", "b"), True), (("a", "a"), False), (("a", None), False)])
def test_runs_of_datasets_with_other_ids_are_noted(tmp_path: Path, prints: tuple[str | None, ...], said: bool) -> None:
    runs = [make_run(tmp_path / f"run{place}", 0.1 + place, 0, 1.0) for place in range(2)]
    for run, value in zip(runs, prints, strict=True):
        info = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**info, "id_fingerprint": value}))
    assert any("stand for different values" in line for line in terminal(tmp_path, runs, None)) == said
    assert ("stand for different values" in (tmp_path / "report.html").read_text()) == said


def test_runs_that_are_named_by_their_seed_alone_have_a_name_in_common(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"seed={seed}", 0.1, seed, 1.0 + seed) for seed in (0, 1, 12)]
    summaries = write_run_report(runs, tmp_path / "report.html")
    assert [(group.name, group.num_seeds) for group in group_runs(summaries)] == [("run", 3)]


def test_runs_of_one_seed_tell_nothing_of_chance(tmp_path: Path) -> None:
    """Seed 0 has three runs, of which one is a copy to the bit: its mean is one value among those of two seeds."""
    found = [(0, 1.0), (0, 1.0), (0, 1.6), (1, 1.4)]
    runs = [make_run(tmp_path / f"run{i}", 0.1, seed, rmse) for i, (seed, rmse) in enumerate(found)]
    (group,) = group_runs(write_run_report(runs, tmp_path / "report.html"))
    sample = group.sample("rmse")
    assert (group.num_seeds, sample.number, sample.mean) == (2, 2, pytest.approx(1.3))
    assert sample.standard_deviation == pytest.approx(math.sqrt(0.02))


def test_a_mean_of_fewer_seeds_than_there_are_says_so(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{seed}", 0.1, seed, rmse) for seed, rmse in enumerate([1.0, math.inf, 1.2])]
    assert "1.1000 ± 0.1414 (2 of 3)" in "\n".join(terminal(tmp_path, runs, None))


def test_runs_of_two_datasets_are_two_groups(tmp_path: Path) -> None:
    """Though their configs name them by one path."""
    prints = ["a", "a", "b", None]
    runs = [make_run(tmp_path / f"run{i}", 0.1, i, 1.0, fingerprint=own) for i, own in enumerate(prints)]
    groups = group_runs(write_run_report(runs, tmp_path / "report.html"))
    assert [[run.info.seed for run in group.runs] for group in groups] == [[0, 1], [2], [3]]
