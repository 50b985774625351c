"""What a command is asked to write: refused before the work where it could not be written, or would replace a file.

Nothing is replaced unasked but what distembed has made itself to be looked at, which says so at its beginning.
"""

import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path

from distembed.base.errors import RunError, UserError
from distembed.base.version import __version__

MADE_BY = f"distembed {__version__}"
"""What a page or a chart names as its maker."""
_MARKS = (b'<meta name="generator" content="distembed ', b"<dc:title>distembed ", b"Software\0distembed ")
"""How a page of HTML, a chart of SVG and one of PNG say that distembed made them."""
_HEAD_BYTES = 4096


def require_file(option: str, file: Path, overwrite: bool, may_replace_own: bool = False) -> None:
    """Finds out, before there is anything to write, what can be known of a file that is going to be written.

    Args:
        option: The option that names it, for the error.
        file: The file.
        overwrite: Whether one that is there may be replaced.
        may_replace_own: Whether a page or a chart that distembed made may be replaced without being asked to.

    Raises:
        UserError: The path is none of a file that could be made, or a file is there.
        RunError: No file can be made in its folder.
    """
    found = _kind(option, file)
    if found == stat.S_IFDIR:
        raise UserError(f"{option} {file} is a folder; name a file.")
    if found not in (None, stat.S_IFREG):
        raise UserError(f"{option} {file} is no regular file, which would be lost; name another one.")
    if found is not None and not overwrite and not (may_replace_own and _is_own(file)):
        raise UserError(f"{option} {file} exists already; name a new file, or add --overwrite to replace it.")
    _require_files_in(option, file, file.absolute().parents)


def require_folder(option: str, folder: Path) -> None:
    """Finds out the same of a folder, which is made where it is missing.

    Raises:
        UserError: The path is none of a folder that could be made.
        RunError: No file can be made there.
    """
    found = _kind(option, folder)
    if found not in (None, stat.S_IFDIR):
        raise UserError(f"{option} {folder} is a file; give a folder.")
    _require_files_in(option, folder, [folder.absolute(), *folder.absolute().parents])


def _kind(option: str, path: Path) -> int | None:
    """Returns what a path names, links followed; None where there is nothing."""
    if any("\ud800" <= character <= "\udfff" for character in str(path)):  # how Python has other bytes
        raise UserError(f"{option} {ascii(str(path))} is not written in UTF-8; name another place.")
    try:
        return stat.S_IFMT(os.stat(path).st_mode)
    except FileNotFoundError:
        if os.path.islink(path):
            raise UserError(f"{option} {path} is a link to a missing file or folder; name another place.") from None
        return None
    except NotADirectoryError:
        return None  # the error of the folder above says more
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{option} {path} cannot be written: {reason}; name another place.") from error


def _require_files_in(option: str, path: Path, folders: Sequence[Path]) -> None:
    """Makes sure that files can be made in the first folder that is there."""
    existing = next(folder for folder in folders if os.path.lexists(folder))
    if not existing.is_dir():
        raise UserError(f"{option} {path} cannot be written: {existing} is a file and no folder; name another one.")
    try:
        # permissions alone are not enough: a file system may be read-only, or none for files
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise RunError(
            f"{option} {path} cannot be written: no file can be made in {existing} ({error}); choose another folder."
        ) from error


def _is_own(file: Path) -> bool:
    """Returns whether distembed made a page or a chart."""
    with file.open("rb") as opened:
        head = opened.read(_HEAD_BYTES)
    return any(mark in head for mark in _MARKS)
