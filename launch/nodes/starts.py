"""How often a job was started, and how each start ended, where the scheduler does not tell failures from interruptions.

Kubernetes and AWS Batch count every start alike, and stop at a number that is given in advance. So they are given a
large one, and the nodes themselves count in the run folder, which all of them see, those that failed. The folder holds
empty files: ``3`` for the third start, ``3.interrupted`` and ``3.failed`` for what the nodes say of its end. A start of
which nothing is said ended with its node, which counts as a failure.
"""

from pathlib import Path

from launch.nodes.exit_codes import INTERRUPTED, MISTAKES, RETRIES_USED

_INTERRUPTED = "interrupted"
_FAILED = "failed"


class Starts:
    """The starts of a job, of which this process is a node's.

    Args:
        folder: Folder for the files, the same on all nodes; it is made where it is missing.
        max_retries: How often the job is started again after it has failed.
    """

    def __init__(self, folder: Path, max_retries: int) -> None:
        self._folder = folder
        self._max_retries = max_retries
        self._number = 0
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> bool:
        """Notes another start; the first node calls it before the others meet there.

        Returns:
            False where the job has failed too often to be started again.
        """
        if self._num_failed() > self._max_retries:
            return False
        self._number = self._newest() + 1
        (self._folder / str(self._number)).touch()
        return True

    def join(self) -> None:
        """Takes part in the newest start; the other nodes call it once the first one listens."""
        self._number = self._newest()

    def end(self, code: int) -> int:
        """Notes how this start has ended on this node.

        Returns:
            The exit code for the scheduler: :data:`RETRIES_USED` for a failure after which the job may not be started
            again, else the given one.
        """
        if code == 0 or code in MISTAKES:
            return code
        (self._folder / f"{self._number}.{_INTERRUPTED if code == INTERRUPTED else _FAILED}").touch()
        return RETRIES_USED if code != INTERRUPTED and self._num_failed() > self._max_retries else code

    def _newest(self) -> int:
        """Returns the number of the newest start; 0 before the first."""
        return max((int(file.name) for file in self._folder.iterdir() if file.name.isdecimal()), default=0)

    def _num_failed(self) -> int:
        """Returns how many starts have failed; a failure on one node outweighs an interruption of the others."""
        names = {file.name for file in self._folder.iterdir()}
        starts = [name for name in names if name.isdecimal()]
        return sum(f"{name}.{_FAILED}" in names or f"{name}.{_INTERRUPTED}" not in names for name in starts)
