"""The tests marked ``gpu``, each with its outcome; passed tests are not run again.

On a processor (``DISTEMBED_DRY_GPU=1``) only the tests of ``tests/gpu`` run: all other GPU tests need a GPU.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu.results import ROOT, Results
from gpu.scale import Scale

PASSED, SKIPPED = "passed", "skipped"
_MARK = "mark.gpu"


class TestsFailed(Exception):
    """Some tests have failed; their rows name them."""


class _Recorder:
    """Deselects passed tests, and records the outcome of each test that runs; rows of other tests are removed."""

    def __init__(self, results: Results) -> None:
        self._results = results
        results.rows[:] = [row for row in results.rows if row["outcome"] == PASSED]

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known = [item for item in items if not self._results.lacks(test=item.nodeid)]
        config.hook.pytest_deselected(items=known)
        items[:] = [item for item in items if item not in known]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != PASSED:
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
            self._results.add([row | ({} if report.passed else {"reason": _reason(report)})])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._results.add([{"test": report.nodeid, "outcome": "failed", "reason": report.longreprtext[-2000:]}])


def _reason(report: pytest.TestReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-2000:]


def files(scale: Scale) -> list[str]:
    """Returns the files that have GPU tests; importing all test files takes most of a minute."""
    folder = ROOT / "tests"
    if scale.device == "cpu":
        return [str(folder / "gpu")]
    return [str(path) for path in sorted(folder.rglob("test_*.py")) if _has_gpu_tests(path)]


def _has_gpu_tests(path: Path) -> bool:
    return path.parent.name == "gpu" or _MARK in path.read_text()


def measure(results: Results, scale: Scale) -> None:
    """Runs the tests.

    Raises:
        TestsFailed: A test failed, or no test has passed.
    """
    if scale.device == "cpu":
        os.environ["DISTEMBED_DRY_GPU"] = "1"
    sys.path.insert(0, str(ROOT))
    # The project's settings without its plugins, which may be missing; the driver has a time limit.
    options = ["-o", "addopts=--import-mode=importlib", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    code = pytest.main([*options, "--rootdir", str(ROOT), *files(scale)], plugins=[_Recorder(results)])
    failed = [row["test"] for row in results.rows if row["outcome"] == "failed"]
    if failed or code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise TestsFailed(f"{len(failed)} failed (pytest ended with {int(code)}): {', '.join(failed)}")
    if not any(row["outcome"] == PASSED for row in results.rows):
        raise TestsFailed("no test has passed")
