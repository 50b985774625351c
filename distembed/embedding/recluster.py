"""Re-clusters a table of the partition ``clustered``: similar ids get a common row (CCE).

Source: Tsang and Ahle, "Clustering the Sketch: Dynamic Compression for Embedding Tables", NeurIPS 2023. For each block
i of columns, over all ids x with weights w_x, their occurrences in training::

    v_x = T_i[a_i[x]] + T'_i[h_i(x)]          the vectors until now
    centroids, codes = k-means of v by w      as many centroids as T_i has rows
    a_i := codes,  T_i := centroids,  T'_i := 0,  h_i := a new hash

So the vector of each id becomes its centroid, and training separates the ids of a cluster again where the loss asks for
it. A row of T_i starts with the weighted mean of its ids' optimizer states, a row of T'_i with states of 0.

Memory holds a block of all full vectors, 8 bytes for each id and partition, and about 60 more for each id.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from distembed.base.errors import UserError
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.partitions import Clustered
from distembed.partitions.kmeans import k_means

_IDS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Reclustered:
    """New numbers of a table.

    Attributes:
        rows: The row of each id in each stored partition.
        values: The weight and the optimizer states of each partition, by the names that they were given under.
    """

    rows: Int32[Tensor, "stored ids"]
    values: Sequence[Mapping[str, Tensor]]


def require_clustered(table: CompositionalEmbeddingConfig) -> None:
    """Raises a :class:`UserError` unless a table has the composition whose parts are sums of stored and hashed rows."""
    num_partitions, name = len(table.scheme.num_rows), table.combine.name
    if name != "concat_sum" and (name, num_partitions) != ("sum", 2):
        raise UserError(
            f"table {table.name!r} has partition clustered and composition {name!r}, which cannot be clustered part by "
            "part; use composition concat_sum."
        )


@torch.no_grad()
def recluster(
    table: CompositionalEmbeddingConfig,
    weights: Sequence[Float[Tensor, "rows_j dim_j"]],
    states: Sequence[Mapping[str, Tensor]],
    id_weights: Float[Tensor, " ids"],
    seed: int,
    device: torch.device | None = None,
) -> Reclustered:
    """Returns the clusters of a table's vectors; equal arguments give equal clusters. The table stays as it is.

    Args:
        table: A table of the partition ``clustered``; see :func:`require_clustered`.
        weights: The weights of its partitions, on the CPU.
        states: The optimizer states of each partition that have a number for each weight or for each row.
        id_weights: A positive weight of each id.
        seed: The seed of k-means.
        device: The device of k-means; the CPU unless given.
    """
    scheme = table.scheme
    assert isinstance(scheme, Clustered)
    num_ids = table.num_embeddings
    chunks = [slice(start, min(start + _IDS_AT_ONCE, num_ids)) for start in range(0, num_ids, _IDS_AT_ONCE)]
    rows = torch.cat([scheme.rows(torch.arange(some.start, some.stop)).int() for some in chunks], dim=1)
    num_stored = scheme.num_stored
    codes: list[Tensor] = []
    values: list[dict[str, Tensor]] = []
    for part, own in enumerate(rows[:num_stored]):
        vectors = torch.empty(num_ids, weights[part].shape[1])
        for some in chunks:
            vectors[some] = weights[part][own[some]]
            if num_stored + part < len(rows):
                vectors[some] += weights[num_stored + part][rows[num_stored + part][some]]
        on_device = (vectors.to(device), id_weights.to(device))
        clusters = k_means(*on_device, scheme.num_rows[part], seed + part)
        codes.append(clusters.codes.int().cpu())
        centroids = torch.zeros_like(weights[part])
        centroids[: len(clusters.centroids)] = clusters.centroids.cpu()
        means = {name: _means(state, own, codes[part], id_weights) for name, state in states[part].items()}
        values.append({"weight": centroids, **means})
    for part in range(num_stored, len(rows)):
        cleared = {"weight": weights[part], **states[part]}
        values.append({name: torch.zeros_like(value) for name, value in cleared.items()})
    return Reclustered(torch.stack(codes), values)


def _means(
    values: Float[Tensor, "rows *dim"], rows: Int32[Tensor, " ids"], codes: Int32[Tensor, " ids"], weights: Tensor
) -> Float[Tensor, "rows *dim"]:
    """Returns the weighted mean of the values of each code's ids, read from their rows; 0 for a code without ids."""
    totals, sums = torch.zeros(len(values), dtype=torch.float64), torch.zeros_like(values, dtype=torch.float64)
    column = (-1, *[1] * (values.dim() - 1))
    for of_rows, own, scale in zip(*(each.split(_IDS_AT_ONCE) for each in (rows, codes, weights)), strict=True):
        totals.index_add_(0, own, scale.double())
        sums.index_add_(0, own, scale.double().view(column) * values[of_rows].double())
    return torch.where(totals.view(column) > 0, sums / totals.view(column), 0.0).to(values.dtype)
