"""Ranks of tests are forked from servers that have loaded what takes long."""

import os
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.processes import SHARED_FOLDER, SharedServer, run_processes


def test_ranks_start_with_what_takes_long_to_load() -> None:
    run_processes(2, _require_loaded)


def _require_loaded(number: int) -> None:
    missing = {"torchrec", "distembed.training.run", "tests.loaded"} - set(sys.modules)
    assert not missing, missing


def test_a_server_is_shared_and_outlives_its_starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_FOLDER, str(tmp_path))
    starter, other, later = (SharedServer("name") for _ in range(3))
    for server in (starter, other, later):
        server.set_forkserver_preload([])
    for server in (starter, other):
        server.ensure_running()
    pid, pipe, own_pipe = starter._forkserver_pid, starter._forkserver_alive_fd, other._forkserver_alive_fd
    assert pid is not None and pipe is not None and own_pipe is not None
    assert (other._forkserver_pid, other._forkserver_address) == (None, starter._forkserver_address)
    os.close(pipe)  # as at the end of the starter
    receiver, sender = other.connect_to_new_process([])
    assert forkserver.read_signed(receiver) not in (pid, os.getpid())
    (tmp_path / "name").write_text((tmp_path / "name").read_text().replace(f"[{os.getpid()},", "[0,"))
    later.ensure_running()
    assert later._forkserver_pid not in (None, pid)
    assert later._forkserver_pid is not None and later._forkserver_alive_fd is not None
    for descriptor in (own_pipe, sender, receiver, later._forkserver_alive_fd):
        os.close(descriptor)
    for ended in (pid, later._forkserver_pid):
        assert os.waitpid(ended, 0)[0] == ended
