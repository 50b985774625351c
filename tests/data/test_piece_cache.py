"""The cache of remote pieces: what it has is what was written, and it never takes more than it may."""

import fcntl
import os
import random
import shutil
import time
from pathlib import Path

import pytest

from distembed.base.checksums import checksum_of
from distembed.data.dataset import mirror
from distembed.data.dataset.mirror import PieceCache
from tests.processes import run_processes


def bytes_on_disk(folder: Path) -> int:
    """Returns the bytes of all pieces by a look of its own, which holds the lock of those who change them."""
    with (folder / "size").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != "size")


def count(folder: Path) -> int:
    return int((folder / "size").read_text())


def piece(number: int) -> bytes:
    draw = random.Random(number)
    return draw.randbytes(draw.randrange(1, 1000))


def get(cache: PieceCache, data: bytes) -> int:
    """Takes a piece from the cache; returns how often it was fetched."""
    fetched: list[bytes] = []
    assert cache.get(checksum_of(data), lambda: fetched.append(data) or data) == data
    return len(fetched)


@pytest.mark.parametrize("most_bytes", [0, 999, 5000, 10**6])
def test_what_is_read_was_written_and_the_limit_holds(tmp_path: Path, most_bytes: int) -> None:
    cache, draw, num_fetched = PieceCache(tmp_path, most_bytes), random.Random(0), 0
    for _ in range(120):
        num_fetched += get(cache, piece(draw.randrange(16)))
        assert count(cache.folder) == bytes_on_disk(cache.folder) <= most_bytes
    assert (num_fetched < 120) == (most_bytes > 500) and (num_fetched == 16) == (most_bytes == 10**6)
    assert cache.get(checksum_of(b"none"), lambda: None) is None


def test_what_was_used_longest_ago_makes_way(tmp_path: Path) -> None:
    cache = PieceCache(tmp_path, 1000)
    pieces = {key: key.encode() * 100 for key in "abcdefghij"}
    for data in [*pieces.values(), pieces["a"], pieces["b"], b"k" * 200]:
        get(cache, data)
        time.sleep(0.002)  # a file system's clock ticks every few milliseconds at most
    kept = {path.read_bytes()[:1].decode() for path in tmp_path.glob("??/*")}
    assert kept == set("abefghijk")


def test_damage_removed_folders_full_disks_and_what_killed_processes_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PieceCache(tmp_path, 1000)
    assert get(cache, bytes(300)) == 1
    (path,) = tmp_path.glob("??/*")
    path.write_bytes(b"?" * 300)
    assert get(cache, bytes(300)) == 1 and get(cache, bytes(300)) == 0 and count(tmp_path) == 300
    (tmp_path / "new").write_bytes(bytes(500))
    (tmp_path / "size").write_text("800")
    assert get(cache, bytes(600)) == 1 and count(tmp_path) == bytes_on_disk(tmp_path) == 900
    (tmp_path / "size").write_text("")
    assert get(cache, bytes(50)) == 1 and count(tmp_path) == 950
    shutil.rmtree(tmp_path)
    assert get(cache, bytes(950)) == 1 and get(cache, bytes(950)) == 0 and count(tmp_path) == 950
    monkeypatch.setattr("distembed.data.dataset.mirror._SPARE_BYTES", 1 << 60)
    assert get(cache, bytes(1)) == get(cache, bytes(1)) == 1 and count(tmp_path) == bytes_on_disk(tmp_path) == 950


def use_cache(rank: int, folder: Path, log: Path) -> None:
    limited, roomy, draw = PieceCache(folder, 4000), PieceCache(log.parent / "roomy", 10**6), random.Random(rank)
    for _ in range(25):
        get(limited, piece(draw.randrange(15)))
        assert bytes_on_disk(limited.folder) <= 4000
    for number in range(8):
        with log.open("a") as file:
            file.write("." * get(roomy, piece(number)))
    os._exit(0)


@pytest.mark.distributed
def test_processes_share_it_within_the_limit_and_fetch_each_piece_once(tmp_path: Path) -> None:
    for name in ("limited", "roomy"):
        (tmp_path / name).mkdir()
    run_processes(3, use_cache, tmp_path / "limited", tmp_path / "log")
    assert count(tmp_path / "limited") == bytes_on_disk(tmp_path / "limited")
    assert (tmp_path / "log").read_text() == "." * 8


def test_bytes_that_were_damaged_on_their_way_are_asked_for_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [b"dama", b"data", b"dama", b"dama"]
    monkeypatch.setattr(mirror, "read_range", lambda url, start, stop: answers.pop(0))
    dataset = mirror.Mirror(tmp_path, "flaky://dataset", PieceCache(tmp_path, 1000))
    for _ in range(2):  # the second time from the cache
        assert dataset.read("file", 0, 4, checksum_of(b"data")) == b"data" and len(answers) == 2
    assert dataset.read("file", 0, 4, checksum_of(b"other")) is None and not answers
