"""Estimates the memory and the computation of a model's networks on a rank, by a step on fake tensors.

Fake tensors have shapes and no values, so that a step of any size takes no memory and no GPU. Only integers are known
(:mod:`distembed.planning.known_integers`): networks over sequences look at lengths.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from distembed.data.dataset.schema import Schema
from distembed.data.reader.batch import Batch
from distembed.embedding import CompositionalEmbeddingBagConfig, CompositionalEmbeddingConfig
from distembed.embedding.modules import EmbeddingModule, embedding_modules, table_configs
from distembed.embedding.share import ReadChunk, ShareIds, TableShare
from distembed.errors import InsufficientMemory
from distembed.host_memory import host_memory_bytes
from distembed.models import Model, ModelConfig, ModelInputs
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning.known_integers import MOST_KNOWN, KnownIntegers
from distembed.planning.typical_batch import batch_of_shapes, typical_batch
from distembed.tasks import Task
from distembed.units import format_bytes


def _product_flops(own: Any, left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    """Returns the operations of ``own + left @ right``, given the tensors' shapes."""
    return 2 * math.prod(left) * right[-1]


_IN_PLACE = {torch.ops.aten.addmm_: _product_flops}
"""Operations of products that torch does not count."""


@dataclass(frozen=True)
class NetworkEstimate:
    """The memory and computation of the networks on a rank; every rank has all of them."""

    parameters: int = 0  # bytes of weights and biases
    buffers: int = 0  # bytes of the tensors that are not trained, such as an order of pairs
    gradients: int = 0  # bytes of the parameters' gradients; with several ranks, views of DDP's buckets
    optimizer_state: int = 0  # bytes of the dense optimizer's state
    # most bytes at once in the forward and backward passes, beside all the above where ranks average gradients in
    # buckets; on a single rank gradients are among them as they arise
    peak: int = 0
    flops: int = 0  # number of floating-point operations of the forward and backward passes
    # bytes of what the task returns of each row for metrics, such as a logit and a label
    output_bytes_per_row: float = 8.0
    is_step_known: bool = True  # whether a step could be followed; else `peak` and `flops` are 0 and say nothing


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
                self.count(value)
        return returned

    def count(self, tensor: Tensor) -> None:
        """Adds the bytes of a tensor's storage, if it is not known yet, until it is freed."""
        storage = tensor.untyped_storage()
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
    """Stands in for an embedding collection: returns vectors of the same shapes, without tables.

    The names are, for each table, feature and name of each vector; as compositional tables have them unless given.
    """

    def __init__(
        self,
        tables: Sequence[CompositionalEmbeddingConfig],
        names: Sequence[Sequence[tuple[str, str]]] | None = None,
    ) -> None:
        super().__init__()
        own_names = names or [
            [(feature, name) for feature in table.feature_names for name in table.vector_names(feature)]
            for table in tables
        ]
        self._vectors = [
            (feature, name, table.embedding_dim)
            for table, pairs in zip(tables, own_names, strict=True)
            for feature, name in pairs
        ]
        self._tables = {table.name: table for table in tables}
        self.scan = _Scan()
        self._origin = torch.empty(0, requires_grad=True)

    def share(self, table_name: str) -> TableShare:
        """Returns a stand-in for the table's share, whose vectors depend on no weights either."""
        return _ShareOfNothing(self._tables[table_name], self.scan)

    def _empty_vectors(self, num_rows: int, num_columns: int) -> Tensor:
        """Returns vectors of this shape that take part in the backward pass."""
        vectors: Tensor = _EmptyVectors.apply(self._origin, num_rows, num_columns)  # type: ignore[no-untyped-call]
        return vectors


@dataclass
class _Scan:
    """How networks go through the vectors of a whole table, chunk by chunk, all of which are alike."""

    world_size: int = 1  # number of ranks that share the table
    most_chunks: int = 1  # number of chunks that are gone through; all others are left out
    # number of chunks that a rank has, the last one in part; 0 where networks go through no table
    num_chunks: float = 0


