"""TorchRec's own collection and sharder, beside which ours are put."""

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from distembed.sharding.placement import SHARDING_TYPES

DIM = 8
NUM_IDS = {"user": 50, "item": 400, "tags": 70}


class AnyTypeSharder(EmbeddingBagCollectionSharder):
    """TorchRec's, which offers row-wise tables on CUDA only, though gloo has what they need."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(SHARDING_TYPES)


def stock_configs(make: Any, **settings: Any) -> list[Any]:
    return [
        make(name=f"t_{name}", num_embeddings=size, embedding_dim=DIM, feature_names=[name], **settings)
        for name, size in NUM_IDS.items()
    ]


def stock_bags(device: str, weighted: bool = False, **settings: Any) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = stock_configs(EmbeddingBagConfig, **settings)
    return EmbeddingBagCollection(tables, is_weighted=weighted, device=torch.device(device))


def take_weights(sharded: nn.Module, whole: nn.Module) -> None:
    """Gives each rank its part of an unsharded module's weights: TorchRec draws new ones when it shards."""
    weights = whole.state_dict()
    with torch.no_grad():
        for key, held in sharded.state_dict().items():
            if not hasattr(held, "local_shards"):
                held.copy_(weights[key])
                continue
            for local in held.local_shards():
                (row, column), (rows, columns) = local.metadata.shard_offsets, local.metadata.shard_sizes
                local.tensor.copy_(weights[key][row : row + rows, column : column + columns])
