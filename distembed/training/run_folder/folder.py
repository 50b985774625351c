"""The run folder: config, versions, metrics and state of one run, written by rank 0 alone."""

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from distembed.base.errors import FolderInUse, Interrupted, RunError, UserError
from distembed.base.files import finite, free_space, full_disk_explained, write_json, write_text
from distembed.base.version import versions
from distembed.training.loggers import LoggedRun, Loggers
from distembed.training.run_folder.lock import owned
from distembed.training.run_folder.record import read_metrics_lines

LAUNCH_FOLDER = "launch"
"""Folder within a run folder for the files of a launch on a cluster, written before the run starts."""
_BEFORE_A_RUN = (LAUNCH_FOLDER, "codes", "config.yaml", "metrics.jsonl")
"""Files that a folder may hold, beside hidden ones, when a run starts there: a killed start leaves the last three."""
_WRITTEN = ("config.yaml", "run.json", "plan.json", "metrics.jsonl", "evaluation.json")
"""Files that a run writes."""


class RunFolder:
    """One run's folder, written by rank 0.

    ::

        config.yaml       the resolved config
        run.json          name, seed, versions, parameters, number of ranks, status
        plan.json         where each table is, and the inputs of that plan; input of `distembed train --plan`
        dataset/          the meaning of the dataset's ids (:mod:`distembed.data.dataset.kept`)
        codes/            codes of tables, where the run begins with a run of codes
        stream.jsonl      the pieces of a stream in the order in which they are read (train --follow)
        metrics.jsonl     one object a line: kind "train", "eval" or "period" (of a stream's rows), step, values
        tensorboard/      the same metrics, unless train.loggers leaves them out
        loggers.json      ids of the run at the services of train.loggers; wandb/ has W&B's own files
        evaluation.json   the final evaluation
        checkpoints/      see :mod:`distembed.checkpoints.checkpoint`; elsewhere where train.checkpoint_dir says so
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._info: dict[str, Any] = {}
        self._metrics: IO[str] | None = None
        self._loggers: Loggers | None = None
        self._last_record: str | None = None

    def require_free(self, wait_seconds: float = 0.0) -> None:
        """Makes sure that no other process trains into this folder, and remembers its ``run.json``.

        The folder is not owned afterwards. :meth:`open` compares ``run.json``, and so notices a process that has
        trained in between.

        Args:
            wait_seconds: Seconds to wait for another process to end.

        Raises:
            UserError: Another process trains into this folder.
        """
        if self.path.is_dir():
            with owned(self.path, wait_seconds):
                self._last_record = self._read_last_record()

    @contextmanager
    def open(
        self,
        config_yaml: str,
        info: Mapping[str, Any],
        resumed_step: int,
        is_at_end: bool = False,
        loggers: Sequence[str] = (),
    ) -> Iterator["RunFolder"]:
        """Owns the folder within the block, and records how the run starts and how it ended.

        It removes the metrics of steps after ``resumed_step`` and the final evaluation of an earlier end.

        Args:
            config_yaml: The resolved config.
            info: Further values for ``run.json``.
            resumed_step: The step after which the run resumes; 0 for a new run.
            is_at_end: Whether the evaluations of ``resumed_step`` will be made again, and are removed too.
            loggers: Names of the loggers that get the metrics too.

        Raises:
            UserError: Another process trains into this folder, or has since :meth:`require_free`.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with owned(self.path):
            if self._read_last_record() != self._last_record:
                raise FolderInUse(f"another process has trained into {self.path} just now; start this one again.")
            write_text(self.path / "config.yaml", config_yaml)
            metrics = self.path / "metrics.jsonl"
            write_text(metrics, "".join(f"{line}\n" for line in _metrics_until(metrics, resumed_step, is_at_end)))
            (self.path / "evaluation.json").unlink(missing_ok=True)  # of an earlier end, after fewer steps
            self._info = {
                "name": self.path.name,
                **info,
                "versions": versions(),
                "status": "running",
                "started": _now(),
            }
            write_json(self.path / "run.json", self._info)
            with (
                _quiet_threads(),
                full_disk_explained(lambda error: _disk_is_full(self.path, error)),
                metrics.open("a", encoding="utf-8") as self._metrics,
            ):
                try:
                    self._loggers = Loggers(loggers, LoggedRun(self.path, config_yaml, resumed_step))
                    yield self
                except BaseException as error:
                    with suppress(RunError):  # run.json does not fit on a full disk; ``error`` is raised anyway
                        self.end(
                            "interrupted" if isinstance(error, KeyboardInterrupt | Interrupted) else "failed", error
                        )
                    raise
                finally:
                    if self._loggers is not None:
                        self._loggers.close(self._info["status"] == "finished")

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Adds a line of metrics to ``metrics.jsonl``, and gives its numbers to the loggers but for a period's line.

        Loggers chart by step, and several periods may have their lines after one step.

        Args:
            kind: ``train``, ``eval`` or ``period``.
            step: Number of training steps taken until now.
            values: Name -> number, text, or numbers by table; ``split`` names the split of an evaluation.
        """
        assert self._metrics is not None and self._loggers is not None
        self._metrics.write(json.dumps(finite({"kind": kind, "step": step, **values})) + "\n")
        self._metrics.flush()
        if kind == "period":
            return
        prefix = values.get("split", kind)
        numbers = {}
        for name, value in values.items():
            by_table = value if isinstance(value, Mapping) else {}
            for path, number in [(name, value), *((f"{name}/{table}", number_) for table, number_ in by_table.items())]:
                if isinstance(number, float | int):
                    numbers[f"{prefix}/{path}"] = number
        self._loggers.log(step, numbers)

    def has_evaluation(self, step: int, split: str | None) -> bool:
        """Returns whether an evaluation on ``split`` after ``step`` steps is recorded, in a folder that is open."""
        lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return any((record := json.loads(line)).get("split") == split and record["step"] == step for line in lines)

    def _read_last_record(self) -> str | None:
        """Returns ``run.json`` as the last process to train into the folder left it; None where none did."""
        file = self.path / "run.json"
        return file.read_text(encoding="utf-8") if file.exists() else None

    def end(self, status: str, error: BaseException | None = None, facts: Mapping[str, Any] | None = None) -> None:
        """Writes the end of the run into ``run.json``: ``finished``, or ``interrupted`` or ``failed`` by an error."""
        self._info |= {"status": status, "finished": _now(), **(facts or {})}
        if error is not None:
            self._info["error"] = f"{type(error).__name__}: {error}"
        write_json(self.path / "run.json", self._info)


@contextmanager
def _quiet_threads() -> Iterator[None]:
    """Keeps TensorBoard's thread from printing the traceback of a full disk, which the next record raises."""
    previous_hook = threading.excepthook
    threading.excepthook = lambda failed: None if isinstance(failed.exc_value, OSError) else previous_hook(failed)
    try:
        yield
    finally:
        threading.excepthook = previous_hook


