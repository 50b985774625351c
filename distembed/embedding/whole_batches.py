"""Refuses batches that are not whole, before anything of them is looked up or sent.

TorchRec checks the first batch of a sharded collection of bags and no other one; of what it lets pass, some makes
FBGEMM's kernels read and write beyond their memory (lengths below 0), and some is looked up in silence as what it is
not (a feature that stands in a batch twice). Here every batch is checked, at the cost of two passes over its lengths.
"""

from collections import Counter

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.tracing import is_traced, require_in_program
from distembed.base.units import enumerate_names
from distembed.embedding.variable_batches import lengths_by_feature

_LARGEST = torch.iinfo(torch.int64).max
_REFUSED = "lengths, offsets and inverse indices do not divide the ids into bags; "
_REFUSED_ON_DEVICE = _REFUSED + "run the batch on the CPU to see why"
_OTHER_WEIGHTS = "The batch has another number of weights than ids; give one weight an id."
_REFUSED_IN_PROGRAM = _REFUSED + "run the batch uncompiled to see why"


def require_whole(features: KeyedJaggedTensor) -> None:
    """Raises unless every feature stands in a batch once, and its bags hold all its ids.

    On a GPU, lengths and offsets themselves are checked asynchronously, so as not to stop the stream, and fail as a
    device-side assertion.

    Raises:
        UserError: The batch has a feature twice, more or fewer ids than its lengths say, a length below 0, offsets that
            do not belong to the lengths, more or fewer weights than ids, or rows with bags that there are not.
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
        whole = (lengths >= 0).all() & (lengths.sum() == num_ids)
        if offsets is not None:
            whole = whole & (offsets.narrow(0, 0, 1) == 0).all() & (offsets.diff() == lengths).all()
        _require_on_device(whole)
    if not is_traced() and sum(features.length_per_key()) != num_ids:
        raise UserError(_other_number_of_ids(features))


def require_integers(what: str, dtype: torch.dtype) -> None:
    """Raises an error for a dtype that is none of integers, whose values would be truncated.

    Args:
        what: What has the dtype, in the plural.
        dtype: The dtype.

    Raises:
        UserError: The dtype is none of integers.
    """
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise UserError(f"{what} are of {dtype}, but must be integers; give int64 or int32.")


def _require_on_device(condition: Bool[Tensor, ""]) -> None:
    """Makes a program, or a device, fail where a condition is not met."""
    if is_traced():
        require_in_program(condition, _REFUSED_IN_PROGRAM)
    else:
        torch._assert_async(condition, _REFUSED_ON_DEVICE)


def _require_numbers_of_bags(features: KeyedJaggedTensor) -> None:
    """Raises where numbers of bags are given for each feature, but not one for every feature, or one is below 0."""
    if not features.variable_stride_per_key():
        return
    numbers, num_keys = features.stride_per_key_per_rank(), len(features.keys())
    if len(numbers) != num_keys or any(len(own) != 1 or own[0] < 0 for own in numbers):
        raise UserError(
            f"The batch has stride_per_key_per_rank={numbers} for {num_keys} features "
            f"({enumerate_names(features.keys())}); give a list with one number, 0 or more, for each feature: how many "
            "bags it has in this batch."
        )


def _require_rows(features: KeyedJaggedTensor) -> None:
    """Raises unless inverse indices have rows for all their features, and name bags that there are."""
    given = features.inverse_indices_or_none()
    if given is None:
        return
    names, bags = given
    require_integers("inverse_indices of the batch", bags.dtype)
    missing = set(features.keys()) - set(names)
    if missing or bags.dim() != 2 or len(bags) != len(names):
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
    """Raises for what the shapes alone show."""
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
            raise UserError(
                f"The batch has {name} of the shape {tuple(tensor.shape)}, but {len(keys)} features "
                f"({enumerate_names(keys)}) of {_numbers_text(features)} have {num_bags} bags; give {expected} numbers."
            )


def _require_bags(features: KeyedJaggedTensor) -> None:
    """Raises, on the CPU, unless lengths and offsets divide all ids into bags."""
    given = features.offsets_or_none()
    offsets = None if given is None else given.numpy()
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
        counts = [own.sum() for own in np.split(lengths, ends[:-1])]
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
    """Returns which feature and row have a bag, for an error."""
    ends = np.cumsum(features.stride_per_key())
    feature = int(np.searchsorted(ends, bag, side="right"))
    row = bag - (ends[feature - 1] if feature else 0)
    return f"feature {features.keys()[feature]!r}: the bag of row {row}"


def _numbers_text(features: KeyedJaggedTensor) -> str:
    """Returns how many rows a batch has, or how many bags each of its features, for an error."""
    if features.variable_stride_per_key():
        return f"{enumerate_names([str(number) for number in features.stride_per_key()])} bags"
    return f"{features.stride()} rows"


def _other_number_of_ids(features: KeyedJaggedTensor) -> str:
    """Returns the text of the error for lengths that do not add up to the number of ids."""
    sums = [int(own.sum()) for own in lengths_by_feature(features)]
    by_feature = enumerate_names([f"{key} {count}" for key, count in zip(features.keys(), sums, strict=True)])
    text = f"The batch has {features.values().numel()} ids, but its lengths add up to {sum(sums)} ({by_feature})"
    if sums != features.length_per_key():
        text += f", and its length_per_key is {features.length_per_key()}"
    return text + "; give one length for each bag, and as many ids as these say together."
