"""TorchX's scheduler for Slurm, corrected.

===============================================  ====================================================================
TorchX 0.7.0                                     here
===============================================  ====================================================================
a heterogeneous job, one component a node        one plain job, elastic where the role is (``script``)
``status`` asserts on "CANCELLED by 0"           every state has an answer, UNKNOWN where it is a new one
a job requeued after NODE_FAIL is failed         it is pending or running, as the controller has it
jobs of one application have one name            each has a name of its own, by which it is found
without accounting there is no status            the controller is asked first (``queries``)
values of variables end at a comma               they arrive as they are
sbatch's reason is lost                          it is the message of the error
logs are found only where the job was submitted  they are found by the job's number alone
following a log asks Slurm ten times a second    every few seconds, however many nodes are followed
following ends when the controller is busy       it is asked again for some minutes
a retry counts preemptions and dead nodes        it counts failures
``cancel`` kills after half a minute at most     a job that has something to save is given its time
===============================================  ====================================================================
"""

import logging
import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torchx.schedulers import slurm_scheduler
from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Stream, filter_regex
from torchx.schedulers.ids import make_unique
from torchx.specs import (
    MISSING,
    AppDef,
    AppDryRunInfo,
    ReplicaStatus,
    Role,
    RoleStatus,
    macros,
    runopts,
)

from distembed.base.errors import RunError, UserError
from distembed.launch.apps.roles import GRACE_SECONDS
from distembed.launch.schedulers.slurm import queries, submission
from distembed.launch.schedulers.slurm.queries import JobRecord
from distembed.launch.schedulers.slurm.script import (
    RANK0_VARIABLE,
    SlurmJob,
    further_options,
    log_pattern,
    time_limit_seconds,
)
from distembed.launch.schedulers.slurm.states import app_state, followed_jobs, log_lines

SBATCH_OPTIONS = {
    "partition": "partition to run in; the cluster's default where it is not given",
    "time": "time limit: minutes, hours:minutes:seconds or days-hours",
    "account": "account that is charged",
    "qos": "quality of service",
    "reservation": "reservation to run in",
    "constraint": "features that the nodes must have",
    "exclude": "nodes not to run on",
    "mem": "memory of a node, such as 64G, or 0 for all of it; that of the role's resource where it is not given",
    "comment": "comment on the job",
    "mail-user": "who is mailed",
    "mail-type": "events that are mailed, such as END,FAIL",
}
"""Run options that become options of sbatch, with their help."""

log = logging.getLogger(__name__)


