"""Slurm's commands as functions: what they are asked, what they answer, and their own reason where they fail.

The controller (``scontrol``, ``squeue``) knows the jobs of now, those that were requeued included, and forgets a job
minutes after its end. Accounting (``sacct``) remembers, but calls a job failed that was requeued after its node
had died, and not every cluster has it. So the controller is asked first, and accounting about what it has forgotten.
A busy controller, or one that starts again, does not answer for a while: that says nothing of a job.
"""

import contextlib
import getpass
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from distembed.errors import RunError, UserError
from launch.slurm.script import CANCEL_SECONDS

_Answer = TypeVar("_Answer")
_JOB_ID = re.compile(r"\d+(?:[_+]\d+)?")
_RUNNING = ("RUNNING", "SIGNALING", "RESIZING")
"""States in which a batch script hears a signal; the last two pass within moments."""
_OUTCOME_UNKNOWN = re.compile(r"timed out|Zero Bytes|reset by peer", re.IGNORECASE)
"""What a command says that has put its question and got no answer."""
_MEMORY_DAYS = 14
"""How far back jobs are listed; so far TorchX looks on other schedulers."""
PATIENCE_SECONDS = 30.0
"""How long a question is put to a controller that does not answer."""
RETRY_SECONDS = 3.0
"""How often."""


@dataclass(frozen=True)
class JobRecord:
    """What Slurm knows of a job.

    Args:
        job_id: Its number.
        name: Its name.
        state: In Slurm's words, which may carry more than one, as in "CANCELLED by 0".
        reason: Why it waits, or has ended; "" where there is nothing to say.
        num_nodes: Nodes that it has, or asks for.
        nodes: The nodes in Slurm's short form, such as "gpu[1-4]"; "" before it starts.
        restarts: How often it was requeued; -1 where that is not known.
        output: File of the batch script's output; None where that is not known.
        is_certain: False for what accounting says while the controller does not answer: it calls a job failed that was
            requeued.
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
    """A node, in one of its partitions.

    Args:
        partition: Name of the partition.
        is_default: Whether jobs that name no partition go there.
        name: Of the node.
        cpus: CPUs that it has, as Slurm counts them.
        memory_mb: Memory in MB; 1 where the cluster does not say.
        gpus: GPUs of all types.
        is_up: Whether it takes jobs, now or when those that it has have ended.
    """

    partition: str
    is_default: bool
    name: str
    cpus: int
    memory_mb: int
    gpus: int
    is_up: bool


def submit(command: Sequence[str], script: str, name: str) -> str:
    """Submits a script and returns the number of its job.

    Args:
        command: ``sbatch`` with its options.
        script: What it reads from its standard input.
        name: Of the job, to look for it where Slurm does not say whether it has taken it.

    Raises:
        UserError: Slurm does not accept the job; the message holds its reason.
        RunError: Slurm cannot be reached, or has not answered.
    """
    remedy = f"It may have taken the job: look with `squeue --name={name}` before you try again"
    # "123;cluster" where there are several clusters
    return _sbatch(command, script, remedy).stdout.strip().partition(";")[0]


def expected_start(command: Sequence[str], script: str) -> str:
    """What Slurm says of when and where it would start a job, which it does not submit.

    Raises:
        UserError: Slurm would not accept the job; the message holds its reason.
        RunError: Slurm cannot be reached, or has not answered.
    """
    said = _without_names(_sbatch([*command, "--test-only"], script, "Try again later").stderr)
    return re.sub(r"^Job \d+ ", "", said)


def list_nodes() -> list[NodeRecord]:
    """All nodes, each once for every partition that it is in.

    Raises:
        UserError: There is no Slurm on this machine.
        RunError: It does not answer.
    """
    answer = _run(["sinfo", "--noheader", "--Node", "--format=%P|%N|%c|%m|%G|%T"])
    if answer.returncode:
        raise RunError(f"Slurm does not answer: {_reason(answer)}")
    return [_node(line) for line in answer.stdout.splitlines()]


def cancel(job_id: str) -> int:
    """Cancels a job; one that has ended already is left as it is.

    A job of :mod:`launch.slurm.script` that runs, and may need some time to save what it has, is only told: Slurm would
    kill it after the cluster's KillWait, half a minute as a rule. Its batch script cancels it when it has saved, or
    :data:`CANCEL_SECONDS` after its time is over. Who cannot wait cancels it once more.

    Returns:
        Seconds within which it ends; 0 where Slurm ends it at once.

    Raises:
        RunError: Slurm does not do it, or has not answered for :data:`PATIENCE_SECONDS`: then the job goes on.
    """
    try:
        seconds = _patiently(lambda: _tell_to_end(job_id))
    except RunError as error:
        raise RunError(
            f"job {job_id} was not cancelled, because Slurm does not answer: {error}. Try again, or "
            f"`scancel {job_id}` ends it without saving"
        ) from error
    if seconds:
        return seconds
    answer = _run(["scancel", job_id])
    if answer.returncode and "already completing or completed" not in answer.stderr:
        raise RunError(f"job {job_id} was not cancelled: {_reason(answer)}")
    return 0


def is_told_to_end(record: JobRecord) -> bool:
    """Whether a job was cancelled by :func:`cancel` and has not done with saving yet."""
    return record.output is not None and os.path.exists(_cancelled_file(record.output))


def find_job(job_id: str, patience_seconds: float | None = None) -> JobRecord | None:
    """What is known of a job; None where there is no such job.

    Args:
        job_id: Its number.
        patience_seconds: How long a controller that does not answer is asked, :data:`PATIENCE_SECONDS` as a rule. Then
            accounting has the word, and what it says need not be the end of a job.

    Raises:
        RunError: The controller cannot be reached, and accounting does not know the job either.
    """
    if not _JOB_ID.fullmatch(job_id):
        return None
    try:
        return _patiently(lambda: _ask_controller(job_id) or _accounted_job(job_id), patience_seconds)
    except RunError:
        record = _accounted_job(job_id)
        if record is None:
            raise
        return replace(record, reason="says accounting; the controller does not answer", is_certain=False)


def list_jobs() -> list[JobRecord]:
    """This user's jobs of two weeks, or those that the controller remembers where there is no accounting."""
    queue = _run(["squeue", "--noheader", "--states=all", f"--user={getpass.getuser()}", "--format=%i|%T|%j"])
    past = _accounting([f"--user={getpass.getuser()}", f"--starttime=now-{_MEMORY_DAYS}days"], "JobID,State,JobName")
    if queue.returncode and not past:
        raise RunError(f"jobs cannot be listed: {_reason(queue)}")
    rows = [*past, *(line.split("|", 2) for line in queue.stdout.splitlines() if not queue.returncode)]
    # the controller's word comes last, and counts
    records = {job_id: JobRecord(job_id, name, state) for job_id, state, name in rows}
    return list(records.values())


