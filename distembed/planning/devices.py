"""Devices to plan for: memory as the driver reports it, bandwidths and operations a second as vendors state them.

Bandwidths count one direction; between nodes it is one 400 Gbit/s port per GPU (200 for A100 and L4), as cloud machines
have. Operations are dense matrix products. Numbers that vendors do not state are guesses, equal for all GPUs: rows
reach 60% of the memory's bandwidth and networks 40% of the operations; an operation takes the host 5 microseconds to
start, with autograd, and a collective 30. A device file has measured numbers instead
(:mod:`distembed.planning.calibrate`), as JSON; ``distembed plan --gpu FILE`` reads it.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from distembed.base.errors import UserError
from distembed.base.files import read_json, write_json
from distembed.base.names import one_of
from distembed.base.units import parse_bytes
from distembed.base.validation import validated

if TYPE_CHECKING:
    import torch

_AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_ZeroOrMore = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_MIB, _GB, _TFLOPS = 2**20, 10**9, 10**12
_FORMAT, _VERSION = "distembed device", 1
_REMEDY = "write one with `distembed plan --calibrate FILE`"
_LOOKUP_SHARE = 0.6
"""Share of the memory's bandwidth that scattered rows of 64 bytes and more reach."""


@dataclass(frozen=True)
class Device:
    """One device of a rank."""

    __pydantic_config__ = {"extra": "forbid", "strict": True}  # of a device file

    name: Annotated[str, Field(pattern=r"^\P{C}{1,99}$")]  # in the catalogue
    kind: Literal["cpu", "cuda"]
    memory_bytes: Annotated[int, Field(ge=1)]  # as the driver reports it
    memory_bandwidth: _AboveZero  # bytes a second between the device and its memory
    local_bandwidth: _AboveZero  # bytes a second to another device of the node
    node_bandwidth: _AboveZero  # bytes a second to another node
    host_bandwidth: _AboveZero  # bytes a second to the machine's memory
    fp32_flops: _AboveZero  # operations a second on float32
    bf16_flops: _AboveZero  # operations a second on bfloat16
    utilisation: _AboveZero  # share of the operations a second that networks of this kind reach
    lookup_bandwidth: _AboveZero  # bytes a second at which rows are read and written one by one
    row_seconds: _ZeroOrMore  # of each row that is looked up and updated, besides its bytes
    launch_seconds: _ZeroOrMore  # in which an operation is started, with its share of the autograd graph
    collective_seconds: _ZeroOrMore  # that a collective takes however little it sends
    reduce_bandwidth: _AboveZero  # bytes a second at which reduce-scatters and all-gathers add or copy results
    # ranks of a node that its cores and memory run at once, each as fast as if it were alone; None for all of them
    ranks_at_once: _AboveZero | None = None
    # median of the relative errors of the estimates of the steps that calibrated the device; None where none were
    error: _ZeroOrMore | None = None

    def reached_flops(self, bf16: bool) -> float:
        return self.utilisation * (self.bf16_flops if bf16 else self.fp32_flops)


