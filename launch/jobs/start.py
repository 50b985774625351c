"""Starts a job: checks it, keeps all that is needed to repeat it, submits it, and follows it to its end.

Nothing is written or submitted before every check is passed.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from torchx.runner import get_runner

from distembed.base.errors import UserError
from distembed.launch.apps.request import parse_shape
from distembed.launch.jobs import preflight
from distembed.launch.jobs.follow import Say, require_ended, submit_and_follow
from distembed.launch.jobs.job import CONTAINERS, LOCAL_SCHEDULERS, Job
from distembed.launch.resources import gpu_name
from distembed.planning import describe_plan
from distembed.planning.devices import DEVICES, Cluster, find_device
from distembed.reports.doctor import Finding
from distembed.training.config import Config, load_config, require_plugins, with_absolute_paths

if TYPE_CHECKING:
    from distembed.reports.plan.assessment import Assessment


def launch_job(job: Job, config: Config, *, dry_run: bool, detach: bool, say: Say) -> None:
    """Starts a job in a run folder that holds no run; see :func:`start`."""
    if detach and job.scheduler in LOCAL_SCHEDULERS:
        raise UserError(f"--detach: jobs of {job.scheduler} end with the command that started them; leave it out.")
    job.require_new()
    start(job, config, dry_run=dry_run, detach=detach, say=say)


def resume_job(job: Job, *, dry_run: bool, detach: bool, say: Say) -> None:
    """Starts a launched job again, from the config in its folder; refuses a job that still runs; see :func:`start`."""
    require_ended(job)
    start(job, load_config(job.folder / "config.yaml"), dry_run=dry_run, detach=detach, say=say)


def start(job: Job, config: Config, *, dry_run: bool, detach: bool, say: Say) -> None:
    """Checks a job and submits it, for the first time or again; follows it to its end unless ``detach`` is set.

    A ``dry_run`` submits nothing, and prints the request and the plan.

    Raises:
        typer.Exit: A check fails; the exit code is 3.
        RunError: The job has failed, or the scheduler cannot be asked.
    """
    from distembed.training.initial_run import begun_config

    config = with_absolute_paths(config)
    require_plugins(config)
    with get_runner() as runner:
        request = job.dry_run(runner)
        _require_resource(job)
        cluster = _cluster(job)
        config.data.load_schema()
        # a job that was submitted before may have begun: it continues from its checkpoints and not train.init_from
        planned = config if job.submissions else begun_config(config)
        # loads torch, so only now
        from distembed.reports.plan.assessment import assess_capacity
        from distembed.reports.plan.report import assessment_as_json

        assessment = assess_capacity(planned, cluster)
        findings = _checks(job, request.request, planned, assessment)
        for finding in findings:
            remedy = f" ({finding.remedy})" if finding.status == "wrong" and finding.remedy else ""
            say(f"{finding.status:5}  {finding.subject}: {finding.detail}{remedy}")
        if dry_run:
            say(str(request))
            say(f"plan: {describe_plan(assessment.plan) if assessment.plan else 'none'}")
        if any(finding.status == "wrong" for finding in findings):
            say("nothing was submitted")
            raise typer.Exit(3)
        if not dry_run:
            job.prepare(config.to_yaml(), assessment_as_json(assessment))
            submit_and_follow(job, runner, detach=detach, say=say)


def _require_resource(job: Job) -> None:
    """Refuses a job on a cluster whose node size is not given: TorchX's default would be too small for it."""
    if (
        job.scheduler not in LOCAL_SCHEDULERS
        and job.component.h is None
        and None in (job.component.cpu, job.component.memMB)
    ):
        raise UserError(
            f"the size of a node of {job.scheduler} is not given, and TorchX would ask for 2 CPUs and 4096 MB: give "
            "--resource NAME, such as gpu_8_h100, or --cpus and --memory-mb."
        )


def _cluster(job: Job) -> Cluster:
    """Returns the cluster to plan for: the most nodes that the job takes, their device and memory.

    A UserError refuses a device that is unknown, or that contradicts the resources or options of the job.
    """
    shape, resource = parse_shape(job.j), job.app().roles[0].resource
    resource_gpu = gpu_name(resource)
    option_gpu = job.gpu.partition(",")[0] if job.gpu else None
    if resource_gpu and option_gpu in DEVICES and option_gpu != resource_gpu:
        raise UserError(f"--gpu is {job.gpu}, and --resource {job.component.h} has {resource_gpu}: leave --gpu out.")
    name = job.gpu or resource_gpu
    if name is None and resource.gpu:
        raise UserError(
            f"the nodes have {resource.gpu} GPUs of an unknown kind: name it with --gpu, such as "
            f"--gpu h100-80gb, or choose a --resource with this kind; known are {', '.join(DEVICES)}."
        )
    device = find_device(name) if name else next(device for device in DEVICES.values() if device.kind == "cpu")
    memory_bytes = resource.memMB * 2**20
    if device.kind == "cpu":
        if resource.gpu > 0:
            raise UserError(f"--gpu is {job.gpu}, and the nodes have {resource.gpu} GPUs: ask for none, or name them.")
        if "mem" in job.options:
            raise UserError(f"-o mem is {job.options['mem']}, which the plan would not use: give --memory-mb.")
        device = dataclasses.replace(device, name="cpu", memory_bytes=memory_bytes)
    elif not resource.gpu:
        raise UserError(f"--gpu is {job.gpu}, and the nodes have no GPUs: give --gpus or another --resource.")
    return Cluster(device, shape.max_nodes, shape.processes, host_memory_bytes=memory_bytes)


def _checks(job: Job, request: Any, config: Config, assessment: "Assessment") -> Sequence[Finding]:
    """Returns the findings of all checks that apply to the job's scheduler; elastic jobs must fit the fewest nodes."""
    from distembed.reports.plan.assessment import assess_capacity

    shape, folder, resource = parse_shape(job.j), Path(job.run_dir), job.app().roles[0].resource
    fewest = (
        assess_capacity(config, dataclasses.replace(assessment.cluster, nodes=shape.min_nodes))
        if shape.elastic
        else assessment
    )
    findings = [
        *preflight.check_trio(),
        preflight.check_device(config, assessment.cluster.device.kind),
        preflight.check_capacity(fewest, shape),
        preflight.check_dataset(config, is_new=not job.submissions),
        preflight.check_writable("run folder", folder),
        preflight.check_checkpoints(config, folder, is_new=not job.submissions),
    ]
    if job.component.python == sys.executable:
        findings.append(preflight.check_build(assessment.cluster.device.kind))
    if job.scheduler in CONTAINERS:
        role = job.app().roles[0]
        findings += [preflight.check_image(role.image), preflight.check_mounts(config, folder, role.mounts)]
    if job.scheduler == "slurm":
        if "mem" in job.options:
            resource = dataclasses.replace(resource, memMB=0)  # Slurm is asked for that instead
        partition = preflight.check_partition(shape, resource, job.options.get("partition"))
        findings.append(partition)
        if partition.status == "ok":
            findings.append(preflight.check_acceptance(request))
    return findings