def host_names(nodes: str) -> list[str]:
    """Names of nodes, in the order of a job's replicas, from Slurm's short form; [] where Slurm cannot tell."""
    if not nodes:
        return []
    answer = _run(["scontrol", "show", "hostnames", nodes])
    return [] if answer.returncode else answer.stdout.split()


def _patiently(ask: Callable[[], _Answer], patience_seconds: float | None = None) -> _Answer:
    """The answer to a question that is put again while there is none.

    Args:
        ask: Puts it, and raises RunError where there is no answer.
        patience_seconds: How long it is put; :data:`PATIENCE_SECONDS` as a rule.

    Raises:
        RunError: There is none.
    """
    end = time.monotonic() + (PATIENCE_SECONDS if patience_seconds is None else patience_seconds)
    while True:
        try:
            return ask()
        except RunError:
            if time.monotonic() >= end:
                raise
        time.sleep(RETRY_SECONDS)


def _ask_controller(job_id: str) -> JobRecord | None:
    """What the controller knows of a job; None where it does not know it, or not any more.

    Raises:
        RunError: It does not answer.
    """
    answer = _run(["scontrol", "show", "job", job_id])
    if not answer.returncode and "JobState=" in answer.stdout:
        return _record(answer.stdout)
    if "Invalid job id" in answer.stderr:
        return None
    raise RunError(f"nothing can be said of job {job_id}: {_reason(answer)}")


def _tell_to_end(job_id: str) -> int:
    """Tells a running job to save what it has and to end.

    Returns:
        Seconds within which it ends; 0 where it cannot be told, or was told before.

    Raises:
        RunError: Slurm does not answer. The job was not told, as far as is known; to tell it twice does no harm.
    """
    record = _ask_controller(job_id)
    if record is None or record.state not in _RUNNING or record.output is None:
        return 0
    grace_seconds = _grace_seconds(job_id)
    return grace_seconds + CANCEL_SECONDS if grace_seconds and _signal(job_id, record.output) else 0


