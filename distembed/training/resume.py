"""What a run that is there was made with, and what may differ when it is gone on with or used."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distembed.config import Config, load_config
from distembed.data.dataset.manifest import Manifest, id_fingerprint
from distembed.embedding import assignment_checksums
from distembed.errors import UserError
from distembed.planning.saved_plan import SavedPlan, read_saved_plan
from distembed.runs.record import read_json_object

# what leaves the numbers as they are; the reader tells by itself whether the dataset is the same
_MAY_CHANGE = {
    "data.path",
    "train.device",
    "train.log_every",
    "train.evaluate_every",
    "train.checkpoint_every",
    "train.keep_checkpoints",
}


def config_of_run(run: Path) -> Config:
    """The config that a run was started with.

    Raises:
        UserError: The folder holds no run, or a file of explicit assignments has changed since.
    """
    for name in ("config.yaml", "run.json"):
        if not (run / name).is_file():
            raise UserError(f"{run} is no run: it has no {name}. Give a folder that `distembed train` made.")
    config = load_config(run / "config.yaml")
    trained_on = read_json_object(run / "run.json").get("assignments", {})
    for path, checksum in assignment_checksums(config.embedding).items():
        if trained_on.get(path) != checksum:
            raise UserError(
                f"{path}, which says which rows the ids of an explicit table have, is not the file that {run} was "
                "trained with; put that one back."
            )
    return config


def dataset_for(run: Path, config: Config, data: str | None) -> str:
    """The dataset to use a run's model on: where it is another one, its ids must mean the same.

    Raises:
        UserError: It is not there, or they do not.
    """
    dataset = data or config.data.require_path()
    if not Path(dataset).exists():
        raise UserError(f"the dataset {dataset} of {run} is not here; say where it is with --data.")
    trained_on = read_json_object(run / "run.json").get("id_fingerprint")
    if trained_on is not None and id_fingerprint(dataset, Manifest.load(dataset)) != trained_on:
        raise UserError(
            f"the ids of {dataset} stand for other values than those of the dataset that {run} was trained on, so its "
            "predictions would mean nothing. Use the dataset it was trained on, or one with the same tables, "
            "vocabularies and hash."
        )
    return dataset


def require_same_config(folder: Path, config: Config) -> None:
    """Refuses to go on with a run with a config that would give other numbers.

    Raises:
        UserError: with every setting that differs.
    """
    before, now = _flat(config_of_run(folder)), _flat(config)
    differences = [
        f"{key}: {before.get(key)!r} before, {now.get(key)!r} now"
        for key in before | now
        if before.get(key) != now.get(key) and not _may_change_on_resume(key)
    ]
    if differences:
        listed = "\n  ".join(differences)
        raise UserError(f"--resume: the config differs from the one that {folder} was started with:\n  {listed}")


def require_same_graphs(folder: Path, graphs: Mapping[str, str]) -> None:
    """Refuses to go on with a run with other graphs, given by table as their fingerprints.

    Raises:
        UserError: with a table whose graph is another one.
    """
    before = read_json_object(folder / "run.json").get("graphs", {})
    for table in {**before, **graphs}:
        if before.get(table) != graphs.get(table):
            raise UserError(
                f"--resume: the graph of table {table!r} is not the one that {folder} was started with; put that one "
                "back."
            )


def plan_of_run(folder: Path, config: Config, say: Callable[[str], None]) -> SavedPlan | None:
    """The plan of a run that is resumed; None where it has none yet, or the ``plan`` section asks for another now.

    Raises:
        UserError: It cannot be read.
    """
    file = folder / "plan.json"
    if not file.exists():
        return None
    if config_of_run(folder).plan != config.plan:
        say("planned anew, since the config's plan section has changed")
        return None
    try:
        return read_saved_plan(file)
    except UserError as error:
        raise UserError(f"--resume: {error} Or remove it, and where tables go is planned anew.") from error


def _may_change_on_resume(key: str) -> bool:
    # a graph is known by its contents, wherever it is
    is_graph = key.startswith("sse.") and key.endswith(".graph")
    return key in _MAY_CHANGE or key.startswith("plan.") or is_graph


def _flat(config: Config) -> dict[str, Any]:
    """Every setting by its dotted path."""

    def walk(prefix: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or not value:
            return {prefix: value}
        return {path: leaf for key, inner in value.items() for path, leaf in walk(f"{prefix}.{key}", inner).items()}

    flat = walk("", dataclasses.asdict(config))
    return {path.removeprefix("."): value for path, value in flat.items()}
