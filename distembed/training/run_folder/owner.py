"""Who owns a folder, as its lock file says in JSON, and whether that process is still there.

A process is known by its id, by when it began, and by the boot and process-id namespace of its machine: process ids
are used again, hosts may have the same name, and containers of one machine do not see each other's processes.
"""

import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

_JOB_VARIABLES = ("SLURM_JOB_ID", "AWS_BATCH_JOB_ID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class FolderOwner:
    """A process that owns a folder, as its text in the lock file describes it.

    Attributes:
        host: Name of the owner's machine.
        pid: Process id of the owner.
        job: The scheduler's id of the owner's job; None where no scheduler started it.
        since: When the process took the folder, in UTC.
        way: How it owns the folder, "flock" or "lease".
        token: A random name of this ownership, so that no two texts of different ownerships are equal.
        renewals: How often the text was renewed, so that no two texts of one ownership are equal.
        machine: The :func:`machine_id` within which ``pid`` names this process; empty where it cannot be read.
        start_ticks: When the process began, in clock ticks since its machine was booted; None where unknown.
    """

    host: str
    pid: int
    job: str | None
    since: str
    way: str
    token: str
    renewals: int
    machine: str
    start_ticks: int | None

    @classmethod
    def this_process(cls, way: str) -> "FolderOwner":
        """Returns a new ownership of this process, under a token of its own."""
        jobs = (os.environ.get(name) for name in _JOB_VARIABLES)
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            job=next((job for job in jobs if job and job != "none"), None),  # torch's launcher writes none without one
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            way=way,
            token=uuid.uuid4().hex,
            renewals=0,
            machine=machine_id(),
            start_ticks=_start_ticks(os.getpid()),
        )

    @classmethod
    def parse(cls, text: str) -> "FolderOwner | None":
        """Reads a lock file's text; returns None where it names no owner: half written, or of another version."""
        try:
            owner = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        return owner if isinstance(owner.pid, int) and owner.pid > 0 else None

    def as_text(self) -> str:
        """Returns the text for the lock file, which :meth:`parse` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def __str__(self) -> str:
        """Describes the owner for an error message."""
        job = "" if self.job is None else f", job {self.job}"
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def is_on_this_machine(self) -> bool:
        """Returns whether the owner's process id names a process that this one can see."""
        return bool(self.machine) and self.machine == machine_id()

    def is_running(self) -> bool:
        """Returns whether the owner's process is there; only a process on its own machine may ask."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        start_ticks = _start_ticks(self.pid)
        return None in (start_ticks, self.start_ticks) or start_ticks == self.start_ticks


def describe_owner(text: str) -> str:
    """Describes for an error message whom a lock file's text names."""
    owner = FolderOwner.parse(text)
    return "another process" if owner is None else f"another process ({owner})"


def machine_id() -> str:
    """Returns a name of this boot of this machine and of this process-id namespace; empty where there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """Returns when a process began; -1 for one that ended and was not waited for, None where it cannot be read."""
    try:
        # the second field is the program's name in parentheses, which may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if fields[0] in "ZX" else int(fields[19])
