"""Holds the bytes of a run with its checkpoints, of a checkpoint, a dataset or a graph against their checksums."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distembed.base.checksums import Verification
from distembed.base.errors import UserError
from distembed.base.files import read_regular_file
from distembed.checkpoints.store import (
    INDEX_FILE,
    LAST_FILE,
    METADATA_FILE,
    CheckpointStore,
    checkpoint_names,
    checkpoint_place,
)
from distembed.data.dataset.kept import kept_dataset
from distembed.data.dataset.manifest import MANIFEST_NAME
from distembed.data.dataset.mirror import is_remote_dataset
from distembed.data.dataset.row_groups import verify_dataset
from distembed.data.remote import is_url
from distembed.graph.csr import verify_graph
from distembed.graph.folder import GRAPH_FILE
from distembed.planning.saved_plan import read_saved_plan
from distembed.training.config import load_config
from distembed.training.resume import load_run_config
from distembed.training.run_folder.record import RunRecord

_MOST_METRICS_BYTES = 4 << 30


@dataclass(frozen=True)
class Checked:
    """A ``run``, ``checkpoint``, ``dataset`` or ``graph`` at a local path or URL, and the result of its check."""

    kind: str
    path: str
    found: Verification


def check(path: str) -> Iterator[Checked]:
    """Checks a run, checkpoint, dataset or graph, and yields the result; a run's kept dataset and checkpoints follow.

    Args:
        path: Folder of a run, a checkpoint, a dataset or a graph, or URL of a checkpoint or a dataset.

    Raises:
        UserError: The path is none of them.
    """
    folder = Path(path)
    if is_url(path) and is_remote_dataset(path):
        yield Checked("dataset", path, verify_dataset(path))
    elif is_url(path) or _has(folder, LAST_FILE, INDEX_FILE, METADATA_FILE):
        yield _check_checkpoint(path)
    elif _has(folder, MANIFEST_NAME):
        yield Checked("dataset", path, verify_dataset(folder))
    elif _has(folder, GRAPH_FILE):
        yield Checked("graph", path, verify_graph(folder))
    elif _has(folder, "run.json", "config.yaml"):
        yield Checked("run", path, _verify_run_files(folder))
        if (kept_folder := kept_dataset(folder)) is not None:
            yield Checked("dataset", str(kept_folder), verify_dataset(kept_folder))
        yield from _check_checkpoints(folder)
    else:
        raise UserError(f"{path} is no run, checkpoint, dataset or graph; give the folder of one.")


def _has(folder: Path, *names: str) -> bool:
    return any((folder / name).is_file() for name in names)


def _verify_run_files(run: Path) -> Verification:
    """Reads the files of a run as all commands do; none of them has a checksum."""
    verification = Verification()
    for name, read in (
        ("config.yaml", lambda: load_run_config(run)),
        ("run.json", lambda: RunRecord.read(run)),
        ("plan.json", lambda: read_saved_plan(run / "plan.json")),
        ("metrics.jsonl", lambda: _require_whole_lines(run / "metrics.jsonl")),
    ):
        if name in ("plan.json", "metrics.jsonl") and not (run / name).exists():
            continue  # the run was killed before it wrote it
        try:
            read()
            verification.add((), run / name)
        except (UserError, OSError) as error:
            # RunRecord.read may repeat the error of load_run_config: it is counted once
            verification.add([text for text in [str(error)] if text not in verification.problems], run / name)
    return verification


def _require_whole_lines(metrics: Path) -> None:
    """Makes sure that all lines but the last, which a killed process may leave cut short, are JSON objects."""
    lines = read_regular_file(metrics, _MOST_METRICS_BYTES).split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            is_object = isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise UserError(f"{metrics}, line {number}, is no JSON object; `distembed train --resume` leaves it out.")


def _check_checkpoints(run: Path) -> Iterator[Checked]:
    """Yields the check of each checkpoint of a run, but not of one that the run removes meanwhile."""
    try:
        checkpoint_dir = load_config(run / "config.yaml").train.checkpoint_dir
    except UserError:
        return  # _verify_run_files has reported the damaged config
    place = checkpoint_place(run, checkpoint_dir)
    store = CheckpointStore(place)
    for name in checkpoint_names(place):
        checked = _check_checkpoint(store.checkpoint_path(name))
        if not checked.found.problems or store.is_whole(name):
            yield checked


def _check_checkpoint(checkpoint: str) -> Checked:
    from distembed.checkpoints.saved import verify_checkpoint  # of all that is checked, this alone needs torch

    return Checked("checkpoint", checkpoint, verify_checkpoint(checkpoint))
