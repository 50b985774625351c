"""What a batch has of each feature, as steps that torch.fx traces and TorchScript compiles.

Where a model is traced, there is no batch yet: its ids, lengths and weights are taken by the functions that are
*wrapped* here, which a trace holds as calls of one step each. Their annotations are plain ones for TorchScript.

Trade-off: a trace checks ids feature by feature and names the table in its error, and not the place of the id; it takes
a batch's lengths as they come, as TorchRec's own collections do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Int64
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.embedding.config import CompositionalEmbeddingConfig


@dataclass(frozen=True, eq=False)
class FeatureIds:
    """What a batch has of one feature.

    Attributes:
        ids: The raw ids, bag after bag.
        mapped: The ids that these have in the feature's table.
        lengths: The number of ids of each bag.
        weights: The weight of each id, or None where none were asked for.
    """

    ids: Int[Tensor, " ids"]
    mapped: Int64[Tensor, " ids"]
    lengths: Int[Tensor, " batch"]
    weights: Float[Tensor, " ids"] | None


def trace_features(
    features: KeyedJaggedTensor, tables: Sequence[CompositionalEmbeddingConfig], is_weighted: bool
) -> dict[str, FeatureIds]:
    """Returns the same for the features of tables, of a batch that torch.fx traces.

    Args:
        features: The batch, a :class:`torch.fx.Proxy`.
        tables: The tables that read it.
        is_weighted: Whether weights are asked for.
    """
    found = {}
    for table in tables:
        for name in table.feature_names:
            ids = feature_ids(features, name)
            weights = feature_weights(features, name) if is_weighted else None
            found[name] = FeatureIds(ids, _trace_map(table, name, ids), feature_lengths(features, name), weights)
    return found


def _trace_map(
    table: CompositionalEmbeddingConfig, feature_name: str, ids: Int[Tensor, " ids"]
) -> Int64[Tensor, " ids"]:
    """Returns the ids that raw ids have in a table, as :func:`distembed.embedding.ids.map_ids` does."""
    where = f"table {table.name!r}, feature {feature_name!r}"
    ids = whole_ids(ids, f"{where}: the ids are no integers")
    if table.pre_hash is not None:
        return table.pre_hash.ids_of_int64(ids, table.num_embeddings)
    if table.id_policy == "modulo":
        return ids % table.num_embeddings
    if table.id_policy == "clip_to_oov":
        assert table.oov_id is not None
        return ids.masked_fill(ids.clamp(0, table.num_embeddings - 1).ne(ids), table.oov_id)
    return ids_inside(ids, table.num_embeddings, f"{where}: ids lie between 0 and {table.num_embeddings - 1}")


@torch.fx.wrap
def feature_ids(features: KeyedJaggedTensor, name: str) -> Tensor:
    """Returns the raw ids of a feature."""
    return features[name].values()


@torch.fx.wrap
def feature_lengths(features: KeyedJaggedTensor, name: str) -> Tensor:
    """Returns the number of ids of each of a feature's bags."""
    return features[name].lengths()


@torch.fx.wrap
def feature_weights(features: KeyedJaggedTensor, name: str) -> Tensor:
    """Returns the weight of each id of a feature; a batch without weights is an error of TorchRec's."""
    return features[name].weights()


@torch.fx.wrap
def whole_ids(ids: Tensor, refusal: str) -> Tensor:
    """Returns ids as int64, or raises an error with this text where they are no integers."""
    if ids.is_floating_point():
        raise ValueError(refusal)
    return ids.long()


@torch.fx.wrap
def ids_inside(ids: Tensor, num_embeddings: int, refusal: str) -> Tensor:
    """Returns the ids, or raises an error with this text where one lies outside of its table.

    On a GPU it fails as a device-side assertion, so as not to stop the stream.
    """
    is_inside = ((ids >= 0) & (ids < num_embeddings)).all()
    if ids.device.type == "cpu":
        if not bool(is_inside):
            raise ValueError(refusal)
    else:
        torch._assert_async(is_inside)
    return ids
