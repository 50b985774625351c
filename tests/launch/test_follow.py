"""Which lines are shown while a job runs, and which of several failures is named."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torchx.specs import AppState, AppStatus

from distembed.error_file import record_error
from distembed.errors import RunError
from launch import follow
from launch.follow import first_failure


def fail(monkeypatch: pytest.MonkeyPatch, file: Path, error: BaseException) -> None:
    """What a rank leaves that dies of an error."""
    file.parent.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    try:
        raise error
    except BaseException as raised:
        record_error(raised)


def test_the_cause_comes_before_its_consequences_and_the_first_before_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_failure(tmp_path) is None
    for node, error in (
        ("node-3", RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [10.0.0.1]:4")),
        ("node-2", RunError("the loss is nan")),
        ("node-1", RunError("of a rank that was late")),
    ):
        fail(monkeypatch, tmp_path / node / "error.json", error)
    torn = tmp_path / "node-0" / "error.json"
    torn.parent.mkdir()
    torn.write_text('{"message": {"mess')
    failure = first_failure(tmp_path)
    assert failure is not None
    assert failure.message == "RunError: the loss is nan" and failure.where.parent.name == "node-2"
    assert "in fail" in failure.traceback and "raise error" in failure.traceback
    assert first_failure(tmp_path, since=failure.time + 1e9) is None


def test_where_there_are_only_consequences_the_first_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ("b", "a"):
        fail(monkeypatch, tmp_path / node / "error.json", ConnectionError(f"Connection reset by peer of {node}"))
    failure = first_failure(tmp_path)
    assert failure is not None and failure.message.endswith("of b")


def test_the_time_of_errors_that_torch_itself_has_written_is_in_whole_seconds(tmp_path: Path) -> None:
    for node, seconds in (("a", 20), ("b", 10)):
        (tmp_path / node).mkdir()
        extra = {"py_callstack": "Traceback", "timestamp": str(seconds)}
        noted = {"message": {"message": f"of {node}", "extraInfo": extra}}
        (tmp_path / node / "error.json").write_text(json.dumps(noted))
    failure = first_failure(tmp_path)
    assert failure is not None and (failure.message, failure.time) == ("of b", 10.0)


class FakeRunner:
    """A scheduler's answers, one after the other; an exception is raised, the last one goes on."""

    def __init__(self, answers: list[Any], lines: dict[int, list[str]]) -> None:
        self.answers, self.lines = answers, lines

    def status(self, handle: str) -> AppStatus | None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return None if answer is None else AppStatus(state=answer)

    def log_lines(self, handle: str, role: str, k: int, should_tail: bool) -> Iterator[str]:
        yield from self.lines[k]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_POLL_SECONDS", 0.001)


def test_lines_of_rank_0_and_of_launchers_are_shown_whichever_node_they_come_from() -> None:
    lines = {
        0: ["[rank 2]:step 10\n", "[rank 3]:step 10\n", "restarting\n"],
        1: ["[rank 0]:step 10\n", "[rank 1]:step 10\n", "[rank 10]:step 10\n"],
    }
    runner: Any = FakeRunner([AppState.PENDING, AppState.RUNNING, AppState.SUCCEEDED], lines)
    said: list[str] = []
    ended = follow.follow(runner, "slurm://s/1", "train", 2, said.append)
    assert ended is not None and ended.state == AppState.SUCCEEDED
    assert said[0] == "waiting: pending"
    assert sorted(said[1:]) == ["node 0: restarting", "step 10"]


def test_a_scheduler_that_does_not_answer_for_a_while_is_no_end_of_the_job() -> None:
    away = ConnectionError("timed out")
    runner: Any = FakeRunner([away, AppState.RUNNING, away, away, AppState.FAILED], {0: []})
    said: list[str] = []
    ended = follow.follow(runner, "slurm://s/1", "train", 1, said.append)
    assert ended is not None and ended.state == AppState.FAILED
    assert said.count("waiting for the scheduler: timed out") == 3


def test_a_scheduler_that_never_answers_again_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "_PATIENCE_SECONDS", 0.05)
    runner: Any = FakeRunner([ConnectionError("timed out")], {})
    with pytest.raises(RunError, match="nothing is known of slurm://s/1 any longer: timed out"):
        follow.follow(runner, "slurm://s/1", "train", 1, lambda _: None)


def test_what_is_wrong_on_this_machine_is_said_at_once() -> None:
    runner: Any = FakeRunner([OSError(28, "No space left on device")], {})
    with pytest.raises(RunError, match="No space left"):
        follow.follow(runner, "local_cwd://s/1", "train", 1, lambda _: None)


def test_a_job_that_nobody_knows_has_no_state() -> None:
    runner: Any = FakeRunner([None], {})
    assert follow.follow(runner, "slurm://s/1", "train", 1, lambda _: None) is None
