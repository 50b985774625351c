"""The peak memory of a preparation is within the least limit, whatever the rows."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from distembed.data.prepare import synthesize_criteo
from tests.data.killed import start

PREPARE = """
import sys
from pathlib import Path
from distembed.data.prepare import ResourceLimits, prepare_criteo
from distembed.data.prepare.options import LEAST_MEMORY_BYTES
from distembed.data.prepare.table import prepare_table
from distembed.data.table.schema import TableSchema

rows, output, kind, threads = sys.argv[1:]
schema = {"label": {"column": "label"}, "categorical": {"text": {"separator": "|"} if kind == "lists" else {}}}
limits = ResourceLimits(LEAST_MEMORY_BYTES, threads=int(threads))
if kind == "criteo":
    prepare_criteo([rows], output, limits=limits)
else:
    prepare_table([rows], output, TableSchema.from_json(schema, "the schema"), limits=limits)
assert "torch" not in sys.modules  # preparing starts without it
peak = next(line for line in Path("/proc/self/status").read_text().split("\\n") if line.startswith("VmHWM"))
assert int(peak.split()[1]) << 10 <= LEAST_MEMORY_BYTES, peak
"""

DRAW = random.Random(0)
TEXTS: dict[str, tuple[int, Callable[[int], str]]] = {
    "short": (1_000_000, lambda row: f"{row:016x}"),
    "long": (150_000, lambda row: f"{row}{DRAW.getrandbits(1700):x}"),
    "longer": (60_000, lambda row: f"{row}{DRAW.getrandbits(10_000):x}"),
    "enormous": (100_000, lambda row: "x" * 15_000_000 if row == 50_000 else f"{row}"),
    "lists": (100_000, lambda row: "|".join(f"{DRAW.getrandbits(40):x}" for _ in range(30))),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("threads", [2, 8])
@pytest.mark.parametrize("kind", ["criteo", *(pytest.param(name, marks=pytest.mark.slow) for name in TEXTS)])
def test_peak_memory_is_within_the_limit(tmp_path: Path, kind: str, threads: int) -> None:
    """It does not grow with the rows, nor with their texts."""
    rows = tmp_path / "rows.csv"
    if kind == "criteo":
        synthesize_criteo(rows, num_rows=300_000, seed=0)
    else:
        num_rows, text = TEXTS[kind]
        with open(rows, "w") as file:
            file.write("label,text\n")
            file.writelines(f"{row % 2},{text(row)}\n" for row in range(num_rows))
    process = start(PREPARE, rows, tmp_path / "out", kind, threads)
    said = process.communicate(timeout=500)[1]
    assert not process.returncode, said.decode()
