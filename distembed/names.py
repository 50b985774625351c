"""Look-up of a name among the known ones, with an error that suggests the nearest."""

import difflib
from collections.abc import Iterable
from typing import TypeVar

from distembed.errors import UserError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name``, or None where none is near."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def one_of(field: str, value: T, known: Iterable[T]) -> T:
    """Returns ``value`` if it is among ``known``.

    Raises:
        UserError: that names the field, the value, the nearest known name, and all known ones.
    """
    known = list(known)
    if value in known:
        return value
    names = [str(k) for k in known]
    guess = nearest(str(value), names)
    hint = f" Did you mean {guess!r}?" if guess else ""
    raise UserError(f"{field} is {value!r}, which is not known.{hint} Known: {', '.join(names)}.")
