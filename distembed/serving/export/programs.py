"""Programs of ``torch.export``: made of a module and its inputs, and saved."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx._symbolic_trace import is_fx_tracing

from distembed.base.errors import RunError
from distembed.base.quiet import silenced_loggers
from distembed.serving.model_folder.program_check import require_plain_program


@dataclass(frozen=True, eq=False)
class ProgramInputs:
    """Inputs of a program, and which of their dimensions differ from call to call.

    Attributes:
        tensors: The inputs by name, in their order; at least two rows, so that none is taken for the only size.
        dynamic: Of each input, which dimensions differ, and whether these are the batch.
    """

    tensors: Mapping[str, Tensor]
    dynamic: Mapping[str, Mapping[int, Any]]


BATCH = torch.export.Dim("batch")
"""The number of rows, which is the same in all inputs."""
ANY = torch.export.Dim.DYNAMIC
"""A size of its own, such as the number of ids."""


def save_program(module: nn.Module, inputs: ProgramInputs, file: Path) -> None:
    """Makes a program of a module and saves it.

    Args:
        module: The module.
        inputs: Inputs to follow its operations with.
        file: The file to write.

    Raises:
        RunError: The module does what a program cannot, such as to depend on the numbers in a tensor.
    """
    try:
        with torch.no_grad(), silenced_loggers(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
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


def _plain(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Returns a program without what loading would unpickle or evaluate, and without the places of its source code."""
    for node in program.graph.nodes:
        node.meta = {name: value for name, value in node.meta.items() if name == "val"}
    program.graph_module.meta.clear()
    program.example_inputs = None
    program._guards_code = []  # sizes are compared all the same: of inputs with the same symbol
    return program