def _grace_seconds(job_id: str) -> int:
    """How long a job may take to save what it has, from its batch script; 0 for one that cannot be told to.

    Raises:
        RunError: Slurm does not answer.
    """
    answer = _run(["scontrol", "write", "batch_script", job_id, "-"])
    # A failure has no script and may still end with code 0. Of these, asking again would change nothing.
    if not answer.stdout and not re.search(r"Invalid|denied|not specified", answer.stderr):
        raise RunError(_reason(answer))
    found = re.search(r"^grace=(\d+)$", answer.stdout, re.MULTILINE)
    return int(found[1]) if found else 0


def _signal(job_id: str, output: Path) -> bool:
    """Sends a batch script what tells it to end; False where it was told before, or where that cannot be noted.

    Raises:
        RunError: Slurm does not do it. Then it is not noted either, so that it can be tried again.
    """
    # For the script that has not begun yet, as while Slurm prepares the node: that does not hear the signal.
    told = _cancelled_file(output)
    try:
        told.touch(exist_ok=False)
    except OSError:
        return False
    is_sent = False
    try:
        answer = _run(["scancel", "--batch", "--signal=USR2", job_id])
        is_sent = not answer.returncode
    finally:
        if not is_sent:
            with contextlib.suppress(OSError):
                told.unlink(missing_ok=True)
    if not is_sent:
        raise RunError(_reason(answer))
    return True


def _cancelled_file(output: Path) -> Path:
    """What lies beside a job's output while the job is told to end."""
    return output.with_suffix(".cancelled")


def _accounted_job(job_id: str) -> JobRecord | None:
    # the last field may hold the separator; SubmitLine is the only place where accounting has the path of the output
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
    """Rows of accounting; none where there is no accounting or it cannot be reached."""
    try:
        answer = _run(["sacct", "--allocations", "--noheader", "--parsable2", f"--format={fields}", *selection])
    except UserError:
        return []
    if answer.returncode:
        return []
    last = fields.count(",")
    rows = [line.split("|", last) for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == last + 1]


def _record(text: str) -> JobRecord:
    """Reads what ``scontrol show job`` prints; of a job of several parts it takes the first."""

    def field(name: str, pattern: str = r"\S*") -> str:
        found = re.search(rf"(?:^|\s){name}=({pattern})", text, re.MULTILINE)
        return "" if found is None or found[1] in ("(null)", "None") else found[1]

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


def _node(line: str) -> NodeRecord:
    """Reads a line of ``sinfo``, such as ``gpu*|node7|96|2063886|gpu:h100:8(S:0-1)|idle``."""
    partition, name, cpus, memory, resources, state = line.split("|")
    gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,(]+)*:(\d+)", resources))
    # "*": it does not respond. One that is powered down is started when it is needed.
    is_up = not re.match(r"(down|drain|fail|unknown|maint|inval|future)|.*\*$", state)
    # "8+" is 8 or more
    return NodeRecord(
        partition.rstrip("*"),
        partition.endswith("*"),
        name,
        int(cpus.rstrip("+")),
        int(memory.rstrip("+")),
        gpus,
        is_up,
    )


def _sbatch(command: Sequence[str], script: str, remedy: str) -> subprocess.CompletedProcess[str]:
    """Puts a script to Slurm; ``remedy`` is said where there is no answer."""
    answer = _run(command, stdin=script, environment=_environment_outside_jobs())
    if answer.returncode:
        reason = _reason(answer)
        if "ontact slurm controller" in reason or "Connection refused" in reason:
            raise RunError(f"the job was not submitted, because Slurm cannot be reached: {reason}")
        if _OUTCOME_UNKNOWN.search(reason):
            raise RunError(f"Slurm has not answered: {reason}. {remedy}")
        raise UserError(f"Slurm does not accept the job: {reason}")
    return answer


def _reason(answer: subprocess.CompletedProcess[str]) -> str:
    """What a command has to say about its failure."""
    return _without_names(answer.stderr) or f"{answer.args[0]} ended with code {answer.returncode}"


def _without_names(stderr: str) -> str:
    """Lines of a command in one, without its name before each."""
    return "; ".join(re.sub(r"^\w+: (?:error: |fatal: )?", "", line) for line in stderr.strip().splitlines())


def _environment_outside_jobs() -> dict[str, str] | None:
    """The environment without what describes the job that this process runs in; None where it runs in no job.

    Its limits, as SLURM_MEM_PER_CPU, would contradict those of the new job.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return None
    kept = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT"}
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith("SLURM_")}


def _run(
    command: Sequence[str], stdin: str | None = None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
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
            "or try it on a Slurm on this machine: tools/mini_slurm.sh up"
        ) from None