def _disk_is_full(folder: Path, error: Exception) -> str:
    return (
        f"what the run records in {folder} could not be written ({error}); {free_space(folder)} are left. Free space, "
        "then go on with --resume."
    )


def _metrics_until(path: Path, step: int, without_its_evaluations: bool) -> list[str]:
    """Returns the lines of metrics of steps up to and including ``step``, without damaged lines.

    ``without_its_evaluations`` leaves out the evaluations at ``step`` itself. A killed run may have come further than
    the checkpoint that it resumes from, or have left half a line.
    """
    lines = []
    for line in read_metrics_lines(path):
        try:
            values = json.loads(line)
            is_dropped = without_its_evaluations and values["kind"] == "eval" and values["step"] == step
            if values["step"] <= step and not is_dropped:
                lines.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return lines


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def default_run_folder(name: str) -> Path:
    """Returns the folder of a new run for which none is given: in ``runs``, named ``name`` and the time in UTC."""
    return Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def holds_run(path: Path) -> bool:
    """Returns whether a run was started in a folder; one that was killed before it wrote ``run.json`` was not."""
    return (path / "config.yaml").exists() and (path / "run.json").exists()


def require_new_or_resume(path: Path, resume: bool) -> None:
    """Makes sure that a run may write into a folder: a new or empty one, or with ``resume`` the folder of a run.

    Raises:
        UserError: A run is there and is not resumed, there is none to resume, or the folder holds other files.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"--run-dir {path} is a file; give a folder.")
    for name in _WRITTEN:
        if (path / name).is_dir():
            raise UserError(f"{path / name} is a folder, where a run writes a file; move it away.")
    if resume and not holds_run(path):
        raise UserError(f"--resume: {path} holds no run; give the folder of the run to go on with.")
    if not path.exists() or all(name in _BEFORE_A_RUN or name.startswith(".") for name in os.listdir(path)):
        return
    if not holds_run(path):
        raise UserError(f"--run-dir {path} is a folder with other files and no run; give a new or empty folder.")
    if not resume:
        raise UserError(f"--run-dir {path} holds a run already; add --resume to go on with it, or give another folder.")
