"""Laws of the report: self-contained, true to the run folders, unmoved by runs that are unfinished or damaged."""

import json
import math
import random
import re
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from rich.console import Console

from distembed.base.errors import UserError
from distembed.reports.comparison import report_columns
from distembed.reports.report import ConfigDifferences, print_comparison, write_run_report
from distembed.tasks.reported_metrics import CLICK_METRICS, ReportedMetric, parse_metrics
from distembed.training.run_folder.folder import RunFolder
from distembed.training.run_folder.record import RunRecord, RunSummary
from tests.html_page import Page
from tests.small_runs import train_small


def make_run(
    path: Path, steps: int = 30, finished: bool = True, parameters: int = 8_441_404, name: str | None = None
) -> Path:
    draw = random.Random(path.name)
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("model:\n  name: dlrm\n")
    info = {
        "name": name or path.name,
        "seed": 0,
        "versions": {"torch": "2.13.0"},
        "world_size": 1,
        "parameters": parameters,
        "embedding_parameters": parameters - 500_000,
        "embedding_bytes": 4 * (parameters - 500_000),
        "embedding_rows": 1_000,
        "full_embedding_bytes": 12 * (parameters - 500_000),
        "embedding_training_bytes": 8 * (parameters - 500_000),
        "full_embedding_training_bytes": 32 * (parameters - 500_000),
        "full_embedding_rows": 8_000,
        "batch_size": 128,
        "status": "finished" if finished else "running",
        "schemes": {"quotient_remainder": 20, "full": 6},
    }
    (path / "run.json").write_text(json.dumps(info))
    with (path / "metrics.jsonl").open("w") as metrics:
        for step in range(1, steps + 1):
            line = {"kind": "train", "step": step, "samples": 128 * step, "loss": 0.5 + draw.random() / 9, "auc": 0.7}
            speed = {"samples_per_second": 10_000.0 + step, "seconds": 7.0 * step}
            metrics.write(json.dumps({**line, **speed}) + "\n")
            if step % 10 == 0:
                evaluation = {"kind": "eval", "split": "validation", "step": step, "samples": 128 * step}
                metrics.write(json.dumps({**evaluation, "logloss": 0.47, "auc": 0.7512}) + "\n")
    if finished:
        bins = [{"predicted": p / 10, "observed": p / 10, "rows": 9} for p in range(1, 9)]
        scores = {"logloss": 0.4622, "auc": 0.7701, "normalized_entropy": 0.81, "calibration": 0.991}
        (path / "evaluation.json").write_text(
            json.dumps({"split": "test", "step": steps, **scores, "calibration_bins": bins})
        )
    return path


def report(tmp_path: Path, *runs: Path) -> tuple[Page, list[RunSummary]]:
    output = tmp_path / "out" / "report.html"
    summaries = write_run_report(runs, output)
    return Page(output.read_text(encoding="utf-8")), summaries


def figures(tmp_path: Path) -> dict[str, str]:
    """Heading -> SVG of the report's figures."""
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    return dict(re.findall(r"<figcaption><b>(.*?)</b>.*?</figcaption>(<svg.*?</svg>)", html, re.DOTALL))


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2, 11, 60])
def test_a_page_is_whole_and_fetches_nothing(tmp_path: Path, count: int) -> None:
    runs = [make_run(tmp_path / f"run{i}", parameters=10**6 * (i + 1)) for i in range(count)]
    page, summaries = report(tmp_path, *runs)
    assert [summary.path for summary in summaries] == runs
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    assert all(value.startswith("#") for value in page.references)
    assert "@import" not in page.text and not re.search(r"url\((?!#)", page.text)


@pytest.mark.parametrize("count", [1, 2])
def test_each_figure_is_there_and_is_valid_svg(tmp_path: Path, count: int) -> None:
    report(tmp_path, *[make_run(tmp_path / f"run{i}") for i in range(count)])
    drawn = figures(tmp_path)
    expected = ["Loss", "AUC", "Throughput", "Calibration"] + ["Parameters against logloss"] * (count > 1)
    assert list(drawn) == expected
    for svg in drawn.values():
        assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_numbers_are_those_of_the_run_folder(tmp_path: Path) -> None:
    page, (summary,) = report(tmp_path, make_run(tmp_path / "run"))
    assert (summary.metric("auc"), summary.metric("logloss"), summary.info.parameters) == (0.7701, 0.4622, 8_441_404)
    assert summary.samples_per_second == 10_015.5, "the median of 10001 ... 10030"
    for text in (
        "8,441,404",
        "31.8 (33.3%)",
        "63.5 (25.0%)",
        "1,000 (12.5%)",
        "4.0x",
        "0.7701",
        "0.4622",
        "0.8100",
        "0.991",
    ):
        assert text in page.text
    assert "20 quotient_remainder, 6 full" in page.text and "4 min" in page.text


