"""The device file: a measured device as JSON, which ``distembed plan --gpu FILE`` takes in the catalogue's place."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from distembed.errors import UserError
from distembed.files import read_json, write_json
from distembed.planning.devices import Device
from distembed.validation import validated

FORMAT, VERSION = "distembed device", 1
_REMEDY = "write one with `distembed plan --calibrate FILE`"


@dataclass(frozen=True)
class MeasuredDevice:
    """A device whose numbers were measured."""

    device: Device
    measured: Sequence[str]  # names of these numbers; the others are those of the catalogue's nearest device
    machine: Mapping[str, Any]  # processor, backend, ranks and threads that measured them


def write_device(path: Path, measured: MeasuredDevice) -> None:
    """Writes a device file.

    Raises:
        RunError: The file cannot be written.
    """
    write_json(path, {"format": FORMAT, "version": VERSION, **dataclasses.asdict(measured)})


def read_device(path: Path) -> Device:
    """Returns the device of a file.

    Raises:
        UserError: The file cannot be read, is of another format or version, or a number of the device is missing,
            unknown or impossible.
    """
    content = read_json(path, _REMEDY)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{path} is no device file; {_REMEDY}.")
    version, values = content.get("version"), content.get("device")
    if version != VERSION:
        raise UserError(
            f"{path} is a device file of version {version!r}, and this distembed reads {VERSION}; {_REMEDY}."
        )
    if not isinstance(values, dict):
        raise UserError(f"{path}: device is {values!r}; it must be an object with the device's numbers: {_REMEDY}.")
    values = {"error": content.get("error"), **values}  # where earlier versions wrote it
    return validated(TypeAdapter(Device), Device, values, f"device of {path}; {_REMEDY}")
