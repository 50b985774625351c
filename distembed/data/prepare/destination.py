"""Where a dataset goes: a local folder that appears at once, or a URL to which each file goes once it is written.

At a URL, other readers may see a dataset grow: it is one when its manifest is there, which is uploaded last and, where
a dataset is replaced, removed before the first file is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from distembed.base.checksums import checksum_of
from distembed.base.errors import UserError
from distembed.base.files import replaced_file
from distembed.data.dataset.manifest import MANIFEST_NAME
from distembed.data.prepare.rejected_rows import REJECTED_NAME
from distembed.data.prepare.split import SPLIT_NAMES
from distembed.data.remote import file_system, is_url, join_url, remove_remote, upload, walk_remote

_DATASET_FILE = re.compile(
    rf"({'|'.join(SPLIT_NAMES)})/part-[0-9]+\.parquet|vocabulary/[^/]+\.parquet|[^/]+\.bin|"
    rf"{re.escape(MANIFEST_NAME)}|{re.escape(REJECTED_NAME)}"
)
"""What a dataset's files are named."""


@dataclass(frozen=True)
class Destination:
    """Where a dataset goes."""

    path: Path  # the folder; of a URL, the local place beside which the work is done, where nothing will be
    url: str | None  # the URL; None for a local folder
    overwrite: bool  # whether a dataset that is there is replaced

    @classmethod
    def of(cls, output: str | os.PathLike[str], work: Path | None, overwrite: bool) -> Destination:
        """Returns the destination that a folder or a URL names, of a URL with a folder for the work.

        Raises:
            UserError: There is a URL without a folder for the work, or such a folder without a URL.
        """
        if not is_url(output):
            if work is not None:
                raise UserError(
                    f"work (--work) is {work}, and the output {os.fspath(output)} is no URL: the work is done beside a "
                    "local output; leave the option out"
                )
            return cls(Path(output), None, overwrite)
        url = os.fspath(output).rstrip("/")
        if work is None:
            raise UserError(
                f"the output {url} is a URL: name a local folder for the work (--work DIR), with room for about 0.4 of "
                "the inputs' text"
            )
        name = url.rpartition("/")[2]
        return cls(work / f"{name}-{checksum_of(url.encode())[:8]}", url, overwrite)

    def __str__(self) -> str:
        return self.url or str(self.path)

    def begin(self, is_resumed: bool) -> None:
        """Makes sure that nothing is at the URL but what may be replaced, such as an upload that is resumed.

        Raises:
            UserError: Something is there that may not be replaced.
            TemporaryFailure: The server does not answer.
        """
        if self.url is None:
            return
        found = self._files_there()
        if others := sorted(name for name in found if not _DATASET_FILE.fullmatch(name)):
            raise UserError(
                f"{self.url} has files that are of no dataset, such as {others[0]}, which stay as they are: name "
                "another output"
            )
        if not found or is_resumed or self.overwrite:
            return
        if MANIFEST_NAME in found:
            raise UserError(f"{self.url} exists already: name another output, or replace it with --overwrite")
        raise UserError(
            f"{self.url} has files and is no dataset (no {MANIFEST_NAME}), perhaps since it was not finished: name "
            "another output, or replace it with --overwrite"
        )

    def remove_manifest(self) -> None:
        """Removes the manifest at the URL, if one is there: what is there is no dataset any more, or not yet."""
        if self.url is not None and (url := self._files_there().get(MANIFEST_NAME)):
            remove_remote(url)

    @contextmanager
    def file(self, folder: Path, file: str) -> Iterator[Path]:
        """Yields a hidden file to write, which becomes a file of the dataset; a second attempt may write another."""
        with replaced_file(folder / file) as hidden:
            yield hidden
            if self.url is not None:
                upload(hidden, join_url(self.url, file))
        if self.url is not None:
            (folder / file).unlink(missing_ok=True)

    def finish(self, folder: Path, moved: Sequence[str]) -> None:
        """Uploads what is left in a dataset's folder, the manifest last, and removes all but these and moved files."""
        if self.url is None:
            return
        written = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
        files = {path.relative_to(folder).as_posix() for path in written} - {MANIFEST_NAME}
        for file in sorted(files):
            upload(folder / file, join_url(self.url, file))
        for name, url in self._files_there().items():
            if name not in (*files, *moved) and _DATASET_FILE.fullmatch(name):
                remove_remote(url)
        upload(folder / MANIFEST_NAME, join_url(self.url, MANIFEST_NAME))

    def _files_there(self) -> dict[str, str]:
        """Returns the URL of each file at the URL, by its name there; one file may have several URLs."""
        assert self.url is not None
        _, path = file_system(self.url)
        found = {file_system(file.url)[1].removeprefix(f"{path}/"): file.url for file in walk_remote(self.url)}
        return {name: url for name, url in found.items() if name != path}  # some stores have a file for a folder
