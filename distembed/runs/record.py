"""Reading a run folder back: whole, still going on, or left by a killed process.

:mod:`distembed.runs.folder` says which files there are. Only ``run.json`` and ``config.yaml`` have to be there;
they are written first. A last line of metrics that was cut short, and values that are no numbers, are passed over.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distembed.errors import UserError

_REQUIRED = ("run.json", "config.yaml")


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds.

    Attributes:
        path: the folder.
        info: ``run.json``.
        config_yaml: the resolved config.
        train: lines of kind ``train``, in the order of steps.
        evals: lines of kind ``eval``, in the order of steps.
        evaluation: the final evaluation; empty where the run has not come to it.
    """

    path: Path
    info: Mapping[str, Any]
    config_yaml: str
    train: Sequence[Mapping[str, Any]]
    evals: Sequence[Mapping[str, Any]]
    evaluation: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """Reads a run folder.

        Raises:
            UserError: where ``path`` is no run folder; it says what is missing.
        """
        if not path.is_dir():
            raise UserError(f"{path} is no folder. Give folders that `distembed train` made.")
        missing = [name for name in _REQUIRED if not (path / name).is_file()]
        if missing:
            raise UserError(
                f"{path} is no run: it has no {' and no '.join(missing)}. Give folders that `distembed train` made."
            )
        lines = _json_lines(path / "metrics.jsonl")
        return cls(
            path=path,
            info=_require_mappings(path / "run.json", ("schemes", "versions")),
            config_yaml=(path / "config.yaml").read_text(encoding="utf-8"),
            train=[line for line in lines if line.get("kind") == "train"],
            evals=[line for line in lines if line.get("kind") == "eval"],
            evaluation=read_json_object(path / "evaluation.json") if (path / "evaluation.json").exists() else {},
        )

    @property
    def status(self) -> str:
        """``run.json``'s; a run that is not known to have ended is ``unfinished``, since it may have been killed."""
        status = str(self.info.get("status", "running"))
        return "unfinished" if status == "running" else status

    def validation_evals(self) -> list[Mapping[str, Any]]:
        """The evaluations during training: those on another split than the final one."""
        return [line for line in self.evals if line.get("split") != self.evaluation.get("split", "test")]


@dataclass(frozen=True)
class RunSummary:
    """A run in one row of the comparison; what is not known is NaN.

    Attributes:
        name: unique within a report.
        path: the run folder.
        status: finished, interrupted, failed or unfinished.
        schemes: partition scheme -> number of tables that have it.
        parameters: of the whole model.
        embedding_bytes: of all embedding tables' weights.
        evaluated_on: the split that the metrics speak of; empty where there was no evaluation yet.
        auc: of that split, as are the following.
        logloss: in nats.
        normalized_entropy: logloss over the entropy of the label rate.
        calibration: sum of predictions over number of positives.
        samples_per_second: the median over the logged windows of training.
    """

    name: str
    path: Path
    status: str
    schemes: Mapping[str, int]
    parameters: float
    embedding_bytes: float
    evaluated_on: str
    auc: float
    logloss: float
    normalized_entropy: float
    calibration: float
    samples_per_second: float

    @classmethod
    def of(cls, record: RunRecord, name: str) -> "RunSummary":
        """Sums a run up; without a final evaluation its last one during training stands in."""
        evaluation = record.evaluation or (record.evals[-1] if record.evals else {})
        speeds = [speed for line in record.train if not math.isnan(speed := number(line, "samples_per_second"))]
        return cls(
            name=name,
            path=record.path,
            status=record.status,
            schemes=record.info.get("schemes") or {},
            parameters=number(record.info, "parameters"),
            embedding_bytes=number(record.info, "embedding_bytes"),
            evaluated_on=str(evaluation.get("split", "")),
            auc=number(evaluation, "auc"),
            logloss=number(evaluation, "logloss"),
            normalized_entropy=number(evaluation, "normalized_entropy"),
            calibration=number(evaluation, "calibration"),
            samples_per_second=statistics.median(speeds) if speeds else math.nan,
        )


def number(values: Mapping[str, Any], key: str) -> float:
    """``values[key]`` as a float; NaN where it is missing, null, infinite or no number."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    return float(value)


def unique_names(records: Sequence[RunRecord]) -> list[str]:
    """A name for each run: its own, and as many of its parent folders as it takes to tell it from the others."""
    paths = [record.path.absolute() for record in records]
    names = [str(record.info.get("name") or path.name) for record, path in zip(records, paths, strict=True)]
    for depth in range(2, max((len(path.parts) for path in paths), default=0)):
        if len(set(names)) == len(names):
            break
        names = [
            "/".join(path.parts[-depth:]) if names.count(name) > 1 else name
            for name, path in zip(names, paths, strict=True)
        ]
    return names


def _require_mappings(path: Path, keys: Sequence[str]) -> Mapping[str, Any]:
    value = read_json_object(path)
    for key in keys:
        if not isinstance(value.get(key) or {}, Mapping):
            raise UserError(f"{path}: {key} is {value[key]!r} instead of an object; the run folder is damaged.")
    return value


def read_json_object(path: Path) -> Mapping[str, Any]:
    """What a JSON file of a run folder holds; UserError where the file is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}); the run folder is damaged.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__} instead of a JSON object; the run folder is damaged.")
    return value


def _json_lines(path: Path) -> list[Mapping[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue  # a killed process leaves half a line
        if isinstance(value, dict):
            found.append(value)
    return sorted(found, key=lambda line: number(line, "step"))
