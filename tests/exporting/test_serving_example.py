"""``serving_example.py`` of an exported folder, run where there is torch and neither distembed nor what it needs."""

import importlib.util
import json
import math
import runpy
import subprocess
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distembed.data.reader import BatchOrder, BatchReader
from distembed.serving.export.export_run import EXAMPLE_NAME
from distembed.serving.export.raw_values import raw_log, raw_quantile
from distembed.serving.model_folder.reading import read_manifest
from tests.server.exported_models import NUM_ROWS
from tests.serving.arrow_rows import draw_rows

NEEDED_BY_TORCH = (
    "torch torchgen functorch typing_extensions sympy mpmath networkx jinja2 markupsafe fsspec filelock".split()
)
NOT_THERE = "distembed torchrec fbgemm_gpu numpy pyarrow pydantic".split()


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment of its own, in which torch and what it needs are the only packages."""
    folder = tmp_path_factory.mktemp("fresh") / "venv"
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in NEEDED_BY_TORCH:
        found = importlib.util.find_spec(name)
        assert found is not None and found.origin is not None
        path = Path(found.origin)
        path = path.parent if path.name == "__init__.py" else path
        (packages / path.name).symlink_to(path)
    return folder / "bin" / "python"


PROGRAM = """
import importlib, json, runpy, sys
absent, *folders = json.load(sys.stdin)
reasons, scores = {}, []
for name in absent:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        reasons[name] = str(error)
for folder, rows in folders:  # as a program, which checks itself, and the function that it defines
    scores.append(runpy.run_path(folder + "/serving_example.py", run_name="__main__")["score"](rows).tolist())
print(json.dumps([reasons, sys.modules["torch"].__version__, scores]))
"""


@pytest.mark.thorough
def test_the_example_scores_the_sample_and_raw_rows_as_the_trainer_with_torch_alone(
    model: Path, shards: Path, python: Path
) -> None:
    """One program and shards, in an interpreter without what the test's environment says of paths."""
    assert [bool(read_manifest(folder).shards) for folder in (model, shards)] == [False, True]
    samples = [json.loads((folder / "sample.json").read_text()) for folder in (model, shards)]
    given: list[Any] = [NOT_THERE]
    for folder, sample in zip((model, shards), samples, strict=True):
        drawn = draw_rows(NUM_ROWS)[-len(sample["rows"]) :]
        given.append([str(folder), [raw(row, own) for row, own in zip(sample["rows"], drawn, strict=True)]])
    command, variables = [python, "-I", "-c", PROGRAM], {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    reasons, version, scores = json.loads(done.stdout)
    assert reasons == {name: f"No module named '{name}'" for name in NOT_THERE} and version.startswith("2.")
    for found, sample in zip(scores, samples, strict=True):
        np.testing.assert_allclose(found, sample["outputs"]["prediction"], atol=2e-6)


def test_the_example_has_at_most_120_lines_and_imports_torch_and_the_standard_library(model: Path) -> None:
    text = (model / EXAMPLE_NAME).read_text()
    assert len(text.splitlines()) <= 120
    imported = [line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert imported == ["json", "math", "re", "decimal", "pathlib", "torch"]


def raw(row: dict[str, Any], drawn: dict[str, Any]) -> dict[str, Any]:
    """Returns a row as it was drawn, but for hashed columns and crosses."""
    computed = {name: row[name] for name in ("hashed", "site_x_code")}
    code, genres = drawn["code"], drawn["genres"]
    return {
        **{name: drawn[name] for name in ("price", "age", "rate", "site", "number")},
        "code": None if code is None else f"{int(code, 16):08x}",
        "genres": None if genres is None else [each for each in genres.split("|") if each][-3:],
        "places": drawn["places"],
        "price_bin": drawn["price"],
        "age_bin": drawn["age"],
        **computed,
    }


def test_the_example_takes_no_raw_value_for_an_id(model: Path) -> None:
    score = runpy.run_path(str(model / EXAMPLE_NAME))["score"]
    row = json.loads((model / "sample.json").read_text())["rows"][0]
    wrong: list[tuple[str, Any]] = [("hashed", "site"), ("hashed", 7.5), ("age_bin", "x"), ("price_bin", "x")]
    for name, value in wrong:
        with pytest.raises(ValueError, match=f"row 0, column '{name}'"):
            score([{**row, name: value}])
    del row["site_x_code"]
    with pytest.raises(ValueError, match=r"column 'site_x_code' is not there: give site\|code as one text"):
        score([row])


def test_raw_numbers_of_bins_are_in_their_bins() -> None:
    for bin_ in (-7, 0, 1, 2, 3, 21, 503_791):
        number = raw_log(bin_)
        assert math.floor(math.log(number) ** 2 if number > 2 else number) == bin_
    for edges in ([], [0.0], [-1.5, 2.0, 7.0]):
        for bin_ in range(1, len(edges) + 2):
            assert 1 + sum(edge <= raw_quantile(edges, bin_) for edge in edges) == bin_


def test_numbers_of_the_sample_become_those_that_the_trainer_reads(run: Path, model: Path) -> None:
    """What is in ``change`` suffices: raw numbers, changed by it in double precision, are the dataset's."""
    wanted = next(iter(BatchReader(run.parent / "dataset", "test", BatchOrder(8192, shuffle=False))))["dense_features"]
    for place, number in enumerate(read_manifest(model).numbers):
        given = [row[number.name] for row in draw_rows(NUM_ROWS)[-len(wanted) :]]
        assert None in given
        found = np.array([np.nan if each is None else each for each in given], np.float32).astype(np.float64)
        if number.change["transform"] == "log":
            found = np.log1p(np.maximum(found, 0))
        elif "mean" in number.change:
            found = (found - number.change["mean"]) / number.change["std"]
        np.testing.assert_allclose(np.nan_to_num(found, nan=0.0), wanted[:, place].numpy(), rtol=1e-6, atol=1e-6)
