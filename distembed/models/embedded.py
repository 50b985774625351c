"""From a KeyedTensor to one tensor in the model's feature order."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedTensor


class StackFeatures(nn.Module):
    """Features in the given order, whatever the order of keys, which follows the sharding plan.

    A module, not a function: TorchRec's pipeline traces down to modules, and keys are known only as it runs.
    """

    def __init__(self, vector_names: Sequence[str], embedding_dim: int) -> None:
        super().__init__()
        self.vector_names = list(vector_names)
        self.embedding_dim = embedding_dim

    def forward(self, embedded: KeyedTensor) -> Float[Tensor, "batch features dim"]:
        """Stacks every feature's vector."""
        if embedded.keys() == self.vector_names:
            values = embedded.values()
        else:
            by_name = embedded.to_dict()
            values = torch.cat([by_name[name] for name in self.vector_names], dim=1)
        return values.view(-1, len(self.vector_names), self.embedding_dim)
