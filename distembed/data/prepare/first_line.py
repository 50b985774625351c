"""What stands at the beginning of a file instead of rows, or before them: another kind of file, a mark, a header.

A first line is a header where it has 40 fields and the first 14, those of the label and the integers, are all
different, none is empty and none is a number: ``label I1 .. C26`` in any words. So are the numbers 0 to 39, which
pandas writes above columns without names. Any other line is a row, well-formed or malformed.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from distembed.data.dataset.schema import CRITEO_CATEGORICAL, CRITEO_DENSE
from distembed.errors import UserError

OTHER_KINDS = {
    b"PK\x03\x04": "a zip archive",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ\x00": "an xz file",
    b"PAR1": "a Parquet file",
}
_NUM_NUMBERS = 1 + len(CRITEO_DENSE)
_NUM_FIELDS = _NUM_NUMBERS + len(CRITEO_CATEGORICAL)
_PANDAS_HEADER = [b"%d" % column for column in range(_NUM_FIELDS)]


def require_text(path: Path, data: bytes) -> None:
    """Makes sure that a file does not begin as one that is no text of one byte a character does.

    Args:
        path: The file, for the error.
        data: Its first bytes.

    Raises:
        UserError: It is another kind of file, or text in UTF-16 or UTF-32.
    """
    kind = next((name for magic, name in OTHER_KINDS.items() if data.startswith(magic)), None)
    if kind is not None:
        raise UserError(
            f"{path} is {kind}; give its rows as text, plain, gzip or Zstandard, or unpack it into a pipe and name "
            "that, or - for standard input"
        )
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)) and b"\0" in data[:8]:
        raise UserError(
            f"{path} is text in UTF-16 or UTF-32; rows are read as ASCII or UTF-8: convert it, such as with "
            "`iconv -f UTF-16 -t UTF-8`"
        )


def split_first_line(block: bytes) -> tuple[list[str] | None, bytes]:
    """Returns the names of the header where the first line is one, else None, and the rows of a file's first block.

    A UTF-8 byte order mark belongs to neither.
    """
    rows = block.removeprefix(codecs.BOM_UTF8)
    end = rows.find(b"\n") + 1 or len(rows)
    fields = rows[:end].removesuffix(b"\n").removesuffix(b"\r").split(b"\t")
    if not _is_header(fields):
        return None, rows
    return [field.decode(errors="backslashreplace").strip('"') for field in fields], rows[end:]


def _is_header(fields: list[bytes]) -> bool:
    if len(fields) != _NUM_FIELDS:
        return False
    names = fields[:_NUM_NUMBERS]
    return fields == _PANDAS_HEADER or (
        len(set(names)) == len(names) and not any(name.strip() == b"" or _is_number(name) for name in names)
    )


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True
