"""What a run keeps of its dataset: the manifest without the rows, and the vocabularies, which say what each id means.

::

    RUN/dataset/manifest.json            schema, preparation, vocabularies, and of each split the number of its rows
    RUN/dataset/vocabulary/C1.parquet    the dataset's own file under another name (a hard link), else a copy

Vocabularies of more than a gigabyte together are links to where they lie, with the checksums that they have. So raw
rows can be scored, and other rows prepared alike, when the dataset itself is gone.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from distembed.base.errors import RunError, UserError
from distembed.base.files import free_space, full_disk_explained
from distembed.data.dataset.manifest import MANIFEST_NAME, Manifest

KEPT_FOLDER = "dataset"
"""Name of the folder within a run's."""
MOST_COPIED_BYTES = 1 << 30
"""Size of all vocabularies together from which on they are not copied."""


def kept_dataset(run: str | os.PathLike[str]) -> Path | None:
    """Returns the folder in which a run keeps its dataset's manifest; None where it has none, as of early versions."""
    folder = Path(run) / KEPT_FOLDER
    return folder if (folder / MANIFEST_NAME).is_file() else None


def keep_dataset(run: Path, dataset: str, manifest: Manifest, links: bool = True) -> None:
    """Keeps in a run's folder what the ids of its dataset mean, unless it is there already.

    Args:
        run: The run's folder.
        dataset: The folder of the dataset that the run is trained on.
        manifest: The dataset's manifest.
        links: Whether large vocabularies are links; if not, the folder has all that it needs, wherever it goes.

    Raises:
        UserError: A vocabulary of the dataset is missing.
        RunError: The files cannot be written.
    """
    folder, kept = run / KEPT_FOLDER, manifest.without_rows()
    with suppress(UserError):
        found = Manifest.load(folder)
        if not found.is_without_rows or found == kept:  # a dataset with rows is left as it is
            return
    with full_disk_explained(lambda error: f"{folder} could not be written ({error}); {free_space(run)} are left"):
        folder.mkdir(exist_ok=True)
        files = kept.other_files
        try:
            links = links and sum((Path(dataset) / file).stat().st_size for file in files) > MOST_COPIED_BYTES
            for file in files:
                _place(Path(dataset) / file, folder / file, links)
        except FileNotFoundError as error:
            raise UserError(f"a vocabulary of the dataset {dataset} is missing ({error}); prepare it again.") from error
        except shutil.Error as error:
            raise RunError(f"a vocabulary of {dataset} could not be copied to {folder}: {error}") from error
        kept.write(folder)


def _place(source: Path, target: Path, links: bool) -> None:
    """Puts a vocabulary into a run's folder: as a link to where it lies, as a hard link, or as a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if links:
        target.symlink_to(source.absolute())
        return
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)
