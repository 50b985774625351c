"""Devices to plan for: memory as the driver reports it, bandwidths and operations a second as the vendors state them.

Bandwidths count one direction; that between nodes is one 400 Gbit/s port a GPU (200 for A100 and L4), as cloud
machines of this kind have. Operations are those of dense matrices.
"""

import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distembed.errors import UserError
from distembed.names import one_of
from distembed.units import parse_bytes

if TYPE_CHECKING:
    import torch

_MIB, _GB, _TFLOPS = 2**20, 10**9, 10**12


@dataclass(frozen=True)
class Device:
    """One device of a rank.

    Attributes:
        name: Name in the catalogue.
        kind: ``cuda`` or ``cpu``.
        memory_bytes: Memory as the driver reports it.
        memory_bandwidth: Bytes a second between the device and its memory.
        local_bandwidth: Bytes a second to another device of the node.
        node_bandwidth: Bytes a second to another node.
        host_bandwidth: Bytes a second to the machine's memory.
        fp32_flops: Operations a second on float32.
        bf16_flops: Operations a second on bfloat16.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bandwidth: float
    local_bandwidth: float
    node_bandwidth: float
    host_bandwidth: float
    fp32_flops: float
    bf16_flops: float


def _device(
    name: str, memory_mib: int, gb_a_second: tuple[float, float, float, float], tflops: tuple[float, float]
) -> Device:
    bandwidths = [bandwidth * _GB for bandwidth in gb_a_second]
    return Device(name, "cuda", memory_mib * _MIB, *bandwidths, *[operations * _TFLOPS for operations in tflops])


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device("a100-40gb", 40_960, (1_555, 300, 25, 32), (19.5, 312)),
        _device("a100-80gb", 81_920, (2_039, 300, 25, 32), (19.5, 312)),
        _device("h100-80gb", 81_559, (3_350, 450, 50, 64), (67, 989)),
        _device("h200-141gb", 143_771, (4_800, 450, 50, 64), (67, 989)),
        _device("b200-180gb", 183_359, (7_700, 900, 50, 64), (80, 2_250)),
        _device("l4-24gb", 23_034, (300, 32, 12.5, 32), (30.3, 121)),
        # two sockets of 32 cores
        Device("cpu-256gb", "cpu", 256 * _GB, 200 * _GB, 25 * _GB, 12.5 * _GB, 200 * _GB, 4 * _TFLOPS, 8 * _TFLOPS),
    )
}
"""Devices to plan for, by name."""

_SETTINGS = {
    "memory": "memory_bytes",
    "memory_bandwidth": "memory_bandwidth",
    "local_bandwidth": "local_bandwidth",
    "node_bandwidth": "node_bandwidth",
    "host_bandwidth": "host_bandwidth",
    "fp32_flops": "fp32_flops",
    "bf16_flops": "bf16_flops",
}


def find_device(text: str) -> Device:
    """Returns the device of a name, with the numbers behind it in place of its own.

    An example is ``h100-80gb,memory=96GiB,node_bandwidth=25GB``. Numbers alone, memory among them, make a device of
    their own; those that are missing are taken from the known device whose memory is nearest.

    Raises:
        UserError: The name or a setting is unknown; the known ones are listed.
    """
    first, *settings = text.split(",")
    if "=" not in first:
        device = DEVICES[one_of("--gpu", first, DEVICES)]
        return dataclasses.replace(device, **_numbers(settings))
    numbers = _numbers([first, *settings])
    if "memory_bytes" not in numbers:
        raise UserError(f"--gpu is {text!r}, which has no memory; add memory=SIZE, such as memory=80GiB.")
    cuda = [device for device in DEVICES.values() if device.kind == "cuda"]
    nearest = min(cuda, key=lambda device: abs(device.memory_bytes - numbers["memory_bytes"]))
    return dataclasses.replace(nearest, name=f"custom (else {nearest.name})", **numbers)


def _numbers(settings: Iterable[str]) -> dict[str, Any]:
    numbers = {}
    for setting in settings:
        key, equals, size = setting.partition("=")
        if not equals:
            raise UserError(f"--gpu has {setting!r} behind the device; give NUMBER=SIZE such as memory=80GiB.")
        numbers[_SETTINGS[one_of("number behind --gpu", key, _SETTINGS)]] = parse_bytes(f"--gpu {key}", size)
    return numbers


def device_here(device: "torch.device", memory_bytes: int) -> Device:
    """Returns the device of this process, by its driver's name for it; an unknown one computes as an A100.

    Args:
        device: Device of this rank.
        memory_bytes: Memory of the device; on a CPU, of the machine.
    """
    name = "cpu"
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
    return dataclasses.replace(_like(name, memory_bytes), memory_bytes=memory_bytes)


def _like(name: str, memory_bytes: int) -> Device:
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    named = [device for device in DEVICES.values() if device.name.partition("-")[0] in words]
    return min(named or [DEVICES["a100-80gb"]], key=lambda device: abs(device.memory_bytes - memory_bytes))
