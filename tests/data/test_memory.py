"""Memory does not grow with the input."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distembed.data.prepare import criteo, synthesize_criteo

PREPARE = """
import resource, sys
from distembed.data.prepare import ResourceLimits, prepare_criteo

prepare_criteo([sys.argv[1]], sys.argv[2], limits=ResourceLimits(288 << 20, threads=2))
assert "torch" not in sys.modules  # preparing starts without it
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_kilobytes(source: Path, output: Path) -> int:
    environment = {**os.environ, "PYTHONPATH": str(Path(criteo.__file__).parents[3]), "MALLOC_ARENA_MAX": "2"}
    command = [sys.executable, "-c", PREPARE, str(source), str(output)]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.timeout(120)
def test_peak_memory_does_not_depend_on_the_size_of_the_input(tmp_path: Path) -> None:
    """Five times the rows, 50 MB more of text: the peak may differ by a row group, not by the rows."""
    peaks = []
    for num_rows in (60_000, 300_000):
        synthesize_criteo(tmp_path / f"{num_rows}.tsv", num_rows=num_rows, seed=0)
        peaks.append(peak_kilobytes(tmp_path / f"{num_rows}.tsv", tmp_path / str(num_rows)))
    assert peaks[1] - peaks[0] < 40_000
