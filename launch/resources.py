"""Named resources of common GPU nodes: ``-h NAME`` of the components. TorchX brings some of AWS's itself.

A node offers a part of its memory to jobs, since the operating system and the scheduler need some: a job that asks for
all of it would never start. ``capabilities`` holds the type of the machine, by which Kubernetes and AWS Batch select
nodes, and under :data:`GPU` the GPU's name in the catalogue of ``distembed plan --gpu``. ``pyproject.toml`` registers
the resources.

Sources: the clouds' own tables of machine types; the generic ones are whole nodes as HGX boards are usually built in.
"""

from functools import partial

from torchx.specs import Resource

MACHINE_TYPE = "node.kubernetes.io/instance-type"
"""Kubernetes's label of nodes, from which TorchX takes the instance type for AWS Batch."""
GPU = "distembed/gpu"
"""Key of a capability: name of the GPU in the catalogue of ``distembed plan``."""

EFA = "vpc.amazonaws.com/efa"
_JOBS_SHARE = 0.96  # of the memory, as TorchX takes for AWS
_MIB_PER_GIB = 1024

_TORCHX_GPUS = {
    "p4d.24xlarge": "a100-40gb",
    "p4de.24xlarge": "a100-80gb",
    "p5.48xlarge": "h100-80gb",
}


def gpu_name(resource: Resource) -> str | None:
    """Returns the name of a resource's GPU in the catalogue of ``distembed plan``; None where it is not known."""
    if GPU in resource.capabilities:
        return str(resource.capabilities[GPU])
    return _TORCHX_GPUS.get(str(resource.capabilities.get(MACHINE_TYPE)))


def _node(
    cpus: int,
    gpus: int,
    memory_gib: int,
    machine: str = "",
    gpu: str = "",
    devices: dict[str, int] | None = None,
) -> Resource:
    """Returns the resource of a node, with the 96% of its memory that jobs can have."""
    capabilities = {key: value for key, value in ((MACHINE_TYPE, machine), (GPU, gpu)) if value}
    memory_mib = int(memory_gib * _MIB_PER_GIB * _JOBS_SHARE)
    return Resource(cpu=cpus, gpu=gpus, memMB=memory_mib, capabilities=capabilities, devices=devices or {})


cpu_16 = partial(_node, 16, 0, 64)
cpu_64 = partial(_node, 64, 0, 256, gpu="cpu-256gb")
gpu_1_a100 = partial(_node, 12, 1, 120, gpu="a100-80gb")
gpu_8_a100 = partial(_node, 96, 8, 1000, gpu="a100-80gb")
gpu_1_h100 = partial(_node, 12, 1, 180, gpu="h100-80gb")
gpu_8_h100 = partial(_node, 96, 8, 1500, gpu="h100-80gb")
gpu_8_h200 = partial(_node, 96, 8, 1500, gpu="h200-141gb")
gpu_8_b200 = partial(_node, 112, 8, 2000, gpu="b200-180gb")
aws_p5e_48xlarge = partial(_node, 192, 8, 2048, "p5e.48xlarge", "h200-141gb", {EFA: 32})
aws_p5en_48xlarge = partial(_node, 192, 8, 2048, "p5en.48xlarge", "h200-141gb", {EFA: 16})
gcp_a2_highgpu_8g = partial(_node, 96, 8, 680, "a2-highgpu-8g", "a100-40gb")
gcp_a2_ultragpu_8g = partial(_node, 96, 8, 1360, "a2-ultragpu-8g", "a100-80gb")
gcp_a3_highgpu_8g = partial(_node, 208, 8, 1872, "a3-highgpu-8g", "h100-80gb")
gcp_a3_megagpu_8g = partial(_node, 208, 8, 1872, "a3-megagpu-8g", "h100-80gb")
gcp_a3_ultragpu_8g = partial(_node, 224, 8, 2952, "a3-ultragpu-8g", "h200-141gb")
azure_nd96asr_v4 = partial(_node, 96, 8, 900, "Standard_ND96asr_v4", "a100-40gb")
azure_nd96amsr_a100_v4 = partial(_node, 96, 8, 1900, "Standard_ND96amsr_A100_v4", "a100-80gb")
azure_nd96isr_h100_v5 = partial(_node, 96, 8, 1900, "Standard_ND96isr_H100_v5", "h100-80gb")
azure_nd96isr_h200_v5 = partial(_node, 96, 8, 1850, "Standard_ND96isr_H200_v5", "h200-141gb")
