"""Benches keep their rows as they come: one that was stopped takes them again, and measures the rest alone."""

import argparse
import json
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import bench_commands

    yield bench_commands
    sys.modules.pop("bench_commands", None)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_stopped_bench_keeps_its_rows(bench: Any, tmp_path: Path, capsys: Any, workers: int) -> None:
    options = argparse.Namespace(output=tmp_path / "out.json", seeds=2, only="")
    measured: list[int] = []

    def measure(number: int, stops: bool = False) -> dict[str, int]:
        if stops:
            raise KeyboardInterrupt
        measured.append(number)
        return {"number": number}

    def measures(stop_at: int | None = None) -> dict[str, Any]:
        return {str(number): partial(measure, number, number == stop_at) for number in range(4)}

    with pytest.raises(KeyboardInterrupt):
        bench.kept_rows(options, measures(stop_at=2))
    assert measured == [0, 1]
    with bench._rows_file(options.output).open("a") as file:
        file.write('{"name": "3", "row": {"num')  # a line that a kill cut short
    expected = {str(number): {"number": number} for number in range(4)}
    assert bench.kept_rows(options, measures(), workers) == bench.kept_rows(options, measures()) == expected
    assert sorted(measured) == [0, 1, 2, 3]
    assert "[2/4] 1 " in (said := capsys.readouterr().err) and "[2/2] " in said

    other = argparse.Namespace(**vars(options) | {"seeds": 3})
    bench.kept_rows(other, measures())
    assert len(measured) == 8, "rows of other options are measured anew"
    bench.write_output(options, expected)
    assert json.loads(options.output.read_text()) == expected
    bench.kept_rows(options, measures())
    assert len(measured) == 12, "a bench that has ended starts anew"


def test_a_failure_starts_no_more_measures_and_keeps_the_rows_of_running_ones(bench: Any, tmp_path: Path) -> None:
    options = argparse.Namespace(output=tmp_path / "out.json", jobs=3)
    has_failed, measured = threading.Event(), list[int]()

    def measure(number: int) -> int:
        if number == 0:
            has_failed.set()
            raise ValueError("no row")
        has_failed.wait()
        measured.append(number)
        time.sleep(0.2)
        return number

    with pytest.raises(ValueError, match="no row"):
        bench.kept_rows(options, {str(number): partial(measure, number) for number in range(50)}, 3)
    kept = [json.loads(line)["row"] for line in bench._rows_file(options.output).read_text().splitlines()]
    assert len(kept) < 10 and sorted(kept) == sorted(measured)


@pytest.mark.parametrize("change", ["input", "threads", "jobs"])
def test_rows_of_other_circumstances_are_not_taken(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    (tmp_path / "rows.tsv").write_text("1")
    options = argparse.Namespace(output=tmp_path / "out.json", data=tmp_path / "rows.tsv", jobs=1)
    measures = {"a": lambda: 1}
    assert bench.kept_rows(options, measures) == {"a": 1}
    other = argparse.Namespace(**vars(options) | {"jobs": 2 if change == "jobs" else 1})
    if change == "input":
        (tmp_path / "rows.tsv").write_text("12")
    if change == "threads":
        monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert bench.kept_rows(other, {"a": lambda: 2}) == {"a": 2}
    if change == "jobs":
        bench.write_output(other, {})
        assert bench.kept_rows(options, {"a": lambda: 3}) == {"a": 1}, "rows of other options are left"


def test_progress_is_told_after_each_value(bench: Any, capsys: Any) -> None:
    assert list(bench.told([5, 6], "rounds")) == [5, 6]
    assert [line.split("  ")[0] for line in capsys.readouterr().err.splitlines()] == ["[1/2] rounds", "[2/2] rounds"]
