"""The cache of remote pieces: what it has is what was written, and it never takes more than it may."""

import fcntl
import os
import random
import time
from pathlib import Path

import pytest

from distembed.checksums import checksum_of
from distembed.data.dataset import mirror
from distembed.data.dataset.piece_cache import PieceCache
from distembed.errors import RunError
from tests.processes import run_processes


def bytes_on_disk(folder: Path) -> int:
    """Returns the bytes of all pieces, and of those that are being written, by a look of its own."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() and path.name != "size" else 0  # the others are empty
        except FileNotFoundError:
            continue
    return total


def piece(key: str) -> bytes:
    draw = random.Random(key)
    return draw.randbytes(draw.randrange(1, 1000))


@pytest.mark.parametrize("most_bytes", [0, 1, 999, 5000, 10**6])
def test_what_is_read_was_written_and_the_limit_holds(tmp_path: Path, most_bytes: int) -> None:
    cache, draw = PieceCache(tmp_path / "cache", most_bytes), random.Random(0)
    found = 0
    for _ in range(300):
        key = str(draw.randrange(40))
        data = cache.read(key)
        assert data in (None, piece(key))
        found += data is not None
        if data is None:
            cache.write(key, piece(key))
        assert bytes_on_disk(tmp_path / "cache") <= most_bytes
        assert (tmp_path / "cache" / "size").read_text() == str(bytes_on_disk(tmp_path / "cache"))
    assert (found > 0) == (most_bytes > 500) and (found == 260) == (most_bytes == 10**6)


def test_what_was_used_longest_ago_makes_way(tmp_path: Path) -> None:
    cache = PieceCache(tmp_path, 1000)
    for key in "abcdefghij":
        cache.write(key, bytes(100))
        time.sleep(0.002)  # a file system's clock ticks every few milliseconds at most
    for key in "ab":
        assert cache.read(key) == bytes(100)
    cache.write("k", bytes(200))
    assert [key for key in "abcdefghijk" if cache.read(key) is not None] == list("abefghijk")


def test_a_damaged_piece_is_removed_and_one_that_is_written_twice_counts_once(tmp_path: Path) -> None:
    cache = PieceCache(tmp_path, 1000)
    for _ in range(2):
        cache.write("a", bytes(300))
        assert (tmp_path / "size").read_text() == "300"
    cache.remove("a")
    cache.remove("a")
    assert cache.read("a") is None and (tmp_path / "size").read_text() == "0"


def test_what_a_killed_process_was_writing_makes_way_and_what_is_being_written_does_not(tmp_path: Path) -> None:
    cache = PieceCache(tmp_path, 1000)
    cache.write("a", bytes(200))
    (tmp_path / "new-killed").write_bytes(bytes(500))
    (tmp_path / "new-writing").write_bytes(bytes(300))
    (tmp_path / "size").write_text("1000")
    with (tmp_path / "new-writing").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        cache.write("b", bytes(450))
        assert cache.read("a") is not None and cache.read("b") is not None
        assert sorted(path.name for path in tmp_path.glob("new-*")) == ["new-writing"]
        assert (tmp_path / "size").read_text() == "950"


def test_a_full_disk_or_a_lost_count_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PieceCache(tmp_path, 1000)
    cache.write("a", bytes(200))
    (tmp_path / "size").write_text("")
    cache.write("b", bytes(300))
    assert (tmp_path / "size").read_text() == "500"
    monkeypatch.setattr("distembed.data.dataset.piece_cache._SPARE_BYTES", 1 << 60)
    cache.write("c", bytes(1))
    assert cache.read("c") is None and cache.read("b") == bytes(300)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunError, match="data.cache_dir: .* cannot be made"):
        PieceCache(tmp_path / "file" / "cache", 1)


def use_cache(rank: int, folder: Path, most_bytes: int) -> None:
    cache, draw = PieceCache(folder, most_bytes), random.Random(rank)
    for _ in range(60):
        key = str(draw.randrange(30))
        data = cache.read(key)
        assert data in (None, piece(key))
        if data is None:
            cache.write(key, piece(key))
        # nothing else in the cache may be above the limit while others write
        with (folder / "size").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            assert bytes_on_disk(folder) <= most_bytes
    os._exit(0)


@pytest.mark.distributed
def test_processes_share_it_within_the_limit(tmp_path: Path) -> None:
    run_processes(3, use_cache, tmp_path, 4000)
    assert (tmp_path / "size").read_text() == str(bytes_on_disk(tmp_path))


def fetch_pieces(rank: int, folder: Path, source: Path, log: Path) -> None:
    read_range = mirror.read_range

    def logged(url: str, start: int, stop: int) -> bytes:
        with log.open("a") as file:
            file.write(f"{start}\n")
        time.sleep(0.02)  # long enough for another process to ask for the same
        return read_range(url, start, stop)

    mirror.read_range = logged
    pieces = mirror.RemotePieces(f"file://{source}", PieceCache(folder, 10**6))
    data = source.read_bytes()
    for start in range(0, len(data), 100):
        assert pieces.read(start, start + 100, checksum_of(data[start : start + 100])) == data[start : start + 100]
    assert pieces.read(0, 100, checksum_of(b"others")) is None
    os._exit(0)


@pytest.mark.distributed
def test_processes_fetch_each_piece_once(tmp_path: Path) -> None:
    source, log = tmp_path / "source", tmp_path / "log"
    source.write_bytes(random.Random(0).randbytes(2000))
    run_processes(3, fetch_pieces, tmp_path / "cache", source, log)
    starts = [int(line) for line in log.read_text().splitlines()]
    assert sorted(starts) == sorted([*range(0, 2000, 100), *[0] * 6])  # what is damaged is asked for twice by each
