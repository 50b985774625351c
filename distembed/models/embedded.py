"""Stacks the vectors of a KeyedTensor into one tensor, in the order of the model's features."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor


class StackFeatures(nn.Module):
    """Stacks the vectors of features in a given order; the order of a KeyedTensor's keys follows the sharding plan.

    It is a module, not a function, since TorchRec's pipeline traces down to modules, and keys are known only at run
    time.

    Args:
        vector_names: The keys in the order to stack them.
        embedding_dim: Dimension of every vector.
    """

    def __init__(self, vector_names: Sequence[str], embedding_dim: int) -> None:
        super().__init__()
        self.vector_names = list(vector_names)
        self.embedding_dim = embedding_dim

    def forward(self, embedded: KeyedTensor) -> Float[Tensor, "batch features dim"]:
        """Returns the vectors of every key."""
        if embedded.keys() == self.vector_names:
            values = embedded.values()
        else:
            by_name = embedded.to_dict()
            values = torch.cat([by_name[name] for name in self.vector_names], dim=1)
        return values.view(-1, len(self.vector_names), self.embedding_dim)
