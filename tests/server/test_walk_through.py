"""The commands of the walk-through to a server that learns, run by bash as they stand there."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import distembed.serving

README = Path(distembed.serving.__file__).with_name("README.md")
ANSWER_OF_MORE = """
until curl -s localhost:8000/healthz | grep -q '"sequence":[3-9]'; do sleep 1; done
ask
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_learns_new_ids(tmp_path: Path) -> None:
    text = README.read_text()
    *steps, forever, more = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = "\n".join(["set -e", *steps, f"(set +e\n{forever}) > forever.log 2>&1 &", more, ANSWER_OF_MORE])
    script = script.replace("localhost:8000", f"127.0.0.1:{port}").replace("--deltas", f"--port {port} --deltas")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "distembed").write_text(f'#!/bin/sh\nexec {sys.executable} -m distembed "$@"\n')
    (tmp_path / "bin" / "distembed").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(README.parents[2]),
    }
    with (tmp_path / "output").open("w") as output_file:
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=tmp_path, env=environment, stdout=output_file, start_new_session=True
        )
        try:
            code = process.wait(500)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the server, the run and the loop too
    output = (tmp_path / "output").read_text()
    assert code == 0, output
    predictions = [json.loads(each) for each in re.findall(r"\[[\d.,]+\]", output)]
    (known, unknown), *later = predictions
    assert known == unknown and len(later) == 2 and all(known != unknown for known, unknown in later), output
    assert '"sequence":2' in output and "distembed_version 2.0" in output
    shown = [json.loads(each)["prediction"] for each in re.findall(r'^\{"prediction".*', text, re.MULTILINE)]
    assert [known == unknown for known, unknown in shown] == [True, False]
