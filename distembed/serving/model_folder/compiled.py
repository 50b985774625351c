"""Compiled programs: the network of an exported model as machine code, made by AOTInductor.

A compiled program is a shared library: its code can do anything that the process which loads it may do. It is loaded
only on request, by a user who trusts its maker; ``network.pt2`` is read as data
(:mod:`~distembed.serving.model_folder.program_check`). It holds the weights, and runs only with the torch and on the
processor that it was made with.
"""

from __future__ import annotations

import json
import platform
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distembed.base.errors import UserError
from distembed.serving.model_folder.manifest import ExportManifest

_DTYPES = {"values": torch.int64, "lengths": torch.int64, "dense": torch.float32, "sequences": torch.float32}
_BATCH_DIMS = {"lengths": 1, "dense": 0, "vectors": 0}
_REMEDY = "export the run with --compile on this machine, or use the program that is not compiled"


def processor_name() -> str:
    """Returns the name of this machine's processor, for example ``AMD EPYC 7B13``, or of its family."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [
        value.strip() for name, _, value in (line.partition(":") for line in lines) if name.strip() == "model name"
    ]
    return names[0] if names else platform.processor() or platform.machine()


def load_compiled(folder: Path, manifest: ExportManifest) -> Any:
    """Returns the compiled program of a folder made for this machine; it runs code of the person who made it."""
    compiled = manifest.compiled
    if compiled is None:
        raise UserError(f"{folder} has no compiled program; export the run with --compile.")
    requirements = {
        "processor": (compiled.processor, processor_name()),
        "vector instructions": (compiled.instructions, torch.backends.cpu.get_cpu_capability()),
        "torch": (manifest.versions.get("torch"), torch.__version__),
    }
    for name, (compiled_for, actual) in requirements.items():
        if compiled_for != actual:
            difference = f"was compiled for the {name} {compiled_for}, and this is {actual}"
            raise UserError(f"{compiled.file} {difference}; {_REMEDY}.")
    try:
        sizes = {
            "lengths": len(manifest.features),
            "dense": len(manifest.numbers),
            "sequences": len(manifest.sequences),
        }
        return CompiledNetwork(folder / compiled.file, {name: sizes.get(name) for name in manifest.network.inputs})
    except RuntimeError as error:
        raise UserError(f"{compiled.file} cannot be loaded: {error}; {_REMEDY}.") from error


class CompiledNetwork:
    """A compiled program, called like one that is not compiled.

    Machine code does not check its memory accesses, so inputs are checked first. ``sizes`` has the inputs in order: the
    number of features of ``lengths``, of columns of ``dense`` and of ``sequences``, and None for ``values``, which may
    have any size, as ``sequences`` may.
    """

    def __init__(self, file: Path, sizes: Mapping[str, int | None]) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._package = torch._inductor.aoti_load_package(str(file))
        self._sizes = sizes

    def __call__(self, *inputs: Tensor) -> Any:
        """Returns the outputs of each row; a ValueError names wrong types, shapes or numbers of rows."""
        input_of_name = dict(zip(self._sizes, inputs, strict=True))
        for name, size in self._sizes.items():
            _require_kind(name, input_of_name[name], size)
        require_same_rows(list(input_of_name), inputs)
        num_rows = input_of_name["lengths"].shape[1]
        if not num_rows:
            # code that is compiled for any number of rows reads past the end where there are none and several lists
            input_of_name = {name: _one_row_input(name, input_of_name, self._sizes[name]) for name in input_of_name}
        outputs = self._package(*(tensor.contiguous() for tensor in input_of_name.values()))
        results = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if not num_rows:
            results = [tensor[:0] for tensor in results]
        return results[0] if len(results) == 1 else results


def _require_kind(name: str, tensor: Tensor, size: int | None) -> None:
    """Raises a ValueError where an input has not the type or shape that the program takes."""
    shape = {"values": (None,), "lengths": (size, None), "dense": (None, size), "sequences": (None,)}[name]
    is_like = tensor.dim() == len(shape) and all(
        expected in (None, actual) for expected, actual in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype != _DTYPES[name] or not is_like:
        shown = ", ".join("any" if expected is None else str(expected) for expected in shape)
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, and the program takes {_DTYPES[name]} [{shown}]"
        )


def require_same_rows(names: Sequence[str], inputs: Sequence[Tensor]) -> None:
    """Raises a ValueError where inputs have different numbers of rows, which a program does not notice by itself."""
    shapes = {name: tensor.shape for name, tensor in zip(names, inputs, strict=True)}
    rows = {name: shape[_BATCH_DIMS[name]] for name, shape in shapes.items() if name in _BATCH_DIMS}
    if len(set(rows.values())) > 1:
        raise ValueError(f"the inputs have different numbers of rows: {rows}")


def _one_row_input(name: str, inputs: Mapping[str, Tensor], size: int | None) -> Tensor:
    """Returns an input that is valid for one row: each feature has the one id 1, and each number is 1."""
    num_features = len(inputs["lengths"])
    shape = {"values": (num_features,), "lengths": (num_features, 1), "sequences": (size or 0,)}.get(name)
    return torch.ones(shape or (1, inputs[name].shape[1]), dtype=_DTYPES[name])


def _try_rows(
    file: Path, shapes: Mapping[str, Sequence[int]], values: Mapping[str, Any], beside: Sequence[int]
) -> None:
    """Runs a compiled program on the given rows, on the first row alone, and on none; faults end this process.

    ``beside`` has the place in ``lengths`` of the feature that each column of ``sequences`` is beside.
    """
    inputs = {name: torch.tensor(numbers, dtype=_DTYPES[name]).view(shapes[name]) for name, numbers in values.items()}
    program = CompiledNetwork(file, {name: len(beside) if name == "sequences" else None for name in inputs})
    lengths = inputs["lengths"]
    with torch.inference_mode():
        for num_rows in (lengths.shape[1], 1, 0):
            ids = _first_rows(inputs["values"], lengths, num_rows)
            first_rows = {"values": ids, "lengths": lengths[:, :num_rows]}
            if "dense" in inputs:
                first_rows["dense"] = inputs["dense"][:num_rows]
            if "sequences" in inputs:
                first_rows["sequences"] = _first_rows(inputs["sequences"], lengths[list(beside)], num_rows)
            program(*first_rows.values())


def _first_rows(values: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
    """Returns the first rows' values of several columns of lists, end to end; ``lengths`` are [columns, rows]."""
    by_cell = values.split(lengths.flatten().tolist())
    cells = [column * lengths.shape[1] + row for column in range(len(lengths)) for row in range(num_rows)]
    return torch.cat([values[:0], *(by_cell[cell] for cell in cells)])


if __name__ == "__main__":
    _try_rows(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.stdin.read()), json.loads(sys.argv[3]))
