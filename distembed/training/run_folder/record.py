"""Reading a run folder back: whole, still going on, or left by a killed process.

:mod:`distembed.training.run_folder.folder` lists the files. Only ``run.json`` and ``config.yaml`` have to be there;
they are written first. A last line of metrics that was cut short, and values that are no numbers, are left out.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from distembed.base.errors import UserError
from distembed.base.files import read_json, read_regular_file
from distembed.tasks.reported_metrics import ReportedMetric, parse_metrics

PRUNED = "pruned after step "
"""Beginning of the error of a run that a sweep ended early."""
_REQUIRED = ("run.json", "config.yaml")
_MOST_METRICS_BYTES = 1 << 34


@dataclass(frozen=True)
class RunInfo:
    """The contents of ``run.json``; None, an empty mapping or NaN for missing values.

    Attributes:
        name: The run's name.
        status: ``finished``, ``interrupted``, ``failed``, ``pruned`` by a sweep, or ``unfinished`` for a run that may
            still train, or may have been killed.
        error: Why the run was interrupted or failed.
        started: When the run was started last, in UTC.
        finished: When it ended, in UTC.
        seed: Seed of the training.
        world_size: Number of ranks.
        batch_size: Number of rows in a batch over all ranks.
        versions: Package -> version that the run used.
        schemes: Partition scheme -> number of tables that have it.
        parameters: Number of parameters of the whole model.
        embedding_parameters: Number of parameters of its tables.
        embedding_bytes: Bytes of the weights and stored rows of ids of all embedding tables.
        embedding_training_bytes: The same with the optimizer's states.
        embedding_rows: Rows of all embedding tables.
        full_embedding_bytes: Bytes of the vectors of full fp32 tables of the same ids.
        full_embedding_training_bytes: The same with the states of the same optimizer.
        full_embedding_rows: Rows of these tables.
        metrics: The reported metrics of the run's evaluations, the task's headline metric first.
        id_fingerprint: Checksum of the meaning of the dataset's ids.
    """

    name: str | None
    status: str
    error: str | None
    started: str | None
    finished: str | None
    seed: int | None
    world_size: int | None
    batch_size: int | None
    versions: Mapping[str, str]
    schemes: Mapping[str, int]
    parameters: float
    embedding_parameters: float
    embedding_bytes: float
    embedding_training_bytes: float
    embedding_rows: float
    full_embedding_bytes: float
    full_embedding_training_bytes: float
    full_embedding_rows: float
    metrics: Sequence[ReportedMetric]
    id_fingerprint: str | None = None

    @classmethod
    def read(cls, path: Path) -> "RunInfo":
        """Reads ``run.json``.

        Raises:
            UserError: The file is damaged.
        """
        values = read_json_object(path)
        for key in ("schemes", "versions"):
            if not isinstance(values.get(key) or {}, Mapping):
                raise UserError(f"{path}: {key} is {values[key]!r} instead of an object; the run folder is damaged.")
        readers = {field.name: _READERS[field.type] for field in fields(cls) if field.type in _READERS}
        plain = {name: read(values, name) for name, read in readers.items()}
        status = "pruned" if PRUNED in (plain["error"] or "") else plain["status"] or "running"
        return cls(
            **{
                **plain,
                "status": "unfinished" if status == "running" else status,
                "versions": values.get("versions") or {},
                "schemes": values.get("schemes") or {},
                "metrics": parse_metrics(values.get("metrics")),
            }
        )


@dataclass(frozen=True)
class CalibrationBin:
    """The mean prediction and the mean label of some rows of an evaluation, by rising prediction."""

    predicted: float
    observed: float


@dataclass(frozen=True)
class MetricsLine:
    """The metrics at one step, of a window of training or an evaluation.

    Attributes:
        kind: ``train``, ``eval`` or ``period``; empty for the final evaluation's own file.
        split: The evaluated split, or the day or hour of a stream; empty for a window of training.
        step: Number of training steps until then; None where the line does not say.
        metrics: Name -> value of every finite number, among them ``samples``, the number of rows read until then.
        calibration_bins: Predictions against labels; empty but for the final evaluation.
    """

    kind: str
    split: str
    step: int | None
    metrics: Mapping[str, float]
    calibration_bins: Sequence[CalibrationBin] = ()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> "MetricsLine":
        """Reads a line of ``metrics.jsonl`` or the object of ``evaluation.json``."""
        return cls(
            kind=_text(values, "kind") or "",
            split=_text(values, "split") or _text(values, "period") or "",
            step=_count(values, "step"),
            metrics={name: number for name in values if not math.isnan(number := _number(values, name))},
            calibration_bins=[
                CalibrationBin(_number(entry, "predicted"), _number(entry, "observed"))
                for entry in values.get("calibration_bins") or ()
                if isinstance(entry, Mapping)
            ],
        )

    def metric(self, name: str) -> float:
        """The metric's value; NaN where it is unknown."""
        return self.metrics.get(name, math.nan)


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder.

    Attributes:
        path: The folder.
        info: The contents of ``run.json``.
        config_yaml: The resolved config.
        train: Windows of training, in the order of steps.
        evals: Evaluations, in the order of steps.
        evaluation: The final evaluation; None before it.
        periods: The last line of each day or hour of a stream, in the order of time.
    """

    path: Path
    info: RunInfo
    config_yaml: str
    train: Sequence[MetricsLine]
    evals: Sequence[MetricsLine]
    evaluation: MetricsLine | None
    periods: Sequence[MetricsLine] = ()

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """Reads a run folder.

        Raises:
            UserError: ``path`` is no run folder, in which case the error lists the missing files, or it is damaged.
        """
        if not path.is_dir():
            raise UserError(f"{path} is no folder. Give folders that `distembed train` made.")
        missing = [name for name in _REQUIRED if not (path / name).is_file()]
        if missing:
            raise UserError(
                f"{path} is no run: it has no {' and no '.join(missing)}. Give folders that `distembed train` made."
            )
        lines = _read_metrics(path / "metrics.jsonl")
        last_of_period = {line.split: line for line in lines if line.kind == "period"}
        final = path / "evaluation.json"
        evaluation = read_json_object(final) if final.exists() else {}
        return cls(
            path=path,
            info=RunInfo.read(path / "run.json"),
            config_yaml=(path / "config.yaml").read_text(encoding="utf-8", errors="replace"),
            train=[line for line in lines if line.kind == "train"],
            evals=[line for line in lines if line.kind == "eval"],
            evaluation=MetricsLine.parse(evaluation) if evaluation else None,
            periods=[last_of_period[name] for name in sorted(last_of_period)],
        )

    def validation_evals(self) -> list[MetricsLine]:
        """Returns the evaluations of ``evals`` on another split than the final evaluation's, which is in it too."""
        final_split = (self.evaluation.split if self.evaluation else "") or "test"
        return [line for line in self.evals if line.split != final_split]


