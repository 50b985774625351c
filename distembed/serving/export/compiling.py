"""Compiles a saved program by AOTInductor: machine code for the processor of this machine, with the weights within.

The trade-off: for single rows a program spends its time on starting operations, of which a compiled one has a handful;
in exchange it is code, twice the bytes, and good for one kind of machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from distembed.base.errors import RunError, UserError
from distembed.base.quiet import silenced_loggers
from distembed.serving.export.programs import ProgramInputs
from distembed.serving.model_folder.compiled import processor_name
from distembed.serving.model_folder.manifest import CompiledProgram, ExportedProgram
from distembed.serving.model_folder.programs import read_program

COMPILED = "compiled/network.pt2"


def require_compiler() -> None:
    """Makes sure that there is a compiler.

    Raises:
        UserError: There is none.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError(
            "--compile needs a C++ compiler, and there is neither one that CXX names nor g++: install g++ (Debian and "
            "Ubuntu: the package g++), or leave --compile out."
        ) from error


def compile_program(file: Path, inputs: ProgramInputs, output: Path) -> None:
    """Compiles a saved program, for inputs of any sizes that it takes.

    Args:
        file: The file of the program.
        inputs: Inputs to compile it with, of at least two rows.
        output: The file to write.

    Raises:
        UserError: It is no program.
        RunError: It cannot be compiled.
    """
    output.parent.mkdir(exist_ok=True)
    program = read_program(file)
    try:
        with torch.no_grad(), silenced_loggers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program.example_inputs = (tuple(inputs.tensors.values()), {})
            torch._inductor.aoti_compile_and_package(program, package_path=str(output))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # the compiler has many of its own
        raise RunError(
            f"{file.name} cannot be compiled by AOTInductor: {type(error).__name__}: {error}. Export without --compile."
        ) from error


def require_running(file: Path, inputs: ProgramInputs) -> None:
    """Makes sure that a compiled program runs: in a process of its own, which faulty machine code ends without a word.

    Args:
        file: The file of the compiled program.
        inputs: Inputs of some rows.

    Raises:
        RunError: It does not run.
    """
    shapes = {name: list(tensor.shape) for name, tensor in inputs.tensors.items()}
    done = subprocess.run(
        [sys.executable, "-m", "distembed.serving.model_folder.compiled", str(file), json.dumps(shapes)],
        input=json.dumps({name: tensor.tolist() for name, tensor in inputs.tensors.items()}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        found = done.stderr.strip().splitlines()
        reason = f"signal {-done.returncode}" if done.returncode < 0 else found[-1] if found else "no reason given"
        raise RunError(
            f"what AOTInductor compiled does not run ({reason}), so that nothing was written. Export without --compile."
        )


def compile_network(folder: Path, network: ExportedProgram, inputs: ProgramInputs) -> CompiledProgram:
    """Compiles the network of a folder and runs it; it has not been compared with the trained model yet.

    Args:
        folder: The folder of the exported model.
        network: Its network.
        inputs: Inputs of the network, of at least two rows.

    Raises:
        RunError: It cannot be compiled, or does not run.
    """
    compile_program(folder / network.file, inputs, folder / COMPILED)
    require_running(folder / COMPILED, inputs)
    return CompiledProgram(COMPILED, processor_name(), torch.backends.cpu.get_cpu_capability(), 0.0)
