"""Where a run's metrics go beside ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow, or a logger of one's own.

``train.loggers`` names them. A logger is made when the run starts, by rank 0, and again when the run resumes. A service
that cannot be reached costs a warning and never the run: ``metrics.jsonl`` has every number.
"""

import importlib.util
import json
import os
import re
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from distembed.base.errors import UserError
from distembed.base.files import write_json
from distembed.base.lazy import NameTable

_MOST_SECONDS = 30
"""How long a service may take to answer."""
_IDS = "loggers.json"
"""File in the run's folder with the ids that services know the run by, so that a resumed run keeps its id."""


@dataclass(frozen=True)
class LoggedRun:
    """A run whose metrics are logged.

    Attributes:
        folder: The run's folder, which names the run.
        config_yaml: The resolved config.
        resumed_step: The step after which the run resumes; 0 for a new run.
    """

    folder: Path
    config_yaml: str
    resumed_step: int

    def id_for(self, service: str, make: Any) -> str:
        """Returns the id of the run at a service, which ``make()`` gives for a run that has none yet."""
        file = self.folder / _IDS
        ids = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if service not in ids:
            write_json(file, ids := {**ids, service: make()})
        known: str = ids[service]
        return known


class MetricsLogger(ABC):
    """Logs the numbers of a run's steps; made with a :class:`LoggedRun`.

    Attributes:
        package: The package that has to be installed; None for one that always is.
    """

    package: ClassVar[str | None] = None

    @abstractmethod
    def __init__(self, run: LoggedRun) -> None:
        """Starts the log of a run, or continues the log of a resumed run."""

    @abstractmethod
    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs numbers, such as ``train/loss`` and ``validation/auc``, after so many steps."""

    @abstractmethod
    def close(self, is_finished: bool) -> None:
        """Ends the log of a run that is finished, or else was interrupted or failed."""


class TensorBoardLogger(MetricsLogger):
    """Writes TensorBoard's files into ``tensorboard`` in the run's folder."""

    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.resumed_step + 1)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self._board.add_scalar(name, number, step)

    def close(self, is_finished: bool) -> None:
        self._board.close()


class WandbLogger(MetricsLogger):
    """Logs to Weights & Biases, by its own environment variables; the project is ``distembed`` unless they name one.

    W&B keeps the numbers that a run logged after the step from which it resumes, and ignores new ones of these steps.
    """

    package = "wandb"

    def __init__(self, run: LoggedRun) -> None:
        import wandb
        import yaml

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "distembed"),
            name=run.folder.name,
            id=run.id_for("wandb", lambda: uuid.uuid4().hex),
            dir=str(run.folder),
            config=yaml.safe_load(run.config_yaml),
            resume="allow",
            settings=wandb.Settings(init_timeout=_MOST_SECONDS, login_timeout=_MOST_SECONDS),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


class MLflowLogger(MetricsLogger):
    """Logs to MLflow, by ``MLFLOW_TRACKING_URI``, in the experiment ``MLFLOW_EXPERIMENT_NAME`` or ``distembed``."""

    package = "mlflow"

    def __init__(self, run: LoggedRun) -> None:
        # MLflow's own are minutes, in which the other ranks would wait for this one
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_MOST_SECONDS))
        import mlflow

        self._metric, self._client = mlflow.entities.Metric, mlflow.MlflowClient()
        self._id = run.id_for("mlflow", lambda: self._create(run.folder.name))
        self._client.update_run(self._id, "RUNNING")
        self._client.log_text(self._id, run.config_yaml, "config.yaml")

    def _create(self, name: str) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "distembed")
        known = self._client.get_experiment_by_name(experiment)
        experiment_id = self._client.create_experiment(experiment) if known is None else known.experiment_id
        run_id: str = self._client.create_run(experiment_id, run_name=name).info.run_id
        return run_id

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        milliseconds = int(time.time() * 1000)
        # names of tables may have letters that MLflow refuses
        named = {re.sub(r"[^\w/.\- :]", "_", name): float(number) for name, number in numbers.items()}
        metrics = [self._metric(name, number, milliseconds, step) for name, number in named.items()]
        self._client.log_batch(self._id, metrics)

    def close(self, is_finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_finished else "KILLED")


LOGGERS: NameTable[type[MetricsLogger]] = NameTable(
    {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MLflowLogger}
)
"""Class by the name of a logger; a plugin adds its own."""


class Loggers:
    """The loggers of a run. A service that fails is dropped with a warning; an error of TensorBoard's is raised."""

    def __init__(self, names: Sequence[str], run: LoggedRun) -> None:
        self._loggers: dict[str, MetricsLogger] = {}
        for name in names:
            with self._service_may_fail(name):
                self._loggers[name] = LOGGERS[name](run)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs the numbers of a step everywhere."""
        for name, logger in list(self._loggers.items()):
            with self._service_may_fail(name):
                logger.log(step, numbers)

    def close(self, is_finished: bool) -> None:
        """Ends all logs, TensorBoard's last, since its error ends the run."""
        for name, logger in sorted(self._loggers.items(), key=lambda named: named[0] == "tensorboard"):
            with self._service_may_fail(name):
                logger.close(is_finished)

    @contextmanager
    def _service_may_fail(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name == "tensorboard":
                raise
            self._loggers.pop(name, None)
            warnings.warn(
                f"{name} failed and gets no more metrics of this run, which metrics.jsonl holds: {error}", stacklevel=2
            )


def require_loggers(names: Sequence[str]) -> None:
    """Refuses loggers whose packages are not installed."""
    for name in names:
        package = LOGGERS[name].package
        if package is not None and not _is_installed(package):
            raise UserError(
                f"train.loggers has {name!r}, and the package {package} is not installed: install it by "
                f"`pip install 'distembed[{package}]'`, or leave {name!r} out."
            )


def _is_installed(package: str) -> bool:
    # a folder of that name in the working directory has a spec without an origin
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