@dataclass(frozen=True)
class RunSummary:
    """A run in one row of the comparison.

    Attributes:
        name: The run's name, unique in the report.
        path: The run folder.
        info: The contents of ``run.json``.
        config_yaml: The resolved config.
        evaluation: The final evaluation, or the last one during training; None before any.
        samples_per_second: Median over the logged windows of training; NaN without any.
        training_seconds: Seconds of training without evaluations and checkpoints; NaN where they are not known.
    """

    name: str
    path: Path
    info: RunInfo
    config_yaml: str
    evaluation: MetricsLine | None
    samples_per_second: float
    training_seconds: float

    @classmethod
    def from_record(cls, record: RunRecord, name: str) -> "RunSummary":
        """Returns the summary of a run; the ``seconds`` of its metrics are cumulative, so the largest is the total."""
        speeds = [line.metrics["samples_per_second"] for line in record.train if "samples_per_second" in line.metrics]
        return cls(
            name=name,
            path=record.path,
            info=record.info,
            config_yaml=record.config_yaml,
            evaluation=record.evaluation or (record.evals[-1] if record.evals else None),
            samples_per_second=statistics.median(speeds) if speeds else math.nan,
            training_seconds=max(
                (each.metrics["seconds"] for each in record.train if "seconds" in each.metrics), default=math.nan
            ),
        )

    @property
    def evaluated_on(self) -> str:
        """The split that the metrics were computed on; empty where there are none."""
        return self.evaluation.split if self.evaluation else ""

    def metric(self, name: str) -> float:
        return self.evaluation.metric(name) if self.evaluation else math.nan


def unique_names(records: Sequence[RunRecord]) -> list[str]:
    """Returns a distinct name for each run: its own, or, for equal names, the shortest end of its path that differs."""
    paths = [record.path.absolute() for record in records]
    names = [record.info.name or path.name for record, path in zip(records, paths, strict=True)]
    for depth in range(2, max((len(path.parts) for path in paths), default=0)):
        if len(set(names)) == len(names):
            break
        names = [
            "/".join(path.parts[-depth:]) if names.count(name) > 1 else name
            for name, path in zip(names, paths, strict=True)
        ]
    return names


def read_json_object(path: Path) -> Mapping[str, Any]:
    """Returns the object that a JSON file of a run folder holds.

    Raises:
        UserError: The file is damaged.
    """
    value = read_json(path, "the run folder is damaged")
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__} instead of a JSON object; the run folder is damaged.")
    return value


def last_metrics(path: Path) -> Mapping[str, Any] | None:
    """Returns the object on the last whole line of ``metrics.jsonl``; None where there is none."""
    return next(reversed(list(_metrics_objects(path))), None)


def _read_metrics(path: Path) -> list[MetricsLine]:
    """Returns the whole lines of ``metrics.jsonl`` in the order of steps."""
    return sorted(map(MetricsLine.parse, _metrics_objects(path)), key=lambda line: line.metric("step"))


def read_metrics_lines(path: Path) -> list[str]:
    """Returns the lines of ``metrics.jsonl``; none where the file is missing, and an error where it cannot be read."""
    try:
        return read_regular_file(path, _MOST_METRICS_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}; the run folder is damaged.") from error


def _metrics_objects(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yields the objects on the whole lines of ``metrics.jsonl``."""
    for line in read_metrics_lines(path):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a killed process leaves half a line
        if isinstance(values, dict):
            yield values


def _number(values: Mapping[str, Any], key: str) -> float:
    """Returns a value as a float; NaN where it is missing, null, infinite or no number."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        return math.nan


def _count(values: Mapping[str, Any], key: str) -> int | None:
    """Returns a value as an integer; None where it is missing or no number."""
    number = _number(values, key)
    return None if math.isnan(number) else int(values[key])


def _text(values: Mapping[str, Any], key: str) -> str | None:
    """Returns a value as text; None where it is missing, null or empty."""
    value = values.get(key)
    return None if value in (None, "") else str(value)


_READERS: dict[Any, Callable[[Mapping[str, Any], str], Any]] = {
    str: _text,
    str | None: _text,
    int | None: _count,
    float: _number,
}
"""How values of these types are read from ``run.json``."""
