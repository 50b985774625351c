"""What a batch has of each feature for the lookups of quantised tables."""

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.embedding.ids import IdMapper
from distembed.embedding.traced_features import FeatureIds


def read_features(features: KeyedJaggedTensor, map_ids: IdMapper, is_weighted: bool) -> dict[str, FeatureIds]:
    """Returns what a batch has of each of its features, by name.

    Args:
        features: The batch.
        map_ids: Maps its ids into their tables.
        is_weighted: Whether weights are asked for.

    Raises:
        UserError: An id lies outside of its table, features have batch sizes of their own, or the batch has no weights
            where they are asked for.
    """
    if features.variable_stride_per_key():
        raise UserError(
            "the batch has a size for each feature, which TorchRec's quantised lookups do not take; give every feature "
            "a bag for each row."
        )
    if is_weighted and features.weights_or_none() is None:
        raise UserError(
            "The collection has is_weighted=True, but the KeyedJaggedTensor has no weights; make it with weights=, or "
            "the collection without is_weighted."
        )
    counts = features.length_per_key()
    ids, mapped = features.values().split(counts), map_ids(features).values().long().split(counts)
    lengths = features.lengths().view(len(counts), features.stride()).unbind()
    weights = features.weights().split(counts) if is_weighted else [None] * len(counts)
    found = zip(ids, mapped, lengths, weights, strict=True)
    return {name: FeatureIds(*own) for name, own in zip(features.keys(), found, strict=True)}


@torch.fx.wrap
def as_batch(keys: list[str], rows: list[Tensor], lengths: list[Tensor]) -> KeyedJaggedTensor:
    """Returns rows and lengths of several keys as a batch."""
    return KeyedJaggedTensor(keys, torch.cat(rows), lengths=torch.cat(lengths))