def test_days_of_streams_are_a_table_of_their_last_lines(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in "ab"]
    for number, run in enumerate(runs):
        with (run / "metrics.jsonl").open("a") as file:
            for day, rows, auc in (("2026-01-01", 900, 0.6), ("2026-01-02", 800, 0.65), ("2026-01-01", 1000, 0.61)):
                line = {"kind": "period", "step": 31, "period": day, "rows": rows, "auc": auc + number / 10}
                file.write(json.dumps({**line, "logloss": 0.5}) + "\n")
    page, _ = report(tmp_path, runs[0])
    days = [["2026-01-01", "1,000", "0.6100", "0.5000"], ["2026-01-02", "800", "0.6500", "0.5000"]]
    assert [["UTC", "rows", "AUC", "logloss"], *days] in page.tables
    page, _ = report(tmp_path, *runs)
    assert ["2026-01-01", "1,000", "0.6100", "0.7100"] in [row for table in page.tables for row in table]


@pytest.mark.parametrize("attack", ["<script>alert(1)</script>", 'a"b<c>&', "</pre></details><b>"])
def test_what_comes_from_a_run_is_escaped(tmp_path: Path, attack: str) -> None:
    run = make_run(tmp_path / "run", name=attack)
    (run / "config.yaml").write_text(f"data:\n  path: {attack}\n")
    page, _ = report(tmp_path, run, make_run(tmp_path / "other"))
    assert "script" not in page.seen
    assert f"path: {attack}" in page.text
    assert page.text.count(attack) >= 4, "title, heading, table, legend, config"


@pytest.mark.thorough
@pytest.mark.parametrize("content", ["", '{"kind": "tr', '{"kind"', "null\n[]\n3\n", "\x00\xff", '{"kind": "train"}\n'])
def test_metrics_cut_short_leave_the_rest_readable(tmp_path: Path, content: str) -> None:
    run = make_run(tmp_path / "run", finished=False)
    whole = RunRecord.read(run)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(content)
    _, (summary,) = report(tmp_path, run)
    assert summary == RunSummary.from_record(whole, "run")
    (run / "metrics.jsonl").unlink()
    _, (summary,) = report(tmp_path, run)
    assert math.isnan(summary.metric("logloss"))


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [0, 1, 9, 10])
def test_unfinished_runs_are_shown_as_far_as_they_came(tmp_path: Path, steps: int) -> None:
    page, (summary,) = report(tmp_path, make_run(tmp_path / "run", steps=steps, finished=False))
    assert summary.info.status == "unfinished"
    assert summary.evaluated_on == ("validation" if steps == 10 else "")
    assert math.isnan(summary.metric("auc")) == (steps < 10)
    assert math.isnan(summary.samples_per_second) == (steps == 0)
    assert "nan" not in page.text.lower().split()
    assert list(figures(tmp_path)) == (["Loss", "AUC", "Throughput"] if steps else []), "no frame is empty"
    assert ("Curves" in page.text) == (steps > 0)
    points = [re.search(r'<g clip-path="[^"]*">\s*<use', svg) for svg in figures(tmp_path).values()]
    assert steps != 1 or all(points), "a line of one window has no length"


@pytest.mark.thorough
@pytest.mark.parametrize("value", ["NaN", "null", "Infinity", '"text"', "true", "[]"])
def test_values_that_are_no_numbers_are_unknown(tmp_path: Path, value: str) -> None:
    run = make_run(tmp_path / "run")
    keys = ("logloss", "auc", "normalized_entropy", "calibration")
    scores = ", ".join(f'"{key}": {value}' for key in keys)
    bins = f'[{{"predicted": {value}, "observed": {value}}}]'
    (run / "evaluation.json").write_text(f'{{"split": "test", {scores}, "calibration_bins": {bins}}}')
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(f'{{"kind": "train", "step": 99, "samples": {value}, "loss": {value}, "auc": {value}}}\n')
    page, (summary, _) = report(tmp_path, run, make_run(tmp_path / "other"))
    assert all(math.isnan(summary.metric(key)) for key in keys)


def test_the_best_is_marked_where_scores_can_be_compared(tmp_path: Path) -> None:
    better, worse = make_run(tmp_path / "better"), make_run(tmp_path / "worse")
    scores = json.loads((worse / "evaluation.json").read_text())
    scores |= {"auc": 0.6, "logloss": 0.6, "normalized_entropy": 0.99}
    (worse / "evaluation.json").write_text(json.dumps(scores))
    output = tmp_path / "report.html"
    write_run_report([worse, better], output)
    assert re.findall("<strong>(.*?)</strong>", output.read_text()) == ["0.7701", "0.4622", "0.8100"]
    write_run_report([better, make_run(tmp_path / "unfinished", finished=False)], output)
    assert "<strong>" not in output.read_text(), "validation and test are not compared"


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    _, summaries = report(tmp_path, *[make_run(tmp_path / name) for name in ("a/full", "b/full", "c/hashed")])
    assert [summary.name for summary in summaries] == ["a/full", "b/full", "hashed"]


