"""Estimates memory and computation of a model's networks on a rank, by a step on fake tensors.

Fake tensors have shapes and no values, so a step of any size takes no memory and no GPU. Only integers have values
(:mod:`distembed.planning.fake_batches`), since networks over sequences read lengths.
"""

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from distembed.base.errors import InsufficientMemory, UserError, one_line
from distembed.base.machine import host_memory_bytes
from distembed.base.tracing import as_on_cuda
from distembed.base.units import format_bytes
from distembed.data.dataset.schema import WEIGHTS
from distembed.data.reader.batch import Batch
from distembed.embedding import CompositionalEmbeddingConfig
from distembed.embedding.collections import embedding_modules, table_configs
from distembed.embedding.share import ReadChunk, ShareIds, TableShare
from distembed.models import Model, ModelConfig, ModelInputs
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning.fake_batches import MOST_KNOWN, KnownIntegers, batch_of_shapes, leaves, tensors, typical_batch
from distembed.sharding.groups.load import FLOAT_BYTES
from distembed.tasks import Task

_IN_PLACE = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * math.prod(left) * right[-1]}
"""Formulas of operations that torch's FLOP counter lacks; each gets the shapes of the arguments."""


@dataclass(frozen=True)
class NetworkEstimate:
    """Memory, in bytes, and computation of the networks on a rank; every rank has all of them."""

    parameters: int = 0
    buffers: int = 0  # tensors that are not trained, like an order of pairs
    gradients: int = 0  # with several ranks, views of DDP's buckets
    optimizer_state: int = 0  # with the averages of train.ema
    # most bytes at once in the forward and backward passes, besides all the above where ranks average gradients in
    # buckets; on a single rank gradients are among them as they arise
    peak: int = 0
    flops: int = 0  # floating-point operations of the forward and backward passes
    output_bytes_per_row: float = 8.0  # outputs that the task returns for metrics, for example a logit and a label
    is_step_known: bool = True  # whether a step could be followed; else `peak` and `flops` are 0 and say nothing


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operators return, until they are freed: ``now``, and ``peak`` at most.

    The copy of its input that ``logsumexp`` makes counts in the peak: it may be the largest tensor of a step.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._storage_bytes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for value in tree_iter(returned):
            if isinstance(value, Tensor):
                self.count(value)
        if func is torch.ops.aten.logsumexp.default:
            self.peak = max(self.peak, self.now + args[0].nbytes)
        return returned

    def count(self, tensor: Tensor) -> None:
        """Counts a tensor's storage until it is freed; a view's storage has been counted already."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storage_bytes:
            self._storage_bytes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.now -= self._storage_bytes.pop(key)


class _EmptyVectors(torch.autograd.Function):
    """Returns uninitialised vectors [num_rows, num_columns] that require a gradient, which goes to no weight."""

    @staticmethod
    def forward(ctx: Any, origin: Tensor, num_rows: int, num_columns: int) -> Tensor:
        return origin.new_empty(num_rows, num_columns)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None, None]:
        return None, None, None


@dataclass
class _Scan:
    """How networks read the vectors of a whole table, in equal chunks; the stand-ins set ``num_chunks``."""

    world_size: int = 1  # number of ranks that share the table
    most_chunks: int = 1  # chunks that the fake step reads; the operations of the rest are extrapolated
    num_chunks: float = 0  # chunks of a rank's share, the last one in part; 0 where networks read no whole table


class _ShareOfNothing(TableShare):
    """Stands in for a rank's share of a table: at most ``scan.most_chunks`` chunks, vectors without values."""

    def __init__(self, table: CompositionalEmbeddingConfig, scan: _Scan) -> None:
        num_ids = math.ceil(table.num_embeddings / scan.world_size)
        super().__init__(table, ShareIds(0, num_ids), num_ids, [], torch.device("cpu"))
        self._scan = scan

    @property
    def world_size(self) -> int:
        return self._scan.world_size

    def num_chunks(self, most_ids: int) -> int:
        self._scan.num_chunks = max(self._scan.num_chunks, self._most_ids / most_ids)
        return min(super().num_chunks(most_ids), self._scan.most_chunks)

    def read(self, number: int, most_ids: int, with_gradients: bool = False) -> ReadChunk:
        chunk_ids = self._ids.between(0, most_ids, self._device)
        return ReadChunk(chunk_ids, torch.empty(len(chunk_ids.ids), self.table.embedding_dim))

    def add_gradients(self, chunk: ReadChunk, gradients: Tensor, totals: Sequence[Tensor]) -> None:
        pass


