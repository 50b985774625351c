"""Maps raw ids into their tables' ranges, before they index anything.

A table may hash its ids first (``pre_hash``); ids that then lie outside of ``[0, num_embeddings)`` follow the table's
``id_policy``. A batch whose ids all lie inside, the usual case, costs one pass over its ids, for the maximum of each
feature. Ids are compared as unsigned numbers, among which a negative one is larger than any table.

In a unified table a feature's ids are checked against the feature's own number of ids, and then its first id is added::

    C3 of 100 ids      7  99         ->   7  99
    C4 of 50 ids       7  49         ->   107  149       first_ids {C3: 0, C4: 100}

All returned ids have one dtype, which the tables' settings decide (``id_dtype``) and never a batch: each rank maps its
own batch, and ids of two types in one all-to-all would make gloo abort, or ranks look up other ids than were sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, Int64
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.tracing import is_traced, require_in_program
from distembed.embedding.batches import require_integers, require_whole_batch, with_ids
from distembed.embedding.config import CompositionalEmbeddingConfig, FeatureIds, common_id_dtype
from distembed.embedding.managed import ManagedFeatures, ManagedIds

_LARGEST_UNSIGNED = 2**64 - 1
_SIGN_BIT = 2**63
_REFUSED_ON_DEVICE = "an id lies outside its table; run the batch on the CPU to see which"


class IdMapper:
    """Maps the raw ids of a batch to ids that lie in their tables; features that no table reads are ignored.

    On the CPU an id that is refused raises a :class:`UserError` that names table, feature, position and value. On a GPU
    the check runs asynchronously, so as not to stop the stream, and fails as a device-side assertion. Returned ids have
    the widest ``id_dtype`` of the tables.

    Args:
        tables: The tables.
        make_managed: Makes the module that gives managed ids their slots, of the identities by feature.
    """

    def __init__(
        self,
        tables: Sequence[CompositionalEmbeddingConfig],
        make_managed: Callable[[dict[str, ManagedIds]], ManagedFeatures] = ManagedFeatures,
    ) -> None:
        self.dtype = common_id_dtype(tables)
        managed = {name: table.managed for table in tables for name in table.feature_names if table.managed is not None}
        self._managed = make_managed(managed) if managed else None
        self._table_by_feature = {name: table for table in tables for name in table.feature_names}
        self._layout: _Layout | None = None

    def __call__(self, features: KeyedJaggedTensor, admits: bool = False) -> KeyedJaggedTensor:
        """Returns the batch with mapped ids; the batch itself where neither an id nor the dtype changes.

        With ``admits``, managed ids are counted and admitted, as in training; if they are sharded, all ranks call it.

        Raises a UserError for a damaged batch and, on the CPU, for an id that is refused.
        """
        require_whole_batch(features)
        values = features.values()
        if values.is_meta:
            return features
        if is_traced():
            return self._with_ids(features, self._map_traced(features))
        if self._managed is not None:
            features = self._managed(features, admits)
            values = features.values()
        if values.numel() == 0:  # of any dtype: torch.tensor([]) is of float32
            return self._with_ids(features, values.to(self.dtype))
        layout = self._find_layout(features)
        # the CPU knows which features have ids outside; on a GPU, all features whose ids may change are mapped
        if values.device.type == "cpu":
            changed = [*layout.always, *_features_outside(features, layout.last_ids)]
        else:
            _assert_inside(features, layout.device_bounds)
            changed = layout.mapped
        ids = values.to(self.dtype)
        return self._with_ids(features, self._map(features, ids, changed) if changed else ids)

    def _find_layout(self, features: KeyedJaggedTensor) -> "_Layout":
        """Returns the layout for a batch: the cached one if keys, dtype and device are equal, else a new one."""
        keys, values = features.keys(), features.values()
        layout = self._layout
        if layout is None or (layout.keys, layout.dtype, layout.device) != (keys, values.dtype, values.device):
            tables = [self._table_by_feature.get(key) for key in keys]
            self._layout = layout = _make_layout(keys, tables, values.dtype, values.device)
        return layout

    def _map(self, features: KeyedJaggedTensor, ids: Int[Tensor, " ids"], changed: Sequence[int]) -> Tensor:
        """Returns ``ids``, the batch's ids converted, with the ids of the features ``changed`` (indices) mapped."""
        keys, counts = features.keys(), features.length_per_key()
        raw, mapped = features.values().split(counts), list(ids.split(counts))
        for index in changed:
            table = self._table_by_feature[keys[index]]
            mapped[index] = map_ids(table, raw[index], feature=keys[index]).to(self.dtype)
        return torch.cat(mapped)

    def _map_traced(self, features: KeyedJaggedTensor) -> Int[Tensor, " ids"]:
        """Returns a batch's mapped ids without looking at values, for a traced or compiled program."""
        keys = features.keys()
        mapped = list(features.values().split(features.length_per_key()))
        for index, key in enumerate(keys):
            table = self._table_by_feature.get(key)
            if table is not None:
                mapped[index] = map_ids(table, mapped[index], feature=key)
        return torch.cat([feature_ids.to(self.dtype) for feature_ids in mapped])

    @staticmethod
    def _with_ids(features: KeyedJaggedTensor, ids: Int[Tensor, " ids"]) -> KeyedJaggedTensor:
        return features if ids is features.values() else with_ids(features, ids, features.weights_or_none())