def test_a_long_run_does_not_make_a_large_page(tmp_path: Path) -> None:
    short = tmp_path / "short.html"
    write_run_report([make_run(tmp_path / "short", steps=600)], short)
    long = tmp_path / "long.html"
    write_run_report([make_run(tmp_path / "long", steps=20_000)], long)
    assert long.stat().st_size < 2 * short.stat().st_size


@pytest.mark.parametrize("lacks", ["run.json", "config.yaml"])
def test_a_folder_that_is_no_run_is_named_with_what_it_lacks(tmp_path: Path, lacks: str) -> None:
    run = make_run(tmp_path / "run")
    (run / lacks).unlink()
    with pytest.raises(UserError, match=rf"{re.escape(str(run))} is no run: it has no {lacks}\."):
        write_run_report([make_run(tmp_path / "good"), run], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_impossible_arguments_are_refused(tmp_path: Path) -> None:
    run, output = make_run(tmp_path / "run"), tmp_path / "report.html"
    cases: list[tuple[list[Path], Path, str]] = [
        ([], output, "one run folder or more"),
        ([tmp_path / "absent"], output, "absent is no folder"),
        ([run / "run.json"], output, "is no folder"),
        ([run, tmp_path / "." / "run"], output, "more than once"),
        ([run], tmp_path, "is a folder"),
    ]
    for runs, target, message in cases:
        with pytest.raises(UserError, match=message):
            write_run_report(runs, target)


@pytest.mark.parametrize("file", ["run.json", "evaluation.json"])
@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, file: str, content: str) -> None:
    run = make_run(tmp_path / "run")
    (run / file).write_text(content)
    with pytest.raises(UserError, match=f"{file}.*damaged"):
        write_run_report([run], tmp_path / "report.html")


def test_one_run_gives_the_same_bytes_each_time(tmp_path: Path) -> None:
    output, run = tmp_path / "report.html", make_run(tmp_path / "run")
    write_run_report([run], output)
    before = output.read_bytes()
    write_run_report([run], output)
    assert output.read_bytes() == before


def test_the_terminal_shows_a_line_a_run(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "full"), make_run(tmp_path / "quotient_remainder", finished=False, name="[red]qr")]
    _, summaries = report(tmp_path, *runs)
    with Console(width=100, file=(tmp_path / "terminal.txt").open("w")) as console:
        print_comparison(summaries, console)
    lines = (tmp_path / "terminal.txt").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["run", "full", "[red]qr"]
    expected = ["8,441,404", "4.0x", "test", "0.7701", "0.4622", "4", "min", "10,016", "finished"]
    assert lines[1].split()[1:] == expected
    assert lines[2].split()[3] == "validation" and lines[2].endswith("unfinished")


def test_captions_name_the_splits_that_were_evaluated(tmp_path: Path) -> None:
    page, _ = report(tmp_path, make_run(tmp_path / "run"), make_run(tmp_path / "other", finished=False))
    assert page.text.count("evaluations on validation marked") == 2
    assert "Final evaluation on test;" in page.text
    assert "On test and validation; lower and further left is better." in page.text


