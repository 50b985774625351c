"""Synthetic Criteo rows and their Bayes figures, against labels drawn and scikit-learn's metrics."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from distembed.base.errors import UserError
from distembed.data.prepare import CriteoOptions, prepare_criteo, synthesize, synthesize_criteo
from tests.data import reference


def test_rows_are_criteo_rows_and_the_same_for_a_seed(tmp_path: Path) -> None:
    for name, seed in (("a.tsv", 1), ("b.tsv", 1), ("c.tsv", 2), ("d.tsv.gz", 1), ("e.tsv.gz", 1)):
        synthesize_criteo(tmp_path / name, num_rows=2000, seed=seed)
    content = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert content["a.tsv"] == content["b.tsv"] != content["c.tsv"]
    assert content["d.tsv.gz"] == content["e.tsv.gz"]
    rows = [reference.parse(line) for line in reference.lines_of(content["a.tsv"])]
    assert len(rows) == 2000 and all(isinstance(row, reference.Row) for row in rows)
    missing = np.mean([[key is None for key in row.keys] for row in rows], 0)
    np.testing.assert_allclose(missing, synthesize.ID_MISSING, atol=0.05)
    for name in ("a.tsv", "d.tsv.gz"):
        prepare_criteo([tmp_path / name], tmp_path / f"prepared-{name}", CriteoOptions(max_rejected=0))
    one = (tmp_path / "prepared-a.tsv/train/part-00000.parquet").read_bytes()
    assert one == (tmp_path / "prepared-d.tsv.gz/train/part-00000.parquet").read_bytes()


def test_bayes_figures_are_those_of_the_true_probabilities(tmp_path: Path) -> None:
    """Drawn labels scatter around the expectation: 60,000 rows give 0.002 of logloss and AUC."""
    source = synthesize._RowDistribution(60_000, 7)
    parts = [source.draw(start, min(start + synthesize.CHUNK_ROWS, 60_000)) for start in (0, synthesize.CHUNK_ROWS)]
    labels = np.concatenate([part.labels for part in parts])
    probabilities = np.concatenate([part.probabilities for part in parts])
    summary = synthesize_criteo(tmp_path / "a.tsv", num_rows=60_000, seed=7)
    assert summary.label_rate == labels.mean() and abs(summary.label_rate - 0.25) < 0.01
    assert summary.bayes_logloss == pytest.approx(log_loss(labels, probabilities), abs=0.008)
    assert summary.bayes_auc == pytest.approx(roc_auc_score(labels, probabilities), abs=0.008)
    tail = slice(54_000, None)
    assert summary.last_tenth_bayes_logloss == pytest.approx(log_loss(labels[tail], probabilities[tail]), abs=0.025)
    entropy = -(probabilities * np.log(probabilities) + (1 - probabilities) * np.log1p(-probabilities)).mean()
    assert summary.bayes_logloss == pytest.approx(entropy)
    # Better than knowing the label rate alone, and not certain either.
    assert summary.bayes_logloss < -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) - 0.08
    assert 0.75 < summary.bayes_auc < 0.9


def test_later_rows_have_ids_that_earlier_ones_lack(tmp_path: Path) -> None:
    synthesize_criteo(tmp_path / "a.tsv", num_rows=20_000, seed=0)
    lines = reference.lines_of((tmp_path / "a.tsv").read_bytes())
    rows = [reference.parse(line) for line in lines]
    keys = np.array([row.keys[3] or 0 for row in rows])
    new = np.isin(keys[19_000:], keys[:19_000], invert=True).mean()
    mixed = np.random.default_rng(0).permutation(keys)
    assert new > 1.2 * np.isin(mixed[19_000:], mixed[:19_000], invert=True).mean()


@pytest.mark.parametrize("num_rows", [1, 2, 11, 2000])
def test_the_summary_lies_beside_the_file(tmp_path: Path, num_rows: int) -> None:
    summary = synthesize_criteo(tmp_path / "a.tsv", num_rows=num_rows, seed=0)
    assert len(reference.lines_of((tmp_path / "a.tsv").read_bytes())) == num_rows
    assert (summary.last_tenth_bayes_auc is None) == (num_rows < 10)
    written = json.loads((tmp_path / "a.tsv.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert written["bayes_auc"] == summary.bayes_auc and written["path"] == "a.tsv"
    assert written["bytes"] == (tmp_path / "a.tsv").stat().st_size
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", "a.tsv.json"]


def test_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthesize_criteo(tmp_path / "a.tsv", num_rows=50, seed=0)
    before = (tmp_path / "a.tsv").read_bytes()
    with pytest.raises(UserError, match="exists already"):
        synthesize_criteo(tmp_path / "a.tsv", num_rows=50, seed=1)

    def fail(*ignored: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesize_criteo(tmp_path / "a.tsv", num_rows=50, seed=1, overwrite=True, progress=fail)
    assert (tmp_path / "a.tsv").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tsv", "a.tsv.json"]


@pytest.mark.parametrize(
    "wrong", [{"num_rows": 0}, {"num_rows": 2**63}, {"num_rows": 10**400}, {"seed": -1}, {"seed": 2**64}]
)
def test_impossible_settings(tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(UserError, match=f"{next(iter(wrong))}.* it must be in"):
        synthesize_criteo(tmp_path / "a.tsv", **{"num_rows": 5, "seed": 0, **wrong})
