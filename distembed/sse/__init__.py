"""Stochastic shared embeddings: ids replaced in training, at random or along a knowledge graph.

Follows Wu, Li, Hsieh, Sharpnack, "Stochastic Shared Embeddings: Data-driven Regularization of Embedding Layers"
(NeurIPS 2019). Each id j of a batch becomes another id k with probability p(j, k), anew at every step:

========== =========================================================================== ==========================
SSE-SE     ``p(j, k) = p0 / (N - 1)`` for every ``k != j``                              ``SSE(p0)``
SSE-Graph  ``p(j, k) = rho p(j, l)`` for neighbours k and non-neighbours l of j         ``SSE(p0, rho, graph)``
both       ``p(j, j) = 1 - p0``
========== =========================================================================== ==========================

Ids are replaced before anything is made of them: before partitions map them to rows, and before the all-to-all sends
them to their tables' ranks. So all partitions, and all column slices of a table, see the same id.

Two users: the collections of :mod:`distembed.embedding`, whose tables take ``sse=``, and any model by
:func:`perturb_inputs` (embeddings of torch) and :class:`IdPerturbation` (labels).
"""

from distembed.graph import Graph
from distembed.sse.perturbation import (
    FeaturePerturbation,
    IdPerturbation,
    perturb_inputs,
    require_forward_pass,
    set_step,
    take_counts,
)
from distembed.sse.replacement import graph_bytes
from distembed.sse.rule import SSE, Walk
from distembed.sse.stream import IdStream

__all__ = [
    "SSE",
    "FeaturePerturbation",
    "Graph",
    "IdPerturbation",
    "IdStream",
    "Walk",
    "graph_bytes",
    "perturb_inputs",
    "require_forward_pass",
    "set_step",
    "take_counts",
]
