"""Batches: a check that a batch is whole, and batches in which features have unequal numbers of bags.

TorchRec checks the first batch of a sharded collection of bags and no later one. FBGEMM's kernels then read and write
outside of their memory where a length is negative. :func:`require_whole_batch` checks every batch, in two passes over
its lengths.

A *variable batch* (TorchRec's VBE) holds a bag once that many rows share, as candidates share the features of a user.
*Inverse indices* name the bag of each row::

    rows of the batch       0   1   2   3
    user's bags    u v      0   0   0   1     three rows have bag u, and one has bag v
    item's bags  a b c d    0   1   2   3     each row has a bag of its own

Bags are looked up, composed and pooled once, and the result is repeated for each row.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.tracing import is_traced, require_in_program
from distembed.base.units import enumerate_names

_LARGEST = torch.iinfo(torch.int64).max
_REFUSED = "lengths, offsets and inverse indices do not divide the ids into bags; run the batch "
_OTHER_WEIGHTS = "The batch has another number of weights than ids; give one weight an id."


def require_whole_batch(features: KeyedJaggedTensor) -> None:
    """Raises a :class:`UserError` for a damaged batch, which FBGEMM would read beyond its memory.

    A whole batch has distinct keys, tensors of matching shapes and dtypes, bags that hold all ids of their feature, and
    inverse indices of existing bags. On a GPU, values are checked asynchronously, as a device-side assertion.
    """
    _require_numbers_of_bags(features)
    _require_shapes(features)
    _require_rows(features)
    lengths, offsets, num_ids = features.lengths(), features.offsets_or_none(), features.values().numel()
    if lengths.is_meta:
        return
    if lengths.device.type == "cpu" and not is_traced():
        _require_bags(features)
    else:
        is_whole = (lengths >= 0).all() & (lengths.sum() == num_ids)
        if offsets is not None:
            is_whole = is_whole & (offsets.narrow(0, 0, 1) == 0).all() & (offsets.diff() == lengths).all()
        _require_on_device(is_whole)
    if not is_traced() and sum(features.length_per_key()) != num_ids:
        raise UserError(_other_number_of_ids(features))


def require_integers(subject: str, dtype: torch.dtype) -> None:
    """Raises a :class:`UserError` for a dtype whose values would be truncated to integers; ``subject`` is a plural."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise UserError(f"{subject} are of {dtype}, but must be integers; give int64 or int32.")


def require_bags_for_rows(features: KeyedJaggedTensor) -> None:
    """Raises a :class:`UserError` if features have unequal numbers of bags and no inverse indices map rows to them."""
    if not features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        return
    if len(set(counts := features.stride_per_key())) > 1:
        raise UserError(
            f"The features of the batch have unequal numbers of bags ({_by_feature(features, counts)}) by "
            "stride_per_key_per_rank, and their pooled vectors stand side by side in rows; give inverse_indices, which "
            "say which of its bags each feature has in each row."
        )


def _require_on_device(condition: Bool[Tensor, ""]) -> None:
    """Makes the traced program, or else the device, fail asynchronously unless a condition holds."""
    if is_traced():
        require_in_program(condition, _REFUSED + "uncompiled to see why")
    else:
        torch._assert_async(condition, _REFUSED + "on the CPU to see why")


def _require_numbers_of_bags(features: KeyedJaggedTensor) -> None:
    if not features.variable_stride_per_key():
        return
    strides_by_key, num_keys = features.stride_per_key_per_rank(), len(features.keys())
    if len(strides_by_key) != num_keys or any(len(strides) != 1 or strides[0] < 0 for strides in strides_by_key):
        raise UserError(
            f"The batch has stride_per_key_per_rank={strides_by_key} for {num_keys} features "
            f"({enumerate_names(features.keys())}); give a list with one number, 0 or more, for each feature: how many "
            "bags it has in this batch."
        )


def _require_rows(features: KeyedJaggedTensor) -> None:
    """Raises unless inverse indices, if given, are ``[features, rows]`` integers with bags that exist."""
    inverse_indices = features.inverse_indices_or_none()
    if inverse_indices is None:
        return
    names, bags = inverse_indices
    require_integers("inverse_indices of the batch", bags.dtype)
    if set(features.keys()) - set(names) or bags.dim() != 2 or len(bags) != len(names):
        raise UserError(
            f"The batch has inverse_indices of the shape {tuple(bags.shape)} for {enumerate_names(names)}, and the "
            f"features {enumerate_names(features.keys())}; give [features, rows] numbers, and the name of each feature."
        )
    if bags.is_meta:
        return
    num_bags = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    most = torch.tensor([num_bags.get(name, _LARGEST) for name in names]).to(bags.device, non_blocking=True)
    outside = (bags < 0) | (bags >= most.unsqueeze(1))
    if is_traced() or bags.device.type != "cpu":
        _require_on_device(~outside.any())
    elif outside.any():
        feature, row = outside.nonzero()[0].tolist()
        name = names[feature]
        raise UserError(
            f"feature {name!r}: inverse_indices say that row {row} has bag {int(bags[feature, row])}, but there are "
            f"{num_bags[name]} bags; they lie between 0 and {num_bags[name] - 1}."
        )


