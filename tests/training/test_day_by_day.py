"""Days trained one after the other, on vocabularies that grow, give nearly what they give all at once, on real rows."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "tools" / "bench_grow.py"
LATER = ["train.dense_optimizer.schedule.warmup=0.0", "train.dense_optimizer.learning_rate=0.0003"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_three_days_one_after_the_other_are_nearly_as_good_as_at_once(criteo_sample: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    arguments = [criteo_sample, "--seeds", 3, "--only", "full", "--output", output, "--later", *LATER]
    subprocess.run([sys.executable, BENCH, *map(str, arguments)], check=True, capture_output=True)
    (row,) = json.loads(output.read_text())
    by_day, at_once = (statistics.mean(logloss for logloss, _ in row[way]) for way in ("by_day", "at_once"))
    assert by_day - at_once < 0.002
