"""Measures what checksums cost when a checkpoint is saved and loaded: against torch's own in turns, and by a clock.

Tables of a gibibyte are saved to a folder and loaded back. The disk's own time varies by more than checksums take, so
that the time spent on them is also measured by itself, within the save and the load::

    python tools/bench_checkpoints.py --output bench_checkpoints.json
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash
from bench_common import surroundings
from torch import nn

from distembed.base.files import write_json
from distembed.checkpoints import load_checkpoint, save_checkpoint, verified_files

TABLES, ROWS, DIM = 8, 2**21, 16
_XXH3 = xxhash.xxh3_128  # the name in the module is replaced below


class _NoDigest:
    """What computes nothing in the place of a digest."""

    def update(self, data: object) -> None:
        pass

    def hexdigest(self) -> str:
        return ""


class _TimedDigest:
    """A digest that counts the seconds it takes."""

    seconds = 0.0

    def __init__(self) -> None:
        self._digest = _XXH3()

    def update(self, data: Any) -> None:
        started = time.perf_counter()
        self._digest.update(data)
        _TimedDigest.seconds += time.perf_counter() - started

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _timed_checksum(data: bytes) -> str:
    digest = _TimedDigest()
    digest.update(data)
    return digest.hexdigest()


@contextmanager
def _checksums(digest: Callable[[], object], checksum: Callable[[bytes], str]) -> Iterator[None]:
    """Replaces how checksums are computed within the block."""
    crc32 = nullcontext if digest is _NoDigest else verified_files._without_crc32
    with (
        mock.patch.object(verified_files, "_without_crc32", crc32),  # torch's own, where there are no others
        mock.patch.object(verified_files.xxhash, "xxh3_128", digest),
        mock.patch.object(verified_files, "checksum_of", checksum),
    ):
        yield


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def measure(folder: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Returns medians of seconds and of shares, by what was done."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.EmbeddingBag(ROWS, DIM) for _ in range(TABLES)])
    kinds = {
        "none": lambda: _checksums(_NoDigest, lambda data: ""),
        "checksums": nullcontext,
        "timed": lambda: _checksums(_TimedDigest, _timed_checksum),
    }
    seconds: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}}
    for number in range(repeats + 1):  # the first turn warms up
        for kind, within in kinds.items():
            path = folder / f"{kind}-{number}"
            with within():
                for action in (save_checkpoint, load_checkpoint):
                    _TimedDigest.seconds = 0.0
                    took = _seconds(lambda action=action, path=path: action(path, model))  # type: ignore[misc]
                    own = _TimedDigest.seconds / took if kind == "timed" else took
                    if number:
                        seconds[action.__name__[:4]].setdefault(kind, []).append(own)
            for file in path.iterdir():
                file.unlink()
    return {
        action: {
            "seconds_without": statistics.median(of["none"]),
            "seconds_with": statistics.median(of["checksums"]),
            "median_ratio": statistics.median(w / wo for w, wo in zip(of["checksums"], of["none"], strict=True)),
            "share_of_checksums": statistics.median(of["timed"]),
        }
        for action, of in seconds.items()
    }


def main() -> None:
    """Runs the bench and prints or writes its result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="Where checkpoints are saved; a temporary folder unless given.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        measured = measure(Path(folder), arguments.repeats)
    for action, values in measured.items():
        print(action, ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    if arguments.output is not None:
        write_json(arguments.output, {"surroundings": surroundings(torch.device("cpu")), "measured": measured})


if __name__ == "__main__":
    main()