def _require_shapes(features: KeyedJaggedTensor) -> None:
    keys, values, weights = features.keys(), features.values(), features.weights_or_none()
    if len(set(keys)) < len(keys):
        name, count = Counter(keys).most_common(1)[0]
        raise UserError(
            f"The batch has the feature {name!r} {count} times ({enumerate_names(keys)}); keys must be unique. Put all "
            "ids of a feature under one key."
        )
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    if lengths is None and offsets is None:
        raise UserError("The batch has neither lengths nor offsets, so that no id has a bag; give lengths.")
    if values.dim() != 1:
        raise UserError(
            f"The ids of the batch have the shape {tuple(values.shape)}; give one dimension, bag after bag, and the "
            "number of ids of each bag as lengths."
        )
    if weights is not None and torch.compiler.is_compiling():
        torch._check(weights.dim() == 1 and weights.shape[0] == values.shape[0], lambda: _OTHER_WEIGHTS)
    elif weights is not None and weights.shape != values.shape:
        raise UserError(
            f"The batch has {values.numel()} ids, and weights of the shape {tuple(weights.shape)}; give one weight an "
            "id."
        )
    num_bags = sum(features.stride_per_key())
    for name, tensor, expected in (("lengths", lengths, num_bags), ("offsets", offsets, num_bags + 1)):
        if tensor is not None and tensor.shape != (expected,):
            is_variable = features.variable_stride_per_key()
            counts = enumerate_names(list(map(str, features.stride_per_key()))) if is_variable else features.stride()
            raise UserError(
                f"The batch has {name} of the shape {tuple(tensor.shape)}, but {len(keys)} features "
                f"({enumerate_names(keys)}) of {counts} {'bags' if is_variable else 'rows'} have {num_bags} bags; give "
                f"{expected} numbers."
            )


def _require_bags(features: KeyedJaggedTensor) -> None:
    """Raises, on the CPU, unless lengths are not negative and agree with offsets and ``length_per_key``."""
    batch_offsets = features.offsets_or_none()
    offsets = None if batch_offsets is None else batch_offsets.numpy()
    if offsets is not None and offsets[0] != 0:
        raise UserError(
            f"The offsets of the batch begin with {offsets[0]}, so that the first ids lie in no bag; they begin with 0."
        )
    lengths, ends = features.lengths().numpy(), np.cumsum(features.stride_per_key())
    if lengths.size and lengths.min() < 0:
        bag = int(lengths.argmin())
        raise UserError(
            f"{_place_of_bag(features, bag)} has {lengths[bag]} ids; lengths are 0 or more, and offsets never fall."
        )
    if offsets is None:
        counts = [feature_lengths.sum() for feature_lengths in np.split(lengths, ends[:-1])]
    else:
        differ = offsets[1:] - offsets[:-1] != lengths
        if differ.any():
            bag = int(differ.argmax())
            raise UserError(
                f"{_place_of_bag(features, bag)} has {lengths[bag]} ids by lengths, but lies between the offsets "
                f"{offsets[bag]} and {offsets[bag + 1]}; give lengths alone, or the offsets that belong to them."
            )
        counts = np.diff(offsets[[0, *ends]]).tolist()
    if lengths.size and counts != features.length_per_key():
        raise UserError(_other_number_of_ids(features))


def _place_of_bag(features: KeyedJaggedTensor, bag: int) -> str:
    """Returns the feature and the row of a bag, for an error."""
    ends = np.cumsum(features.stride_per_key())
    feature = int(np.searchsorted(ends, bag, side="right"))
    row = bag - (ends[feature - 1] if feature else 0)
    return f"feature {features.keys()[feature]!r}: the bag of row {row}"


def _by_feature(features: KeyedJaggedTensor, counts: Sequence[int]) -> str:
    """Returns ``a 3, b 5``: each feature with its number, for an error."""
    return enumerate_names([f"{key} {count}" for key, count in zip(features.keys(), counts, strict=True)])


def _other_number_of_ids(features: KeyedJaggedTensor) -> str:
    """Returns the text of the error for lengths that do not add up to the number of ids."""
    sums = [int(feature_lengths_.sum()) for feature_lengths_ in lengths_by_feature(features)]
    text = f"The batch has {features.values().numel()} ids, but its lengths add up to {sum(sums)} "
    text += f"({_by_feature(features, sums)})"
    if sums != features.length_per_key():
        text += f", and its length_per_key is {features.length_per_key()}"
    return text + "; give one length for each bag, and as many ids as these say together."


