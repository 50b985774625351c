"""Datasets at URLs: their rows are those of the folder that was uploaded, however often the server fails."""

import itertools
from pathlib import Path

import pytest

from distembed.base.errors import RunError, UserError
from distembed.data.dataset import mirror as mirrors
from distembed.data.dataset.config import DataConfig
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.mirror import dataset_folder, is_remote_dataset, mirror_of
from distembed.data.dataset.row_groups import verify_dataset
from distembed.data.reader import BatchOrder, BatchReader, Decoding, order, read_share
from distembed.data.remote import remove_remote, upload
from tests.data.flaky_files import Flaky, flaky_files
from tests.data.small_dataset import SCHEMA, make_dataset, rows_of

URL = "flaky://bucket/d"


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a cache of the test's own, and windows so small that a hundred rows fill many."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(order, "WINDOW_ROWS", 8)
    mirrors._mirror_folder.cache_clear()


def upload_dataset(folder: Path, url: str = URL) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            upload(path, f"{url}/{path.relative_to(folder)}")


def read_rows(dataset: Path | str, decode_threads: int = 0) -> list[list[int]]:
    reader = BatchReader(dataset, "all", BatchOrder(10, seed=3), decoding=Decoding(decode_threads))
    return [rows_of(batch) for batch in itertools.chain(reader, reader)]


@pytest.mark.parametrize(
    ("num_rows", "most_bytes", "threads"),
    [
        *[(0, 0, 3), (1, 10**9, 0), (151, 0, 3), (151, 20_000, 0), (151, 10**9, 3)],
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in itertools.product((0, 1, 151), (0, 20_000, 10**9), (0, 3))
        ),
    ],
)
def test_rows_are_those_of_the_folder_though_much_fails(
    tmp_path: Path, num_rows: int, most_bytes: int, threads: int
) -> None:
    folder = make_dataset(tmp_path / "d", num_rows, group_rows=13)
    expected = read_rows(folder)
    with flaky_files(0.1) as flaky:
        upload_dataset(folder)
        local = dataset_folder(URL, str(tmp_path / "own"), most_bytes)
        assert read_rows(local, decode_threads=threads) == expected
        shares = [list(read_share(local, "all", 10, rank=rank, world_size=2)) for rank in range(2)]
        in_order = [rows_of(batch) for batches in shares for batch in batches]
        assert sum(in_order, []) == list(range(num_rows))
        assert flaky.failures or num_rows < 2 or most_bytes  # which leaves few requests
        pieces = tmp_path / "own" / "pieces"
        kept = sum(path.stat().st_size for path in pieces.rglob("*") if path.is_file() and path.name != "size")
        assert kept <= most_bytes and (kept > 0) == (most_bytes > 0)


def test_each_byte_is_fetched_once_where_the_cache_has_room(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 151)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    with flaky_files(0) as flaky:
        upload_dataset(folder)
        for _ in range(2):  # processes, of which each looks at the manifest
            mirrors._mirror_folder.cache_clear()
            read_rows(URL)
        assert flaky.bytes_read == sum(sizes.values()) + sizes["manifest.json"]
        # a cache of another version of the dataset has nothing that this one has not
        other = make_dataset(tmp_path / "other", 140)
        upload_dataset(other)
        mirrors._mirror_folder.cache_clear()
        assert read_rows(URL) == read_rows(other)
        assert len(list((tmp_path / "cache" / "distembed").glob("d-*"))) == 2


def test_damage_is_found_wherever_it_is(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 151)
    expected = read_rows(folder)
    with flaky_files(0):
        upload_dataset(folder)
        assert not verify_dataset(URL).problems
        assert verify_dataset(URL).num_bytes == verify_dataset(folder).num_bytes
        assert read_rows(URL) == expected
        # in the cache: fetched again
        for path in (tmp_path / "cache").rglob("pieces/??/*"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        (checksums,) = (tmp_path / "cache").rglob("d-*/checksums.bin")
        checksums.write_bytes(b"?")
        assert read_rows(URL) == expected
        # at the URL: named
        (stored,) = [file for name, file in Flaky.store.items() if name.endswith("d/part1.parquet")]
        stored.getbuffer()[200] ^= 1
        problems = verify_dataset(URL).problems
        assert problems == [
            f"{URL}/part1.parquet, row group 0 is damaged: its checksum differs from the recorded one; prepare the "
            "data again, or fetch the file again from where a whole copy is"
        ]
        assert read_rows(URL) == expected  # from the cache
        with pytest.raises(UserError, match=f"{URL}/part1.parquet, row group 0 is damaged"):
            read_rows(dataset_folder(URL, str(tmp_path / "empty")))
        remove_remote(f"{URL}/part0.parquet")
        with pytest.raises(UserError, match=f"{URL}/part0.parquet cannot be read: it does not exist"):
            read_rows(dataset_folder(URL, str(tmp_path / "another")))
        assert len(verify_dataset(URL).problems) == 2


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 20)
    with flaky_files(0) as flaky:
        assert not is_remote_dataset(URL)
        with pytest.raises(UserError, match=f"{URL} is no dataset: .*manifest.json cannot be found"):
            Manifest.load(URL)
        upload_dataset(folder)
        assert is_remote_dataset(URL) and Manifest.load(URL).splits["all"].num_rows == 20
        (tmp_path / "file").touch()
        with pytest.raises(RunError, match="data.cache_dir: .* cannot be made"):
            DataConfig(path=URL, cache_dir=str(tmp_path / "file")).require_path()
        flaky.share = 1.0
        mirrors._mirror_folder.cache_clear()
        with pytest.raises(RunError, match="5 tries failed"):
            Manifest.load(URL)


def test_a_config_knows_a_url_by_its_cache(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "d", 20)
    with flaky_files(0):
        upload_dataset(folder)
        config = DataConfig(path=URL, cache_dir=str(tmp_path / "own"), cache_bytes=12345)
        assert config.load_schema() == SCHEMA and config.threads_of_rank(99) > 0
        local = Path(config.require_path())
        assert local.parent == tmp_path / "own"
        found = mirror_of(local)
        assert found is not None and (found.url, found.cache.most_bytes) == (URL, 12345)
        assert Manifest.load(local) == Manifest.load(folder)
    assert mirror_of(folder) is None and DataConfig(path=str(folder)).require_path() == str(folder)