class _Vectors(nn.Module):
    """Stands in for an embedding collection: returns vectors of equal shapes, without tables."""

    def __init__(self, tables: Any, scan: _Scan) -> None:
        super().__init__()
        self._tables, self._scan = {table.name: table for table in tables}, scan
        # (feature, name, dimension) of each vector; a feature that several of TorchRec's tables share has several
        self._vectors = [
            (feature, name, table.embedding_dim)
            for table, keys in zip(tables, get_embedding_names_by_table(tables), strict=True)
            for feature, key in zip(table.feature_names, keys, strict=True)
            for name in table.vector_names(key)
        ]
        self._origin = torch.empty(0, requires_grad=True)

    def share(self, table_name: str) -> TableShare:
        return _ShareOfNothing(self._tables[table_name], self._scan)

    def _empty_vectors(self, num_rows: int, num_columns: int) -> Tensor:
        vectors: Tensor = _EmptyVectors.apply(self._origin, num_rows, num_columns)  # type: ignore[no-untyped-call]
        return vectors


class _PooledVectors(_Vectors):
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        dims = {name: dim for _, name, dim in self._vectors}
        return KeyedTensor(list(dims), list(dims.values()), self._empty_vectors(features.stride(), sum(dims.values())))


class _SequenceVectors(_Vectors):
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        outputs = {}
        for feature, name, dim in self._vectors:
            ids = features[feature]
            outputs[name] = JaggedTensor(self._empty_vectors(len(ids.values()), dim), lengths=ids.lengths())
        return outputs


@dataclass(frozen=True)
class _VectorInputs(ModelInputs):
    """Gives a model stand-ins in place of embedding collections."""

    scan: _Scan

    def _make_pooled(self, tables: Sequence[CompositionalEmbeddingConfig]) -> nn.Module:
        return _PooledVectors(tables, self.scan)

    def _make_sequences(self, tables: Sequence[CompositionalEmbeddingConfig]) -> nn.Module:
        return _SequenceVectors(tables, self.scan)


def _build_networks(model_config: ModelConfig, inputs: ModelInputs, scan: _Scan) -> Model:
    """Builds a model with stand-ins in place of its collections, within a mode of fake tensors."""
    model = model_config.build(_VectorInputs(inputs.schema, inputs.tables, inputs.embedding_dim, scan))
    replace_collections(model, scan)
    return model


