"""Preparations in several processes: the same results, whoever dies."""

import json
import random
from pathlib import Path

import pytest

from distembed.data.prepare import beats
from distembed.data.prepare.progress import ProgressUpdate
from distembed.errors import RunError, TemporaryFailure, UserError
from tests.data.killed import prepare_with_kills, start
from tests.data.reference import folder_bytes
from tests.data.small_work import TASKS, prepare_in

pytestmark = pytest.mark.distributed

PREPARE = """
import sys
from pathlib import Path
from tests.data.small_work import prepare_in
prepare_in(int(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_any_number_of_processes_makes_the_same(tmp_path: Path, processes: int) -> None:
    updates: list[ProgressUpdate] = []
    results = prepare_in(processes, tmp_path / "out", progress=updates.append)
    assert results["written"] == dict.fromkeys(TASKS, [processes])
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == results["manifest"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", *TASKS]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (last,) = {update for update in updates if update.stage == "write" and update.bytes_done == 210}
    assert last == ProgressUpdate("write", 210, 210, 21)


@pytest.mark.parametrize(
    ("trouble", "kind", "text"),
    [
        (UserError("rows are bad"), UserError, "^rows are bad$"),
        (RunError("nothing works"), RunError, "^nothing works$"),
        (OSError(28, "No space left on device"), OSError, "No space left"),
        (KeyError("key"), RunError, "process 1 has failed: KeyError: 'key'"),
    ],
)
def test_the_error_of_another_process_is_that_of_the_command(
    tmp_path: Path, trouble: Exception, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        prepare_in(2, tmp_path / "out", trouble=trouble)
    assert not list(tmp_path.iterdir())


def test_a_dead_process_ends_the_command_and_what_was_done_is_kept(tmp_path: Path) -> None:
    notes: list[str] = []
    with pytest.raises(TemporaryFailure, match=r"process 1 of 2 has ended \(exit code 3\).*what is done is kept"):
        prepare_in(2, tmp_path / "out", trouble="die", note=notes.append)
    results = prepare_in(1, tmp_path / "out", note=notes.append)
    assert results["written"][TASKS[0]] == [2] and results["written"][TASKS[3]] == [1]
    assert len(notes) == 1 and "goes on with what was done" in notes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_other_inputs_or_options_had_done_is_not_gone_on_with(tmp_path: Path) -> None:
    notes: list[str] = []
    with pytest.raises(TemporaryFailure):
        prepare_in(2, tmp_path / "out", trouble="die")
    assert prepare_in(1, tmp_path / "out", "others", note=notes.append)["written"] == dict.fromkeys(TASKS, [1])
    assert len(notes) == 1 and "begins anew" in notes[0]


def test_a_process_that_is_not_heard_of_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a machine is switched off; here there are no such processes."""
    from functools import partial

    from distembed.data.prepare.processes import run_in_processes
    from tests.data.small_work import prepare

    monkeypatch.setattr(beats, "PATIENCE_SECONDS", 0.5)
    program = partial(prepare, tmp_path / "out", "rows", None)
    with pytest.raises(TemporaryFailure, match="nothing has been heard of process 1 of 2"):
        run_in_processes(program, 1, 0, 2)
    with pytest.raises(TemporaryFailure, match="process 0 of 2 has not begun"):
        run_in_processes(program, 1, 1, 2)


def test_two_nodes_share_a_folder(tmp_path: Path) -> None:
    code = """
import sys
from functools import partial
from pathlib import Path
from distembed.data.prepare.processes import run_in_processes
from tests.data.small_work import prepare
run_in_processes(partial(prepare, Path(sys.argv[1]), "rows", None), 2, int(sys.argv[2]), 2)
"""
    nodes = [start(code, tmp_path / "out", node) for node in (1, 0)]
    for node in nodes:
        assert node.communicate(timeout=60)[1] == b"" and node.returncode == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == prepare_in(1, tmp_path / "alone")["manifest"]


@pytest.mark.slow  # preparing rows is killed so by default (test_resumed.py)
def test_killed_at_random_moments_no_task_is_done_twice(tmp_path: Path) -> None:
    prepare_in(1, tmp_path / "undisturbed")
    killed, done = prepare_with_kills(
        lambda: start(PREPARE, 2, tmp_path / "out"), tmp_path / "out", random.Random(0), 20
    )
    assert killed and done
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "undisturbed")
