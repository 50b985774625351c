"""``distembed serve --compiled``: the same answers, and nothing compiled where that was not asked for."""

from pathlib import Path

import numpy as np
import pytest

import distembed
from tests.server.exported_models import exported, json_rows, trained_run
from tests.server.processes import serving
from tests.small_runs import distembed as command


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiled_program_is_served_where_that_is_asked_for(tmp_path: Path) -> None:
    run = trained_run(tmp_path)
    plain = exported(run, tmp_path / "plain")
    done = command("serve", plain, "--port", 0, "--compiled", code=2)
    assert "has no compiled program; export the run with --compile" in done.stderr.replace("\n", " ")
    model = exported(run, tmp_path / "model", compile=True)
    rows = json_rows(40)
    expected = distembed.load(run).predict(rows)
    with serving(model, tmp_path / "compiled", "--compiled") as server:
        status, answer = server.ask({"rows": rows})
        assert status == 200
        np.testing.assert_allclose(answer["prediction"], expected, atol=1e-6)
    code = model / "compiled" / "network.pt2"
    code.write_bytes(code.read_bytes()[:-1] + b"?")
    done = command("serve", model, "--port", 0, "--compiled", code=2)
    assert "is damaged: its checksum differs from the recorded one" in done.stderr.replace("\n", " ")