def replace_collections(model: nn.Module, scan: _Scan | None = None) -> None:
    """Replaces a model's collections, TorchRec's among them, by stand-ins without tables; changes the model."""
    for path, module in embedding_modules(model).items():
        stand_in = _PooledVectors if isinstance(module, EmbeddingBagCollectionInterface) else _SequenceVectors
        model.set_submodule(path, stand_in(table_configs(module), scan or _Scan()))


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
    """Runs a step of a model's networks on fake tensors and returns its memory and operations, without tables.

    Where the model reads values other than integers, the estimate has weights only (``is_step_known`` is False).
    ``num_rows`` are one rank's, to which the task's ``added_rows`` are added. ``optimizer`` is the dense optimizer (a
    key of ``OPTIMIZERS``). Several ranks average gradients, in buckets. With ``pads_lists`` networks pad lists to their
    greatest length, as on CUDA.
    """
    mode, schema = KnownIntegers(), inputs.schema
    num_queries, num_rows = num_rows, num_rows + math.ceil(max(task.added_rows.values(), default=0) / world_size)
    ids_per_row = sum(feature.mean_ids_per_row for feature in schema.categorical)
    if num_rows * (len(schema.columns) + ids_per_row) > MOST_KNOWN:
        with mode:
            batch = batch_of_shapes(schema, num_rows)
    else:
        batch = mode.fake(typical_batch(schema, num_rows, pads_lists))
    with mode.active():
        fields = dict(batch.fields)
        if num_rows > num_queries:  # rows that the task adds have no weight
            fields[WEIGHTS] = fields[WEIGHTS][:num_queries]
        batch = Batch(fields, num_queries * world_size)
        scan = _Scan(world_size)
        model = _build_networks(model_config, inputs, scan)

        def run() -> int:
            layout = as_on_cuda() if pads_lists else nullcontext()
            with layout, torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                outputs = model(*[batch[name] for name in model.batch_fields])
            loss, rows = task.step(outputs, batch)
            output_bytes = sum(output.nbytes for output in rows.values())
            del rows
            loss.backward()
            return output_bytes

        step = partial(measure_step, model, run, tensors(batch), num_queries, optimizer, world_size > 1)
        try:
            estimate = step()
            left_out = scan.num_chunks - scan.most_chunks
            if left_out <= 0:
                return estimate
            # one chunk more: the difference is a chunk's operations, by which the chunks left out are extrapolated
            scan.most_chunks += 1
            chunk_flops = step().flops - estimate.flops
        except RuntimeError:
            # the model reads a value, or an operator has no fake form; training will raise any other error
            return count_networks(model, optimizer)
        return replace(estimate, flops=estimate.flops + round(left_out * chunk_flops))


def measure_step(
    model: nn.Module, run: Callable[[], int], inputs: Sequence[Tensor], num_rows: int, optimizer: str, averages: bool
) -> NetworkEstimate:
    """Runs a step within a mode of fake tensors; returns its memory and operations, and the networks' weights.

    ``run`` runs the forward and backward passes and returns the bytes of outputs that are kept; its errors are raised.
    With ``averages`` gradients leave the peak at once, as they go into buckets. Clears all gradients afterwards.
    """
    hooks = [
        # as DistributedDataParallel would: estimated gradients go into their buckets as soon as they are there
        parameter.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
        for parameter in model.parameters()
        if averages and parameter.requires_grad
    ]
    try:
        with FlopCounterMode(display=False, custom_mapping=_IN_PLACE) as counter, _LiveBytes() as live:
            for tensor in (*model.parameters(), *model.buffers(), *inputs):
                live.count(tensor)  # so that views of these add nothing to the peak
            before = live.peak = live.now
            output_bytes = run()
            peak = live.peak - before
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    return replace(
        count_networks(model, optimizer),
        is_step_known=True,
        peak=peak,
        flops=counter.get_total_flops(),
        output_bytes_per_row=output_bytes / max(1, num_rows),
    )


