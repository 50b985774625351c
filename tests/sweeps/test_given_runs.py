"""A sweep is given by its folder, or by all that is in it; what is no run of it is left to be refused."""

from pathlib import Path

import pytest

from distembed.base.errors import UserError
from distembed.training.sweeps.sweep import given_runs


def make_sweep(folder: Path, names: list[str]) -> list[Path]:
    (folder / "logs").mkdir(parents=True)
    for file in ("sweep.json", "report.html"):
        (folder / file).write_text("{}")
    for name in names:
        (folder / name).mkdir()
        for file in ("run.json", "config.yaml"):
            (folder / name / file).write_text("{}")
    return [folder / name for name in names]


@pytest.mark.parametrize("names", [["seed=0"], ["rate=1,seed=0", "rate=1,seed=1", "rate=2,seed=0"]])
def test_a_sweep_is_its_runs(tmp_path: Path, names: list[str]) -> None:
    runs = make_sweep(tmp_path / "sweep", names)
    assert given_runs([tmp_path / "sweep"]) == runs
    assert given_runs(sorted((tmp_path / "sweep").iterdir())) == runs


def test_what_is_no_sweeps_own_is_left_to_be_refused(tmp_path: Path) -> None:
    make_sweep(tmp_path / "sweep", [])
    others = [tmp_path / "logs", tmp_path / "sweep" / "notes"]
    assert given_runs(others) == others
    with pytest.raises(UserError, match="none of whose runs has begun"):
        given_runs([tmp_path / "sweep"])
