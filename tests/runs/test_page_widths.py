"""Every kind of page fits windows of 1,300 and 800 pixels: Chromium draws it, and measures its boxes and texts."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from distembed.reports.plan.page import render_capacity_page
from distembed.reports.plan.report import CapacityReport
from distembed.reports.report import write_run_report
from distembed.reports.statistics import dataset_statistics
from distembed.reports.statistics.page import render_page
from tests.capacity.plan_values import plan_assessment, without_plan
from tests.runs.test_report import make_run
from tests.small_runs import write_dataset

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1300, 800)
MEASURE = """
const outside = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1
  || inner.top < outer.top - 1 || inner.bottom > outer.bottom + 1;
const measure = page => {
  page.querySelectorAll("details").forEach(folded => { folded.open = true; });
  const root = page.documentElement, window = root.getBoundingClientRect(), found = [];
  if (root.scrollWidth > root.clientWidth) found.push("the page scrolls sideways");
  for (const box of page.querySelectorAll("table, th, td, figure, figure svg, pre, p"))
    if (box.scrollWidth > box.clientWidth + 1 || outside(box.getBoundingClientRect(), window))
      found.push(`${box.tagName} is cut: ${box.textContent.slice(0, 40)}`);
  for (const text of page.querySelectorAll("figure svg text"))
    if (outside(text.getBoundingClientRect(), text.closest("svg").getBoundingClientRect()))
      found.push(`text is cut: ${text.textContent}`);
  return {found, boxes: page.querySelectorAll("table, figure").length};
};
addEventListener("load", () => {
  const measured = [...document.querySelectorAll("iframe")].map(frame => measure(frame.contentDocument));
  document.body.textContent = JSON.stringify(measured);
});
"""


def runs_page(count: int, steps: int, label: str = "run") -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        runs = [
            make_run(folder / f"{label}{number}", steps, number > 0, 10 ** (3 + number % 7)) for number in range(count)
        ]
        for number, run in enumerate(runs):
            settings = "".join(f"  a_long_setting_{key}: {'value_' * key}{number}\n" for key in range(count))
            (run / "config.yaml").write_text(f"model:\n{settings}")
        write_run_report(runs, folder / "report.html", baseline=runs[0].name)
        return (folder / "report.html").read_text()

    return write


def statistics_page(folder: Path) -> str:
    return render_page(dataset_statistics(write_dataset(folder / "dataset")))


PAGES: dict[str, Callable[[Path], str]] = {
    "one run, no step": runs_page(1, 0),
    "two runs of two steps": runs_page(2, 2),
    "twelve runs with long names": runs_page(12, 30, "quotient_remainder-with_16_collisions-and_row_wise_adagrad-"),
    "statistics": statistics_page,
    "plan, 2 ranks": lambda folder: render_capacity_page(CapacityReport(plan_assessment(1, 2))),
    "plan, 1024 ranks": lambda folder: render_capacity_page(CapacityReport(plan_assessment(1024, 1, host_memory=True))),
    "no plan": lambda folder: render_capacity_page(without_plan(plan_assessment(2, 1))),
}


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("kind", PAGES)
def test_a_page_fits_the_window(kind: str, tmp_path: Path) -> None:
    page = PAGES[kind](tmp_path)
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{html.escape(page)}"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(f"<!doctype html><script>{MEASURE}</script><body>{frames}</body>")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=2200,1000", "--dump-dom"]
    command = [str(CHROMIUM), *options, (tmp_path / "frames.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    (measured,) = re.findall(r"<body>(\[.*\])</body>", html.unescape(shown))
    for width, values in zip(WIDTHS, json.loads(measured), strict=True):
        assert values["boxes"] == page.count("<table") + page.count("<figure>") > 0
        assert not values["found"], f"at {width} pixels: {values['found']}"
