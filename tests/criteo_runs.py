"""A run on drawn Criteo rows, whose values have ids by a vocabulary: what scoring raw rows is held against."""

import random
from pathlib import Path
from typing import Any

import yaml

from distembed.data.prepare import CriteoOptions, prepare_criteo
from tests.data.reference import good_line
from tests.small_runs import config_values, distembed

NUM_LINES = 700


def write_lines(path: Path, num_lines: int = NUM_LINES, seed: int = 0) -> Path:
    """Writes well-formed rows."""
    rng = random.Random(seed)
    path.write_bytes(b"".join(good_line(rng) + b"\n" for _ in range(num_lines)))
    return path


def criteo_run(folder: Path, *overrides: str, ranks: int = 1, **sections: Any) -> Path:
    """Writes ``rows.tsv``, prepares ``dataset`` of it, trains for three steps, and returns the run's folder."""
    prepare_criteo([write_lines(folder / "rows.tsv")], folder / "dataset", CriteoOptions(min_count=2))
    values = {**config_values(folder / "dataset"), **sections}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    arguments = ("train.max_steps=3", *overrides, "--run-dir", folder / "run")
    distembed("train", folder / "config.yaml", *arguments, ranks=ranks)
    return folder / "run"
