"""Files that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distembed.errors import RunError


@contextmanager
def whole_file(path: Path) -> Iterator[str]:
    """Gives a temporary file that takes the place of ``path`` once it is whole; on an error it is removed.

    Raises:
        RunError: where it cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(descriptor):
            yield temporary
            os.fsync(descriptor)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise RunError(f"{path} could not be written ({error}){_room_left(path.parent)}") from error
    finally:
        if temporary is not None:
            os.unlink(temporary)


def _room_left(folder: Path) -> str:
    try:
        return f"; {shutil.disk_usage(folder).free >> 20:,} MiB are left. Free space, or choose another folder."
    except OSError:
        return "; choose another folder."
