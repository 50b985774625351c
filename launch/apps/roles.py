"""The role of an application: resources of its nodes, and checks against the abilities of its scheduler."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchx import specs

from distembed.base.errors import UserError
from distembed.base.version import __version__
from distembed.launch.apps.request import NodeRequest, Shape

ELASTIC = ("docker", "kubernetes", "local", "ray", "slurm")
"""Schedulers, by TorchX's names of their back ends, on which a job continues with fewer nodes."""
NEED_IMAGE = ("aws_batch", "docker", "kubernetes")
"""Schedulers that run containers."""
MOUNT_NOTHING = ("local", "ray", "slurm")
"""Schedulers whose processes see the files of the machine that they run on."""
GRACE_SECONDS = "distembed.grace_seconds"
"""Key of a role's metadata: seconds that its processes have to save their state when they are asked to end."""

# With TorchX's suffix (15), that of a pod ("-evaluate-999-0") and a rest, within the 63 of a DNS label.
_LONGEST_NAME = 32


@dataclass
class NodeRole(specs.Role):
    """A role that refuses a scheduler without an ability that it needs; TorchX calls ``pre_proc`` once it is chosen."""

    def pre_proc(self, scheduler: str, dryrun_info: Any) -> Any:
        elastic = self.min_replicas is not None and self.min_replicas < self.num_replicas
        if elastic and scheduler not in ELASTIC:
            raise UserError(
                f"j asks for {self.min_replicas} to {self.num_replicas} nodes, and {scheduler} starts a job on all of "
                f"its nodes or on none; ask for {self.num_replicas} nodes, or take one of {', '.join(ELASTIC)}"
            )
        if not self.image and scheduler in NEED_IMAGE:
            raise UserError(
                f"image is empty, and {scheduler} runs containers; name one that holds distembed, such as "
                f"{default_image(self.resource)}, which tools/Dockerfile builds"
            )
        if self.image and scheduler in ("local", "slurm"):
            raise UserError(
                f"image is {self.image!r}, and {scheduler} runs jobs on the nodes as they are: leave it out"
            )
        if self.mounts and scheduler in MOUNT_NOTHING:
            raise UserError(
                f"mounts are for containers; on {scheduler} the job sees the files of its nodes: leave them out"
            )
        if scheduler == "docker":
            _correct_docker_names(dryrun_info.request)
        return dryrun_info


def job_name(text: str) -> str:
    """Returns a name made of ``text`` that every scheduler takes: a DNS-1035 label of at most 32 characters.

    TorchX leaves a digit at the start: Kubernetes accepts the job, and refuses the Service that names its nodes.
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower())
    name = re.sub(r"^[^a-z]+", "", name)[:_LONGEST_NAME].rstrip("-")
    if not name:
        raise UserError(f"name is {text!r}; it needs a letter from a to z, such as dlrm-1")
    return name


def find_resource(request: NodeRequest) -> specs.Resource:
    """Returns the resources of a node: named ones, or numbers; 2 CPUs and 4096 MB where nothing is given."""
    h, numbers = request.h, {"cpu": request.cpu, "gpu": request.gpu, "memMB": request.memMB}
    integers = {field: _whole(field, value) for field, value in numbers.items() if value is not None}
    if h is not None:
        if integers:
            numbers_too = ", ".join(f"{field}={value}" for field, value in integers.items())
            raise UserError(f"h is {h!r}, which gives the size of a node, and {numbers_too} too; give one of them")
        try:
            return specs.named_resources[h]
        except KeyError as error:
            raise UserError(f"h is {h!r}: {error.args[0]} Or give cpu, gpu and memMB instead.") from error
    if integers.get("gpu", 0) > 0 and len(integers) < len(numbers):
        raise UserError(
            f"gpu is {request.gpu} without cpu and memMB, and {request.gpu} processes would need more than the "
            "default of 2 and 4096; give them too, or choose a named resource such as gpu_8_h100"
        )
    for field, value in integers.items():
        least = 0 if field == "gpu" else 1
        if value < least:
            raise UserError(f"{field} is {value}; it starts at {least}")
    return specs.Resource(**{"cpu": 2, "gpu": 0, "memMB": 4096, **integers})


def default_image(resource: specs.Resource) -> str:
    """Returns the name under which ``tools/Dockerfile`` says to build the image of this version for a node."""
    return f"distembed:{__version__}-{'cuda' if resource.gpu > 0 else 'cpu'}"


def _whole(field: str, value: int) -> int:
    """Returns an integer of TorchX, which hands over text where an argument may be None."""
    try:
        return int(value)
    except ValueError:
        raise UserError(f"{field} is {value!r}; give a whole number") from None


def require_gpus(shape: Shape, resource: specs.Resource) -> None:
    """Refuses more processes on a node than it has GPUs, where it has any: NCCL does not share a GPU."""
    if 0 < resource.gpu < shape.processes:
        raise UserError(
            f"j is '{shape}', {shape.processes} processes on a node of {resource.gpu} GPUs; "
            f"each process takes one: give {shape.nodes}x{resource.gpu}, or nodes of more GPUs"
        )


def on_gpus(overrides: Sequence[str]) -> list[str]:
    """Returns settings with which a training uses the GPUs of its nodes, or fails where it cannot.

    A node whose driver has failed would otherwise train on its processor, and every other rank wait for it.
    """
    if "train.device=cpu" in overrides:
        raise UserError(
            "train.device is cpu, and the job asks for nodes with GPUs, which would stand idle; ask for none, or leave "
            "train.device out"
        )
    return [*(setting for setting in overrides if not setting.startswith("train.device=")), "train.device=cuda"]


def parse_mounts(mounts: list[str] | None) -> list[Any]:
    """Returns TorchX's mounts from ``type=bind,src=/host,dst=/container[,readonly]``, split at the commas."""
    try:
        return specs.parse_mounts(mounts) if mounts else []
    except (KeyError, ValueError) as error:
        raise UserError(
            f"mounts are {','.join(mounts or [])!r}: {error.args[0]}; a mount is "
            "type=bind|volume|device,src=...,dst=...[,readonly], its type first"
        ) from error


def _correct_docker_names(request: Any) -> None:
    """Removes leading dashes, which Docker refuses: TorchX cuts names to their last 30 characters."""
    for container in request.containers:
        options = container.kwargs
        options["name"] = options["hostname"] = options["name"].lstrip("-")
        options["environment"]["TORCHX_RANK0_HOST"] = options["environment"]["TORCHX_RANK0_HOST"].lstrip("-")
