"""Remedies are searched to the end, however busy the machine is; the step of equal networks is followed once."""

import functools
from typing import Any

import pytest

from distembed.models import ModelInputs
from distembed.planning.networks import NetworkEstimate, estimate_network
from distembed.reports.plan import report
from distembed.reports.plan.remedies import find_remedies
from distembed.tasks import Task
from distembed.training import build

_ESTIMATES: dict[str, NetworkEstimate] = {}


def estimate_once(config: Any, inputs: ModelInputs, task: Task, *step: Any, **settings: Any) -> NetworkEstimate:
    """Returns the estimate of networks that differ from earlier ones in nothing but the rows of their tables."""
    vectors = [(own.name, own.embedding_dim, own.combine.name, own.vector_names("")) for own in inputs.tables.values()]
    key = repr((config, inputs.schema, vectors, type(task), step, settings))
    if key not in _ESTIMATES:
        _ESTIMATES[key] = estimate_network(config, inputs, task, *step, **settings)
    return _ESTIMATES[key]


@pytest.fixture(autouse=True)
def searched_to_the_end_and_networks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_remedies", functools.partial(find_remedies, max_seconds=600))
    monkeypatch.setattr(build, "estimate_network", estimate_once)
