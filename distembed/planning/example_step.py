"""The networks of a model that is at hand: counted by themselves, and by a step on an example batch.

The batch is real, since how many ids its rows have is read off it; the step runs on fake tensors of the same shapes,
of which integers keep their values.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_map
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from distembed.embedding.modules import embedding_modules
from distembed.errors import UserError, one_line
from distembed.planning.known_integers import KnownIntegers
from distembed.planning.networks import (
    FakeStep,
    NetworkEstimate,
    count_networks,
    measure_step,
    replace_collections,
)

_FLOAT_BYTES = 4
_LEAVES = (Tensor, JaggedTensor, KeyedJaggedTensor, KeyedTensor)


class OnDevice(TorchFunctionMode):
    """Makes every tensor of the block one of a device, whatever device is asked for, which need not be there.

    Args:
        device: The device, such as ``meta``, where tensors take no memory.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (Tensor.cuda, Tensor.cpu):
            return args[0].to(self._device)
        if kwargs.get("device") is not None or func in _device_constructors():
            kwargs["device"] = self._device
        if func is Tensor.to:
            args = [self._device if isinstance(each, torch.device | str) else each for each in args]
        return func(*args, **kwargs)


@dataclass(frozen=True)
class ExampleBatch:
    """What a model is called with, for one rank's rows."""

    value: Any  # a tuple of the positional arguments, a mapping of the named ones, or the only argument
    num_rows: int

    def __post_init__(self) -> None:
        for ids in self.jagged():
            if ids.stride() != self.num_rows:
                raise UserError(f"the example batch of {self.num_rows:,} rows has {ids.stride():,} rows of ids.")

    def jagged(self) -> list[KeyedJaggedTensor]:
        """Returns the ids of the batch."""
        return [leaf for leaf in leaves(self.value) if isinstance(leaf, KeyedJaggedTensor)]

    def ids_per_row(self) -> dict[str, float]:
        """Returns the mean number of ids of a row, by feature."""
        return {feature: float(lengths.float().mean()) for feature, lengths in self._lengths()}

    def multi_hot(self) -> frozenset[str]:
        """Returns the features of which a row has several ids."""
        return frozenset(feature for feature, lengths in self._lengths() if int(lengths.max()) > 1)

    def dense_numbers_per_row(self) -> int:
        """Returns how many float32 numbers a row has beside its ids, labels included."""
        dense = [leaf for leaf in leaves(self.value) if isinstance(leaf, Tensor)]
        return sum(each.numel() * each.itemsize for each in dense) // (_FLOAT_BYTES * self.num_rows)

    def _lengths(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each feature with the number of ids of every row."""
        for ids in self.jagged():
            yield from ((feature, each.lengths()) for feature, each in ids.to_dict().items())


def leaves(value: Any) -> list[Any]:
    """Returns the tensors, plain and jagged, of a value: within tuples, lists, dicts and dataclasses."""
    found: list[Any] = []

    def noted(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    with_leaves(value, noted)
    return found


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns the value with each of its :func:`leaves` changed."""

    def changed(node: Any) -> Any:
        if isinstance(node, _LEAVES):
            return change(node)
        if not dataclasses.is_dataclass(node) or isinstance(node, type):
            return node
        own = {field.name: with_leaves(getattr(node, field.name), change) for field in dataclasses.fields(node)}
        return dataclasses.replace(node, **own)

    return tree_map(changed, value, is_leaf=lambda node: isinstance(node, _LEAVES))


def estimate_own_networks(
    model: nn.Module, batch: ExampleBatch | None, optimizer: str, bf16: bool, averages: bool
) -> tuple[NetworkEstimate, str]:
    """Counts the networks of a model: all of it but its collections; the model stays as it is.

    Args:
        model: The model, not sharded, on the meta device.
        batch: What the model is called with; None where nothing is known of it.
        optimizer: Name of the dense optimizer, a key of ``OPTIMIZERS``.
        bf16: Whether the networks compute in bf16.
        averages: Whether gradients are averaged over ranks, in buckets.

    Returns:
        The estimate, and why its step is not known; empty where it is.
    """
    if "" in embedding_modules(model):  # the model is a collection itself
        return NetworkEstimate(), ""
    failures: list[str] = []
    mode = KnownIntegers()
    value = None if batch is None else with_leaves(batch.value, mode.fake)
    try:
        networks = copy.deepcopy(model)
        with mode.active():
            replace_collections(networks)
            _make_fake(networks)
    except Exception as error:  # whatever someone's own module raises, such as one without its weights' sizes
        return NetworkEstimate(is_step_known=False), f"the model cannot be copied: {one_line(error)}"
    with mode.active(), OnDevice("cpu"):
        if batch is None:
            return count_networks(networks, optimizer), "there is no --example to count them by"
        step = FakeStep(lambda: _run(networks, value, bf16, failures), list(_tensors(value)), batch.num_rows)
        return measure_step(networks, step, optimizer, averages), "".join(failures)


def _make_fake(module: nn.Module) -> None:
    """Puts fake tensors of the same shapes in the place of a module's parameters, buffers and other tensors."""
    fakes: dict[int, tuple[Tensor, Tensor]] = {}  # with the originals, so that no other tensor gets the id of one
    for part in module.modules():
        held: list[dict[str, Any]] = [part._parameters, part._buffers, vars(part)]
        for tensors in held:
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor):
                    _, tensors[name] = fakes.setdefault(id(tensor), (tensor, _fake_like(tensor)))


def _fake_like(tensor: Tensor) -> Tensor:
    """Returns a tensor or parameter of the same shape; called where tensors are fake."""
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _run(model: nn.Module, value: Any, bf16: bool, failures: list[str]) -> int:
    """Runs the forward and backward passes; adds to ``failures`` why it cannot, and raises a ``RuntimeError`` then."""
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            outputs = _call(model, value)
        trained = [tensor for tensor in _tensors(outputs) if tensor.requires_grad]
        if not trained:
            raise ValueError("no output depends on a weight")
        torch.autograd.backward(trained, [torch.ones_like(tensor) for tensor in trained])
    except Exception as error:  # whatever someone's own model raises
        failures.append(f"a step on the example batch fails: {one_line(error)}")
        raise RuntimeError(failures[0]) from error
    return 0


def _call(model: nn.Module, value: Any) -> Any:
    """Calls the model with a batch, as :class:`ExampleBatch` says."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return model(*value)
    return model(**value) if isinstance(value, dict) else model(value)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields all tensors of a value, those of jagged ones apart."""
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, KeyedTensor):
            yield leaf.values()
        else:
            parts = (leaf.values(), leaf.lengths(), leaf.weights_or_none())
            yield from (part for part in parts if part is not None)