class SlurmScheduler(slurm_scheduler.SlurmScheduler):  # type: ignore[misc,unused-ignore]
    """Runs the one role of an application as a plain job of Slurm; see the module's comparison with TorchX's.

    The job is elastic where the role's ``min_replicas`` is below its ``num_replicas``. In the role's arguments
    ``$${rank0_env}`` names the variable that holds the name of the first node. Logs are looked for in ``log_dir`` where
    neither the controller nor accounting knows the job's own folder.
    """

    def __init__(self, session_name: str, log_dir: str | None = None) -> None:
        super().__init__(session_name)
        self._log_dir = log_dir

    def _run_opts(self) -> runopts:
        options = runopts()
        for name, text in SBATCH_OPTIONS.items():
            options.add(name, type_=str, default=None, help=text)
        options.add(
            "sbatch",
            type_=str,
            default=None,
            help="further options of sbatch, such as '--exclusive --nodelist=n[1-4] --dependency=afterok:12'",
        )
        options.add(
            "job_dir", type_=str, default=None, help="folder that the workspace is copied to and the job runs in"
        )
        options.add(
            "log_dir",
            type_=str,
            default=None,
            help="folder for the logs, which every node must see; job_dir, or else the current folder",
        )
        options.add(
            "signal_seconds",
            type_=int,
            default=None,
            help="how long before its time limit the job is sent SIGUSR1, to save its state; 0 for never; a minute "
            "longer than its processes have for that, or 120 where the role does not say",
        )
        return options

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo[SlurmJob]:
        if len(app.roles) != 1:
            names = ", ".join(role.name for role in app.roles) or "none"
            raise UserError(
                f"the application {app.name!r} has {len(app.roles)} roles ({names}); on Slurm it must have one"
            )
        return AppDryRunInfo(self._job(make_unique(app.name), app.roles[0], cfg), str)

    def _job(self, name: str, role: Role, cfg: Mapping[str, Any]) -> SlurmJob:
        """Returns the job whose nodes are the replicas of the role; ``cfg`` holds the values of ``_run_opts``."""
        if role.entrypoint == MISSING:
            raise UserError(f"the role {role.name!r} has no entrypoint, the program to run")
        # The macros that differ between jobs and nodes are left standing: the script fills them in.
        values = macros.Values(
            img_root=role.image, app_id=macros.app_id, replica_id=macros.replica_id, rank0_env=RANK0_VARIABLE
        )
        filled = values.apply(role)
        job_dir = str(Path(cfg["job_dir"]).absolute()) if cfg.get("job_dir") else ""
        min_nodes = role.num_replicas if role.min_replicas is None else role.min_replicas
        grace_seconds = int(role.metadata.get(GRACE_SECONDS, 0))
        chosen = {option: str(cfg[option]) for option in SBATCH_OPTIONS if cfg.get(option) not in (None, "")}
        return SlurmJob(
            name=name,
            role=role.name,
            program=[filled.entrypoint, *filled.args],
            log_dir=Path(cfg.get("log_dir") or job_dir or os.getcwd()).absolute(),
            environment=filled.env,
            min_nodes=min_nodes,
            max_nodes=role.num_replicas,
            options={**self._resources(role, cfg), **chosen},
            directory=job_dir,
            max_retries=role.max_retries,
            warning_seconds=_warning_seconds(cfg, grace_seconds),
            grace_seconds=grace_seconds,
            further=further_options(cfg.get("sbatch") or "", named_options=SBATCH_OPTIONS),
        )

    def _partition_memmb(self, partition: str | None) -> int | None:
        """Returns the largest memory of a partition's nodes, in MB; None where Slurm does not know it."""
        try:
            nodes = queries.list_nodes()
        except (UserError, RunError):
            return None
        names = partition.split(",") if partition else [node.partition for node in nodes if node.is_default]
        return max((node.memory_mb for node in nodes if node.partition in names), default=None)

    def _resources(self, role: Role, cfg: Mapping[str, Any]) -> dict[str, str]:
        """Returns sbatch's options for the CPUs, GPUs and memory that the role needs of a node."""
        options = {}
        if role.resource.cpu > 0:
            options["cpus-per-task"] = str(role.resource.cpu)
        if role.resource.gpu > 0:
            # a node, not a task: a launcher shares them out among its own processes
            options["gpus-per-node"] = str(role.resource.gpu)
        # Where a cluster does not report the memory of its nodes, Slurm takes it for 1 MB.
        memory = self._partition_memmb(cfg.get("partition")) if role.resource.memMB > 0 else None
        if role.resource.memMB > 0 and (memory is None or memory > 1000):
            options["mem"] = f"{role.resource.memMB}M"
        return options

    def schedule(self, dryrun_info: AppDryRunInfo[SlurmJob]) -> str:
        job = dryrun_info.request
        # Slurm ends a job whose output it cannot write, without a message
        for folder in {job.log_dir, Path(job.directory or job.log_dir)}:
            folder.mkdir(parents=True, exist_ok=True)
        job_id = submission.submit(job.command, job.script(), job.full_name)
        # left by an old job of this number
        (job.log_dir / f"slurm-{job_id}.cancelled").unlink(missing_ok=True)
        return job_id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Returns the state of a job, which may be some seconds old; None where Slurm does not know it.

        It is UNKNOWN where accounting reports an end and the controller does not answer: the job may be requeued.
        """
        # TorchX asks in every thread that follows a replica
        answer = followed_jobs.answer(app_id)
        record, state = answer.record, answer.state
        if record is None:
            return None
        role = record.name.rpartition("/")[2] or record.job_id
        hosts = followed_jobs.host_names(record.nodes)
        num_replicas = len(hosts) or record.num_nodes
        replicas = [
            ReplicaStatus(id=k, role=role, state=state, hostname=hosts[k] if hosts else "") for k in range(num_replicas)
        ]
        return DescribeAppResponse(
            app_id=app_id,
            state=state,
            num_restarts=record.restarts,
            msg=_message(record, answer.has_ended),
            roles=[Role(name=role, image="", num_replicas=num_replicas)],
            roles_statuses=[RoleStatus(role, replicas)],
        )

    def list(self) -> list[ListAppResponse]:
        return [ListAppResponse(app_id=record.job_id, state=app_state(record.state)) for record in queries.list_jobs()]

    def _cancel_existing(self, app_id: str) -> None:
        seconds = submission.cancel(app_id)
        if seconds:
            log.warning(
                "job %s was told to save its state, and ends within %d seconds; cancel it again to end it at once",
                app_id,
                seconds,
            )

    def log_file(self, app_id: str, role_name: str = "", k: int = 0) -> Path:
        """Returns the log of replica ``k`` of the role, or that of the batch script without a role."""
        record = followed_jobs.answer(app_id).record
        folder = Path(self._log_dir or os.getcwd())
        if record is not None and record.output is not None:
            folder = record.output.parent
        return folder / log_pattern(Path(), role_name, str(k)).name.replace("%j", app_id)

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Yields the lines of both streams of a replica, in their order, of all its starts."""
        if since or until:
            log.warning("since and until are ignored: Slurm's logs carry no times")
        if streams in (Stream.STDOUT, Stream.STDERR):
            log.warning("both streams are shown: they are kept in one file")
        path = self.log_file(app_id, role_name, k)
        remedy = (
            f"What Slurm says of job {app_id} is in {path.parent / log_pattern(Path()).name.replace('%j', app_id)}, "
            "if it has started; a log in another folder is found with log_dir"
        )
        lines = log_lines(path, (lambda: followed_jobs.has_ended(app_id)) if should_tail else None, remedy)
        return filter_regex(regex, lines) if regex else lines


