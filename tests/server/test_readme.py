"""The examples of README.md, as they stand there, on a port of the test's own; numbers of answers are other ones."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import distembed.serving.server
from distembed.commands.serving import app
from tests.server.processes import Server

README = Path(distembed.serving.server.__file__).with_name("README.md")
EXAMPLE = re.compile(r"```bash\n(curl .*)\n```\n```json\n(.*)\n```\n")


def without_scores(values: dict[str, Any]) -> dict[str, Any]:
    scores = values.get("prediction")
    return values if scores is None else {"prediction": [score if score is None else 0 for score in scores]}


@pytest.mark.distributed
def test_examples_are_answered_so(server: Server) -> None:
    examples = EXAMPLE.findall(README.read_text())
    assert len(examples) == 5
    for asked, answer in examples:
        line = asked.replace("localhost:8000", f"127.0.0.1:{server.port}")
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert without_scores(json.loads(done.stdout)) == without_scores(json.loads(answer)), asked


def test_every_option_is_there_with_its_default() -> None:
    text = README.read_text()
    rows = dict(re.findall(r"^\| (`--[^|]+) \| ([^|]+) \|", text, re.MULTILINE))
    documented = {
        name.strip("` "): default.strip("` ")
        for names, defaults in rows.items()
        for name, default in zip(names.split(","), defaults.split(","), strict=True)
    }
    group: Any = get_command(app)
    command = group.commands["serve"]
    options = {option.opts[0]: option.default for option in command.params if option.opts[0].startswith("--")}
    options = {name: "no" if default is False else str(default) for name, default in options.items()}
    assert documented == {name: default for name, default in options.items() if "completion" not in name}
