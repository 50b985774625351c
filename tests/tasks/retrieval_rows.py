"""A small dataset of users and items with features, and a config of two towers over it."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.small_runs import call

NUM_USERS, NUM_ITEMS = 30, 40
ROWS = {"train": 400, "validation": 60, "test": 90}
SCHEMA = """
label: {column: click}
dense:
  age: {transform: none, missing: keep}
  price: {transform: none, missing: keep}
categorical:
  user: {kind: string}
  film: {kind: string}
  country: {kind: string}
  history: {kind: string, separator: "|", vocabulary: film}
  genres: {kind: string, separator: "|"}
split: column:split
"""


def write_rows(path: Path, hard: bool = False) -> Path:
    """Writes rows of users who click films whose numbers are near their own; a film has the same features everywhere.

    Some numbers and lists are missing. In ``hard`` rows users and films are missing or out of the vocabulary too, and a
    film's genres change from row to row.
    """
    rng = np.random.default_rng(0)
    genres = [sorted({f"g{film % 4}", f"g{film % 7}"}) if film % 9 else [] for film in range(NUM_ITEMS)]
    lines = ["click,user,film,country,history,genres,age,price,split"]
    for split, num_rows in ROWS.items():
        for _ in range(num_rows):
            user, film = int(rng.integers(NUM_USERS)), int(rng.integers(NUM_ITEMS))
            click = int(abs(film - user) % NUM_ITEMS < 8 or rng.random() < 0.2)
            history = [f"f{int(each)}" for each in (user + rng.integers(0, 6, rng.integers(0, 4))) % NUM_ITEMS]
            age = "" if user % 11 == 0 else f"{user / 7:.3f}"
            price = "" if film % 13 == 0 else f"{film / 9:.3f}"
            names, own_genres = [f"u{user}", f"f{film}"], genres[film]
            if hard:
                names = [["", f"rare {len(lines)}", name][min(2, int(rng.integers(12)))] for name in names]
                own_genres = genres[int(rng.integers(NUM_ITEMS))]
            fields = [click, *names, f"c{user % 3}", "|".join(history), "|".join(own_genres)]
            lines.append(",".join(map(str, [*fields, age, price, split])))
    path.write_text("\n".join(lines) + "\n")
    return path


def prepare_rows(folder: Path, hard: bool = False) -> Path:
    """Returns the dataset that ``distembed prepare table`` makes of the rows of :func:`write_rows`."""
    (folder / "schema.yaml").write_text(SCHEMA)
    rows = write_rows(folder / "rows.csv", hard)
    call("prepare", "table", rows, "--schema", folder / "schema.yaml", "--output", folder / "films")
    return folder / "films"


def write_config(path: Path, dataset: Path, **sections: Any) -> Path:
    """Writes a small model's config in fp32 with SGD, which does not amplify rounding; the sections are merged."""
    values: dict[str, Any] = {
        "data": {"path": str(dataset)},
        "model": {
            "name": "two_tower",
            "item": "film",
            "item_features": ["genres", "price"],
            "user_tower": [12],
            "item_tower": [],
            "output_dim": 6,
            "temperature": 0.3,
            "soft_one_hot": {"bins": 4, "value_range": [0.0, 5.0]},
        },
        "task": {"name": "retrieval", "cutoffs": [3, 10]},
        "embedding": {"default": {"partition": "quotient_remainder", "embedding_dim": 8, "threshold": 10}},
        "train": {
            "batch_size": 65,
            "epochs": 2,
            "precision": "fp32",
            "device": "cpu",
            "log_every": 1,
            "checkpoint_every": 3,
            "keep_checkpoints": 9,
            "dense_optimizer": {"name": "sgd", "learning_rate": 0.05},
            "sparse_optimizer": {"name": "sgd", "learning_rate": 0.5},
        },
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    path.write_text(yaml.safe_dump(values))
    return path