def map_ids(
    table: CompositionalEmbeddingConfig,
    ids: Int[Tensor, " ids"],
    where: str = "",
    first_position: int = 0,
    feature: str | None = None,
) -> Int64[Tensor, " ids"]:
    """Returns raw ids as ids of a table, in ``[0, num_embeddings)``: hashed, or else mapped by the table's policy.

    The ids of a feature of a unified table are mapped into the feature's own range.

    Args:
        table: The table, whose hash and policy are applied.
        ids: Tensor of any integers.
        where: Text for the error that says where the ids are from; the feature unless given.
        first_position: Position of ``ids[0]`` there, for the error.
        feature: The feature that has the ids; None for ids of the table itself.

    Raises:
        UserError: The dtype is not of integers, or the policy is ``error`` and an id lies outside (a GPU or a program
            fails asynchronously instead).
    """
    where = f"table {table.name!r}, {where or f'feature {feature!r}'}"
    require_integers(f"{where}: the ids", ids.dtype)
    own = table.ids_of(feature)
    if table.managed is not None:
        return table.managed.lookup(ids.long())
    inside = _ids_inside(table, own, ids.long(), where, first_position)
    return inside + own.first if own.first else inside


def _ids_inside(
    table: CompositionalEmbeddingConfig, own: FeatureIds, ids: Int64[Tensor, " ids"], where: str, first_position: int
) -> Int64[Tensor, " ids"]:
    """Returns ids in ``[0, own.num_ids)``: hashed, or else mapped by the table's policy."""
    if table.pre_hash is not None:
        return table.pre_hash.ids_of_int64(ids, own.num_ids)
    if table.id_policy == "modulo":
        return ids % own.num_ids
    outside = ids.clamp(0, own.num_ids - 1).ne(ids)
    if table.id_policy == "clip_to_oov":
        return ids.masked_fill(outside, own.oov_id)
    if is_traced():
        require_in_program(
            ~outside.any(),
            f"{where}: an id lies outside of 0 to {own.num_ids - 1} (num_embeddings={own.num_ids}); run the batch "
            "uncompiled to see which.",
        )
    elif ids.device.type != "cpu":
        torch._assert_async(~outside.any(), _REFUSED_ON_DEVICE)
    elif outside.any():
        position = int(outside.nonzero()[0])
        raise UserError(_refusal(own, where, first_position + position, int(ids[position])))
    return ids


def _refusal(own: FeatureIds, where: str, position: int, value: int) -> str:
    """Returns the text of the error for an id outside of its table, or of its feature's ids."""
    return (
        f"{where}: the id at position {position} is {value}; ids lie between 0 and {own.num_ids - 1} "
        f"(num_embeddings={own.num_ids}). Map unseen values to an out-of-vocabulary id, make the table larger, or set "
        f"the table's id_policy: clip_to_oov takes such an id for {own.oov_id} (oov_id), modulo for its remainder."
    )


@dataclass(frozen=True)
class _Layout:
    """The limits of each feature's ids, for batches with equal keys, dtype and device."""

    keys: list[str]
    dtype: torch.dtype
    device: torch.device
    always: list[int]  # indices of the features whose ids always change: they are hashed, or moved in a unified table
    mapped: list[int]  # indices of the features whose ids may change: always, or by a policy other than error
    last_ids: NDArray[np.uint64]  # by feature: the largest id that is not changed or refused; no limit if always
    # by feature: the largest id that is not refused; sign bits are flipped, so that a signed comparison is unsigned
    device_bounds: Int64[Tensor, " keys"]


def _make_layout(
    keys: Sequence[str], tables: Sequence[CompositionalEmbeddingConfig | None], dtype: torch.dtype, device: torch.device
) -> _Layout:
    last_ids = np.full(len(keys), _LARGEST_UNSIGNED, dtype=np.uint64)
    bounds = last_ids.copy()
    always, mapped = [], []
    for i, table in enumerate(tables):
        if table is None:
            continue
        require_integers(f"table {table.name!r}, feature {keys[i]!r}: the ids", dtype)
        own = table.ids_of(keys[i])
        if table.pre_hash is not None or own.first:  # map_ids checks the ids that it moves
            always.append(i)
        else:
            # read as unsigned, negative ids lie beyond the dtype's own maximum
            last_ids[i] = min(own.num_ids - 1, torch.iinfo(dtype).max)
        if table.pre_hash is not None or own.first or table.id_policy != "error":
            mapped.append(i)
        else:
            bounds[i] = own.num_ids - 1
    device_bounds = torch.from_numpy((bounds ^ np.uint64(_SIGN_BIT)).view(np.int64)).to(device)
    return _Layout(list(keys), dtype, device, always, mapped, last_ids, device_bounds)


def _features_outside(features: KeyedJaggedTensor, last_ids: NDArray[np.uint64]) -> list[int]:
    """Returns the indices of the features with an id above their limit; negative ids, read as unsigned, are above."""
    values = features.values().numpy()
    counts = np.array(features.length_per_key())
    starts = counts.cumsum() - counts
    filled = counts.nonzero()[0]
    if len(filled) < len(counts):  # reduceat takes an empty range for a single element
        starts, last_ids = starts[filled], last_ids[filled]
    outside = np.maximum.reduceat(values.view(f"u{values.itemsize}"), starts) > last_ids
    return filled[outside].tolist() if outside.any() else []


def _assert_inside(features: KeyedJaggedTensor, device_bounds: Int64[Tensor, " keys"]) -> None:
    """Asserts asynchronously on the device that no id exceeds its feature's bound: feature -> bags -> ids."""
    ids, lengths = features.values().long(), features.lengths()
    if features.variable_stride_per_key():
        num_bags = torch.tensor(features.stride_per_key()).to(lengths.device, non_blocking=True)
        bounds = device_bounds.repeat_interleave(num_bags, output_size=lengths.numel())
    else:
        bounds = device_bounds.repeat_interleave(features.stride())
    bounds = bounds.repeat_interleave(lengths, output_size=ids.numel())
    torch._assert_async(~((ids ^ -_SIGN_BIT) > bounds).any(), _REFUSED_ON_DEVICE)
