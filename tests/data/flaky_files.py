"""A file system of fsspec in this process's memory, much of what is asked of which fails."""

import io
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from distembed.data import remote


class Flaky(MemoryFileSystem):
    """Fails by a draw; a file that is read breaks in the middle of a read, and a write may fail once it is done."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    share = 0.0
    seekable = True
    failures = 0
    bytes_read = 0
    draw = random.Random(0)

    @classmethod
    def may_fail(cls) -> None:
        if cls.draw.random() < cls.share:
            cls.failures += 1
            raise cls.draw.choice([OSError("the connection is broken"), RuntimeError("an answer of another kind")])

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        self.may_fail()
        return dict(super().info(path, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.may_fail()
        return super().ls(path, detail=detail, **options)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        self.may_fail()
        super().put_file(lpath, rpath, **options)
        self.may_fail()

    def rm_file(self, path: str) -> None:
        self.may_fail()
        super().rm_file(path)
        self.may_fail()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.may_fail()
        data = bytes(super().cat_file(path, start=start, end=end, **options))
        type(self).bytes_read += len(data)
        return data

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode != "rb":
            return super()._open(path, mode, **options)
        self.may_fail()
        return _FlakyFile(self, super()._open(path, mode, **options).getvalue())


class _FlakyFile(io.BytesIO):
    def __init__(self, files: Flaky, data: bytes) -> None:
        super().__init__(data)
        self._files = files

    def seekable(self) -> bool:
        return self._files.seekable

    def read(self, size: int | None = -1) -> bytes:
        self._files.may_fail()
        data = super().read(self._files.draw.randint(1, max(1, size or 1)) if size and size > 0 else size)
        type(self._files).bytes_read += len(data)
        return data


@contextmanager
def flaky_s3(folder: Path, share: float) -> Iterator[str]:
    """Within the block ``s3://`` is a server of this machine, which fails that share of requests; yields a bucket."""
    import s3fs

    from tests.robustness.s3_server import BUCKET, failing_s3

    (folder / "server").mkdir()
    with failing_s3(folder / "server", share, seed=0) as url, pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ENDPOINT_URL", url)
        patched.setenv("AWS_ACCESS_KEY_ID", "key")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patched.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        yield f"s3://{BUCKET}"
        s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def flaky_files(share: float, seekable: bool = True) -> Iterator[type[Flaky]]:
    """Within the block there are URLs ``flaky://...``, of which nothing is there yet, and retries do not wait.

    Args:
        share: Share of the calls that fail.
        seekable: Whether files can be read from the middle.
    """
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    Flaky.pseudo_dirs[:] = [""]
    Flaky.share, Flaky.seekable, Flaky.failures, Flaky.bytes_read = share, seekable, 0, 0
    Flaky.draw = random.Random(0)
    waited = remote.FIRST_WAIT_SECONDS
    remote.FIRST_WAIT_SECONDS = 0.0
    try:
        yield Flaky
    finally:
        remote.FIRST_WAIT_SECONDS = waited
