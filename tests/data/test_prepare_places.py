"""Where a preparation may write, whether there is room, and two at once: a sentence each, and nothing is lost."""

import errno
import os
import random
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from distembed.base.errors import RunError, UserError
from distembed.base.files import nearest_folder, require_free_space
from distembed.data.prepare import ResourceLimits, prepare_criteo, staging, synthesize_criteo
from distembed.data.prepare.options import LEAST_MEMORY_BYTES, MOST_THREADS
from distembed.data.prepare.staging import staged_folder
from tests.data import reference
from tests.data.killed import start
from tests.data.reference import folder_bytes

ROWS = reference.content(2000, 1)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "rows.tsv").write_bytes(ROWS)
    return tmp_path / "in" / "rows.tsv"


@pytest.fixture
def give_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Says that every disk has so many bytes free."""
    return lambda free: monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**15, 0, int(free)))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("loop", "exists already|is no dataset"),
        ("loop/x", "cannot be made"),
        ("in/rows.tsv", "is an input too"),
        ("in/rows.tsv/x", "cannot be made"),
        ("in", "lies inside the output"),
        ("file", "exists already|is no dataset"),
        ("file/x", "cannot be made"),
        ("folder", "exists already|is no dataset"),
        ("x" * 300, "cannot be made"),
        ("a\0b", "null byte"),
        ("a\udcff", "no characters in UTF-8"),
        ("/proc/self/x", "cannot be made"),
    ],
)
def test_an_output_that_cannot_be_is_said_in_a_sentence(
    tmp_path: Path, rows: Path, name: str, said: str, overwrite: bool
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis").write_text("precious")
    before = folder_bytes(tmp_path)
    with pytest.raises(UserError, match=said):
        prepare_criteo([rows], tmp_path / name, overwrite=overwrite)
    assert folder_bytes(tmp_path) == before


def test_a_folder_that_may_not_be_written(tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match="out cannot be made: .*Permission denied.*name another output"):
        prepare_criteo([rows], tmp_path / "out")


def test_one_of_many_at_once_makes_the_output(tmp_path: Path) -> None:
    """Also while the winner flushes what it wrote, when it is about to give its folder the name."""
    flush, flushing, ended = staging._flush, threading.Event(), threading.Event()
    refused: list[str] = []

    def slow_flush(folder: Path) -> None:
        flushing.set()
        assert ended.wait(60)
        flush(folder)

    def others() -> None:
        flushing.wait(60)
        for _ in range(3):
            with pytest.raises(UserError) as caught, staged_folder(tmp_path / "out", overwrite=True) as theirs:
                (theirs / "theirs").touch()
            refused.append(str(caught.value))
        ended.set()

    thread = threading.Thread(target=others)
    thread.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(staging, "_flush", slow_flush)
        with staged_folder(tmp_path / "out", overwrite=False) as folder:
            (folder / "mine").touch()
    thread.join()
    assert len(refused) == 3 and all("another process is preparing" in text for text in refused)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_a_dataset_that_a_killed_run_had_put_aside_is_not_worked_against(tmp_path: Path) -> None:
    """It comes back at once, and is not found out at the end of the work."""
    (tmp_path / ".out.replaced").mkdir()
    (tmp_path / ".out.replaced" / "manifest.json").touch()
    with pytest.raises(UserError, match="exists already"):
        with staged_folder(tmp_path / "out", overwrite=False):
            pytest.fail("the work began")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "manifest.json"]


def test_room_is_asked_for_where_the_output_will_lie(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert (
        nearest_folder(tmp_path / "a" / "b")
        == nearest_folder(tmp_path / "link" / "b")
        == Path(os.path.realpath(tmp_path))
    )
    free = shutil.disk_usage(tmp_path).free
    require_free_space(tmp_path / "x", free // 2, "")
    with pytest.raises(
        RunError, match="x would not fit on its disk: at least .* TiB are needed, and .* are free; mend it."
    ):
        require_free_space(tmp_path / "x", 2 * free + 2**50, "mend it")


@pytest.mark.parametrize("name", ["rows.tsv", "rows.tsv.gz"])
def test_synthetic_rows_that_would_not_fit(tmp_path: Path, give_free: Callable[[float], None], name: str) -> None:
    summary = synthesize_criteo(tmp_path / name, num_rows=500, seed=0)
    give_free(summary.bytes)
    synthesize_criteo(tmp_path / name, num_rows=500, seed=0, overwrite=True)
    give_free(summary.bytes * 0.8)
    with pytest.raises(RunError, match=f"{name}.* would not fit on its disk: at least .* are needed"):
        synthesize_criteo(tmp_path / name, num_rows=500, seed=0, overwrite=True)
    assert (tmp_path / name).stat().st_size == summary.bytes
    with pytest.raises(RunError, match="4,611,686,018,427,387,904 rows take"):
        synthesize_criteo(tmp_path / "more.tsv", num_rows=2**62, seed=0)
    assert not list(tmp_path.glob("*more*"))


def test_a_disk_that_fills_up_while_rows_are_synthesized(tmp_path: Path) -> None:
    def fill(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match=r"rows.tsv could not be written: its disk is full; 50 rows take"):
        synthesize_criteo(tmp_path / "rows.tsv", num_rows=50, seed=0, progress=fill)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("/dev/null", "is no regular file"),
        ("pipe", "is no regular file"),
        ("folder", "is a folder; name a file"),
        ("dangling", "is a link to a missing file"),
        ("loop", "Too many levels of symbolic links"),
        ("missing/x", "does not exist; make it first"),
        ("file/x", "file is a file and no folder"),
        ("x" * 300, "File name too long"),
        ("a\0b", "null byte"),
        ("file", "exists already"),
        ("summary", "summary.json exists already"),
    ],
)
def test_synthesizing_replaces_nothing_that_is_not_its_own(
    tmp_path: Path, name: str, said: str, overwrite: bool
) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    for file in ("file", "summary.json"):
        (tmp_path / file).write_text("precious")
    if overwrite and "exists already" in said:
        synthesize_criteo(tmp_path / name, num_rows=5, seed=0, overwrite=True)
        return
    kinds = {path.name: path.lstat().st_mode for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=said):
        synthesize_criteo(tmp_path / name, num_rows=5, seed=0, overwrite=overwrite)
    assert {path.name: path.lstat().st_mode for path in tmp_path.iterdir()} == kinds
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("threads", [1, 2, 7, 100, MOST_THREADS])
@pytest.mark.parametrize("memory_bytes", [LEAST_MEMORY_BYTES, 1 << 30, 1 << 34])
def test_blocks_in_work_stay_within_the_memory(threads: int, memory_bytes: int) -> None:
    limits = ResourceLimits(memory_bytes, threads)
    assert 1 <= limits.num_threads <= threads
    for has_lists, each in ((False, 10), (True, 20)):
        assert each * (limits.num_threads + 2) * limits.block_bytes(has_lists) <= memory_bytes


PREPARE = """
import sys
from pathlib import Path
from distembed.data.prepare import ResourceLimits, prepare_criteo
from distembed.data.prepare.options import LEAST_MEMORY_BYTES
from distembed.data.prepare.table import prepare_table
from distembed.data.table.schema import TableSchema

