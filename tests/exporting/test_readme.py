"""The examples of the guide to exporting, run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import distembed.serving.export
from tests.criteo_runs import criteo_run
from tests.in_process import in_this_process as command

README = Path(distembed.serving.export.__file__).with_name("README.md")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_examples_run_as_they_stand_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    criteo_run(tmp_path).rename(tmp_path / "runs" / "first")
    monkeypatch.chdir(tmp_path)
    for line in "".join(blocks("sh")).splitlines():
        program, *arguments = line.split()
        if program == "distembed":
            command(*arguments)
        else:
            assert program == "python"
            done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (0, ""), done.stderr
    script = "".join(blocks("python"))
    environment = {**os.environ, "PYTHONPATH": str(README.parents[3])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    score, difference = re.fullmatch(r"tensor\(\[([\d.]+)\].*\)\n([\d.e-]+)\n", done.stdout, re.DOTALL).groups()
    assert 0 < float(score) < 1 and float(difference) <= 1e-6
