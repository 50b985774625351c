"""Estimates the memory and the computation of a model's networks on a rank, by a step on fake tensors.

Fake tensors have shapes and no values, so that a step of any size takes no memory and no GPU.
"""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from distembed.data.dataset.schema import BatchField, Schema
from distembed.data.reader.batch import Batch
from distembed.embedding import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig, vector_names
from distembed.embedding.modules import embedding_modules, table_configs
from distembed.errors import InsufficientMemory
from distembed.host_memory import host_memory_bytes
from distembed.models import Model, ModelConfig, ModelInputs
from distembed.optim.kinds import OPTIMIZERS
from distembed.tasks import Task
from distembed.units import format_bytes


@dataclass(frozen=True)
class NetworkEstimate:
    """The memory and computation of the networks on a rank; every rank has all of them.

    Attributes:
        parameters: Bytes of weights and biases.
        buffers: Bytes of the tensors that are not trained, such as an order of pairs.
        gradients: Bytes of the parameters' gradients, which are views of the buckets of DistributedDataParallel where
            ranks average them.
        optimizer_state: Bytes of the dense optimizer's state.
        peak: Most bytes at once in the forward and backward passes, beside all the above where ranks average gradients
            in buckets; on a single rank gradients are among them as they arise.
        flops: Number of floating-point operations of the forward and backward passes.
        output_bytes_per_row: Bytes that the task keeps of each row for metrics, such as a logit and a label.
    """

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    peak: int = 0
    flops: int = 0
    output_bytes_per_row: float = 8.0


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
        """Adds the bytes of a storage that is not known yet, until it is freed."""
        key, num_bytes = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, num_bytes)

    def _forget(self, key: int, num_bytes: int) -> None:
        """Subtracts the bytes of a storage that is freed."""
        self._known.discard(key)
        self.now -= num_bytes