def create_scheduler(session_name: str, log_dir: str | None = None, **kwargs: Any) -> SlurmScheduler:
    """Returns the scheduler; TorchX calls this for ``-s slurm``, with arguments of other schedulers too."""
    return SlurmScheduler(session_name, log_dir)


def _message(record: JobRecord, has_ended: bool) -> str:
    """Returns a job's state in Slurm's words, with the reason, and whether it is saving after it was cancelled."""
    reasons = [record.reason] if record.reason else []
    if not has_ended and submission.is_being_cancelled(record):
        reasons.append("told to end")
    return f"{record.state} ({'; '.join(reasons)})" if reasons else record.state


def _warning_seconds(cfg: Mapping[str, Any], grace_seconds: int) -> int:
    """Returns how long before its time limit the job is sent SIGUSR1; 0 for never.

    A UserError refuses a warning within the grace period, and one with which a job would be interrupted at its start.
    """
    seconds = cfg.get("signal_seconds")
    if seconds is None:
        # the end of a step that is killed after its grace is counted before Slurm ends the job for good
        seconds = grace_seconds + 60 if grace_seconds else 120
    seconds = int(seconds)
    if not 0 <= seconds <= 65535:
        raise UserError(f"signal_seconds is {seconds}; Slurm takes 0 to 65535")
    if 0 < seconds <= grace_seconds:
        raise UserError(
            f"signal_seconds is {seconds} and grace_seconds {grace_seconds}: Slurm would end the job before its "
            "processes have had that long to save their state. "
            f"Set signal_seconds to {grace_seconds + 60} or leave it out, or set grace_seconds below {seconds}"
        )
    limit = time_limit_seconds(str(cfg["time"])) if cfg.get("time") else None
    # Slurm may send the signal a minute early: a job would be interrupted as soon as it starts, again and again.
    shortest = seconds + 120
    if limit is not None and seconds and limit < shortest:
        raise UserError(
            f"time is {cfg['time']}, {limit} seconds, and signal_seconds {seconds}: the job would be interrupted as "
            f"soon as it has started. Ask for {-(-shortest // 60)} minutes or more, or set signal_seconds to 0"
        )
    return seconds
