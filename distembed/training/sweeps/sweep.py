"""A sweep: its folder, and its runs with their configs, found and checked before the first one starts.

::

    DIR/sweep.json     the config file, the settings, and the outcome of each run
    DIR/NAME/          a run, as `distembed train` makes it
    DIR/logs/NAME.log  its output
    DIR/optuna.log     a study of the runs for each command, for `optuna-dashboard DIR/optuna.log`
    DIR/report.html    the comparison of all runs

Each run's own folder says how far it has come, so that a sweep resumes after any end: finished and pruned runs are left
as they are, others are resumed or started.
"""

import dataclasses
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from distembed.base.errors import RunError, UserError
from distembed.base.files import read_regular_file, require_folder, write_json
from distembed.base.names import one_of
from distembed.base.units import enumerate_lines, enumerate_names
from distembed.base.validation import MAX_BYTES
from distembed.checkpoints.store import checkpoint_place
from distembed.training.config import Config, load_config, relative_to_run
from distembed.training.describe import describe
from distembed.training.initial_run import resumed_config
from distembed.training.run_folder.folder import holds_run
from distembed.training.run_folder.lock import LOCK_NAME
from distembed.training.run_folder.record import RunInfo
from distembed.training.start import RunOptions, find_start
from distembed.training.sweeps.axes import NamedRun, named_runs, parse_axes

SWEEP_FILE, SWEEP_REPORT, STUDY_FILE, LOGS = "sweep.json", "report.html", "optuna.log", "logs"
_OWN = (SWEEP_FILE, SWEEP_REPORT, STUDY_FILE, LOGS)
"""How the error of a run begins that was stopped early, since other runs were better."""
Sampler = Literal["grid", "random", "tpe"]
RunState = Literal["finished", "pruned", "resumed", "new"]


@dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep, named as in :class:`~distembed.training.sweeps.axes.NamedRun`, with its config and folder."""

    name: str
    recipe: str
    varied: tuple[str, ...]
    config: Config
    folder: Path
    state: RunState

    @property
    def options(self) -> RunOptions:
        """The options that it is started with; it waits for a process of a killed sweep that still saves its run."""
        return RunOptions(self.folder, resume_or_start=True)


@dataclass(frozen=True)
class Outcome:
    """How a run of a sweep ended: why it did not finish, its final metrics as a line, and the seconds that it took."""

    status: Literal["finished", "pruned", "failed", "interrupted"]
    error: str | None = None
    described: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Sweep:
    """A sweep and the way in which it is trained.

    Attributes:
        config: The config file.
        settings: ``key=value`` or ``key=`` and several values.
        folder: The sweep's folder.
        runs: Its runs, in the order in which they are started; by ``tpe``, all that may be chosen.
        sampler: ``grid`` and ``random`` train all runs; ``tpe`` chooses each by the results of earlier runs.
        trials: Number of runs that ``tpe`` chooses.
        prune: Whether a run is stopped early whose evaluation is worse than the median of the other runs.
        baseline: Run, or recipe of runs that differ in the seed alone, that others are compared with.
    """

    config: Path
    settings: Sequence[str]
    folder: Path
    runs: Sequence[PlannedRun]
    sampler: Sampler = "grid"
    trials: int | None = None
    prune: bool = False
    baseline: str | None = None

    def __post_init__(self) -> None:
        if self.baseline is not None:
            names = dict.fromkeys(name for run in self.runs for name in (run.name, run.recipe))
            one_of("--baseline", self.baseline, names)

    def record(self, outcomes: Mapping[str, Outcome]) -> None:
        """Writes ``sweep.json`` with the outcome of each run; a run without one is waiting, or left out by ``tpe``."""
        runs = {
            run.name: {
                "settings": list(run.varied),
                **(asdict(outcomes[run.name]) if run.name in outcomes else {"status": "waiting"}),
            }
            for run in self.runs
            if self.sampler != "tpe" or run.name in outcomes
        }
        value = {"format": "distembed sweep", "config": str(self.config), "settings": list(self.settings), "runs": runs}
        write_json(self.folder / SWEEP_FILE, value)

    def require_all_finished(self, outcomes: Mapping[str, Outcome]) -> None:
        """Raises :class:`~distembed.base.errors.RunError`, with the reasons, where runs have failed."""
        failed = [f"{name}: {end.error}" for name, end in outcomes.items() if end.status in ("failed", "interrupted")]
        if failed:
            raise RunError(
                f"{len(failed)} of {len(self.runs)} runs did not finish; the same command tries them again. Their "
                f"output is in {self.folder / LOGS}:{enumerate_lines(failed)}"
            )


def plan_sweep(
    config: Path, settings: Sequence[str], folder: Path, sampler: Sampler = "grid", trials: int | None = None
) -> list[PlannedRun]:
    """Checks all runs of a sweep, and returns them in the order of the values; no run is started.

    ``random`` takes the first ``trials`` runs after a shuffle with a fixed seed.

    Raises:
        UserError: A run cannot be started; the error lists the mistakes of all runs. Or this process is one of several
            ranks.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            f"a sweep trains each run in one process, and this is one of {os.environ['WORLD_SIZE']} ranks; start it by "
            "itself, with --workers for several runs at a time."
        )
    if (trials is None) != (sampler == "grid"):
        raise UserError(
            f"--sampler is {sampler} and --trials is {trials}: random and tpe need a number of runs, such as --trials "
            "20, and grid trains all runs."
        )

    def is_valid(overrides: Sequence[str]) -> bool:
        try:
            load_config(config, overrides)
        except UserError:
            return False
        return True

    runs = named_runs(parse_axes(settings, is_valid))
    if sampler == "random":
        random.Random(0).shuffle(runs)
        runs = runs[:trials]
    mistakes: dict[str, list[str]] = {}
    planned = []
    for run in runs:
        try:
            planned.append(plan_run(run, load_config(config, run.overrides), folder))
        except UserError as error:
            mistakes.setdefault(str(error), []).append(run.name)
    require_no_mistakes(mistakes)
    return planned


