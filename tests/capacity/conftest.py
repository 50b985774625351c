"""Remedies are looked for to the end here, however busy the machine is."""

import functools

import pytest

from distembed.reports.plan import report
from distembed.reports.plan.remedies import find_remedies


@pytest.fixture(autouse=True)
def patient_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_remedies", functools.partial(find_remedies, max_seconds=600))
