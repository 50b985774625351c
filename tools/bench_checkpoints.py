"""Measures the cost of checksums when a checkpoint is saved and loaded.

Tables of a gibibyte are saved and loaded with and without checksums, in turns. The time of a disk varies by more than
the time of checksums, so the bench also measures the time within the checksum function::

    python tools/bench_checkpoints.py --output bench_checkpoints.json
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bench_commands import bench_parser, median_ratio, write_output
from bench_common import surroundings
from torch import nn

from distembed.base.checksums import checksum_of
from distembed.checkpoints import blocks, load_checkpoint, save_checkpoint

TABLES, ROWS, DIM = 8, 2**21, 16


class _TimedChecksum:
    """A checksum function that adds up its seconds; several threads may call it at once."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, data: Any) -> str:
        started = time.perf_counter()
        found = checksum_of(data)
        self.seconds += time.perf_counter() - started
        return found


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def measure(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Returns medians of seconds, of ratios and of the checksums' shares, for ``save`` and ``load``."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.EmbeddingBag(ROWS, DIM) for _ in range(TABLES)])
    timed = _TimedChecksum()
    kinds = {"none": lambda data: "", "checksums": checksum_of, "timed": timed}
    seconds: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
    for number in range(repeats + 1):  # turn 0 warms up
        for kind, checksum in kinds.items():
            path = folder / f"{kind}-{number}"
            with mock.patch.object(blocks, "checksum_of", checksum):
                for action in (save_checkpoint, load_checkpoint):
                    timed.seconds = 0.0
                    took = _seconds(lambda action=action, path=path: action(path, model))  # type: ignore[misc]
                    own = timed.seconds / took if kind == "timed" else took
                    if number:
                        seconds[action.__name__[:4]].setdefault(kind, []).append(own)
            for file in path.iterdir():
                file.unlink()
    return {
        action: {
            "seconds_without": statistics.median(of["none"]),
            "seconds_with": statistics.median(of["checksums"]),
            "median_ratio": median_ratio(of["checksums"], of["none"]),
            "share_of_checksums": statistics.median(of["timed"]),
        }
        for action, of in seconds.items()
    }


def main() -> None:
    """Measures, and prints the medians."""
    parser = bench_parser(__doc__)
    parser.add_argument("--folder", type=Path, help="folder of the checkpoints; a temporary folder unless given")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measured = measure(Path(folder), arguments.repeats)
    for action, values in measured.items():
        print(action, ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    write_output(arguments, {"surroundings": surroundings(torch.device("cpu")), "measured": measured})


if __name__ == "__main__":
    main()