def plan_run(run: NamedRun, config: Config, folder: Path) -> PlannedRun:
    """Returns a run of a sweep's folder with its state, and refuses one that cannot be started or resumed.

    Raises:
        UserError: The run cannot be started, or its folder holds a run of another config.
    """
    own_folder = (folder / run.name).absolute()
    config = _with_own_checkpoints(config, own_folder)
    planned = PlannedRun(run.name, run.recipe, run.varied, config, own_folder, _state(config, own_folder))
    if planned.state in ("new", "resumed"):
        find_start(config, planned.options, lambda function: function(), lambda text: None)
        describe(config)
    return planned


def require_no_mistakes(mistakes: Mapping[str, Sequence[str]]) -> None:
    """Raises :class:`~distembed.base.errors.UserError` where runs have mistakes, each with the names of its runs."""
    if mistakes:
        lines = [f"{enumerate_names(runs, most=4)}: {text}" for text, runs in mistakes.items()]
        raise UserError(f"the sweep is not started, since some of its runs cannot be:{enumerate_lines(lines)}")


def _state(config: Config, folder: Path) -> RunState:
    """Returns how far the run in a folder has come.

    A run whose config has changed counts as ``resumed``, even if it had finished: :func:`find_start` then refuses it.
    """
    if not holds_run(folder):
        return "new"
    info = RunInfo.read(folder / "run.json")
    text = read_regular_file(folder / "config.yaml", MAX_BYTES).decode(errors="replace")
    # the config in the folder has grown tables and decisions, which resumed_config gives this config too
    if text != relative_to_run(resumed_config(config, folder), folder).to_yaml():
        return "resumed"
    ends: dict[str, RunState] = {"finished": "finished", "pruned": "pruned"}
    return ends.get(info.status, "resumed")


def _with_own_checkpoints(config: Config, folder: Path) -> Config:
    """Returns the config with a place for checkpoints that no other run of the sweep has.

    A ``train.checkpoint_dir`` outside of the run's folder is shared, and gets a folder of the run's name.
    """
    shared = config.train.checkpoint_dir
    place = os.path.normpath(checkpoint_place(folder, shared))
    if shared is None or ("://" not in shared and Path(place).is_relative_to(folder)):
        return config
    train = dataclasses.replace(config.train, checkpoint_dir=f"{shared.rstrip('/')}/{folder.name}")
    return dataclasses.replace(config, train=train)


def require_sweep_folder(folder: Path) -> None:
    """Refuses a path where no sweep can write: a file, or a folder with other files and no sweep."""
    require_folder("--run-dir", folder)
    # a sweep that was killed at once has its lock and an empty folder of logs
    files = sorted({*os.listdir(folder)} - {LOCK_NAME, LOGS}) if folder.is_dir() else []
    if files and SWEEP_FILE not in files:
        raise UserError(
            f"--run-dir {folder} is a folder with other files and no sweep ({enumerate_names(files, most=3)}); give a "
            "new or empty folder, or that of a sweep."
        )


def given_runs(folders: Sequence[Path]) -> list[Path]:
    """Returns folders of runs, with the folder of a sweep replaced by the folders of its runs.

    A sweep's own files, which a shell's ``SWEEP/*`` lists too, are left out. Any other path is returned
    unchanged; reading it as a run refuses it.

    Raises:
        UserError: A sweep has no run that has begun.
    """
    runs_: list[Path] = []
    for folder in folders:
        if (folder / SWEEP_FILE).is_file():
            runs = sorted(path for path in folder.iterdir() if holds_run(path))
            if not runs:
                raise UserError(
                    f"{folder} is a sweep none of whose runs has begun; give folders that `distembed train` made."
                )
            runs_ += runs
        elif folder.name not in _OWN or not (folder.parent / SWEEP_FILE).is_file():
            runs_.append(folder)
    return runs_
