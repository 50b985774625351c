"""Many requests at once, of which some are malformed: no wrong score, no crash, and no memory that grows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distembed import LoadedModel
from tests.server.exported_models import json_rows
from tests.server.processes import Server, serving

LOAD = Path(__file__).parents[2] / "tools" / "serve_load.py"

pytestmark = pytest.mark.distributed


def load(server: Server, rows: Path, requests: int, clients: int, malformed: float) -> dict[str, Any]:
    options = ("--requests", requests, "--clients", clients, "--malformed", malformed)
    asked = [LOAD, server.port, rows, *options, "--number", "price", "--text", "code", "--seed", requests]
    done = subprocess.run([sys.executable, *map(str, asked)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + server.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["wrong"] == 0, found["first_wrong"]
    assert found["requests"] == requests and set(found["statuses"]) <= {"200", "422"}
    return found


def resident_kib(server: Server) -> int:
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


@pytest.fixture(scope="module")
def rows(trained: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rows = json_rows(300, seed=11)
    scores = trained.predict(rows).tolist()
    written = [json.dumps({"row": row, "score": score}) for row, score in zip(rows, scores, strict=True)]
    file.write_text("\n".join(written))
    return file


def metric(server: Server, name: str) -> float:
    lines = server.ask(path="/metrics")[1].decode().splitlines()
    return float(next((line for line in lines if line.startswith(f"{name} ")), "0").rpartition(" ")[2])


def test_many_clients_at_once_have_right_scores(server: Server, rows: Path) -> None:
    before = {status: metric(server, f'distembed_requests_total{{status="{status}"}}') for status in ("200", "422")}
    batches = metric(server, "distembed_batch_rows_count")
    found = load(server, rows, requests=500, clients=20, malformed=0.05)
    assert found["statuses"]["422"] > 5
    for status, count in found["statuses"].items():
        assert metric(server, f'distembed_requests_total{{status="{status}"}}') - before[status] == count
    assert metric(server, "distembed_batch_rows_count") - batches < 500  # they were joined
    assert metric(server, "distembed_waiting_requests") == 0


@pytest.mark.slow
def test_ten_thousand_requests_leave_the_memory_as_it_was(model: Path, rows: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "server") as server:
        load(server, rows, requests=2000, clients=50, malformed=0.01)
        before = resident_kib(server)
        load(server, rows, requests=10_000, clients=50, malformed=0.01)
        assert resident_kib(server) - before < 10 << 10
        assert server.ask(path="/healthz")[0] == 200 and "Traceback" not in server.output