def _gpu(
    name: str, memory_mib: int, gb_a_second: tuple[float, float, float, float], tflops: tuple[float, float]
) -> Device:
    memory, local, node, host = [bandwidth * _GB for bandwidth in gb_a_second]
    return Device(
        name=name,
        kind="cuda",
        memory_bytes=memory_mib * _MIB,
        memory_bandwidth=memory,
        local_bandwidth=local,
        node_bandwidth=node,
        host_bandwidth=host,
        fp32_flops=tflops[0] * _TFLOPS,
        bf16_flops=tflops[1] * _TFLOPS,
        utilisation=0.4,
        lookup_bandwidth=_LOOKUP_SHARE * memory,
        row_seconds=0.0,
        launch_seconds=5e-6,
        collective_seconds=30e-6,
        reduce_bandwidth=memory,
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _gpu("a100-40gb", 40_960, (1_555, 300, 25, 32), (19.5, 312)),
        _gpu("a100-80gb", 81_920, (2_039, 300, 25, 32), (19.5, 312)),
        _gpu("h100-80gb", 81_559, (3_350, 450, 50, 64), (67, 989)),
        _gpu("h200-141gb", 143_771, (4_800, 450, 50, 64), (67, 989)),
        _gpu("b200-180gb", 183_359, (7_700, 900, 50, 64), (80, 2_250)),
        _gpu("l4-24gb", 23_034, (300, 32, 12.5, 32), (30.3, 121)),
        # two sockets of 32 cores
        Device(
            name="cpu-256gb",
            kind="cpu",
            memory_bytes=256 * _GB,
            memory_bandwidth=200 * _GB,
            local_bandwidth=25 * _GB,
            node_bandwidth=12.5 * _GB,
            host_bandwidth=200 * _GB,
            fp32_flops=4 * _TFLOPS,
            bf16_flops=8 * _TFLOPS,
            utilisation=0.4,
            lookup_bandwidth=_LOOKUP_SHARE * 200 * _GB,
            row_seconds=20e-9,
            launch_seconds=20e-6,
            collective_seconds=200e-6,
            reduce_bandwidth=2 * _GB,
        ),
    )
}
"""Devices to plan for, by name."""

_BYTES_A_SECOND = [f"{name}_bandwidth" for name in ("memory", "local", "node", "host", "lookup", "reduce")]
_SIZES = {name: name for name in (*_BYTES_A_SECOND, "fp32_flops", "bf16_flops")} | {"memory": "memory_bytes"}
_MAY_BE_ZERO = ("row_seconds", "launch_seconds", "collective_seconds")
_NUMBERS = ("utilisation", "ranks_at_once", "error", *_MAY_BE_ZERO)
"""Numbers that are not sizes; seconds are given like ``launch_seconds=4e-6``."""


def find_device(text: str, field: str = "--gpu") -> Device:
    """Returns a catalogue device or the device of a file (``.json``), with optional numbers that override its own.

    An example is ``h100-80gb,memory=96GiB,node_bandwidth=25GB``. Numbers alone, memory among them, make a custom
    CUDA device; missing numbers come from the catalogue's GPU with the nearest memory.

    Raises:
        UserError: The name or a setting is unknown; the known ones are listed. Or the device file cannot be read.
    """
    first, *settings = text.split(",")
    if "=" not in first or first.endswith(".json"):
        device = read_device(Path(first)) if first.endswith(".json") else DEVICES[one_of(field, first, DEVICES)]
        return dataclasses.replace(device, **_numbers(settings, field))
    numbers = _numbers([first, *settings], field)
    if "memory_bytes" not in numbers:
        raise UserError(f"{field} is {text!r}, which has no memory; add memory=SIZE, like memory=80GiB.")
    cuda = [device for device in DEVICES.values() if device.kind == "cuda"]
    nearest = min(cuda, key=lambda device: abs(device.memory_bytes - numbers["memory_bytes"]))
    return dataclasses.replace(nearest, name=f"custom (else {nearest.name})", **numbers)


@dataclass(frozen=True)
class MeasuredDevice:
    """A device with measured numbers."""

    device: Device
    measured: Sequence[str]  # names of the measured numbers; all others are the nearest catalogue device's
    machine: Mapping[str, Any]  # processor, backend, ranks and threads that measured them


def write_device(path: Path, measured: MeasuredDevice) -> None:
    """Writes a device file; raises a ``RunError`` where it cannot be written."""
    write_json(path, {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(measured)})


def read_device(path: Path) -> Device:
    """Returns the device of a file.

    Raises:
        UserError: The file cannot be read, has another format or version, or a number is missing, unknown or
            impossible.
    """
    content = read_json(path, _REMEDY)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UserError(f"{path} is no device file; {_REMEDY}.")
    version, values = content.get("version"), content.get("device")
    if version != _VERSION:
        raise UserError(
            f"{path} is a device file of version {version!r}, and this distembed reads {_VERSION}; {_REMEDY}."
        )
    if not isinstance(values, dict):
        raise UserError(f"{path}: device is {values!r}; it must be an object with the device's numbers: {_REMEDY}.")
    values = {"error": content.get("error"), **values}  # earlier versions wrote it next to the device
    return validated(TypeAdapter(Device), Device, values, f"device of {path}; {_REMEDY}")