def test_runs_of_early_versions_have_no_known_compression(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    info = json.loads((run / "run.json").read_text())
    for name in ("full_embedding_bytes", "full_embedding_training_bytes", "full_embedding_rows", "embedding_rows"):
        del info[name]
    (run / "run.json").write_text(json.dumps(info))
    page, (summary,) = report(tmp_path, run)
    assert "25.0%" not in page.text and "33.3%" not in page.text
    (column,) = (each for each in report_columns([summary]) if each.heading == "compression")
    assert column.text(summary) == "–"


def test_the_compression_of_an_early_run_follows_from_its_config_and_dataset(dataset: Path, tmp_path: Path) -> None:
    run = train_small(tmp_path, dataset, 1)
    _, (before,) = report(tmp_path, run)
    assert before.info.full_embedding_training_bytes > before.info.embedding_training_bytes > 0
    info = json.loads((run / "run.json").read_text())
    early = {key: value for key, value in info.items() if "_embedding_" not in key and "_training_bytes" not in key}
    (run / "run.json").write_text(json.dumps(early))
    _, (after,) = report(tmp_path, run)
    assert after.info == before.info


def settings(page: Page) -> list[list[str]]:
    """The table of the report's section on different settings, by rows."""
    (table,) = [table for table in page.tables if table[0][0] == "runs" and "model.name" in table[0]]
    return table


def test_what_differs_between_configs_is_a_table(tmp_path: Path) -> None:
    configs = {
        "full": {"model": {"name": "dlrm", "top": [4]}, "train": {"seed": 1, "epochs": 1}, "same": {"x": 1}},
        "full-seed2": {"model": {"name": "dlrm", "top": [4]}, "train": {"seed": 2, "epochs": 1}, "same": {"x": 1}},
        "other": {"model": {"name": "dcn", "deep": [2]}, "train": {"seed": 1, "epochs": 3}, "same": {"x": 1}},
    }
    runs = [make_run(tmp_path / name) for name in configs]
    for run, config in zip(runs, configs.values(), strict=True):
        (run / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    page, _ = report(tmp_path, *runs)
    assert settings(page) == [
        ["runs", "model.name", "model.top", "train.epochs", "model.deep"],
        ["full", "dlrm", "[4]", "1", "–"],
        ["other", "dcn", "–", "3", "[2]"],
    ]
    page, _ = report(tmp_path, *runs[:2])
    assert "Nothing but the seed." in page.text
    (runs[2] / "config.yaml").write_text("no: [yaml")
    page, _ = report(tmp_path, *runs)
    assert settings(page)[2] == ["other", *["–"] * (len(settings(page)[0]) - 1)]


def test_of_many_settings_that_differ_the_others_are_counted(tmp_path: Path) -> None:
    configs = ["\n".join(f"k{number}: {run}" for number in range(40)) for run in range(3)]
    found = ConfigDifferences.of(configs)
    assert len(found.keys) == 16 and found.num_others == 24
    assert ConfigDifferences.of(configs[:1]).keys == ()


@pytest.mark.thorough
@pytest.mark.parametrize(("count", "expected"), [(3, "run0"), (60, "1")])
def test_points_carry_names_or_numbers(tmp_path: Path, count: int, expected: str) -> None:
    runs = [make_run(tmp_path / f"run{i}", parameters=10**6 + 10**5 * i) for i in range(count)]
    for number, run in enumerate(runs):
        (run / "config.yaml").write_text(f"model:\n  name: {number}\n")
    page, _ = report(tmp_path, *runs)
    drawn = re.findall(r">([^<>]+)</text>", figures(tmp_path)["Parameters against logloss"])
    labels = [f"run{i}" if count < 9 else str(i + 1) for i in range(count)]
    assert labels[0] == expected and set(labels) <= set(drawn)
    if count > 8:
        assert page.text.count("60 run59") == 3, "the number stands beside the name in both tables and the legend"


def test_metrics_are_those_that_the_runs_tasks_report(tmp_path: Path) -> None:
    metric = ReportedMetric("rmse", "RMSE", better="lower")
    for wrong in (None, "rmse", [3], [{"name": "rmse"}], [{**asdict(metric), "number_format": "what"}]):
        assert parse_metrics(wrong) == CLICK_METRICS
    assert parse_metrics([asdict(metric), {"name": 3}]) == (metric,)


def test_figures_of_several_labels_are_of_the_headline_s_label(tmp_path: Path) -> None:
    metrics = [ReportedMetric(name, name.replace(".", " "), better="lower") for name in ("buy.logloss", "click.auc")]
    for headline, better, calibrated in (("buy.auc", "buy logloss", True), ("stars.rmse", "stars rmse", False)):
        first = ReportedMetric(headline, headline.replace(".", " "), better="lower")
        more = ReportedMetric("buy.calibration", "buy calibration")
        runs = [make_run(tmp_path / headline / name) for name in "ab"]
        for number, run in enumerate(runs):
            info = json.loads((run / "run.json").read_text())
            info |= {"metrics": [asdict(metric) for metric in (first, *metrics, more)], "parameters": 9 + number}
            (run / "run.json").write_text(json.dumps(info))
            (run / "config.yaml").write_text(f"model:\n  name: {number}\n")
            scores = json.loads((run / "evaluation.json").read_text())
            (run / "evaluation.json").write_text(json.dumps({**scores, "buy.logloss": 0.4, "stars.rmse": 0.9}))
        report(tmp_path, *runs)
        assert f"Parameters against {better}" in figures(tmp_path)
        assert ("Calibration" in figures(tmp_path)) == calibrated


def test_a_run_that_goes_on_has_no_final_evaluation_of_fewer_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    folder = RunFolder(run)
    folder.require_free()
    with folder.open("model: {}\n", {}, 30):
        _, (summary,) = report(tmp_path, run)
    assert summary.evaluation is not None
    assert (summary.evaluated_on, summary.evaluation.step) == ("validation", 30)
