"""The device file: a measured device as JSON, which ``distembed plan --gpu FILE`` takes in the catalogue's place."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distembed.errors import UserError
from distembed.files import read_json, write_json
from distembed.names import one_of
from distembed.planning.devices import Device

FORMAT, VERSION = "distembed device", 1
_REMEDY = "write one with `distembed plan --calibrate FILE`"
_KINDS = ("cpu", "cuda")
_MAY_BE_ZERO = ("row_seconds", "launch_seconds", "collective_seconds", "error")
_MAY_BE_NONE = ("ranks_at_once", "error")


@dataclass(frozen=True)
class MeasuredDevice:
    """A device whose numbers were measured.

    Attributes:
        device: The device.
        measured: Names of the numbers that were measured; the others are those of the catalogue's nearest device.
        machine: What measured them: processor, backend, ranks and threads.
    """

    device: Device
    measured: Sequence[str]
    machine: Mapping[str, Any]


def write_device(path: Path, measured: MeasuredDevice) -> None:
    """Writes a device file.

    Raises:
        RunError: The file cannot be written.
    """
    write_json(
        path,
        {
            "format": FORMAT,
            "version": VERSION,
            "device": dataclasses.asdict(measured.device),
            "measured": list(measured.measured),
            "machine": dict(measured.machine),
        },
    )


def read_device(path: Path) -> Device:
    """Returns the device of a file.

    Raises:
        UserError: The file cannot be read, is of another format or version, or a number of the device is missing,
            unknown or impossible.
    """
    content = read_json(path, _REMEDY)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is no device file; {_REMEDY}.")
    if content.get("version") != VERSION:
        raise UserError(
            f"{path} is a device file of version {content.get('version')!r}, and this distembed reads {VERSION}; "
            f"{_REMEDY}."
        )
    values = content.get("device")
    if not isinstance(values, dict):
        raise UserError(f"{path}: device is {values!r}; it must be an object with the device's numbers: {_REMEDY}.")
    values = {"error": content.get("error"), **values}  # where earlier versions wrote it
    fields = [field.name for field in dataclasses.fields(Device)]
    for name in values:
        one_of(f"{path}: number of the device", name, fields)
    for name in fields:
        if name not in values:
            raise UserError(f"{path}: the device has no {name}; {_REMEDY}.")
        _require_possible(f"{path}: device.{name}", name, values[name])
    return Device(**values)


def _require_possible(where: str, name: str, value: Any) -> None:
    """Raises a :class:`UserError` unless a field of a device can have a value."""
    if name == "kind":
        one_of(where, value, _KINDS)
    elif name == "name":
        if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) < 100:
            raise UserError(f"{where} is {value!r}; give a name of up to 99 characters.")
    elif name == "memory_bytes":
        if type(value) is not int or value < 1:
            raise UserError(f"{where} is {value!r}; give a whole number of bytes above 0.")
    elif not (name in _MAY_BE_NONE and value is None):
        least = 0 if name in _MAY_BE_ZERO else math.ulp(0.0)
        if type(value) not in (int, float) or not least <= value < math.inf:
            raise UserError(f"{where} is {value!r}; give a number {'of 0 or more' if least == 0 else 'above 0'}.")
