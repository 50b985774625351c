"""Triton's kernels on a CPU, by its interpreter, in a process of their own.

Whether kernels are interpreted is decided when Triton is imported, and holds for all of the process. So that other
tests have Triton as it is, those of the interpreter are run elsewhere, one after the other.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from distembed.kernels.tables import Formula, Storage, TablePart
from distembed.kernels.triton_lookup import TritonLookup

Run = Callable[..., Any]
"""Calls a function of a module with arguments, in the other process, and returns what it returns."""


@contextmanager
def interpreter() -> Iterator[Run]:
    """Starts the other process, which ends with the block."""
    with ProcessPoolExecutor(1, get_context("spawn"), _interpret) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from triton.runtime import interpreter

    patch_tensor: Any = interpreter._patch_lang_tensor

    def patch_index(tensor: Any, scope: Any) -> None:
        """Has the end of a range be a number, which Triton 3.6 makes of an array as NumPy 2.5 no longer lets it."""
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_index

    def require_multiples(handle: Any, name: str, values: Sequence[int]) -> None:
        """Notes a claim about numbers, which a card would take as true, and checks it."""
        handle.attr[name] = values
        assert name != "tt.divisibility" or (handle.data % values[-1] == 0).all(), (values, handle.data)

    handle: Any = interpreter.TensorHandle
    handle.set_attr = require_multiples
    stock_patch: Any = interpreter._patch_lang
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        """Has the language be interpreted from a module's first call on; Triton does and undoes it at every call."""
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            stock_patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    _stock.update(generic_reduce=interpreter.ReduceOps.generic_reduce, generic_scan=interpreter.ScanOps.generic_scan)
    interpreter.ReduceOps.generic_reduce = _reduced
    interpreter.ScanOps.generic_scan = _scanned


_stock: dict[str, Any] = {}


def by_stock(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function in the other process with the interpreter's own reductions and scans, which are slower."""
    from triton.runtime import interpreter

    ops: Any
    with ExitStack() as stack:
        for ops, name in ((interpreter.ReduceOps, "generic_reduce"), (interpreter.ScanOps, "generic_scan")):
            stack.enter_context(patch.object(ops, name, _stock[name]))
        return function(*arguments)


def _steps(ops: Any, given: Sequence[Any]) -> Iterator[Any]:
    """Yields each tensor, and the results of combining its numbers along an axis, from the first to each.

    Triton's interpreter takes the numbers of the other axes one by one; the combining function stays the kernel's.
    """
    columns = [np.moveaxis(each.handle.data, ops.axis, 0) for each in given]
    found: list[tuple[Any, ...]] = []
    for numbers in zip(*columns, strict=True):
        tensors = tuple(ops.to_tensor(own, each.dtype) for own, each in zip(numbers, given, strict=True))
        combined = ops.combine_fn.fn(*found[-1], *tensors) if found else tensors
        found.append(combined if isinstance(combined, tuple) else (combined,))
    shape = columns[0].shape[1:]
    for each, results in zip(given, zip(*found, strict=True), strict=True):
        yield each, [own.handle.data.reshape(shape) for own in results]


def _reduced(ops: Any, given: Sequence[Any]) -> list[Any]:
    lasts = [(each, results[-1]) for each, results in _steps(ops, given)]
    return [ops.to_tensor(np.expand_dims(own, ops.axis) if ops.keep_dims else own, each.dtype) for each, own in lasts]


def _scanned(ops: Any, given: Sequence[Any]) -> list[Any]:
    assert not ops.reverse, "only scans from the first number on are replaced"
    return [ops.to_tensor(np.stack(results, ops.axis), each.dtype) for each, results in _steps(ops, given)]


class InterpretedLookup:
    """Is made and called as :class:`distembed.kernels.operation.FusedLookup` is."""

    def __init__(
        self, formula: Formula, parts: Sequence[Sequence[TablePart]], tables: Sequence[int], storages: Sequence[Storage]
    ) -> None:
        assert os.environ["TRITON_INTERPRET"] == "1"
        self.lookup = TritonLookup(formula, parts, tables, storages)

    def __call__(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        storages: Sequence[Storage],
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        if counts is not None:  # one bag of each feature
            offsets = torch.tensor([0, *accumulate(counts)])
        return self.lookup(ids, offsets, weights, storages)
