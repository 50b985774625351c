"""Checks of values in models that are compiled, exported or transformed, where batches have no values yet.

A check that raises an error in Python becomes an operation of the program, which fails when it is run::

    eager      UserError: table 't', feature 'f': the id at position 3 is 70; ids lie between 0 and 69 ...
    compiled   RuntimeError: table 't', feature 'f': an id lies outside of 0 to 69; run the batch uncompiled to see ...

It costs a pass over the ids, which a compiler joins with other passes, and no wait for the device. torch.fx traces
with stand-ins for values: a module that reads its batches becomes one node of the graph.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.fx import Proxy


def is_traced() -> bool:
    """Returns whether torch.compile, torch.export, torch.jit.trace or torch.func runs the code."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active()


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switches autocast off where it is on; an exported program would keep an unneeded switch."""
    on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


def require_in_program(condition: Bool[Tensor, ""], message: str) -> None:
    """Makes a program fail with a RuntimeError where a condition is not met; on a GPU by a device-side assertion."""
    if torch.jit.is_tracing():
        _scripted_check()(condition, message)  # which a trace keeps; it drops the operation below
    else:
        torch._assert_async(condition, message)


@cache
def _scripted_check() -> Callable[[Tensor, str], Tensor]:
    """Returns :func:`_require` as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and still asked for
        compiled: Callable[[Tensor, str], Tensor] = torch.jit.script(_require)
    return compiled


def _require(condition: Tensor, message: str) -> Tensor:
    """Returns a condition, since a trace needs a tensor, or raises an error where it is not met."""
    if not bool(condition):
        raise RuntimeError(message)
    return condition


def is_proxy(*inputs: object) -> bool:
    """Returns whether torch.fx traces: one of a module's inputs is a stand-in."""
    return any(isinstance(value, Proxy) for value in inputs)


def one_node(module: nn.Module, *inputs: Any) -> Any:
    """Returns torch.fx's stand-in for a module's output: a call of the module, as of a leaf."""
    tracer: Any = next(value.tracer for value in inputs if isinstance(value, Proxy))
    return tracer.create_proxy("call_module", tracer.path_of_module(module), inputs, {})


_AS_ON_CUDA = ContextVar("as_on_cuda", default=False)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Has networks compute as on CUDA within the block, without reading lengths, to estimate a step's memory there."""
    token = _AS_ON_CUDA.set(True)
    try:
        yield
    finally:
        _AS_ON_CUDA.reset(token)


def is_as_on_cuda() -> bool:
    """Returns whether a block of :func:`as_on_cuda` runs."""
    return _AS_ON_CUDA.get()
