"""Tasks of a preparation run once, and their results and errors are the same on every engine."""

from pathlib import Path

import pytest

from distembed.data.prepare.options import ProgressUpdate
from distembed.data.prepare.work import Advance, Work


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
