"""Rows whose columns are missing, unknown or nested, and requests without rows, beside other requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distembed.serving.model_folder.reading import read_manifest
from distembed.serving.server.scoring import RowRequest, Scorer, Scores
from tests.server.exported_models import json_rows


def probe(values: Tensor, lengths: Tensor, dense: Tensor) -> Tensor:
    """Gives each row a number that another row has by chance alone: a sum over its ids and numbers."""
    found = (dense.double() * (torch.arange(dense.shape[1]) + 0.577)).sum(1)
    for feature, lists in enumerate(values.split(lengths.sum(1).tolist())):
        for row, ids in enumerate(lists.split(lengths[feature].tolist())):
            found[row] += sum((id_ + 1) ** 0.5 * (feature + 1.618) for id_ in ids.tolist())
    return found


@pytest.fixture(scope="module")
def scorer(model: Path) -> Scorer:
    return Scorer(model, read_manifest(model), probe, 64)


def said(answer: Scores) -> list[Any]:
    """Returns each row's score, or the column and reason where it has none."""
    assert answer.problem is None
    bad = {each.row: (each.field, each.reason) for each in answer.bad}
    scores = answer.outputs["prediction"].tolist()
    assert [row for row, score in enumerate(scores) if np.isnan(score)] == sorted(bad)
    return [bad.get(row, score) for row, score in enumerate(scores)]


def alone(scorer: Scorer, rows: Sequence[dict[str, Any]]) -> list[Any]:
    return [said(scorer.score([RowRequest([row])])[0])[0] for row in rows]


def test_missing_columns_are_named_with_what_they_may_be(scorer: Scorer) -> None:
    (row,) = json_rows(1)
    lacking = {name: value for name, value in row.items() if name != "site"}
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([lacking], "has no column 'site'"),
        ([{**lacking, "sites": 1}], "Did you mean 'sites' for 'site'?"),
        ([{}], "not one column"),
        ([{str(number): 1 for number in range(5000)}], "has no column"),
    ]
    for rows, text in cases:
        refused, fine = scorer.score([RowRequest(rows), RowRequest([row])])
        assert text in (refused.problem or "") and len(refused.problem or "") < 2000
        assert said(fine) == alone(scorer, [row])
    # of several rows, one that has a column is enough: it is missing in the others
    (answer,) = scorer.score([RowRequest([lacking, row])])
    assert said(answer) == alone(scorer, [{**row, "site": None}, row])


def test_columns_that_nobody_asks_for_are_not_looked_at(scorer: Scorer) -> None:
    (row,) = json_rows(1)
    others: list[Any] = [{"x": 1}, [[["a"]]], "\0", 2**100]
    for other in others:
        assert said(scorer.score([RowRequest([{**row, "unknown": other}])])[0]) == alone(scorer, [row])


@pytest.mark.parametrize("requests", [[], [[]], [[], []], [[], json_rows(2)]])
def test_there_may_be_no_rows(scorer: Scorer, requests: list[list[dict[str, Any]]]) -> None:
    answers = scorer.score([RowRequest(rows) for rows in requests])
    assert [len(answer.outputs["prediction"]) for answer in answers] == [len(rows) for rows in requests]


@pytest.mark.parametrize("depth", [1, 500, 1000])
def test_values_of_any_depth_are_named_in_short(scorer: Scorer, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    (row,) = json_rows(1)
    for name in ("site", "price", "places"):
        (answer,) = scorer.score([RowRequest([{**row, name: value}, row])])
        if (name, depth) == ("places", 1):
            assert not answer.bad
            continue
        (bad,) = answer.bad
        assert (bad.row, bad.field) == (0, name) and len(bad.reason) < 300