def count_networks(model: nn.Module, optimizer: str) -> NetworkEstimate:
    """Returns the bytes of parameters, buffers, gradients and optimizer state; ``is_step_known`` is False."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return NetworkEstimate(
        parameters=sum(weight.nbytes for weight in model.parameters()),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
        gradients=sum(weight.nbytes for weight in trained),
        optimizer_state=sum(OPTIMIZERS[optimizer].torch_state_bytes(0, weight.numel()) for weight in trained),
        is_step_known=False,
    )


def require_networks_fit(model_config: ModelConfig, inputs: ModelInputs, num_copies: int) -> None:
    """Checks that this machine's memory holds ``num_copies`` of the networks' weights, without allocating them.

    Raises:
        InsufficientMemory: The weights take more memory than the machine has.
    """
    with FakeTensorMode():
        model = _build_networks(model_config, inputs, _Scan())
        num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) * num_copies
    if num_bytes > host_memory_bytes():
        raise InsufficientMemory(
            f"The networks of model.name={model_config.name!r} take {format_bytes(num_bytes)} for their weights alone"
            f"{f' in {num_copies} processes' if num_copies > 1 else ''}; this machine has "
            f"{format_bytes(host_memory_bytes())}. Lower the sizes of layers under model, or embedding_dim."
        )


class OnDevice(TorchFunctionMode):
    """Makes and moves every tensor of the block on one device, whichever device the code names."""

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
            args = [self._device if isinstance(argument, torch.device | str) else argument for argument in args]
        return func(*args, **kwargs)


@dataclass(frozen=True)
class ExampleBatch:
    """Arguments of a model's call, for one rank's rows; refuses ids of another number of rows (``UserError``)."""

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
        """Returns the features with several ids in some row."""
        return frozenset(feature for feature, lengths in self._lengths() if int(lengths.max()) > 1)

    def dense_numbers_per_row(self) -> int:
        """Returns the bytes of all plain tensors, in float32 numbers per row; labels are included."""
        num_bytes = sum(leaf.nbytes for leaf in leaves(self.value) if isinstance(leaf, Tensor))
        return num_bytes // (FLOAT_BYTES * self.num_rows)

    def _lengths(self) -> list[tuple[str, Tensor]]:
        return [(feature, jagged.lengths()) for ids in self._ids() for feature, jagged in ids.to_dict().items()]

    def _ids(self) -> list[KeyedJaggedTensor]:
        return [leaf for leaf in leaves(self.value) if isinstance(leaf, KeyedJaggedTensor)]


def estimate_own_networks(
    model: nn.Module, batch: ExampleBatch | None, optimizer: str, bf16: bool, averages: bool
) -> tuple[NetworkEstimate, str]:
    """Estimates all modules but the collections of an unsharded model on the meta device, which stays unchanged.

    Returns the estimate, and the reason why the step is unknown: empty where it is known. Errors of the model's code
    become this reason. With ``averages``, ranks average gradients, in buckets.
    """
    if "" in embedding_modules(model):  # the model is a collection itself
        return NetworkEstimate(), ""
    mode = KnownIntegers()
    value = None if batch is None else mode.fake(batch.value)
    try:
        networks = _copy(model, mode)
    except Exception as error:  # of a module without a config, which may raise anything
        return NetworkEstimate(is_step_known=False), f"the model cannot be copied: {one_line(error)}"
    with mode.active(), OnDevice("cpu"):
        if batch is None:
            return count_networks(networks, optimizer), "there is no --example to count them by"
        run = partial(_run, networks, value, bf16)
        try:
            return measure_step(networks, run, tensors(value), batch.num_rows, optimizer, averages), ""
        except Exception as error:  # of a model without a config, which may raise anything
            unknown = f"a step on the example batch fails: {one_line(error)}"
            return count_networks(networks, optimizer), unknown


def _copy(model: nn.Module, mode: KnownIntegers) -> nn.Module:
    """Returns a copy of a model with fake tensors of equal shapes, and with stand-ins for its collections."""
    fakes: dict[int, Any] = {}  # deepcopy's memo: the fake tensor by the real one's id
    with mode.active():
        for module in model.modules():
            for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
                if isinstance(tensor, Tensor) and id(tensor) not in fakes:
                    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
                    is_weight = isinstance(tensor, nn.Parameter)
                    fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_weight else fake
    networks = copy.deepcopy(model, fakes)
    with mode.active():
        replace_collections(networks)
    return networks


def _run(model: nn.Module, value: Any, bf16: bool) -> int:
    """Runs forward and backward on an :class:`ExampleBatch`'s value; returns 0, since no output is kept."""
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
