"""Sizes as a user writes them."""

from distembed.errors import UserError


def parse_bytes(field: str, text: str) -> int:
    """``2GB`` -> 2,000,000,000; ``2GiB`` -> 2^31; a plain number is bytes."""
    units = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    units |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(number) :].lower()
    try:
        count = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        raise UserError(f"{field} is {text!r}; give a size such as 500MB, 2GB or 2GiB.") from None
    if count <= 0:
        raise UserError(f"{field} is {text!r}; it must be above 0.")
    return count
