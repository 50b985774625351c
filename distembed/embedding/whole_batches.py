"""Refuses batches that are not whole, before anything of them is looked up or sent.

TorchRec checks the first batch of a sharded collection of bags and no other one; of what it lets pass, some makes
FBGEMM's kernels read and write beyond their memory (lengths below 0), and some is looked up in silence as what it is
not (a feature that stands in a batch twice). Here every batch is checked, at the cost of two passes over its lengths.
"""

from collections import Counter

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.errors import UserError
from distembed.units import enumerate_names

_REFUSED_ON_DEVICE = "lengths and offsets do not divide the ids into bags; run the batch on the CPU to see why"


def require_whole(features: KeyedJaggedTensor) -> None:
    """Raises unless every feature stands in a batch once, all have the same bags, and these hold all ids.

    On a GPU, lengths and offsets themselves are checked asynchronously, so as not to stop the stream, and fail as a
    device-side assertion.

    Raises:
        UserError: The batch has a size of its own for each feature, a feature twice, more or fewer ids than its lengths
            say, a length below 0, offsets that do not belong to the lengths, or more or fewer weights than ids.
    """
    _require_one_size(features)
    _require_shapes(features)
    lengths, offsets, num_ids = features.lengths(), features.offsets_or_none(), features.values().numel()
    if lengths.is_meta:
        return
    if lengths.device.type == "cpu":
        _require_bags(features)
    else:
        whole = (lengths >= 0).all() & (lengths.sum() == num_ids)
        if offsets is not None:
            whole = whole & (offsets.narrow(0, 0, 1) == 0).all() & (offsets.diff() == lengths).all()
        torch._assert_async(whole, _REFUSED_ON_DEVICE)
    if sum(features.length_per_key()) != num_ids:
        raise UserError(_other_number_of_ids(features))


def _require_one_size(features: KeyedJaggedTensor) -> None:
    """Raises where features have bags of their own number, which TorchRec calls a variable batch per feature."""
    field = None
    if features.variable_stride_per_key():
        field = "stride_per_key_per_rank"
    elif features.inverse_indices_or_none() is not None:
        field = "inverse_indices"
    if field is not None:
        raise UserError(
            f"The batch has a number of rows of its own for each feature ({field} is set), which compositional tables "
            "do not support: give every feature one bag for each row, and leave stride_per_key_per_rank and "
            "inverse_indices out of the KeyedJaggedTensor."
        )


def _require_shapes(features: KeyedJaggedTensor) -> None:
    """Raises for what the shapes alone show."""
    keys, values, weights = features.keys(), features.values(), features.weights_or_none()
    if len(set(keys)) < len(keys):
        name, count = Counter(keys).most_common(1)[0]
        raise UserError(
            f"The batch has the feature {name!r} {count} times ({enumerate_names(keys)}); keys of a KeyedJaggedTensor "
            "are unique. Put all ids of a feature under one key."
        )
    lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    if lengths is None and offsets is None:
        raise UserError("The batch has neither lengths nor offsets, so that no id has a bag; give lengths.")
    if values.dim() != 1:
        raise UserError(
            f"The ids of the batch have the shape {tuple(values.shape)}; give one dimension, bag after bag, and the "
            "number of ids of each bag as lengths."
        )
    if weights is not None and weights.shape != values.shape:
        raise UserError(
            f"The batch has {values.numel()} ids, and weights of the shape {tuple(weights.shape)}; give one weight an "
            "id."
        )
    num_bags = len(keys) * features.stride()
    for name, tensor, expected in (("lengths", lengths, num_bags), ("offsets", offsets, num_bags + 1)):
        if tensor is not None and tensor.shape != (expected,):
            raise UserError(
                f"The batch has {name} of the shape {tuple(tensor.shape)}, but {len(keys)} features "
                f"({enumerate_names(keys)}) of {features.stride()} rows have {num_bags} bags; give {expected} numbers."
            )


def _require_bags(features: KeyedJaggedTensor) -> None:
    """Raises, on the CPU, unless lengths and offsets divide all ids into bags."""
    given = features.offsets_or_none()
    offsets = None if given is None else given.numpy()
    if offsets is not None and offsets[0] != 0:
        raise UserError(
            f"The offsets of the batch begin with {offsets[0]}, so that the first ids lie in no bag; they begin with 0."
        )
    keys, stride, lengths = features.keys(), features.stride(), features.lengths().numpy()
    by_feature = lengths.reshape(len(keys), stride)
    if lengths.size and lengths.min() < 0:
        feature, row = np.argwhere(by_feature < 0)[0]
        raise UserError(
            f"feature {keys[feature]!r}: the bag of row {row} has {by_feature[feature, row]} ids; lengths are 0 or "
            "more, and offsets never fall."
        )
    if offsets is None:
        counts = by_feature.sum(axis=1)
    else:
        differ = offsets[1:] - offsets[:-1] != lengths
        if differ.any():
            bag = int(differ.argmax())
            raise UserError(
                f"feature {keys[bag // stride]!r}: the bag of row {bag % stride} has {lengths[bag]} ids by lengths, "
                f"but lies between the offsets {offsets[bag]} and {offsets[bag + 1]}; give lengths alone, or the "
                "offsets that belong to them."
            )
        counts = np.diff(offsets[:: stride or 1])
    if stride and counts.tolist() != features.length_per_key():
        raise UserError(_other_number_of_ids(features))


def _other_number_of_ids(features: KeyedJaggedTensor) -> str:
    """Returns the text of the error for lengths that do not add up to the number of ids."""
    sums = features.lengths().view(len(features.keys()), features.stride()).sum(dim=1).tolist()
    by_feature = enumerate_names([f"{key} {count}" for key, count in zip(features.keys(), sums, strict=True)])
    text = f"The batch has {features.values().numel()} ids, but its lengths add up to {sum(sums)} ({by_feature})"
    if sums != features.length_per_key():
        text += f", and its length_per_key is {features.length_per_key()}"
    return text + "; give one length for each bag, and as many ids as these say together."