class _ShareOfNothing(TableShare):
    """Stands in for a rank's share of a table: has few chunks of ids, whose vectors have no values, and no weights."""

    def __init__(self, table: CompositionalEmbeddingConfig, scan: _Scan) -> None:
        num_ids = math.ceil(table.num_embeddings / scan.world_size)
        super().__init__(table, ShareIds(0, num_ids), num_ids, [], torch.device("cpu"))
        self._scan = scan

    @property
    def world_size(self) -> int:
        return self._scan.world_size

    def num_chunks(self, most_ids: int) -> int:
        self._scan.num_chunks = self._most_ids / most_ids
        return min(super().num_chunks(most_ids), self._scan.most_chunks)

    def read(self, number: int, most_ids: int, with_gradients: bool = False) -> ReadChunk:
        chunk_ids = self._ids.between(0, most_ids, self._device)
        return ReadChunk(chunk_ids, torch.empty(len(chunk_ids.ids), self.table.embedding_dim))

    def add_gradients(self, chunk: ReadChunk, gradients: Tensor, totals: Sequence[Tensor]) -> None:
        pass


class _PooledVectors(_Vectors):
    """Stands in for a collection of bags: returns one vector a row and feature."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        dims = {name: dim for _, name, dim in self._vectors}
        return KeyedTensor(list(dims), list(dims.values()), self._empty_vectors(features.stride(), sum(dims.values())))


class _SequenceVectors(_Vectors):
    """Stands in for a collection of sequences: returns one vector an id."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        outputs = {}
        for feature, name, dim in self._vectors:
            ids = features[feature]
            outputs[name] = JaggedTensor(self._empty_vectors(len(ids.values()), dim), lengths=ids.lengths())
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
    world_size: int,
    pads_lists: bool = False,
) -> NetworkEstimate:
    """Runs a step of a model's networks on fake tensors, which take no memory.

    Args:
        model_config: The config's section ``model``.
        inputs: The features and tables that the model is built from; the memory of tables is not counted.
        task: The task that the model learns.
        num_rows: Rows of a step on one rank.
        optimizer: Name of the dense optimizer, a key of ``OPTIMIZERS``.
        bf16: Whether the networks compute in bf16.
        world_size: Number of ranks.
        pads_lists: Whether networks pad lists to their greatest length, as on CUDA.

    Returns:
        The estimate, whose step is not known of a model that looks at numbers other than integers, which fake tensors
        do not have.
    """
    mode = KnownIntegers()
    batch = _fake_batch(mode, inputs.schema, num_rows, pads_lists)
    with mode.active():
        model = model_config.build(_VectorInputs(inputs.schema, inputs.tables, inputs.embedding_dim))
        replace_collections(model)
        scans = [module.scan for module in model.modules() if isinstance(module, _Vectors)]
        for scan in scans:
            scan.world_size = world_size
        fake_step = FakeStep(lambda: _step(model, task, batch, bf16), _batch_tensors(batch), num_rows)
        estimate = measure_step(model, fake_step, optimizer, world_size > 1)
        left_out = max((scan.num_chunks - scan.most_chunks for scan in scans), default=0)
        if left_out <= 0:
            return estimate
        for scan in scans:
            scan.most_chunks += 1
        of_chunk = measure_step(model, fake_step, optimizer, world_size > 1).flops - estimate.flops
        return dataclasses.replace(estimate, flops=estimate.flops + round(left_out * of_chunk))


def _fake_batch(mode: KnownIntegers, schema: Schema, num_rows: int, pads_lists: bool) -> Batch:
    """Returns a batch of fake tensors, whose ids and lengths are known where they are not too many to be made."""
    ids_per_row = sum(feature.mean_ids_per_row for feature in schema.categorical)
    if num_rows * (len(schema.columns) + ids_per_row) > MOST_KNOWN:
        with mode:
            return batch_of_shapes(schema, num_rows)
    typical = typical_batch(schema, num_rows, pads_lists)
    return Batch({name: mode.fake(field) for name, field in typical.fields.items()}, num_rows)


@dataclass(frozen=True)
class FakeStep:
    """A step on fake tensors."""

    run: Callable[[], int]  # runs the forward and backward passes and returns the bytes that are kept of the outputs
    inputs: Sequence[Tensor]
    num_rows: int


