"""The notebooks of tools/tutorials/: each runs from an empty folder, and their results are as the text says."""

import json
import os
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

TUTORIALS = Path(__file__).parents[2] / "tools" / "tutorials"
NAMES = ["own_table", "shrink_a_torchrec_model"]


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a notebook's cells in a folder, by the commands of this Python; returns the text of all outputs."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(TUTORIALS.parents[1]), prepend=os.pathsep)
    notebook = nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.get("text") or output["data"]["text/plain"] for output in outputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_valid_has_no_outputs_and_links_to_files(name: str) -> None:
    notebook = nbformat.read(TUTORIALS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)
        for link in re.findall(r"\]\((.*?)\)", cell.source):
            assert (TUTORIALS / link).is_file()
        magic, *commands = cell.source.replace("\\\n", " ").splitlines()
        if magic == "%%bash" and len(commands) > 1:
            assert commands[0] == "set -eo pipefail", "a command that fails would not end the notebook"


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute and a half each on two free cores
def test_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = executed("own_table", tmp_path, monkeypatch)
    assert "\x1b" not in text, "a notebook is no terminal: progress bars would draw each state on a line of its own"
    auc = {run.parent.name: json.loads(run.read_text())["auc"] for run in tmp_path.glob("runs/*/evaluation.json")}
    assert auc["full"] - 0.02 < auc["quotient_remainder_4"] and auc["remainder_4"] < auc["quotient_remainder_4"] - 0.03


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute and a half each on two free cores
def test_shrink_a_torchrec_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = executed("shrink_a_torchrec_model", tmp_path, monkeypatch)
    auc = {name: float(value) for name, value in re.findall(r"'([^']+)': \{[^}]*'auc': ([0-9.]+)", text)}
    assert all(auc["stock"] - 0.02 < auc[name] for name in ("compressed", "fitted", "fitted, continued"))
    of_runs = [float(value) for value in re.findall(r"^test: .*AUC ([0-9.]+)", text, re.MULTILINE)]
    assert of_runs == [auc["stock"], pytest.approx(auc["fitted"], abs=0.01)]
    assert "exit code 3\n" in text and "does not fit: 1 x 2" in text and "\nfits: 1 x 2" in text