class _EmptyVectors(torch.autograd.Function):
    """Returns vectors [num_rows, num_columns] that depend on no weights, so that their gradient is dropped."""

    @staticmethod
    def forward(ctx: Any, origin: Tensor, num_rows: int, num_columns: int) -> Tensor:
        return origin.new_empty(num_rows, num_columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        return None, None, None


class _Vectors(nn.Module):
    """Stands in for an embedding collection: returns vectors of the same shapes, without tables."""

    def __init__(self, tables: Sequence[CompositionalEmbeddingConfig]) -> None:
        super().__init__()
        self._tables = tables
        self._origin = torch.empty(0, requires_grad=True)

    def _empty_vectors(self, num_rows: int, num_columns: int) -> Tensor:
        """Returns vectors of this shape that take part in the backward pass."""
        vectors: Tensor = _EmptyVectors.apply(self._origin, num_rows, num_columns)  # type: ignore[no-untyped-call]
        return vectors


class _PooledVectors(_Vectors):
    """Stands in for a collection of bags: returns one vector a row and feature."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        keys = {name: table.embedding_dim for table in self._tables for name in vector_names([table])}
        return KeyedTensor(list(keys), list(keys.values()), self._empty_vectors(features.stride(), sum(keys.values())))


class _SequenceVectors(_Vectors):
    """Stands in for a collection of sequences: returns one vector an id."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        outputs = {}
        for table in self._tables:
            for feature in table.feature_names:
                ids = features[feature]
                for name in table.vector_names(feature):
                    vectors = self._empty_vectors(len(ids.values()), table.embedding_dim)
                    outputs[name] = JaggedTensor(vectors, lengths=ids.lengths())
        return outputs


class _VectorInputs(ModelInputs):
    """Gives a model stand-ins in the place of embedding collections."""

    def _make_pooled(self, tables: Sequence[CompositionalEmbeddingBagConfig]) -> nn.Module:
        return _PooledVectors(tables)

    def _make_sequences(self, tables: Sequence[CompositionalEmbeddingConfig]) -> nn.Module:
        return _SequenceVectors(tables)


def estimate_network(
    model_config: ModelConfig,
    inputs: ModelInputs,
    task: Task,
    num_rows: int,
    optimizer: str,
    bf16: bool,
    averages: bool,
) -> NetworkEstimate | None:
    """Runs a step of a model's networks on fake tensors, which take no memory.

    Args:
        model_config: The config's section ``model``.
        inputs: The features and tables that the model is built from; the memory of tables is not counted.
        task: The task that the model learns.
        num_rows: Rows of a step on one rank.
        optimizer: Name of the dense optimizer, a key of ``OPTIMIZERS``.
        bf16: Whether the networks compute in bf16.
        averages: Whether gradients are averaged over ranks, in buckets.

    Returns:
        The estimate; None for a model whose step depends on values, which fake tensors do not have.
    """
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, _LiveBytes() as live:
        model = model_config.build(_VectorInputs(inputs.schema, inputs.tables, inputs.embedding_dim))
        _replace_collections(model)
        parameters = list(model.parameters())
        if averages:
            # as DistributedDataParallel would: estimated gradients go into their buckets as soon as they are there
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
        batch = _empty_batch(inputs.schema, num_rows)
        before = live.peak = live.now
        try:
            output_bytes = _step(model, task, batch, bf16)
        except RuntimeError:
            # a look at values, or an operator that has no form for fake tensors; what else it may be, training raises
            return None
        peak = live.peak - before
    trained = sum(map(_num_bytes, parameters))
    kind = OPTIMIZERS[optimizer]
    optimizer_state = sum(kind.torch_state_bytes(0, parameter.numel()) for parameter in parameters)
    return NetworkEstimate(
        trained,
        sum(map(_num_bytes, model.buffers())),
        trained,
        optimizer_state,
        peak,
        counter.get_total_flops(),
        output_bytes / max(1, num_rows),
    )


def require_networks_fit(model_config: ModelConfig, inputs: ModelInputs, num_copies: int) -> None:
    """Makes sure, without making them, that this machine can hold the weights of a model's networks.

    Args:
        model_config: The config's section ``model``.
        inputs: The features and tables that the model is built from; the memory of tables is not counted.
        num_copies: Number of processes of this machine that make them.

    Raises:
        InsufficientMemory: The weights take more memory than the machine has.
    """
    with FakeTensorMode():
        model = model_config.build(_VectorInputs(inputs.schema, inputs.tables, inputs.embedding_dim))
        _replace_collections(model)
        num_bytes = sum(map(_num_bytes, [*model.parameters(), *model.buffers()])) * num_copies
    if num_bytes > host_memory_bytes():
        raise InsufficientMemory(
            f"The networks of model.name={model_config.name!r} take {format_bytes(num_bytes)} for their weights alone"
            f"{f' in {num_copies} processes' if num_copies > 1 else ''}; this machine has "
            f"{format_bytes(host_memory_bytes())}. Lower the sizes of layers under model, or embedding_dim."
        )


def _replace_collections(model: nn.Module) -> None:
    """Puts stand-ins in the place of the collections that the model has made itself, such as TorchRec's."""
    for path, module in embedding_modules(model).items():
        is_pooled = isinstance(module, EmbeddingBagCollectionInterface)
        stand_in = (_PooledVectors if is_pooled else _SequenceVectors)(table_configs(module))
        model.set_submodule(path, stand_in)


def _empty_batch(schema: Schema, num_rows: int) -> Batch:
    """Returns a batch of the schema's fields, with as many ids as there are on average."""

    def empty(field: BatchField) -> Tensor | KeyedJaggedTensor:
        if not field.is_jagged:
            return torch.empty(num_rows) if field.is_vector else torch.empty(num_rows, len(field.columns))
        counts = [math.ceil(num_rows * feature.mean_ids_per_row) for feature in schema.categorical]
        return KeyedJaggedTensor(
            list(field.columns),
            torch.empty(sum(counts), dtype=torch.int64),
            lengths=torch.empty(num_rows * len(counts), dtype=torch.int32),
            stride=num_rows,
            length_per_key=counts,
            offset_per_key=list(accumulate(counts, initial=0)),
        )

    return Batch({field.name: empty(field) for field in schema.fields}, num_rows)


def _step(model: Model, task: Task, batch: Batch, bf16: bool) -> int:
    """Runs the forward and backward passes of a batch; returns the bytes of the task's outputs."""
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        outputs = model(*[batch[name] for name in model.batch_fields])
    loss, rows = task.step(outputs, batch)
    output_bytes = sum(map(_num_bytes, rows.values()))
    del rows
    loss.backward()
    return output_bytes


def _drop_gradient(parameter: Tensor) -> None:
    """Frees a gradient at once, as if it were copied into its bucket."""
    parameter.grad = None


def _num_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's values."""
    return tensor.numel() * tensor.itemsize
