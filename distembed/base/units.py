"""Bytes and counts as text that a user writes or reads.

``pydantic.ByteSize`` accepts "2GB or so" and "2.GB" (as 2 bytes), and would have to be installed for ``distembed
doctor``, which finds missing packages.
"""

from collections.abc import Sequence

from distembed.base.errors import UserError

_BINARY_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {name.lower(): num_bytes for name, num_bytes in _BINARY_UNITS.items()}


def parse_bytes(field: str, text: str, least: int = 1) -> int:
    """Returns the bytes of a size: ``2GB`` is 2,000,000,000, ``2GiB`` is 2^31, a plain number is bytes.

    Units are b, kb, mb, gb, tb (powers of 1000) and kib, mib, gib, tib (powers of 1024). ``field`` names the option or
    setting in the error, as for a size below ``least``.
    """
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(number) :].lower()
    try:
        count = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise UserError(f"{field} is {text!r}; give a size such as 500MB, 2GB or 2GiB.") from None
    if count <= 0:
        raise UserError(f"{field} is {text!r}; it must be above 0.")
    if count < least:
        raise UserError(f"{field} is {text!r}; it must be {exact_bytes(least)} or more.")
    return count


def format_bytes(num_bytes: int) -> str:
    """Returns a size as ``1.50 GiB``, in the largest unit up to TiB that gives at least 1."""
    name, unit_bytes = binary_unit(num_bytes)
    return f"{num_bytes:.0f} B" if name == "B" else f"{num_bytes / unit_bytes:.2f} {name}"


def binary_unit(num_bytes: int) -> tuple[str, int]:
    """Returns the name and the bytes of the unit in which :func:`format_bytes` writes a size."""
    return [(name, size) for name, size in _BINARY_UNITS.items() if size == 1 or num_bytes >= size][-1]


def exact_bytes(num_bytes: int) -> str:
    """Returns a size, as ``80GiB``, that :func:`parse_bytes` reads back to the byte."""
    for unit in ("GiB", "MiB", "GB", "MB"):
        if num_bytes % _UNITS[unit.lower()] == 0:
            return f"{num_bytes // _UNITS[unit.lower()]}{unit}"
    return str(num_bytes)


def format_duration(seconds: float) -> str:
    """Returns a time as ``0.43 s``, ``40 s``, ``12 min`` or ``3.5 h``, in the largest unit that gives at least 2."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def enumerate_names(names: Sequence[str], most: int = 12) -> str:
    """Returns names separated by commas; of more than ``most``, the first ones and the number of the rest."""
    return " ".join([", ".join(names[:most]), *_more_text(names, most)])


def format_ranges(numbers: Sequence[int], most: int = 3) -> str:
    """Returns ascending numbers as ``0-3, 8``; after ``most`` ranges, how many further numbers there are."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:most])
    num_others = sum(last - first + 1 for first, last in ranges[most:])
    return f"{shown} and {num_others:,} more" if num_others else shown


def enumerate_lines(lines: Sequence[str], most: int = 12) -> str:
    """Returns lines indented below a heading; of more than ``most`` the first ones and the number of the rest."""
    return "".join(f"\n  {line}" for line in [*lines[:most], *_more_text(lines, most)])


def _more_text(listed: Sequence[str], most: int) -> list[str]:
    """Returns the end of a list whose first ``most`` elements are named; nothing where all are named."""
    return [f"and {len(listed) - most:,} more"] if len(listed) > most else []
