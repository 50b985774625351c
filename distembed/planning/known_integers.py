"""Fake tensors whose integers are known: how long sequences are decides how a model goes through them.

A step on fake tensors takes no memory, but stops where a model looks at a value. What networks look at are lengths, ids
and what follows from them, such as places and groups: integers, which are computed here as they are in training. All
other tensors have shapes alone. Torch does the same for integers of one element; here they have any number.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import gru_impl_data
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

MOST_KNOWN = 2**26
"""Integers of a tensor up to which they are kept: half a gigabyte."""
_LEAVES = (Tensor, JaggedTensor, KeyedJaggedTensor, KeyedTensor)
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


class KnownIntegers(FakeTensorMode):
    """A mode in which tensors are fake, and those of integers and truth values have values for as long as they can."""

    def fake(self, value: Any) -> Any:
        """Returns the value with fake :func:`leaves` of the same shapes; integers keep their values."""

        def changed(node: Any) -> Any:
            if isinstance(node, _LEAVES):
                return self._fake_leaf(node)
            if not dataclasses.is_dataclass(node) or isinstance(node, type):
                return node
            own = {field.name: self.fake(getattr(node, field.name)) for field in dataclasses.fields(node)}
            return dataclasses.replace(node, **own)

        return tree_map(changed, value, is_leaf=lambda node: isinstance(node, _LEAVES))

    def _fake_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._fake_tensor(leaf)
        if isinstance(leaf, KeyedTensor):
            return KeyedTensor(leaf.keys(), leaf.length_per_key(), self._fake_tensor(leaf.values()))
        parts: dict[str, Any] = {"values": leaf.values(), "weights": leaf.weights_or_none(), "lengths": leaf.lengths()}
        parts = tree_map_only(Tensor, self._fake_tensor, parts)
        if isinstance(leaf, JaggedTensor):
            return JaggedTensor(**parts)
        return KeyedJaggedTensor(
            leaf.keys(),
            **parts,
            stride=leaf.stride(),
            length_per_key=leaf.length_per_key(),
            offset_per_key=leaf.offset_per_key(),
        )

    def _fake_tensor(self, tensor: Tensor) -> Tensor:
        if self.may_turn_const(tensor):
            return self.fake_tensor_converter.from_real_tensor(self, tensor, make_constant=True)
        return self.from_tensor(tensor)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Makes tensors fake within the block, and known integers those of numpy's arrays and back."""
        with self, _ThroughNumpy(self):
            yield

    def may_turn_const(self, t: Tensor) -> bool:
        """Returns whether a tensor's values are kept; torch asks."""
        is_integer = not (t.is_floating_point() or t.is_complex())
        is_kept = is_integer and t.layout == torch.strided and t.device.type == "cpu" and t.numel() <= MOST_KNOWN
        return (is_kept and not isinstance(t, FakeTensor)) or super().may_turn_const(t)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator; integers that it makes of none, such as a range, are known as well."""
        made = super().dispatch(func, types, args, kwargs)
        if not isinstance(made, FakeTensor) or made.constant is not None or made.is_floating_point():
            return made
        if made.device.type != "cpu" or made.numel() > MOST_KNOWN or torch.Tag.nondeterministic_seeded in func.tags:
            return made
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            return made
        with no_dispatch():
            known = func(*args, **(kwargs or {}))
            if func in _EMPTY:
                known.zero_()  # what lies there by chance may be no place in anything
        return self._fake_tensor(known)


def leaves(value: Any) -> list[Any]:
    """Returns the tensors, plain and jagged, of a value: within tuples, lists, dicts and dataclasses."""
    found: list[Any] = []
    for node in tree_leaves(value, is_leaf=lambda node: isinstance(node, _LEAVES)):
        if isinstance(node, _LEAVES):
            found.append(node)
        elif dataclasses.is_dataclass(node) and not isinstance(node, type):
            found += leaves([getattr(node, field.name) for field in dataclasses.fields(node)])
    return found


def tensors(value: Any) -> list[Tensor]:
    """Returns all tensors of a value, those of jagged ones apart."""
    return [own for leaf in leaves(value) for own in tree_leaves(leaf) if isinstance(own, Tensor)]


class _ThroughNumpy(TorchFunctionMode):
    """Makes arrays of numpy's of known integers, and known integers of such arrays, which torch would not."""

    def __init__(self, mode: KnownIntegers) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], FakeTensor):
            known = args[0].constant
            if known is None:
                raise RuntimeError("the values of a fake tensor are not known")
            with no_dispatch():
                return func(known, *args[1:], **(kwargs or {}))
        args, kwargs = tree_map_only(Tensor, self._known, (args, kwargs or {}))
        if func is torch.gru and len(args) > 1 and not args[1].is_floating_point():
            func = gru_impl_data  # the same operators step by step; torch's own reads the sizes of the steps as memory
        return func(*args, **kwargs)

    def _known(self, tensor: Tensor) -> Tensor:
        """Returns a fake tensor in the place of a real one of integers, which comes from an array of numpy's."""
        is_real = not isinstance(tensor, FakeTensor) and not tensor.is_floating_point()
        return self._mode._fake_tensor(tensor) if is_real else tensor
