"""Where a run's metrics go beside ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow, or a logger of one's own.

``train.loggers`` names them. A logger is made when the run starts, by rank 0, and again when the run resumes. A service
that cannot be reached costs a warning and never the run: ``metrics.jsonl`` has every number. Each service gets the
numbers from a thread of its own, which makes and calls its logger: a slow service slows neither training nor another
service.
"""

import importlib.util
import json
import os
import queue
import re
import threading
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from distembed.base.errors import UserError
from distembed.base.files import write_json
from distembed.base.lazy import NameTable

TENSORBOARD = "tensorboard"
_MOST_SECONDS = 30
"""How long W&B may take to start a run."""
_PAUSES = (2.0, 10.0)
"""Seconds between attempts to log a line; a service that fails once more after them gets no more metrics."""
_MOST_SECONDS_AT_END = 60
"""How long services may take, together, for the metrics that wait at the end of a run."""
_MOST_WAITING = 1000
"""Lines of metrics that wait for a slow service at most."""
_IDS = "loggers.json"
"""File in the run's folder with the ids that services know the run by, so that a resumed run keeps its id."""
_IDS_LOCK = threading.Lock()


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

    def id_for(self, service: str, make: Callable[[], str]) -> str:
        """Returns the id of the run at a service, which ``make()`` gives for a run that has none yet."""
        known = self._ids().get(service) or make()
        with _IDS_LOCK:  # services have threads of their own
            write_json(self.folder / _IDS, self._ids() | {service: known})
        return known

    def _ids(self) -> dict[str, str]:
        file = self.folder / _IDS
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


class MetricsLogger(ABC):
    """Logs the numbers of a run's steps; made with a :class:`LoggedRun`, and called by one thread.

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
    {TENSORBOARD: TensorBoardLogger, "wandb": WandbLogger, "mlflow": MLflowLogger}
)
"""Class by the name of a logger; a plugin adds its own."""


class _Service:
    """Gives a service the metrics that wait in its queue, from a thread; drops the service with a warning if it fails.

    A full queue drops its oldest metrics, with one warning.
    """

    def __init__(self, name: str, run: LoggedRun) -> None:
        self.name = name
        self._waiting: queue.Queue[tuple[int, Mapping[str, float]] | bool] = queue.Queue(_MOST_WAITING)
        self._has_dropped = False
        # a daemon, since a service may never answer
        self.thread = threading.Thread(target=self._serve, args=(run,), name=f"distembed-{name}", daemon=True)
        self.thread.start()

    def put(self, entry: tuple[int, Mapping[str, float]] | bool) -> None:
        """Adds the numbers of a step, or whether the run is finished, which ends the log; does not wait."""
        if not self.thread.is_alive():
            return
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            with suppress(queue.Empty):  # the thread may have taken it meanwhile
                self._waiting.get_nowait()
            self._waiting.put_nowait(entry)  # fits: no other thread puts
            if not self._has_dropped:
                self._has_dropped = True
                warnings.warn(
                    f"train.loggers: {_MOST_WAITING} lines of metrics wait for {self.name}; the oldest are dropped "
                    "from here on. Raise train.log_every; metrics.jsonl has all lines.",
                    stacklevel=3,
                )

    def _serve(self, run: LoggedRun) -> None:
        try:
            logger = LOGGERS[self.name](run)
            while not isinstance(entry := self._waiting.get(), bool):
                _log_patiently(logger, *entry)
            logger.close(entry)
        except Exception as error:
            warnings.warn(
                f"{self.name} failed and gets no more metrics of this run, which metrics.jsonl holds: {error}",
                stacklevel=2,
            )


def _log_patiently(logger: MetricsLogger, step: int, numbers: Mapping[str, float]) -> None:
    """Logs a line; tries again after pauses if it fails, and raises the last error."""
    for pause in _PAUSES:
        try:
            return logger.log(step, numbers)
        except Exception:
            time.sleep(pause)
    logger.log(step, numbers)


class Loggers:
    """The loggers of a run: TensorBoard, and services in threads of their own.

    TensorBoard writes files, by a queue and a thread of its own; its error is raised. :meth:`close` waits
    ``most_seconds`` for all services together at most.
    """

    def __init__(self, names: Sequence[str], run: LoggedRun, most_seconds: float = _MOST_SECONDS_AT_END) -> None:
        self._most_seconds = most_seconds
        self._board = TensorBoardLogger(run) if TENSORBOARD in names else None
        self._services = [_Service(name, run) for name in names if name != TENSORBOARD]

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs the numbers of a step everywhere; does not wait for services."""
        if self._board is not None:
            self._board.log(step, numbers)
        for service in self._services:
            service.put((step, numbers))

    def close(self, is_finished: bool) -> None:
        """Ends all logs; waits for services that have not taken all metrics, with a time limit."""
        for service in self._services:
            service.put(is_finished)
        end = time.monotonic() + self._most_seconds
        for service in self._services:
            service.thread.join(max(0.0, end - time.monotonic()))
            if service.thread.is_alive():
                warnings.warn(
                    f"train.loggers: {service.name} has not taken all metrics within {self._most_seconds:g} s after "
                    "the run's end, and may lack the last ones; metrics.jsonl has them.",
                    stacklevel=2,
                )
        if self._board is not None:  # last, since its error ends the run
            self._board.close(is_finished)


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
