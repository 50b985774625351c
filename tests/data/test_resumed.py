"""Preparing Criteo's rows, and resuming after it was interrupted."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from distembed.base.errors import UserError
from distembed.data.prepare import CriteoOptions, ResourceLimits, pipeline, prepare_criteo, write_parquet
from distembed.data.prepare.options import ProgressUpdate
from distembed.data.prepare.work import Advance, Work
from distembed.data.prepare.write_parquet import FilePlan, FileWriter, WrittenFile
from tests.data import reference
from tests.data.killed import Forked, prepare_with_kills, result_files
from tests.data.reference import folder_bytes

OPTIONS = CriteoOptions(split="days", min_count=3)
OPTIONS_OF_FEW = CriteoOptions(max_rejected=1, hash_size=50)


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    folder = tmp_path_factory.mktemp("days")
    for day in range(5):
        content = reference.content(300 + 40 * day, day, malformed=0.005)
        (folder / f"day_{day}.tsv").write_bytes(content)
    yield sorted(folder.iterdir())


@pytest.fixture(scope="module")
def undisturbed(days: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    prepare_criteo(days, output, OPTIONS)
    return folder_bytes(output)


@pytest.mark.thorough
@pytest.mark.parametrize("part_bytes", [100, 10_000])
def test_the_bytes_depend_on_no_size_of_parts(
    days: list[Path], undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Nor of blocks, nor on the memory and threads; not even where parts have no line at all."""
    monkeypatch.setattr(ResourceLimits, "counting_bytes", 1)
    monkeypatch.setattr(ResourceLimits, "block_bytes", lambda limits, has_lists: 3011)
    if part_bytes == 100:
        days = [tmp_path / "short.tsv"]
        days[0].write_bytes(reference.content(12, 7, malformed=0.2))
    monkeypatch.setattr(pipeline, "PART_BYTES", part_bytes)
    options = OPTIONS_OF_FEW if part_bytes == 100 else OPTIONS
    prepare_criteo(days, tmp_path / "parts", options, ResourceLimits(320 << 20, threads=5))
    if part_bytes == 100:
        monkeypatch.setattr(pipeline, "PART_BYTES", 2**20)
        prepare_criteo(days, tmp_path / "whole", OPTIONS_OF_FEW)
        undisturbed = folder_bytes(tmp_path / "whole")
    assert folder_bytes(tmp_path / "parts") == undisturbed


def test_interrupted_it_goes_on(
    days: list[Path], undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, written = tmp_path / "out", []

    def write(writer: FileWriter, plan: FilePlan) -> WrittenFile:
        if len(written) == 2:
            raise KeyboardInterrupt
        return write_and_note(writer, plan)

    def write_and_note(writer: FileWriter, plan: FilePlan) -> WrittenFile:
        written.append(plan.path)
        return original(writer, plan)

    original = FileWriter.write
    monkeypatch.setattr(write_parquet.FileWriter, "write", write)
    kept: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        prepare_criteo(days, output, OPTIONS, note=kept.append)
    assert not output.exists() and len(kept) == 1 and "finished tasks are kept" in kept[0]
    done = result_files(output)
    assert len([name for name in done if name.startswith("read/")]) == 5 and "vocabulary/000000.json" in done
    notes: list[str] = []
    before = list(written)
    monkeypatch.setattr(write_parquet.FileWriter, "write", write_and_note)
    prepare_criteo(days, output, OPTIONS, note=notes.append)
    assert folder_bytes(output) == undisturbed and "this resumes" in notes[0]
    assert len(set(written)) == len(written) and set(before) < set(written)


def test_a_changed_input_is_not_gone_on_with(days: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.tsv"
    rows.write_bytes(days[0].read_bytes())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(write_parquet.FileWriter, "write", interrupt)
        prepare_criteo([rows], tmp_path / "out", CriteoOptions(hash_size=50))
    os.utime(rows, (1, 1))
    notes: list[str] = []
    prepare_criteo([rows], tmp_path / "out", CriteoOptions(hash_size=50), note=notes.append)
    assert any("starts over" in note for note in notes)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "rows.tsv"]


@pytest.mark.parametrize("engine", ["ray", "spark"])
def test_a_cluster_cannot_read_pipes(tmp_path: Path, engine: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=f"engine .*'?{engine}.*, and .*pipe has no known size"):
        prepare_criteo([tmp_path / "pipe"], tmp_path / "out", OPTIONS, ResourceLimits(engine=engine))
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def leftovers(output: Path) -> list[str]:
    return [path.name for path in output.parent.iterdir() if path.name.startswith(f".{output.name}.")]


def prepare(days: list[Path], output: Path) -> None:
    prepare_criteo(days, output, OPTIONS, ResourceLimits(threads=2))


def kill_and_compare(days: list[Path], undisturbed: dict[str, bytes], tmp_path: Path, kills: int) -> None:
    draw, killed, done = random.Random(kills), 0, 0
    while killed < kills:
        output = tmp_path / f"out-{killed}"
        more, finished = prepare_with_kills(lambda to=output: Forked(prepare, days, to), output, draw, kills - killed)
        killed, done = killed + more, done + finished
        assert folder_bytes(output) == undisturbed
        if leftovers(output):  # killed when the dataset was in place
            with pytest.raises(UserError, match="exists already"):
                prepare(days, output)
        assert not leftovers(output)
    assert done


def test_killed_at_random_moments(days: list[Path], undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    kill_and_compare(days, undisturbed, tmp_path, 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_a_hundred_times(days: list[Path], undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    kill_and_compare(days, undisturbed, tmp_path, 100)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_tasks", [0, 1, 7])
def test_a_finished_task_is_not_done_again(tmp_path: Path, num_tasks: int, threads: int) -> None:
    tasks = [f"a/b {number}" for number in range(num_tasks)]
    done: list[str] = []
    fails = set(tasks[4:5])

    def do(task: str, advance: Advance) -> dict[str, object]:
        if task in fails:
            raise OSError("the disk is gone")
        done.append(task)
        return {"name": task, "float": 0.1, "many": (1, 2)}

    if fails:
        with pytest.raises(OSError, match="the disk is gone"):
            Work(tmp_path).run_stage("read", tasks, do, threads=threads)
        assert len(done) >= 4
        fails.clear()
    for _ in range(2):
        results = Work(tmp_path).run_stage("read", tasks, do, threads=threads)
        assert results == [{"name": task, "float": 0.1, "many": [1, 2]} for task in tasks]
        assert sorted(done) == tasks


def test_progress_counts_what_was_done_before_a_kill(tmp_path: Path) -> None:
    updates: list[ProgressUpdate] = []
    work = Work(tmp_path, updates.append)

    def do(task: str, advance: Advance) -> None:
        advance(10, 1)
        advance(5, 0)

    work.run_stage("write", ["a", "b"], do, total_bytes=45)
    work = Work(tmp_path, updates.append)
    work.run_stage("write", ["a", "b", "c"], do, total_bytes=45)
    assert updates[-1] == ProgressUpdate("write", 45, 45, 3)
    assert [update.bytes_done for update in updates] == sorted(update.bytes_done for update in updates)
