"""From a KeyedTensor to one tensor in the model's feature order."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor


def stack_features(
    embedded: KeyedTensor, feature_names: Sequence[str], embedding_dim: int
) -> Float[Tensor, "batch features dim"]:
    """Features in the given order, whatever the order of keys, which follows the sharding plan."""
    if embedded.keys() == list(feature_names):
        values = embedded.values()
    else:
        by_name = embedded.to_dict()
        values = torch.cat([by_name[name] for name in feature_names], dim=1)
    return values.view(values.shape[0], len(feature_names), embedding_dim)
