"""Batches in which a feature has bags of its own number, which TorchRec calls a variable batch per feature (VBE).

Where many rows share a bag of a feature, as the candidates that are shown to one user do, the batch holds that bag
once, and *inverse indices* say which of a feature's bags each row has::

    rows of the batch       0   1   2   3
    user's bags    u v      0   0   0   1     three rows have bag u, and one has bag v
    item's bags  a b c d    0   1   2   3     each row has a bag of its own

Bags are looked up, composed and pooled once, and the result is repeated for each row.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.units import enumerate_names


def lengths_by_feature(features: KeyedJaggedTensor) -> Sequence[Int[Tensor, " bags"]]:
    """Returns the lengths of each feature's bags, in the order of the keys."""
    if features.variable_stride_per_key():
        return features.lengths().split(features.stride_per_key())
    # not KeyedJaggedTensor.to_dict: it fails on a batch of no rows
    return features.lengths().view(len(features.keys()), features.stride()).unbind()


def with_ids(
    features: KeyedJaggedTensor, ids: Int[Tensor, " ids"], weights: Float[Tensor, " ids"] | None
) -> KeyedJaggedTensor:
    """Returns a batch with other ids and weights in the same bags."""
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
    """Returns a batch whose elements lie side by side, as collectives and operators read them; a copy where not."""
    given = (
        features.values(),
        features.weights_or_none(),
        # lengths and offsets as they were given: computing one from the other fails for batches that are not whole
        features.lengths_or_none(),
        features.offsets_or_none(),
    )
    if all(own is None or own.is_contiguous() for own in given):
        return features
    values, weights, lengths, offsets = (None if own is None else own.contiguous() for own in given)
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
    """Returns a batch in which features with fewer bags than others have empty ones behind these.

    Which rows have which bags it no longer says.
    """
    if not features.variable_stride_per_key():
        return features
    bags = lengths_by_feature(features)
    padded = features.lengths().new_zeros(len(bags), max(map(len, bags), default=0))
    for row, own in zip(padded, bags, strict=True):
        row[: len(own)] = own
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
    """Returns which of a feature's bags each row has, by feature; None where bag i is that of row i."""
    return None if inverse_indices is None else dict(zip(inverse_indices[0], inverse_indices[1].long(), strict=True))


def require_bags_for_rows(features: KeyedJaggedTensor) -> None:
    """Raises a :class:`UserError` where features have unequal numbers of bags and nothing says which row has which."""
    if not features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        return
    if len(set(counts := features.stride_per_key())) > 1:
        by_feature = enumerate_names([f"{key} {count}" for key, count in zip(features.keys(), counts, strict=True)])
        raise UserError(
            f"The features of the batch have unequal numbers of bags ({by_feature}) by stride_per_key_per_rank, and "
            "their pooled vectors stand side by side in rows; give inverse_indices, which say which of its bags each "
            "feature has in each row."
        )


def jagged_vectors(
    keys: Sequence[str],
    dim: int,
    vectors: Float[Tensor, "ids width"],
    lengths: Int[Tensor, " bags"],
    ids: Int[Tensor, " ids"] | None,
    bags: Int64[Tensor, " rows"] | None,
) -> dict[str, JaggedTensor]:
    """Returns the output of a feature of sequences: each row's vectors, under a key for each ``dim`` columns.

    Args:
        keys: Keys of the output.
        dim: Number of columns of each.
        vectors: Vector of each id, bag after bag.
        lengths: Number of ids of each bag.
        ids: The ids, which the output is to carry as weights, or None.
        bags: Which bag each row has; bag i is that of row i unless given.
    """
    if bags is not None:
        lengths, places = _places_for_rows(lengths, bags)
        vectors, ids = vectors.index_select(0, places), None if ids is None else ids.index_select(0, places)
    # torch.fx traces it, for which a split has no known number of parts
    parts = [vectors.narrow(1, i * dim, dim) for i in range(len(keys))]
    return {key: JaggedTensor(own, lengths=lengths, weights=ids) for key, own in zip(keys, parts, strict=True)}


def _places_for_rows(
    lengths: Int[Tensor, " bags"], bags: Int64[Tensor, " rows"]
) -> tuple[Int[Tensor, " rows"], Int64[Tensor, " repeated"]]:
    """Returns the length of each row's bag, and the places of all rows' ids among those of the bags."""
    repeated = lengths[bags]
    starts = lengths.cumsum(0) - lengths
    # from a place among the rows' ids to that among the bags'
    shifts = (starts[bags] - (repeated.cumsum(0) - repeated)).repeat_interleave(repeated)
    return repeated, torch.arange(len(shifts), device=shifts.device) + shifts
