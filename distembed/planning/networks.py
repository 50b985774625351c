"""What a model's networks take of a rank's memory, and how much they compute, found by running them on fake tensors.

Only shapes exist of these: a step of any size takes no memory, and no GPU.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from torchrec.sparse.jagged_tensor import KeyedTensor

from distembed.models.config import DCNConfig, DLRMConfig, build_model
from distembed.optim.kinds import OPTIMIZERS


@dataclass(frozen=True)
class NetworkEstimate:
    """The networks on a rank, in bytes; every rank has all of them.

    Attributes:
        parameters: weights and biases.
        buffers: what is no parameter and is not trained, such as an order of pairs.
        gradients: of the parameters; they are views of the buckets of DistributedDataParallel, where there are some.
        optimizer_state: what the dense optimizer keeps.
        peak: the fullest moment of forward and backward, beside all the above where ranks average gradients in buckets;
            with one rank gradients count, as they come.
        flops: floating-point operations of the forward and backward passes.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    peak: int = 0
    flops: int = 0


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operators return for as long as these are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for value in tree_iter(returned):
            if isinstance(value, Tensor):
                self._count(value.untyped_storage())
        return returned

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


class _Arrived(torch.autograd.Function):
    """Pooled vectors out of nothing, which only autograd keeps, and whose gradient goes nowhere."""

    @staticmethod
    def forward(ctx: Any, origin: Tensor, num_rows: int, num_columns: int) -> Tensor:
        return origin.new_empty(num_rows, num_columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        return None, None, None


class _Tables(nn.Module):
    """Gives a batch's pooled vectors without tables."""

    def __init__(self, names: Sequence[str], dim: int) -> None:
        super().__init__()
        self._names, self._dim = list(names), dim
        self._origin = torch.empty(0, requires_grad=True)

    def forward(self, num_rows: int) -> KeyedTensor:
        count = len(self._names)
        values = _Arrived.apply(self._origin, num_rows, count * self._dim)  # type: ignore[no-untyped-call]
        return KeyedTensor(self._names, [self._dim] * count, values)


def estimate_network(
    config: DLRMConfig | DCNConfig,
    vector_names: Sequence[str],
    embedding_dim: int,
    num_dense: int,
    num_rows: int,
    optimizer: str,
    bf16: bool,
    averages: bool,
) -> NetworkEstimate:
    """Runs a step of a model's networks on fake tensors, which take no memory.

    Args:
        config: of the model.
        vector_names: of the pooled vectors that it takes, as for :func:`build_model`.
        embedding_dim: D of each.
        num_dense: number of dense features.
        num_rows: b.
        optimizer: name of the dense one, a key of ``OPTIMIZERS``.
        bf16: whether the networks compute in bf16.
        averages: whether gradients are averaged over ranks, in buckets.
    """
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, _LiveBytes() as live:
        model = build_model(config, _Tables(vector_names, embedding_dim), vector_names, embedding_dim, num_dense)
        parameters = list(model.parameters())
        if averages:
            # a gradient goes into its bucket as soon as it is there
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        batch = torch.empty(num_rows, num_dense), torch.empty(num_rows)
        before = live.peak = live.now
        _step(model, *batch, bf16)
        peak = live.peak - before
    trained = sum(map(_num_bytes, parameters))
    kind = OPTIMIZERS[optimizer]
    kept = sum(kind.torch_state_bytes(0, parameter.numel()) for parameter in parameters)
    return NetworkEstimate(
        trained, sum(map(_num_bytes, model.buffers())), trained, kept, peak, counter.get_total_flops()
    )


def _step(model: nn.Module, dense_features: Tensor, labels: Tensor, bf16: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        logits = model(dense_features, len(labels))
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="sum")
    loss.backward()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize
