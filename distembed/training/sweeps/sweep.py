"""A sweep as a whole: its folder, its runs, and the comparison at its end.

::

    DIR/sweep.json     the config file, the settings, and what became of each run
    DIR/NAME/          a run, as `distembed train` makes it
    DIR/logs/NAME.log  what it printed
    DIR/report.html    the comparison of all runs

What a run has come to is known from its own folder, so that a sweep goes on after any end: finished runs are left as
they are, others are resumed or begun.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from distembed.base.errors import Interrupted, RunError, UserError
from distembed.base.files import require_folder, write_json
from distembed.base.names import one_of
from distembed.base.units import enumerate_lines, enumerate_names
from distembed.training.run_folder.folder import holds_run
from distembed.training.sweeps.planned import PlannedRun, require_no_mistakes
from distembed.training.sweeps.worker import Outcome
from distembed.training.sweeps.workers import Workers

SWEEP_FILE, SWEEP_REPORT = "sweep.json", "report.html"
_LOGS = "logs"
SWEEP_OWN = (SWEEP_FILE, _LOGS, SWEEP_REPORT)
"""What a sweep keeps in its folder beside its runs."""


@dataclass
class Sweep:
    """The runs of a sweep and what becomes of them.

    Attributes:
        config: The config file.
        settings: ``key=value``, of which some have several values.
        folder: The sweep's folder.
        runs: Its runs, in the order in which they are begun.
        say: Prints a line.
        baseline: Name of the run, or of the runs that differ in their seed alone, that the others are compared with;
            None for none.
        outcomes: How each run ended, by name; those that were finished before are among them.
    """

    config: Path
    settings: Sequence[str]
    folder: Path
    runs: Sequence[PlannedRun]
    say: Callable[[str], None]
    baseline: str | None = None
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses a baseline that is none of the runs, before any is trained."""
        if self.baseline is not None:
            one_of(
                "--baseline", self.baseline, dict.fromkeys(name for run in self.runs for name in (run.name, run.recipe))
            )

    def train(self, num_workers: int) -> None:
        """Trains all runs that are not finished, whatever becomes of others.

        Args:
            num_workers: Number of processes that train runs at the same time.

        Raises:
            UserError: The folder cannot be used, or the model of a run cannot be built; nothing is trained then.
            RunError: The folder cannot be written.
            Interrupted: After a signal, once the runs that were being trained have saved a checkpoint.
        """
        require_sweep_folder(self.folder)
        (self.folder / _LOGS).mkdir(parents=True, exist_ok=True)
        self.outcomes |= {run.name: Outcome("finished") for run in self.runs if run.state == "finished"}
        to_train = [run for run in self.runs if run.state != "finished"]
        self._record()
        with Workers(num_workers, self.folder / _LOGS) as workers:
            self._check(workers, to_train)
            for run, outcome in workers.do("train", to_train, self._say_begun):
                self.outcomes[run.name] = outcome
                self._record()
                self._say_ended(run, outcome)
            stopped = workers.stopped
        if stopped:
            num_finished = sum(outcome.status == "finished" for outcome in self.outcomes.values())
            raise Interrupted(
                f"interrupted with {num_finished} of {len(self.runs)} runs finished; the same command goes on with "
                "the others."
            )

    def require_all_finished(self) -> None:
        """Makes sure that every run has come to its end.

        Raises:
            RunError: Some have not; the error says why.
        """
        others = {name: outcome for name, outcome in self.outcomes.items() if outcome.status != "finished"}
        if others:
            lines = [f"{name}: {outcome.error}" for name, outcome in others.items()]
            raise RunError(
                f"{len(others)} of {len(self.runs)} runs did not finish; the same command tries them again. What they "
                f"printed is in {self.folder / _LOGS}:{enumerate_lines(lines)}"
            )

    def _check(self, workers: Workers, runs: Sequence[PlannedRun]) -> None:
        """Builds the model of every recipe without weights, one seed of each, before the first run is trained.

        Raises:
            UserError: One cannot be built.
        """
        recipes: dict[str, PlannedRun] = {}
        for run in runs:
            recipes.setdefault(run.recipe, run)
        mistakes: dict[str, list[str]] = {}
        for run, outcome in workers.do("check", list(recipes.values())):
            if outcome.status == "failed":
                mistakes.setdefault(outcome.error or "", []).append(run.name)
        require_no_mistakes(mistakes)

    def _record(self) -> None:
        """Writes what has become of the runs."""
        runs = {
            run.name: {"settings": list(run.varied), **asdict(self.outcomes[run.name])}
            if run.name in self.outcomes
            else {"settings": list(run.varied), "status": "waiting"}
            for run in self.runs
        }
        value = {"format": "distembed sweep", "config": str(self.config), "settings": list(self.settings), "runs": runs}
        write_json(self.folder / SWEEP_FILE, value)

    def _say_begun(self, run: PlannedRun) -> None:
        self.say(f"{'resuming' if run.state == 'resumed' else 'training'} {run.name}")

    def _say_ended(self, run: PlannedRun, outcome: Outcome) -> None:
        told = outcome.described or outcome.error or ""
        place = f"[{len(self.outcomes)}/{len(self.runs)}]"
        self.say(f"{place} {run.name} {outcome.status} in {outcome.seconds:,.0f} s  {told}".rstrip())


def require_sweep_folder(folder: Path) -> None:
    """Makes sure that a sweep may write into a folder: a new or empty one, or that of a sweep.

    Raises:
        UserError: The path is none of such a folder.
        RunError: No file can be made there.
    """
    require_folder("--run-dir", folder)
    found = sorted(os.listdir(folder)) if folder.is_dir() else []
    if found and SWEEP_FILE not in found:
        raise UserError(
            f"--run-dir {folder} is a folder with other files and no sweep ({enumerate_names(found, most=3)}); give a "
            "new or empty folder, or that of a sweep."
        )


def given_runs(places: Sequence[Path]) -> list[Path]:
    """Returns folders of runs, with the folder of a sweep replaced by the folders of its runs.

    A sweep's own files, which a shell's ``SWEEP/*`` lists too, are left out. Any other place is returned as it is; its
    reader refuses it.

    Args:
        places: Folders of runs and of sweeps.

    Raises:
        UserError: A sweep has no run that has begun.
    """
    found: list[Path] = []
    for place in places:
        if place.name in SWEEP_OWN and (place.parent / SWEEP_FILE).is_file():
            continue
        found += _runs_of_sweep(place) if (place / SWEEP_FILE).is_file() else [place]
    return found


def _runs_of_sweep(folder: Path) -> list[Path]:
    runs = sorted(path for path in folder.iterdir() if holds_run(path))
    if not runs:
        raise UserError(f"{folder} is a sweep none of whose runs has begun; give folders that `distembed train` made.")
    return runs