def measure_step(model: nn.Module, step: FakeStep, optimizer: str, averages: bool) -> NetworkEstimate:
    """Counts the parameters of networks, and what a step of theirs takes; called where tensors are fake.

    Args:
        model: The networks, with stand-ins in the place of collections.
        step: The step.
        optimizer: Name of the dense optimizer, a key of ``OPTIMIZERS``.
        averages: Whether gradients are averaged over ranks, in buckets.

    Returns:
        The estimate, whose step is not known where the step raises a ``RuntimeError``.
    """
    counted = count_networks(model, optimizer)
    hooks = [
        # as DistributedDataParallel would: estimated gradients go into their buckets as soon as they are there
        parameter.register_post_accumulate_grad_hook(_drop_gradient)
        for parameter in model.parameters()
        if averages and parameter.requires_grad
    ]
    try:
        with FlopCounterMode(display=False, custom_mapping=_IN_PLACE) as counter, _LiveBytes() as live:
            for tensor in (*model.parameters(), *model.buffers(), *step.inputs):
                live.count(tensor)  # views of them are nothing new
            before = live.peak = live.now
            output_bytes = step.run()
            peak = live.peak - before
    except RuntimeError:
        # a look at values, or an operator that has no form for fake tensors; what else it may be, training raises
        return counted
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    return dataclasses.replace(
        counted,
        is_step_known=True,
        peak=peak,
        flops=counter.get_total_flops(),
        output_bytes_per_row=output_bytes / max(1, step.num_rows),
    )


def count_networks(model: nn.Module, optimizer: str) -> NetworkEstimate:
    """Returns what networks take from step to step; their step is not known.

    Args:
        model: The networks, with stand-ins in the place of collections.
        optimizer: Name of the dense optimizer, a key of ``OPTIMIZERS``.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return NetworkEstimate(
        parameters=sum(map(_num_bytes, model.parameters())),
        buffers=sum(map(_num_bytes, model.buffers())),
        gradients=sum(map(_num_bytes, trained)),
        optimizer_state=sum(OPTIMIZERS[optimizer].torch_state_bytes(0, each.numel()) for each in trained),
        is_step_known=False,
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
        replace_collections(model)
        num_bytes = sum(map(_num_bytes, [*model.parameters(), *model.buffers()])) * num_copies
    if num_bytes > host_memory_bytes():
        raise InsufficientMemory(
            f"The networks of model.name={model_config.name!r} take {format_bytes(num_bytes)} for their weights alone"
            f"{f' in {num_copies} processes' if num_copies > 1 else ''}; this machine has "
            f"{format_bytes(host_memory_bytes())}. Lower the sizes of layers under model, or embedding_dim."
        )


def replace_collections(model: nn.Module) -> dict[str, EmbeddingModule]:
    """Puts stand-ins in the place of the collections of a model, such as TorchRec's; returns these by their path."""
    replaced = embedding_modules(model)
    for path, module in replaced.items():
        stand_in = _PooledVectors if isinstance(module, EmbeddingBagCollectionInterface) else _SequenceVectors
        model.set_submodule(path, stand_in(table_configs(module), _stock_names(module)))
    return replaced


def _stock_names(module: EmbeddingModule) -> list[list[tuple[str, str]]] | None:
    """Returns, for each table of one of TorchRec's collections, features and names of vectors; None for others."""
    if isinstance(module, EmbeddingBagCollection):
        configs: Sequence[BaseEmbeddingConfig] = module.embedding_bag_configs()
    elif isinstance(module, EmbeddingCollection):
        configs = module.embedding_configs()
    else:
        return None
    names = get_embedding_names_by_table(configs)
    return [list(zip(config.feature_names, own, strict=True)) for config, own in zip(configs, names, strict=True)]


def _batch_tensors(batch: Batch) -> list[Tensor]:
    """Returns the tensors of all fields of a batch."""
    return [
        tensor
        for field in batch.fields.values()
        for tensor in ((field.values(), field.lengths()) if isinstance(field, KeyedJaggedTensor) else (field,))
    ]


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
