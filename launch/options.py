"""Options of the commands that launch, in groups: each is a value that changes a job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from distembed.base.errors import UserError
from launch.apps.request import ElasticRequest

if TYPE_CHECKING:
    from launch.jobs.job import Job


@dataclass(frozen=True)
class JobOptions:
    """What the scheduler and the nodes are asked for, whenever a job is submitted; None changes nothing."""

    options: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="Of the scheduler: `-o partition=gpu -o time=12:00:00`."),
    ] = None
    resource: Annotated[
        str | None,
        typer.Option("--resource", help="Named resource of a node, such as gpu_8_h100, in place of its numbers."),
    ] = None
    cpus: Annotated[int | None, typer.Option("--cpus", help="CPUs of a node.")] = None
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs of a node; one a process where --gpu is given.")] = (
        None
    )
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", help="Device of each process, where --resource does not say, as for the plan: `h100-80gb`."
        ),
    ] = None
    memory_mb: Annotated[int | None, typer.Option("--memory-mb", help="Memory of a node in MB.")] = None
    image: Annotated[str | None, typer.Option("--image", help="Container image that holds distembed.")] = None
    env: Annotated[
        list[str] | None, typer.Option("--env", help="Environment variable, NAME=VALUE; may be repeated.")
    ] = None

    def applied_to(self, job: "Job", j: str | None = None) -> "Job":
        """Returns the job with these options, on other nodes and processes where ``j`` is given."""
        return job.changed(
            j,
            _pairs("--option", self.options),
            self.gpu,
            h=self.resource,
            cpu=self.cpus,
            gpu=self.gpus,
            memMB=self.memory_mb,
            image=self.image,
            env=_pairs("--env", self.env),
        )


@dataclass(frozen=True)
class TrainingOptions:
    """How a job's processes are started and started again, which stays as it was first launched."""

    mount: Annotated[
        list[str] | None, typer.Option(help="Mount of a container: type=bind,src=/host,dst=/container.")
    ] = None
    max_restarts: Annotated[int, typer.Option(help="How often dead processes are started again in place.")] = (
        ElasticRequest.max_restarts
    )
    max_retries: Annotated[int, typer.Option(help="How often the whole job is started again.")] = (
        ElasticRequest.max_retries
    )
    grace_seconds: Annotated[
        int, typer.Option(help="How long processes may take to save their state when the job is asked to end.")
    ] = ElasticRequest.grace_seconds
    rdzv_port: Annotated[
        int | None,
        typer.Option(help="Port of the first node where nodes meet; one from 20000 to 29999 by the run folder."),
    ] = None
    python: Annotated[
        str | None, typer.Option(help="Interpreter on the nodes; this one, or `python` in a container.")
    ] = None

    def applied_to(self, job: "Job") -> "Job":
        """Returns the job with these options."""
        return job.changed(
            mounts=[part for one in self.mount or [] for part in one.split(",")],
            max_restarts=self.max_restarts,
            max_retries=self.max_retries,
            grace_seconds=self.grace_seconds,
            rdzv_port=self.rdzv_port,
            python=self.python,
        )


@dataclass(frozen=True)
class SubmitOptions:
    """Whether a job is submitted, and then followed."""

    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and the plan.")] = False
    detach: Annotated[bool, typer.Option("--detach", help="Do not follow the job.")] = False


def _pairs(option: str, texts: Sequence[str] | None) -> Mapping[str, str]:
    """Reads ``NAME=VALUE`` texts.

    Raises:
        UserError: A text has no name or no ``=``.
    """
    pairs = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(f"{option} is {text!r}; give NAME=VALUE.")
        pairs[name] = value
    return pairs
