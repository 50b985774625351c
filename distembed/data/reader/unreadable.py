"""Row groups that cannot be read, some of which a run may do without.

The rows of another row group take the place of those that cannot be read: the next one that can, over and over if it
has fewer. So every batch has as many rows as it would have, every rank takes as many steps, and which rows these are
depends on what is damaged alone, not on the number of ranks.

Trade-off: some rows are trained on twice. Leaving rows out would need all ranks to agree before an epoch, and so to
read all of it before. Where a server failed for a while, a run that is repeated may find the rows that were missing.
"""

from __future__ import annotations

import threading

from distembed.errors import RunError, UserError


class Unreadable:
    """Counts row groups that could not be read; threads share it.

    Args:
        most: Most of them that are allowed.

    Attributes:
        found: What is wrong with each row group that could not be read, by its name.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.found: dict[str, str] = {}
        self._lock = threading.Lock()

    def allow(self, group: str, error: UserError | RunError) -> None:
        """Notes that a row group could not be read, any number of times.

        Raises:
            UserError: More cannot be read than are allowed, or the error itself where none is.
            RunError: The error itself, where none is allowed.
        """
        with self._lock:
            self.found.setdefault(group, str(error))
            num_found = len(self.found)
        if not self._most:
            raise error
        if num_found > self._most:
            raise UserError(too_many_unreadable(num_found, self._most, str(error))) from error


def too_many_unreadable(num_found: int, most: int, error: str) -> str:
    """Returns the text of an error: more row groups cannot be read than are allowed."""
    return f"{num_found} row groups cannot be read, and data.skip_unreadable allows {most}; the last: {error}"
