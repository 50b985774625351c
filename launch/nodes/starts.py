"""The starts of a job, counted in files that all nodes see.

Kubernetes and AWS Batch count every start of a job alike, and stop at a number that is given in advance. So they are
given a large number, and the nodes count failures themselves, by empty files in the run folder. For the third start::

    3                  it has begun
    3.interrupted      a node says that it was interrupted
    3.failed           a node says that it failed

A start with the first file alone ended with its node, which counts as a failure.
"""

from pathlib import Path

from launch.nodes.exit_codes import INTERRUPTED, MISTAKES, RETRIES_USED

_INTERRUPTED = "interrupted"
_FAILED = "failed"


class Starts:
    """The starts of a job, which its nodes note in ``folder``; a failed job starts again ``max_retries`` times."""

    def __init__(self, folder: Path, max_retries: int) -> None:
        self._folder = folder
        self._max_retries = max_retries
        self._number = 0
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> bool:
        """Notes another start on the first node, before the nodes meet; returns False after too many failures."""
        if self._num_failed() > self._max_retries:
            return False
        self._number = self._newest() + 1
        (self._folder / str(self._number)).touch()
        return True

    def join(self) -> None:
        """Takes part in the newest start, on the other nodes, once the first node listens."""
        self._number = self._newest()

    def end(self, code: int) -> int:
        """Notes the end of this start on this node; returns its code, or :data:`RETRIES_USED` for the last failure."""
        if code == 0 or code in MISTAKES:
            return code
        (self._folder / f"{self._number}.{_INTERRUPTED if code == INTERRUPTED else _FAILED}").touch()
        return RETRIES_USED if code != INTERRUPTED and self._num_failed() > self._max_retries else code

    def _newest(self) -> int:
        """Returns the number of the newest start; 0 before the first."""
        return max((int(file.name) for file in self._folder.iterdir() if file.name.isdecimal()), default=0)

    def _num_failed(self) -> int:
        """Returns how many starts have failed; a failure of one node outweighs interruptions of other nodes."""
        names = {file.name for file in self._folder.iterdir()}
        starts = [name for name in names if name.isdecimal()]
        return sum(f"{name}.{_FAILED}" in names or f"{name}.{_INTERRUPTED}" not in names for name in starts)
