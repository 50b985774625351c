"""Interactions of users who mostly go from an item to the next one, and the datasets that the command makes of them."""

from pathlib import Path

import numpy as np

from distembed.commands.cli import app

NUM_USERS, NUM_ITEMS = 70, 40


def write_interactions(path: Path) -> Path:
    """Writes a TSV file of users, items, ratings and times; users like items whose numbers are near their own."""
    rng = np.random.default_rng(0)
    lines = ["user\titem\trating\ttime\tprice"]
    for user in range(NUM_USERS):
        steps = rng.choice([1, 2, 7], size=rng.integers(5, 16), p=[0.8, 0.1, 0.1])
        for time, item in enumerate((user + np.cumsum(steps)) % NUM_ITEMS):
            rating = 5 - abs(item - user % NUM_ITEMS) % 5 + rng.normal() / 4
            lines.append(f"u{user}\ti{item}\t{rating:.2f}\t{time}\t{rng.random():.3f}")
    path.write_text("\n".join(lines) + "\n")
    return path


def prepare(kind: str, folder: Path, *options: str) -> Path:
    """Returns the dataset that ``distembed prepare`` makes of the interactions: ``ratings`` or ``sequences``."""
    source = write_interactions(folder / f"{kind}.tsv")
    arguments = ["prepare", kind, str(source), "--output", str(folder / kind), *options]
    app(arguments, standalone_mode=False)
    return folder / kind
