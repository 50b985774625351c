"""Stochastic shared embeddings: ids replaced in training, at random or along a knowledge graph.

Follows Wu, Li, Hsieh, Sharpnack, "Stochastic Shared Embeddings: Data-driven Regularization of Embedding Layers"
(NeurIPS 2019). Each id j of a batch becomes another id k with probability p(j, k), anew at every step:

========== =========================================================================== ==========================
SSE-SE     ``p(j, k) = p0 / (N - 1)`` for every ``k != j``                              ``SSE(p0)``
SSE-Graph  ``p(j, k) = rho p(j, l)`` for neighbours k and non-neighbours l of j         ``SSE(p0, rho, graph)``
both       ``p(j, j) = 1 - p0``
========== =========================================================================== ==========================

Ids are replaced before partitions map them to rows, and before the all-to-all sends them to their tables' ranks. So all
partitions, and all column slices of a table, see the same id.

The collections of :mod:`distembed.embedding` do it for tables with ``sse=``; any other model by :func:`perturb_inputs`
(for torch's embeddings) and :class:`IdPerturbation` (for labels).

``rule.py`` states the rule of a table; ``perturbation.py`` holds the modules, which replace the ids of a batch
(``replacement.py``) by random numbers (``draws.py``, ``random_words.py``) that depend on step and rank alone.
"""

from typing import TYPE_CHECKING

from distembed.base.lazy import imports_on_demand

if TYPE_CHECKING:
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
    from distembed.sse.rule import SSE, IdStream, Walk

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
__getattr__ = imports_on_demand(__name__)