def lengths_by_feature(features: KeyedJaggedTensor) -> Sequence[Int[Tensor, " bags"]]:
    """Returns the lengths of each feature's bags, in the order of the keys."""
    if features.variable_stride_per_key():
        return features.lengths().split(features.stride_per_key())
    # not KeyedJaggedTensor.to_dict: it fails on a batch of no rows
    return features.lengths().view(len(features.keys()), features.stride()).unbind()


def with_ids(
    features: KeyedJaggedTensor, ids: Int[Tensor, " ids"], weights: Float[Tensor, " ids"] | None
) -> KeyedJaggedTensor:
    """Returns a batch with the bags and inverse indices of ``features``, and new ids and weights of equal length."""
    is_variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(),
        ids,
        weights=weights,
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=None if is_variable else features.stride(),
        # the tensor, for which the method gives lists: torch.compile takes no lists here
        stride_per_key_per_rank=features._stride_per_key_per_rank if is_variable else None,
        length_per_key=features.length_per_key(),
        offset_per_key=features.offset_per_key_or_none(),
        inverse_indices=features.inverse_indices_or_none(),
    )


def without_gaps(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns a batch of contiguous tensors, as collectives and FBGEMM read them; the batch itself if it is one."""
    tensors = (
        features.values(),
        features.weights_or_none(),
        # lengths and offsets as they were given: computing one from the other fails for batches that are not whole
        features.lengths_or_none(),
        features.offsets_or_none(),
    )
    if all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return features
    values, weights, lengths, offsets = (None if tensor is None else tensor.contiguous() for tensor in tensors)
    is_variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(),
        values,
        weights=weights,
        lengths=lengths,
        offsets=offsets,
        stride=None if is_variable else features.stride(),
        stride_per_key_per_rank=features._stride_per_key_per_rank if is_variable else None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def with_equal_numbers_of_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Returns a batch whose features all have the largest number of bags, by appended empty bags.

    TorchRec's dists need equal numbers. Inverse indices are dropped: they apply after the lookup.
    """
    if not features.variable_stride_per_key():
        return features
    bags = lengths_by_feature(features)
    padded = features.lengths().new_zeros(len(bags), max(map(len, bags), default=0))
    for row, feature_bags in zip(padded, bags, strict=True):
        row[: len(feature_bags)] = feature_bags
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        weights=features.weights_or_none(),
        lengths=padded.flatten(),
        stride=padded.shape[1],
        length_per_key=features.length_per_key(),
    )


def bags_of_rows(
    inverse_indices: tuple[list[str], Int[Tensor, "features rows"]] | None,
) -> Mapping[str, Int64[Tensor, " rows"]] | None:
    """Returns the bag of each row, by feature; None without inverse indices, where row i has bag i."""
    return None if inverse_indices is None else dict(zip(inverse_indices[0], inverse_indices[1].long(), strict=True))


def jagged_vectors(
    keys: Sequence[str],
    dim: int,
    vectors: Float[Tensor, "ids width"],
    lengths: Int[Tensor, " bags"],
    ids: Int[Tensor, " ids"] | None,
    bags: Int64[Tensor, " rows"] | None,
) -> dict[str, JaggedTensor]:
    """Returns a sequence feature's output: ``keys[i]`` has columns ``[i * dim, (i + 1) * dim)`` of each row's vectors.

    Row i has the vectors of bag ``bags[i]``, or of bag i without ``bags``. ``ids``, if given, become the weights.
    """
    if bags is not None:
        lengths, positions = _places_for_rows(lengths, bags)
        vectors, ids = vectors.index_select(0, positions), None if ids is None else ids.index_select(0, positions)
    # narrow: torch.fx does not know the number of parts of a split
    ranges = [vectors.narrow(1, i * dim, dim) for i in range(len(keys))]
    return {key: JaggedTensor(part, lengths=lengths, weights=ids) for key, part in zip(keys, ranges, strict=True)}


def _places_for_rows(
    lengths: Int[Tensor, " bags"], bags: Int64[Tensor, " rows"]
) -> tuple[Int[Tensor, " rows"], Int64[Tensor, " repeated"]]:
    """Returns the length of each row's bag, and for each id of the rows its index among the ids of the bags."""
    # lengths [2, 1], bags [0, 0, 1]  ->  repeated [2, 2, 1], places [0, 1, 0, 1, 2]
    repeated = lengths[bags]
    starts = lengths.cumsum(0) - lengths
    # for each id of the rows: start of its bag among the bags' ids - start of its row among the rows' ids
    shifts = (starts[bags] - (repeated.cumsum(0) - repeated)).repeat_interleave(repeated)
    return repeated, torch.arange(len(shifts), device=shifts.device) + shifts