def _numbers(settings: Iterable[str], field: str) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise UserError(f"{field} has {setting!r} after the device; give NUMBER=SIZE, like memory=80GiB.")
        if one_of(f"number of {field}", key, [*_SIZES, *_NUMBERS]) in _SIZES:
            numbers[_SIZES[key]] = parse_bytes(f"{field} {key}", text)
            continue
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        may_be_zero = key in _MAY_BE_ZERO
        if not (0 < number < math.inf or (may_be_zero and number == 0)):
            allowed = "of 0 or more, of seconds like 4e-6" if may_be_zero else "above 0, like 0.5"
            raise UserError(f"{field} {key} is {text!r}; give a number {allowed}.")
        numbers[key] = number
    return numbers


def device_here(device: "torch.device", memory_bytes: int) -> Device:
    """Returns the catalogue device most like this process's, with ``memory_bytes``; an unknown GPU is an A100."""
    name = "cpu"
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    alike = [known for known in DEVICES.values() if known.name.partition("-")[0] in words]
    most_alike = min(alike or [DEVICES["a100-80gb"]], key=lambda candidate: abs(candidate.memory_bytes - memory_bytes))
    return dataclasses.replace(most_alike, memory_bytes=memory_bytes)


MAX_RANKS = 2**16
"""Most ranks of a plan; its time and memory grow with each of them."""


@dataclass(frozen=True)
class Cluster:
    """Machines and their devices."""

    device: Device  # of each rank; ranks on a CPU share their machine's memory
    nodes: int  # number of machines
    ranks_per_node: int
    host_memory_bytes: int = 0  # of a machine with CUDA devices, in which tables may lie
    # memory of each rank where ranks differ, in place of the device's; empty where they are alike
    memory_by_rank: tuple[int, ...] = ()
    # each rank's share of host memory besides a CUDA device, where ranks differ
    host_memory_by_rank: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for option, number in (("--nodes", self.nodes), ("--gpus", self.ranks_per_node)):
            if number < 1:
                raise UserError(f"{option} is {number}; it must be 1 or more.")
        if self.world_size > MAX_RANKS:
            raise UserError(
                f"--nodes {self.nodes} with --gpus {self.ranks_per_node} are {self.world_size:,} ranks; a plan has "
                f"{MAX_RANKS:,} at most."
            )
        for memory in filter(None, (self.memory_by_rank, self.host_memory_by_rank)):
            if len(memory) != self.world_size:
                raise UserError(f"memory is given for {len(memory)} ranks; name all {self.world_size}, or one for all.")

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def ranks_at_once(self) -> float:
        """Number of a node's ranks that its cores run at once, each as fast as if it were alone."""
        return min(self.ranks_per_node, self.device.ranks_at_once or math.inf)

    @property
    def rank_bytes(self) -> int:
        """Most memory of any rank: its device's, or its share of the machine's on a CPU."""
        if self.memory_by_rank:
            return max(self.memory_by_rank)
        return self.device.memory_bytes // (self.ranks_per_node if self.device.kind == "cpu" else 1)

    @property
    def host_bytes_per_rank(self) -> int:
        """Most bytes of a rank's share of host memory besides a CUDA device; 0 on CPUs."""
        if self.host_memory_by_rank:
            return max(self.host_memory_by_rank)
        return 0 if self.device.kind == "cpu" else self.host_memory_bytes // self.ranks_per_node

    @property
    def bytes_by_rank(self) -> tuple[int, ...]:
        return self.memory_by_rank or (self.rank_bytes,) * self.world_size

    @property
    def host_bytes_by_rank(self) -> tuple[int, ...]:
        return self.host_memory_by_rank or (self.host_bytes_per_rank,) * self.world_size
