"""Devices to plan for: memory as the driver reports it, and bandwidths as the vendors state them.

Bandwidths count one direction; that between nodes is one 400 Gbit/s port a GPU (200 for A100 and L4), as cloud
machines of this kind have.
"""

from dataclasses import dataclass

from distembed.names import one_of

_MIB, _GB = 2**20, 10**9


@dataclass(frozen=True)
class Device:
    """One device of a rank.

    Attributes:
        name: in the catalogue, or ``custom``.
        kind: ``cuda`` or ``cpu``.
        memory_bytes: that a process can allocate.
        memory_bandwidth: bytes a second between the device and its memory.
        local_bandwidth: bytes a second to another device of the node.
        node_bandwidth: bytes a second to another node.
    """

    name: str
    kind: str
    memory_bytes: int
    memory_bandwidth: float
    local_bandwidth: float
    node_bandwidth: float


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("a100-40gb", "cuda", 40_960 * _MIB, 1_555 * _GB, 300 * _GB, 25 * _GB),
        Device("a100-80gb", "cuda", 81_920 * _MIB, 2_039 * _GB, 300 * _GB, 25 * _GB),
        Device("h100-80gb", "cuda", 81_559 * _MIB, 3_350 * _GB, 450 * _GB, 50 * _GB),
        Device("h200-141gb", "cuda", 143_771 * _MIB, 4_800 * _GB, 450 * _GB, 50 * _GB),
        Device("b200-180gb", "cuda", 183_359 * _MIB, 7_700 * _GB, 900 * _GB, 50 * _GB),
        Device("l4-24gb", "cuda", 23_034 * _MIB, 300 * _GB, 32 * _GB, 12.5 * _GB),
        Device("cpu-256gb", "cpu", 256 * _GB, 200 * _GB, 25 * _GB, 12.5 * _GB),
    )
}
"""By name."""


def find_device(name: str) -> Device:
    """The device of this name.

    Raises:
        UserError: for an unknown one, with the known ones.
    """
    return DEVICES[one_of("--gpu", name, DEVICES)]
