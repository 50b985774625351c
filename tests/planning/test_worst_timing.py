"""Estimated memory of a step against what malloc gives out at most in ten runs, as ``tools/bench_memory.py`` has it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "tools" / "bench_memory.py"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1800)
def test_estimates_are_close_to_the_highest_of_ten_runs(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    subprocess.run([sys.executable, BENCH, "--output", output], check=True)
    rows = json.loads(output.read_text())["rows"]
    assert len(rows) == 9
    for row in rows:
        assert 0.9 * row["highest"] <= row["estimate"] <= 4 / 3 * row["highest"], row
