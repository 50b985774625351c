"""Numbers of a plan as a reader sees them; bytes are written by :mod:`distembed.units`."""

import math

from distembed.units import format_bytes


def bytes_or_dash(num_bytes: int) -> str:
    """Returns a size, and a dash for none."""
    return format_bytes(num_bytes) if num_bytes else "-"


def format_milliseconds(milliseconds: float) -> str:
    """Returns the number with at least three digits, without the unit."""
    return f"{milliseconds:,.{_decimals(milliseconds)}f}"


def milliseconds_at_least(milliseconds: float) -> str:
    """Returns the number as :func:`format_milliseconds`, rounded down, for what nothing is below."""
    scale = 10 ** _decimals(milliseconds)
    return format_milliseconds(math.floor(milliseconds * scale) / scale)


def added_milliseconds(milliseconds: float) -> str:
    """Returns a difference with its sign and unit, such as ``+0.125 ms``; ``+0 ms`` where it is too small to see."""
    text = format_milliseconds(abs(milliseconds))
    return "+0 ms" if float(text.replace(",", "")) == 0 else f"{_sign(milliseconds)}{text} ms"


def added_bytes(num_bytes: int) -> str:
    """Returns a difference with its sign and unit, such as ``-1.50 GiB``."""
    return f"{_sign(num_bytes)}{format_bytes(abs(num_bytes))}"


def percent_at_most(share: float) -> str:
    """Returns a share in percent, rounded up, such as ``2.5%``; without digits behind the point from 10% on."""
    scale = 10 if share < 0.1 else 1
    return f"{math.ceil(round(100 * share * scale, 6)) / scale:,.{1 if scale == 10 else 0}f}%"


def _decimals(milliseconds: float) -> int:
    """Returns the digits behind the point that a time is written with."""
    return 1 if milliseconds >= 100 else 2 if milliseconds >= 10 else 3


def _sign(difference: float) -> str:
    """Returns the sign of a difference; plus for none."""
    return "-" if difference < 0 else "+"
