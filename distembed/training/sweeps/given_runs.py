"""The folders of runs that are given, of which those of a sweep may be given at once: by its folder, or ``SWEEP/*``."""

from collections.abc import Sequence
from pathlib import Path

from distembed.base.errors import UserError
from distembed.training.run_folder.folder import holds_run
from distembed.training.sweeps.sweep import SWEEP_FILE, SWEEP_OWN


def given_runs(places: Sequence[Path]) -> list[Path]:
    """Returns the folders of runs: those that are given, and in the place of a sweep's folder those of its runs.

    What a sweep keeps beside its runs, as a shell's ``SWEEP/*`` names it, is left out. Anything else that is no run is
    returned, to be refused by what reads it.

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
