"""What differs where a model is compiled, exported or transformed, and its batches have no values yet.

A check of values that stops Python on the spot becomes an operation of the program there, which fails when it is run::

    eager      UserError: table 't', feature 'f': the id at position 3 is 70; ids lie between 0 and 69 ...
    compiled   RuntimeError: table 't', feature 'f': an id lies outside of 0 to 69; run the batch uncompiled to see ...

It costs a pass over the ids, which a compiler joins with others, and no wait for the device.

torch.fx, which traces with stand-ins for values, gets a module that looks at its batches as one node of the graph.
TorchScript is refused: scripts have no such modules, and traces drop checks.
"""

from typing import Any, NoReturn

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.fx import Proxy

from distembed.errors import UserError


def is_traced() -> bool:
    """Returns whether operations are being written down or transformed: torch.compile, torch.export, torch.func."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def require_in_program(condition: Bool[Tensor, ""], message: str) -> None:
    """Makes a program fail where a condition is not met; on a GPU that is a device-side assertion.

    Args:
        condition: The condition.
        message: What the RuntimeError says, on the CPU.
    """
    torch._assert_async(condition, message)


def is_proxy(*inputs: object) -> bool:
    """Returns whether torch.fx traces: one of a module's inputs is a stand-in."""
    return any(isinstance(value, Proxy) for value in inputs)


def one_node(module: nn.Module, *inputs: Any) -> Any:
    """Returns what stands for a module's output where torch.fx traces: a call of the module, as of a leaf."""
    tracer: Any = next(value.tracer for value in inputs if isinstance(value, Proxy))
    return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, {})


class Unscripted:
    """Base of modules that TorchScript does not take."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuses ``torch.jit.script``, which calls this first.

        Raises:
            UserError: Always.
        """
        refuse_script(self, "torch.jit.script")


def refuse_jit_trace(module: object) -> None:
    """Raises a :class:`UserError` where ``torch.jit.trace`` follows a module."""
    if torch.jit.is_tracing():
        refuse_script(module, "torch.jit.trace")


def refuse_script(module: object, function: str) -> NoReturn:
    """Raises a :class:`UserError` that says what to do instead of TorchScript."""
    raise UserError(
        f"{function} does not take {type(module).__name__}: TorchScript has no partitions and compositions, and its "
        "traces drop the checks of ids. Use torch.export or torch.compile; for a server, distembed export; and for "
        "TorchRec's own inference in TorchScript, quantise the model first, with the mappings of "
        "distembed.quantization."
    )
