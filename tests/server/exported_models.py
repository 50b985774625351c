"""Runs on rows of every kind of column, exported: what the server is tested with."""

from pathlib import Path
from typing import Any

import yaml

from distembed.serving.export.export_run import ExportOptions, export_run
from distembed.training.trained_run import find_trained_run
from tests.serving.arrow_rows import draw_rows, prepare_table
from tests.small_runs import config_values, distembed

NUM_ROWS = 300


def trained_run(
    folder: Path, schema: dict[str, Any] | None = None, rows: list[dict[str, Any]] | None = None, **sections: Any
) -> Path:
    """Prepares rows as ``dataset``, trains for three steps, and returns the run's folder."""
    prepare_table(rows or draw_rows(NUM_ROWS), folder / "dataset", schema)
    (folder / "config.yaml").write_text(yaml.safe_dump({**config_values(folder / "dataset"), **sections}))
    distembed("train", folder / "config.yaml", "train.max_steps=3", "--run-dir", folder / "run")
    return folder / "run"


def exported(run: Path, folder: Path, **options: Any) -> Path:
    """Exports a run, and returns the folder of the model."""
    export_run(find_trained_run(run, None), folder, ExportOptions(**options))
    return folder


def json_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows as a client sends them: without the label and the weight, and what the model is not shown."""
    return [
        {name: value for name, value in row.items() if name not in ("click", "importance", "unused")}
        for row in draw_rows(num_rows, seed)
    ]
