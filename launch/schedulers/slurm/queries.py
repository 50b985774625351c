"""Runs Slurm's commands, and reads the state of jobs and nodes from their output.

The controller (``scontrol``, ``squeue``) knows current jobs, requeued ones included, and forgets a job minutes after
its end. Accounting (``sacct``) remembers, but calls a job failed that was requeued after its node had died, and not
every cluster has it. So the controller is asked first, and accounting about jobs that the controller has forgotten. A
controller that is busy or restarts does not answer for a while: it is asked again.
"""

import getpass
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from distembed.base.errors import RunError, UserError

PATIENCE_SECONDS = 30.0
"""How long a controller that does not answer is asked again."""
RETRY_SECONDS = 3.0
"""Seconds between two attempts to ask the controller."""

Completed = subprocess.CompletedProcess[str]
_Answer = TypeVar("_Answer")
_JOB_ID = re.compile(r"\d+(?:[_+]\d+)?")
_LISTED_DAYS = 14
"""How many days back jobs are listed; TorchX takes as many for other schedulers."""


@dataclass(frozen=True)
class JobRecord:
    """A job, as Slurm knows it.

    Args:
        state: State in Slurm's words, like "RUNNING" or "CANCELLED by 0".
        reason: Why the job waits, or has ended.
        nodes: The nodes in Slurm's short form, like "gpu[1-4]"; "" before the job starts.
        restarts: How often the job was requeued; -1 where that is not known.
        output: File of the batch script's output.
        is_certain: False where accounting answers in place of a silent controller: it calls requeued jobs failed.
    """

    job_id: str
    name: str
    state: str
    reason: str = ""
    num_nodes: int = 1
    nodes: str = ""
    restarts: int = -1
    output: Path | None = None
    is_certain: bool = True


@dataclass(frozen=True)
class NodeRecord:
    """A node, in one of its partitions; ``memory_mb`` is 1 where the cluster does not report it.

    ``is_default`` is set where jobs that name no partition go there, ``is_up`` where the node takes jobs, now or later.
    """

    partition: str
    is_default: bool
    name: str
    cpus: int
    memory_mb: int
    gpus: int
    is_up: bool


def run_command(
    command: Sequence[str], stdin: str | None = None, environment: dict[str, str] | None = None
) -> Completed:
    """Runs one of Slurm's commands to its end, by default with this process's environment."""
    try:
        return subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
        )
    except FileNotFoundError:
        raise UserError(
            f"there is no {command[0]} on PATH; run this where Slurm's commands are, such as a cluster's login node, "
            "or try it on a Slurm on this machine: tests/launch/mini_slurm.sh up"
        ) from None


def failure_reason(completed: Completed) -> str:
    """Returns the message of a command that failed, or its exit code where it has printed nothing."""
    return without_prefixes(completed.stderr) or f"{completed.args[0]} ended with code {completed.returncode}"


def without_prefixes(stderr: str) -> str:
    """Returns printed lines as one line, without prefixes like ``sbatch: error:``."""
    return "; ".join(re.sub(r"^\w+: (?:error: |fatal: )?", "", line) for line in stderr.strip().splitlines())


