"""What differs where a model is compiled, exported or traced, and its batches have no values yet.

A check of values that stops Python on the spot becomes an operation of the program there, which fails when it is run::

    eager      UserError: table 't', feature 'f': the id at position 3 is 70; ids lie between 0 and 69 ...
    compiled   RuntimeError: table 't', feature 'f': an id lies outside of 0 to 69; run the batch uncompiled to see ...

It costs a pass over the ids, which a compiler joins with others, and no wait for the device.
"""

import torch
from jaxtyping import Bool
from torch import Tensor


def is_traced() -> bool:
    """Returns whether what runs is being written down: by torch.compile, torch.export or torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def require_in_program(condition: Bool[Tensor, ""], message: str) -> None:
    """Makes a program fail where a condition is not met; on a GPU that is a device-side assertion.

    Args:
        condition: The condition.
        message: What the RuntimeError says, on the CPU.
    """
    torch._assert_async(condition, message)


def is_transformed() -> bool:
    """Returns whether ``torch.func`` transforms what runs, as in ``torch.func.grad`` or ``vmap``."""
    return torch._C._are_functorch_transforms_active()
