"""Runs on rows of every kind of column, exported: what the server is tested with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from distembed.serving.export import parity
from distembed.serving.export.export_run import ExportOptions, export_run
from distembed.training.trained_run import find_trained_run
from tests.in_process import in_this_process
from tests.serving.arrow_rows import draw_rows, prepare_table
from tests.small_runs import config_values

NUM_ROWS = 300
T = TypeVar("T")
_MADE: dict[str, Any] = {}


def once(name: str, make: Callable[[], T]) -> T:
    """Returns the value that the first call of ``make`` under this name gave in this process."""
    if name not in _MADE:
        _MADE[name] = make()
    found: T = _MADE[name]
    return found


def trained_run(
    folder: Path, schema: dict[str, Any] | None = None, rows: list[dict[str, Any]] | None = None, **sections: Any
) -> Path:
    """Prepares rows as ``dataset``, trains for three steps, and returns the run's folder."""
    prepare_table(rows or draw_rows(NUM_ROWS), folder / "dataset", schema)
    (folder / "config.yaml").write_text(yaml.safe_dump({**config_values(folder / "dataset"), **sections}))
    in_this_process("train", folder / "config.yaml", "train.max_steps=3", "--run-dir", folder / "run")
    return folder / "run"


def exported(run: Path, folder: Path, **options: Any) -> Path:
    """Exports a run, and returns the folder of the model."""
    export_run(find_trained_run(run, None), folder, ExportOptions(**options))
    return folder


def session_run(factory: pytest.TempPathFactory) -> Path:
    """Returns the one run that all tests share, on rows of every kind of column."""
    return once("run", lambda: trained_run(factory.mktemp("exported")))


def session_model(factory: pytest.TempPathFactory) -> Path:
    """Returns the export of the shared run."""
    run = session_run(factory)
    return once("model", lambda: exported(run, run.parent / "model"))


SERVER_BYTES = 800
"""Memory of servers of which two hold the tables of the shared run in int8."""


def session_shards(factory: pytest.TempPathFactory) -> Path:
    """Returns an export of the shared run with shards of partitions in int8.

    Among its few rows, two that change places are more of the AUC than is allowed.
    """
    run = session_run(factory)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parity, "require_close_metric", lambda *_: None)
        options: dict[str, Any] = {"precision": "int8", "materialise": "never", "server_bytes": SERVER_BYTES}
        return once("shards", lambda: exported(run, run.parent / "shards", **options))


def json_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns rows as a client sends them: without the label and the weight, and what the model is not shown."""
    return [
        {name: value for name, value in row.items() if name not in ("click", "importance", "unused")}
        for row in draw_rows(num_rows, seed)
    ]
