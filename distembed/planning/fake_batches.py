"""Batches for a step on fake tensors, on which a model's networks run without memory or a GPU.

A step on fake tensors stops where a model reads a value. Networks read lengths, ids and integers computed from them, so
:class:`KnownIntegers` keeps the values of integers and booleans; other tensors have shapes only. Torch does this for
integers of one element; here they have any number.

Lists of a :func:`typical_batch` are a little longer than on average, since the fullest of many steps counts: the total
length of a batch's lists varies by ``mean / sqrt(rows)`` where lengths vary as much as their mean.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch._decomp.decompositions import gru_impl_data
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from distembed.data.dataset.schema import SPARSE_FEATURES, BatchField, Schema
from distembed.data.reader.batch import Batch

MOST_KNOWN = 2**26
"""Largest number of integers in a tensor whose values are kept: half a gigabyte."""
_LEAVES = (Tensor, JaggedTensor, KeyedJaggedTensor, KeyedTensor)
_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default)


class KnownIntegers(FakeTensorMode):
    """A mode with fake tensors in which integers and booleans keep their values where possible."""

    def fake(self, value: Any) -> Any:
        """Returns a copy of nested containers and dataclasses with fake tensors; integers keep their values."""

        def changed(node: Any) -> Any:
            if isinstance(node, _LEAVES):
                return self._fake_leaf(node)
            if not dataclasses.is_dataclass(node) or isinstance(node, type):
                return node
            fake_fields = {field.name: self.fake(getattr(node, field.name)) for field in dataclasses.fields(node)}
            return dataclasses.replace(node, **fake_fields)

        return tree_map(changed, value, is_leaf=lambda node: isinstance(node, _LEAVES))

    def _fake_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return self._fake_tensor(leaf)
        if isinstance(leaf, KeyedTensor):
            return KeyedTensor(leaf.keys(), leaf.length_per_key(), self._fake_tensor(leaf.values()))
        fields: dict[str, Any] = {
            "values": leaf.values(),
            "weights": leaf.weights_or_none(),
            "lengths": leaf.lengths(),
        }
        fields = tree_map_only(Tensor, self._fake_tensor, fields)
        if isinstance(leaf, JaggedTensor):
            return JaggedTensor(**fields)
        return KeyedJaggedTensor(
            leaf.keys(),
            **fields,
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
        """Makes tensors fake within the block; ``numpy()`` of known integers and tensors from arrays work too."""
        with self, _ThroughNumpy(self):
            yield

    def may_turn_const(self, t: Tensor) -> bool:
        """Returns whether a tensor's values are kept; torch calls it."""
        is_integer = not (t.is_floating_point() or t.is_complex())
        is_kept = is_integer and t.layout == torch.strided and t.device.type == "cpu" and t.numel() <= MOST_KNOWN
        return (is_kept and not isinstance(t, FakeTensor)) or super().may_turn_const(t)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator. Integers from an operator without tensor inputs, like a range, keep their values too."""
        fake = super().dispatch(func, types, args, kwargs)
        if not isinstance(fake, FakeTensor) or fake.constant is not None or fake.is_floating_point():
            return fake
        if fake.device.type != "cpu" or fake.numel() > MOST_KNOWN or torch.Tag.nondeterministic_seeded in func.tags:
            return fake
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
            return fake
        with no_dispatch():
            real = func(*args, **(kwargs or {}))
            if func in _EMPTY:
                real.zero_()  # arbitrary memory may be no valid index
        return self._fake_tensor(real)


def leaves(value: Any) -> list[Any]:
    """Returns all plain and jagged tensors within tuples, lists, dicts and dataclasses."""
    tensor_leaves: list[Any] = []
    for node in tree_leaves(value, is_leaf=lambda node: isinstance(node, _LEAVES)):
        if isinstance(node, _LEAVES):
            tensor_leaves.append(node)
        elif dataclasses.is_dataclass(node) and not isinstance(node, type):
            tensor_leaves += leaves([getattr(node, field.name) for field in dataclasses.fields(node)])
    return tensor_leaves


def tensors(value: Any) -> list[Tensor]:
    """Returns all tensors of a value; a jagged tensor gives its parts."""
    return [tensor for leaf in leaves(value) for tensor in tree_leaves(leaf) if isinstance(tensor, Tensor)]


class _ThroughNumpy(TorchFunctionMode):
    """Converts known integers to numpy arrays, and integers from arrays to fake tensors; torch refuses both."""

    def __init__(self, mode: KnownIntegers) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.numpy, Tensor.__array__) and isinstance(args[0], FakeTensor):
            constant = args[0].constant
            if constant is None:
                raise RuntimeError("the values of a fake tensor are not known")
            with no_dispatch():
                return func(constant, *args[1:], **(kwargs or {}))
        args, kwargs = tree_map_only(Tensor, self._known, (args, kwargs or {}))
        if func is torch.gru and len(args) > 1 and not args[1].is_floating_point():
            func = gru_impl_data  # the same operators step by step; torch's own reads the sizes of the steps as memory
        return func(*args, **kwargs)

    def _known(self, tensor: Tensor) -> Tensor:
        """Returns a fake tensor in place of a real one of integers, which comes from a numpy array."""
        is_real = not isinstance(tensor, FakeTensor) and not tensor.is_floating_point()
        return self._mode._fake_tensor(tensor) if is_real else tensor


_DEVIATIONS, _MOST_LONGER = 2.0, 0.2
"""Standard deviations by which a batch's lists are longer than the mean, and the largest share of the mean."""
_LARGEST_MULTIPLE = 10_000
"""Largest ratio of two features' mean lengths at which one counts as a multiple of the other."""