rows, output, kind, threads = sys.argv[1:]
schema = {"label": {"column": "label"}, "categorical": {"text": {"separator": "|"} if kind == "lists" else {}}}
limits = ResourceLimits(LEAST_MEMORY_BYTES, threads=int(threads))
if kind == "criteo":
    prepare_criteo([rows], output, limits=limits)
else:
    prepare_table([rows], output, TableSchema.from_json(schema, "the schema"), limits=limits)
assert "torch" not in sys.modules  # preparing starts without it
peak = next(line for line in Path("/proc/self/status").read_text().split("\\n") if line.startswith("VmHWM"))
assert int(peak.split()[1]) << 10 <= LEAST_MEMORY_BYTES, peak
"""

DRAW = random.Random(0)
TEXTS: dict[str, tuple[int, Callable[[int], str]]] = {
    "short": (1_000_000, lambda row: f"{row:016x}"),
    "long": (150_000, lambda row: f"{row}{DRAW.getrandbits(1700):x}"),
    "longer": (60_000, lambda row: f"{row}{DRAW.getrandbits(10_000):x}"),
    "enormous": (100_000, lambda row: "x" * 15_000_000 if row == 50_000 else f"{row}"),
    "lists": (100_000, lambda row: "|".join(f"{DRAW.getrandbits(40):x}" for _ in range(30))),
}


@pytest.mark.thorough
@pytest.mark.timeout(600)
@pytest.mark.parametrize("threads", [8, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["criteo", *(pytest.param(name, marks=pytest.mark.slow) for name in TEXTS)])
def test_peak_memory_is_within_the_limit(tmp_path: Path, kind: str, threads: int) -> None:
    """It does not grow with the rows, nor with their texts."""
    rows = tmp_path / "rows.csv"
    if kind == "criteo":
        synthesize_criteo(rows, num_rows=300_000, seed=0)
    else:
        num_rows, text = TEXTS[kind]
        with open(rows, "w") as file:
            file.write("label,text\n")
            file.writelines(f"{row % 2},{text(row)}\n" for row in range(num_rows))
    process = start(PREPARE, rows, tmp_path / "out", kind, threads)
    said = process.communicate(timeout=500)[1]
    assert not process.returncode, said.decode()
