"""The runs of a sweep with their configs: what each is going to do, found and checked before the first one starts."""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distembed.base.errors import UserError
from distembed.base.files import read_regular_file
from distembed.base.units import enumerate_lines, enumerate_names
from distembed.base.validation import MAX_BYTES
from distembed.checkpoints.store import checkpoint_place
from distembed.training.config import Config, load_config
from distembed.training.describe import describe
from distembed.training.initial_run import resumed_config
from distembed.training.run_folder.folder import holds_run
from distembed.training.run_folder.record import RunInfo
from distembed.training.start import RunOptions, find_start
from distembed.training.sweeps.axes import NamedRun, named_runs, parse_axes

RunState = Literal["finished", "resumed", "new"]
"""What a sweep finds of a run: a finished one is left as it is, one that was begun is resumed."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of a sweep.

    Attributes:
        name: Its name.
        recipe: The name without the seed, which runs have in common that differ in it alone.
        varied: The settings that vary, with its values.
        config: The whole config.
        folder: Its folder.
        state: What is there of it.
    """

    name: str
    recipe: str
    varied: tuple[str, ...]
    config: Config
    folder: Path
    state: RunState

    @property
    def options(self) -> RunOptions:
        """What it is started with."""
        return RunOptions(self.folder, resume=self.state == "resumed")


def plan_sweep(config: Path, settings: Sequence[str], folder: Path) -> list[PlannedRun]:
    """Returns the runs of a sweep, in the order of the values.

    Args:
        config: The config file.
        settings: ``key=value``, of which some have several values.
        folder: The sweep's folder, which gets a folder for each run.

    Raises:
        UserError: A run cannot be started; the error lists what is wrong with all of them. Or this process is one of
            several ranks.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError(
            f"a sweep trains each run in one process, and this is one of {os.environ['WORLD_SIZE']} ranks; start it by "
            "itself, with --workers for several runs at a time."
        )

    def is_valid(overrides: Sequence[str]) -> bool:
        try:
            load_config(config, overrides)
        except UserError:
            return False
        return True

    mistakes: dict[str, list[str]] = {}
    planned = []
    for run in named_runs(parse_axes(settings, is_valid)):
        try:
            planned.append(_plan_run(config, run, folder))
        except UserError as error:
            mistakes.setdefault(str(error), []).append(run.name)
    require_no_mistakes(mistakes)
    return planned


def require_no_mistakes(mistakes: dict[str, list[str]]) -> None:
    """Makes sure that no run of a sweep is wrong.

    Args:
        mistakes: What is wrong, with the names of the runs that it is wrong with.

    Raises:
        UserError: There are mistakes.
    """
    if mistakes:
        lines = [f"{enumerate_names(runs, most=4)}: {text}" for text, runs in mistakes.items()]
        raise UserError(f"the sweep is not started, since some of its runs cannot be:{enumerate_lines(lines)}")


def _plan_run(path: Path, run: NamedRun, folder: Path) -> PlannedRun:
    """Returns a run, after the checks of one that is started by itself; nothing is written."""
    own_folder = (folder / run.name).absolute()
    config = _with_own_checkpoints(load_config(path, run.overrides), own_folder)
    planned = PlannedRun(run.name, run.recipe, run.varied, config, own_folder, _state(config, own_folder))
    if planned.state != "finished":
        find_start(config, planned.options, lambda function: function(), _say_nothing)
        describe(config)
    return planned


def _state(config: Config, folder: Path) -> RunState:
    if not holds_run(folder):
        return "new"
    if RunInfo.read(folder / "run.json").status != "finished":
        return "resumed"
    text = read_regular_file(folder / "config.yaml", MAX_BYTES).decode(errors="replace")
    # a config that goes on from another run's is recorded with its tables as they have grown
    return "finished" if text == resumed_config(config, folder).to_yaml() else "resumed"


def _with_own_checkpoints(config: Config, folder: Path) -> Config:
    """Returns the config of a run with checkpoints of its own: those outside of its folder are in one of its name."""
    shared = config.train.checkpoint_dir
    place = os.path.normpath(checkpoint_place(folder, shared))
    if shared is None or ("://" not in shared and Path(place).is_relative_to(folder)):
        return config
    train = dataclasses.replace(config.train, checkpoint_dir=f"{shared.rstrip('/')}/{folder.name}")
    return dataclasses.replace(config, train=train)


def _say_nothing(text: str) -> None:
    """Prints nothing: a sweep says by itself what its runs are."""