def typical_batch(schema: Schema, num_rows: int, pads_lists: bool = False) -> Batch:
    """Returns a batch of the schema's fields with about as many ids and numbers as the fullest of many steps.

    With ``pads_lists``, every list has its feature's greatest length: networks on CUDA pad lists to it, since waiting
    for the device to tell the real lengths would stall the step.
    """
    longer = 1 + min(_MOST_LONGER, _DEVIATIONS / math.sqrt(max(1, num_rows)))
    lists = {feature.name for feature in schema.categorical if feature.multi_hot} | {*schema.dense_sequences}
    means = {name: longer * mean for name, mean in _ids_per_row(schema).items() if name in lists}
    lengths = dict.fromkeys(schema.categorical_names, torch.ones(num_rows, dtype=torch.int32))
    lengths |= typical_lengths(means, num_rows)
    if pads_lists:
        dataset_features = (
            feature for feature in schema.categorical if feature.table is None
        )  # a task adds other features
        most_ids = {
            feature.name: feature.max_ids_per_row for feature in dataset_features if feature.max_ids_per_row is not None
        }
        if not schema.beside:  # else lists of numbers are as long as their own column of ids
            most_ids |= dict.fromkeys(schema.dense_sequences, max(most_ids.values())) if most_ids else {}
        lengths |= {name: torch.full((num_rows,), count, dtype=torch.int32) for name, count in most_ids.items()}
    sizes = {feature.name: feature.num_embeddings for feature in schema.categorical}

    def jagged(field: BatchField) -> KeyedJaggedTensor:
        row_lengths = [lengths[name] for name in field.columns]
        counts = [int(rows.sum()) for rows in row_lengths]
        if field.name == SPARSE_FEATURES:
            values = [torch.arange(count) % sizes[name] for name, count in zip(field.columns, counts, strict=True)]
        else:
            values = [torch.zeros(count) for count in counts]
        return KeyedJaggedTensor(list(field.columns), _joined(values), lengths=_joined(row_lengths), stride=num_rows)

    return _batch(schema, num_rows, jagged)


def batch_of_shapes(schema: Schema, num_rows: int) -> Batch:
    """Returns a batch of mean lengths without values, within a mode of fake tensors, for batches too large to make."""
    means = _ids_per_row(schema)

    def jagged(field: BatchField) -> KeyedJaggedTensor:
        counts = [math.ceil(num_rows * means[name]) for name in field.columns]
        return KeyedJaggedTensor(
            list(field.columns),
            torch.empty(sum(counts), dtype=torch.int64 if field.name == SPARSE_FEATURES else torch.float32),
            lengths=torch.empty(num_rows * len(counts), dtype=torch.int32),
            stride=num_rows,
            length_per_key=counts,
            offset_per_key=list(accumulate(counts, initial=0)),
        )

    return _batch(schema, num_rows, jagged)


def _ids_per_row(schema: Schema) -> dict[str, float]:
    means = {feature.name: feature.mean_ids_per_row for feature in schema.categorical}
    return means | {name: schema.mean_numbers_per_row(name) for name in schema.dense_sequences}


def _batch(schema: Schema, num_rows: int, jagged: Callable[[BatchField], KeyedJaggedTensor]) -> Batch:
    fields = {
        field.name: jagged(field) if field.is_jagged else torch.zeros(field.shape(num_rows)) for field in schema.fields
    }
    return Batch(fields, num_rows)


def typical_lengths(means: Mapping[str, float], num_rows: int) -> dict[str, Int[Tensor, " rows"]]:
    """Returns the number of ids of each row of each list feature, ``means`` on average.

    Features with equal means have equal lengths. A mean that is k times another has k times its length in each row, as
    negative items of sequences have. Otherwise the lengths of a feature differ by one at most.
    """
    # row i of mean m has ceil((i + 1) m) - ceil(i m) ids, so that the first r rows have ceil(r m) in all
    lengths: dict[float, Tensor] = {}
    for mean in sorted(set(means.values())):
        # the largest of the smaller means that this one is a multiple of
        ratios = {base: mean / base for base in lengths if base * _LARGEST_MULTIPLE >= mean > 0}
        bases = (base for base, ratio in ratios.items() if math.isclose(ratio, round(ratio), rel_tol=1e-9))
        base = max(bases, default=None)
        ends = torch.ceil(torch.arange(num_rows + 1, dtype=torch.float64) * mean - 1e-9).clamp_(min=0)
        lengths[mean] = ends.diff().int() if base is None else lengths[base] * round(mean / base)
    return {name: lengths[mean] for name, mean in means.items()}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if tensors else torch.zeros(0, dtype=torch.int64)
