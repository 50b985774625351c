"""Ranks of tests are forked from servers that have loaded what takes long."""

import sys

from tests.processes import run_processes


def test_ranks_start_with_what_takes_long_to_load() -> None:
    run_processes(2, _require_loaded)


def _require_loaded(number: int) -> None:
    missing = {"torchrec", "distembed.training.run", "tests.loaded"} - set(sys.modules)
    assert not missing, missing
