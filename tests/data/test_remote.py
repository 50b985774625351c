"""Remote files are read and written as they are, however often what is asked of their server fails."""

import random
import time
from pathlib import Path

import pytest

from distembed.base.errors import RunError, UserError
from distembed.data import remote
from tests.data.flaky_files import flaky_files

SIZES = [0, 1, 100_001]


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


@pytest.mark.parametrize("seekable", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read_though_much_fails(tmp_path: Path, size: int, seekable: bool) -> None:
    (tmp_path / "sent").write_bytes(content(size))
    with flaky_files(0.1 if seekable else 0.03, seekable) as flaky:
        for number in range(10):
            remote.upload(tmp_path / "sent", f"flaky://folder/{number}.bin")
            assert remote.read_remote(f"flaky://folder/{number}.bin") == content(size)
        remote.fetch("flaky://folder/3.bin", tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == content(size)
        assert remote.find_remote("flaky://folder/3.bin").num_bytes == size
        assert flaky.failures or size < 2
        if seekable:
            assert flaky.bytes_read == 11 * size  # nothing was read twice


def test_a_file_is_read_from_anywhere(tmp_path: Path) -> None:
    data = content(100_001)
    (tmp_path / "sent").write_bytes(data)
    draw = random.Random(0)
    with flaky_files(0.1):
        remote.upload(tmp_path / "sent", "flaky://file")
        with remote.open_remote("flaky://file") as file:
            assert file.seek(0, 2) == len(data) and file.read(1) == b""
            for _ in range(50):
                start, size = draw.randrange(len(data)), draw.choice([1, 17, 60_000])
                file.seek(start)
                assert file.read(size) == data[start : start + size] and file.tell() == min(start + size, len(data))


def test_urls_stand_for_files_folders_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "sent").write_bytes(b"12")
    names = ["day_0.csv", "day_1.csv", "notes.txt", "_SUCCESS", ".hidden", "deeper/day_2.csv"]
    with flaky_files(0.1):
        for name in names:
            remote.upload(tmp_path / "sent", remote.join_url("flaky://rows/", name))

        def urls(url: str) -> list[str]:
            found = remote.list_remote(url)
            assert all(file.num_bytes == 2 and file.version for file in found)
            return [file.url.rpartition("rows/")[2] for file in found]

        assert urls("flaky://rows") == ["day_0.csv", "day_1.csv", "notes.txt"]
        assert urls("flaky://rows/*.csv") == ["day_0.csv", "day_1.csv"]
        assert urls("flaky://rows/notes.txt") == ["notes.txt"]
        remote.remove_remote("flaky://rows/notes.txt")
        remote.remove_remote("flaky://rows/notes.txt")
        assert urls("flaky://rows/day_[0-1].csv") == urls("flaky://rows/") == ["day_0.csv", "day_1.csv"]
        for url, text in {"flaky://nothing": "does not exist", "flaky://rows/*.tsv": "matches no file"}.items():
            with pytest.raises(UserError, match=f"^{url.replace('*', '[*]')} .*{text}"):
                remote.list_remote(url)


def test_it_gives_up_after_five_tries_with_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    with flaky_files(1.0) as flaky:
        monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.5)
        monkeypatch.setattr(time, "sleep", waits.append)
        with pytest.raises(RunError, match="flaky://file cannot be found: 5 tries failed"):
            remote.open_remote("flaky://file")
        assert waits == [0.5, 1, 2, 4] and flaky.failures == 5


def test_what_no_try_would_mend_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it was tried again"))
    for do in (remote.read_remote, remote.find_remote, remote.list_remote):
        with flaky_files(0), pytest.raises(UserError, match="flaky://nothing cannot be (found|listed): it does not"):
            do("flaky://nothing")
    with pytest.raises(UserError, match="nosuch://a can be neither read nor written"):
        remote.read_remote("nosuch://a")
    assert not remote.is_url("a/b") and not remote.is_url(Path("s3://a")) and remote.is_url("s3://a")


def test_a_file_that_changes_while_it_is_read_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(bytes(3_000_000))
    (tmp_path / "other").write_bytes(bytes(3_000_001))
    with flaky_files(0) as flaky:
        remote.upload(tmp_path / "one", "flaky://file")
        with remote.open_remote("flaky://file") as file:
            assert file.read(10) == bytes(10)
            remote.upload(tmp_path / "other", "flaky://file")
            flaky.share = 0.5
            with pytest.raises(UserError, match="flaky://file was changed while it was read"):
                while file.read(1000):
                    pass