def retry(ask: Callable[[], _Answer], patience_seconds: float | None = None) -> _Answer:
    """Calls ``ask`` every :data:`RETRY_SECONDS` until it raises no RunError, and returns its answer.

    After ``patience_seconds`` (:data:`PATIENCE_SECONDS` unless given) the error is raised.
    """
    end = time.monotonic() + (PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
    while True:
        try:
            return ask()
        except RunError:
            if time.monotonic() >= end:
                raise
        time.sleep(RETRY_SECONDS)


def list_nodes() -> list[NodeRecord]:
    """Returns all nodes, each once for each of its partitions."""
    answer = run_command(["sinfo", "--noheader", "--Node", "--format=%P|%N|%c|%m|%G|%T"])
    if answer.returncode:
        raise RunError(f"Slurm does not answer: {failure_reason(answer)}")
    return [_parse_node(line) for line in answer.stdout.splitlines()]


def query_job(job_id: str, patience_seconds: float | None = None) -> JobRecord | None:
    """Returns the record of a job; None for text that is no job's number, and for a job that Slurm does not know.

    After ``patience_seconds`` without an answer of the controller, accounting is asked, which may call a requeued job
    failed: its record has ``is_certain=False``. RunError where accounting does not know the job either.
    """
    if not _JOB_ID.fullmatch(job_id):
        return None
    try:
        return retry(lambda: ask_controller(job_id) or _accounted_job(job_id), patience_seconds)
    except RunError:
        record = _accounted_job(job_id)
        if record is None:
            raise
        return replace(record, reason="says accounting; the controller does not answer", is_certain=False)


def list_jobs() -> list[JobRecord]:
    """Returns this user's jobs of the last two weeks, from accounting and the controller.

    Where one of the two fails, the other's jobs are returned. RunError where the controller fails and accounting lists
    no job.
    """
    queue = run_command(["squeue", "--noheader", "--states=all", f"--user={getpass.getuser()}", "--format=%i|%T|%j"])
    past = _accounting([f"--user={getpass.getuser()}", f"--starttime=now-{_LISTED_DAYS}days"], "JobID,State,JobName")
    if queue.returncode and not past:
        raise RunError(f"jobs cannot be listed: {failure_reason(queue)}")
    rows = [*past, *(line.split("|", 2) for line in queue.stdout.splitlines() if not queue.returncode)]
    # the controller's answers come last, and replace accounting's
    records = {job_id: JobRecord(job_id, name, state) for job_id, state, name in rows}
    return list(records.values())


def find_job(name: str) -> str | None:
    """Returns the number of the job of a unique name, from the controller or else accounting; None without one.

    RunError where the controller does not answer and accounting does not know the job.
    """
    queue = run_command(["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i"])
    if not queue.returncode and queue.stdout.split():
        return queue.stdout.split()[0]
    past = _accounting([f"--name={name}", f"--starttime=now-{_LISTED_DAYS}days"], "JobID")
    if queue.returncode and not past:
        raise RunError(f"jobs cannot be listed: {failure_reason(queue)}")
    return past[0][0] if past else None


def host_names(nodes: str) -> list[str]:
    """Returns names of nodes from their short form, in the order of a job's replicas; [] where Slurm fails."""
    if not nodes:
        return []
    answer = run_command(["scontrol", "show", "hostnames", nodes])
    return [] if answer.returncode else answer.stdout.split()


def ask_controller(job_id: str) -> JobRecord | None:
    """Returns the controller's record of a job; None where it does not know the job; RunError without an answer."""
    answer = run_command(["scontrol", "show", "job", job_id])
    if not answer.returncode and "JobState=" in answer.stdout:
        return _parse_job(answer.stdout)
    if "Invalid job id" in answer.stderr:
        return None
    raise RunError(f"nothing can be said of job {job_id}: {failure_reason(answer)}")


def _accounted_job(job_id: str) -> JobRecord | None:
    """Returns accounting's record of a job; None where it does not know it or does not answer."""
    # the last field may hold the separator; accounting has the path of the output in SubmitLine only
    rows = _accounting([f"--jobs={job_id}"], "JobID,State,NNodes,NodeList,JobName,SubmitLine")
    for row_id, state, num_nodes, nodes, name, line in rows:
        if row_id == job_id:
            output = re.search(r"--output=(.*slurm-%j\.out)", line)
            path = Path(output[1].replace("%j", job_id).replace("%%", "%")) if output else None
            return JobRecord(
                job_id,
                name,
                state,
                num_nodes=int(num_nodes) if num_nodes.isdecimal() else 1,
                nodes="" if nodes == "None assigned" else nodes,
                output=path,
            )
    return None


def _accounting(selection: Sequence[str], fields: str) -> list[list[str]]:
    """Returns rows of accounting; none where there is no accounting or it cannot be reached."""
    try:
        answer = run_command(["sacct", "--allocations", "--noheader", "--parsable2", f"--format={fields}", *selection])
    except UserError:
        return []
    if answer.returncode:
        return []
    num_separators = fields.count(",")
    # the last field may contain the separator; lines with too few fields are dropped
    rows = [line.split("|", num_separators) for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == num_separators + 1]


def _parse_job(text: str) -> JobRecord:
    """Reads the output of ``scontrol show job``; of a job of several parts it takes the first."""

    def field(name: str, pattern: str = r"\S*") -> str:
        matched = re.search(rf"(?:^|\s){name}=({pattern})", text, re.MULTILINE)
        return "" if matched is None or matched[1] in ("(null)", "None") else matched[1]

    num_nodes = re.match(r"\d+", field("NumNodes"))  # "1-2" while an elastic job waits
    output = field("StdOut", ".*")
    return JobRecord(
        job_id=field("JobId"),
        name=field("JobName", ".*"),
        state=field("JobState"),
        reason=field("Reason"),
        num_nodes=int(num_nodes[0]) if num_nodes else 1,
        nodes=field("NodeList"),
        restarts=int(field("Restarts") or -1),
        output=Path(output.replace("%%", "%")) if output else None,
    )


def _parse_node(line: str) -> NodeRecord:
    """Reads a line of ``sinfo``, like ``gpu*|node7|96|2063886|gpu:h100:8(S:0-1)|idle``; "8+" is 8 or more."""
    partition, name, cpus, memory, resources, state = line.split("|")
    return NodeRecord(
        partition.rstrip("*"),
        partition.endswith("*"),
        name,
        int(cpus.rstrip("+")),
        int(memory.rstrip("+")),
        gpus=sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)*:(\d+)", resources)),
        # "*": it does not respond. A node that is powered down is started when it is needed.
        is_up=not re.match(r"(down|drain|fail|unknown|maint|inval|future)|.*\*$", state),
    )
