"""Programs of ``torch.export``: made of a module and its inputs, saved, and compiled by AOTInductor where asked for.

A compiled program is machine code for the processor of this machine, with the weights within. Trade-off: for single
rows a program spends its time on starting operations, and a compiled one has a handful of them; in exchange it is code,
takes its bytes a second time, and runs on one kind of machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_tracing

from distembed.base.errors import RunError, UserError
from distembed.base.process import silenced_loggers
from distembed.serving.model_folder.compiled import processor_name
from distembed.serving.model_folder.manifest import CompiledProgram, ExportedProgram
from distembed.serving.model_folder.program_check import require_plain_program
from distembed.serving.model_folder.programs import read_program

COMPILED = "compiled/network.pt2"


@dataclass(frozen=True, eq=False)
class ProgramInputs:
    """Inputs of a program by name, in their order, and for ``torch.export`` the dimensions that differ between calls.

    They have at least two rows, since torch takes a size of one as constant. ``beside`` has, for each column of lists
    of numbers, the place in ``lengths`` of the feature with as many ids.
    """

    tensors: Mapping[str, Tensor]
    dynamic: Mapping[str, Mapping[int, Any]]
    beside: Sequence[int] = ()


BATCH = torch.export.Dim("batch")
"""The number of rows, which all inputs share."""
ANY = torch.export.Dim.DYNAMIC
"""A size of one input alone, for example the number of ids."""


def save_program(module: nn.Module, inputs: ProgramInputs, file: Path) -> None:
    """Traces a module on some inputs, saves the program, and checks that a server will accept the file.

    Raises a :class:`RunError` for a module that cannot be traced or is not made of PyTorch's operations alone.
    """
    try:
        with torch.no_grad(), _quiet():
            is_fx_tracing()  # which logs a notice once a process
            shapes = {name: dict(dims) for name, dims in inputs.dynamic.items()}
            arguments = tuple(inputs.tensors.values())
            exported = torch.export.export(module.eval(), arguments, dynamic_shapes=shapes, strict=False)
            file.parent.mkdir(exist_ok=True)
            torch.export.save(_plain(exported), file)
            require_plain_program(file)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch.export has many of its own
        raise RunError(
            f"{type(module).__name__} cannot be made a program of torch.export: {type(error).__name__}: {error}. A "
            "model, task, composition or partition of one's own has to be of operations on tensors alone."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    with silenced_loggers(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _plain(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Removes from a program, in place, values that loading would unpickle or evaluate, and source locations."""
    for node in program.graph.nodes:
        node.meta = {name: value for name, value in node.meta.items() if name == "val"}
    program.graph_module.meta.clear()
    program.example_inputs = None
    program._guards_code = []  # inputs whose sizes share a symbol are compared nevertheless
    return program


def require_compiler() -> None:
    """Raises a :class:`UserError` where there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError(
            "--compile needs a C++ compiler, and there is neither one that CXX names nor g++: install g++ (Debian and "
            "Ubuntu: the package g++), or leave --compile out."
        ) from error


def compile_network(folder: Path, network: ExportedProgram, inputs: ProgramInputs) -> CompiledProgram:
    """Compiles the network of a folder and tries it on ``inputs``; the caller compares its scores later.

    Until then the largest difference in the returned description is 0.
    """
    compile_program(folder / network.file, inputs, folder / COMPILED)
    require_running(folder / COMPILED, inputs)
    return CompiledProgram(COMPILED, processor_name(), torch.backends.cpu.get_cpu_capability(), 0.0)


def compile_program(file: Path, inputs: ProgramInputs, output: Path) -> None:
    """Compiles the program of a file for inputs of any number of rows, like ``inputs``, and writes it to ``output``."""
    output.parent.mkdir(exist_ok=True)
    program = read_program(file)
    try:
        with torch.no_grad(), _quiet():
            program.example_inputs = (tuple(inputs.tensors.values()), {})
            torch._inductor.aoti_compile_and_package(program, package_path=str(output))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the compiler has many of its own
        raise RunError(
            f"{file.name} cannot be compiled by AOTInductor: {type(error).__name__}: {error}. Export without --compile."
        ) from error


def require_running(file: Path, inputs: ProgramInputs) -> None:
    """Runs a compiled program in a process of its own, since faulty machine code ends its process.

    Raises a :class:`RunError` if that process fails or is killed.
    """
    shapes = {name: list(tensor.shape) for name, tensor in inputs.tensors.items()}
    process = subprocess.run(
        [
            *(sys.executable, "-m", "distembed.serving.model_folder.compiled"),
            *(str(file), json.dumps(shapes), json.dumps(list(inputs.beside))),
        ],
        input=json.dumps({name: tensor.tolist() for name, tensor in inputs.tensors.items()}),
        capture_output=True,
        text=True,
    )
    if process.returncode:
        *_, last_line = ["no reason given", *process.stderr.strip().splitlines()]
        reason = f"signal {-process.returncode}" if process.returncode < 0 else last_line
        raise RunError(
            f"what AOTInductor compiled does not run ({reason}), so that nothing was written. Export without --compile."
        )
