"""The networks of a model that is at hand: counted by themselves, and by a step on an example batch.

The batch is real, since how many ids its rows have is read off it; the step runs on fake tensors of the same shapes,
of which integers keep their values.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError, one_line
from distembed.embedding.modules import embedding_modules
from distembed.planning.known_integers import KnownIntegers, leaves, tensors
from distembed.planning.networks import (
    FakeStep,
    NetworkEstimate,
    count_networks,
    measure_step,
    replace_collections,
)

_FLOAT_BYTES = 4


class OnDevice(TorchFunctionMode):
    """Makes every tensor of the block one of a device, whatever device is asked for, which need not be there."""

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
        for ids in self._ids():
            if ids.stride() != self.num_rows:
                raise UserError(f"the example batch of {self.num_rows:,} rows has {ids.stride():,} rows of ids.")

    def ids_per_row(self) -> dict[str, float]:
        """Returns the mean number of ids of a row, by feature."""
        return {feature: float(lengths.float().mean()) for feature, lengths in self._lengths()}

    def multi_hot(self) -> frozenset[str]:
        """Returns the features of which a row has several ids."""
        return frozenset(feature for feature, lengths in self._lengths() if int(lengths.max()) > 1)

    def dense_numbers_per_row(self) -> int:
        """Returns how many float32 numbers a row has beside its ids, labels included."""
        num_bytes = sum(leaf.nbytes for leaf in leaves(self.value) if isinstance(leaf, Tensor))
        return num_bytes // (_FLOAT_BYTES * self.num_rows)

    def _lengths(self) -> list[tuple[str, Tensor]]:
        return [(feature, own.lengths()) for ids in self._ids() for feature, own in ids.to_dict().items()]

    def _ids(self) -> list[KeyedJaggedTensor]:
        return [leaf for leaf in leaves(self.value) if isinstance(leaf, KeyedJaggedTensor)]


def estimate_own_networks(
    model: nn.Module, batch: ExampleBatch | None, optimizer: str, bf16: bool, averages: bool
) -> tuple[NetworkEstimate, str]:
    """Counts the networks of a model: all of it but its collections; the model stays as it is.

    The model is not sharded, and on the meta device; where ranks average gradients, these are in buckets. The estimate
    comes with why its step is not known; empty where it is.
    """
    if "" in embedding_modules(model):  # the model is a collection itself
        return NetworkEstimate(), ""
    mode = KnownIntegers()
    value = None if batch is None else mode.fake(batch.value)
    try:
        networks = _copy(model, mode)
    except Exception as error:  # whatever someone's own module raises, such as one without its weights' sizes
        return NetworkEstimate(is_step_known=False), f"the model cannot be copied: {one_line(error)}"
    with mode.active(), OnDevice("cpu"):
        if batch is None:
            return count_networks(networks, optimizer), "there is no --example to count them by"
        step = FakeStep(lambda: _run(networks, value, bf16), tensors(value), batch.num_rows)
        try:
            return measure_step(networks, step, optimizer, averages), ""
        except Exception as error:  # whatever someone's own model raises
            unknown = f"a step on the example batch fails: {one_line(error)}"
            return count_networks(networks, optimizer), unknown


def _copy(model: nn.Module, mode: KnownIntegers) -> nn.Module:
    """Returns a model with fake tensors of the same shapes, and with stand-ins in the place of its collections."""
    fakes: dict[int, Any] = {}  # by the tensors' ids: a copy takes what is there for the tensor's copy
    with mode.active():
        for part in model.modules():
            for tensor in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
                if isinstance(tensor, Tensor) and id(tensor) not in fakes:
                    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
    networks = copy.deepcopy(model, fakes)
    with mode.active():
        replace_collections(networks)
    return networks


def _run(model: nn.Module, value: Any, bf16: bool) -> int:
    """Runs the forward and backward passes of a batch, which is as :class:`ExampleBatch` says."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            outputs = model(*value)
        else:
            outputs = model(**value) if isinstance(value, dict) else model(value)
    trained = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
    if not trained:
        raise ValueError("no output depends on a weight")
    torch.autograd.backward(trained, [torch.ones_like(tensor) for tensor in trained])
    return 0
