r"""The weight of an id's vector in the distortion of codes: how much an error in it costs the model.

Adagrad divides the gradient of a number by the root of its sum of squared gradients, which so stands for the curvature
of the loss (Duchi, Hazan and Singer, JMLR 2011, section 1.1)::

    vector = start - lr * sum of g / root(sum of g^2)

    loss of an error e in an id's vector  ~  |e|^2 root(sum of g^2) / lr

For an id that was seen n times, the sum is near ``n s``, with the mean square s of a gradient; sums of single ids are
noisy, so s is the mean of a table. Hence the weight::

    w_x = root(count_x * sum of squared gradients of the table / sum of counts of the table)

Tables to which the model is more sensitive get more bytes of a common budget. Rare ids weigh more than by their counts:
their few steps have not reached a minimum, so that an error costs loss in the first order. A run without these sums, of
another optimizer or of ids that share rows, has ``w_x = root(count_x)``. Where ids have no counts, each has the mean
count of a lookup in each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from distembed.checkpoints.optimizer_state import name_with_columns
from distembed.data.dataset.manifest import Manifest
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.occurrences import id_weights
from distembed.serving.convert.run_source import RunAsStock


class IdWeights:
    """The weights of the ids of several groups of tables; the tables of a group have common codes.

    Args:
        source: The run.
        groups: The tables of each group, by the names of their full weights.
        counts: How often each id occurs in training, by the name of the table; tables may lack it.
        manifest: The dataset's, for the number of training rows: the lookups of a table without counts.
    """

    def __init__(
        self,
        source: RunAsStock,
        groups: Sequence[Mapping[str, CompositionalEmbeddingConfig]],
        counts: Mapping[str, Tensor],
        manifest: Manifest,
    ) -> None:
        train = manifest.splits.get("train")
        self._counts, self._num_rows = counts, 1 if train is None else max(1, train.num_rows)
        totals = {next(iter(group)): [_total(source, *own) for own in group.items()] for group in groups}
        found = {name: sum(own for own in values if own is not None) for name, values in totals.items()}
        self._totals = found if all(own for values in totals.values() for own in values) else {}

    @property
    def by_gradient(self) -> bool:
        """Whether weights are scaled by squared gradients: the run keeps them for all tables."""
        return bool(self._totals)

    def of(self, group: Mapping[str, CompositionalEmbeddingConfig]) -> Float[Tensor, " ids"]:
        """Returns the weight of each id of a group, positive, in float64."""
        name, table = next(iter(group.items()))
        counts = self._counts.get(table.name)
        weights = id_weights(table, counts).double().expand(table.num_embeddings)
        total = float(weights.sum()) if counts is not None else float(self._num_rows)
        return (weights * (self._totals.get(name, total) / float(weights.sum()))).sqrt()


def squared_gradients(
    source: RunAsStock, name: str, table: CompositionalEmbeddingConfig
) -> Float[Tensor, "ids columns"] | None:
    """Returns Adagrad's sums of a full weight; None where the run keeps none.

    There is a column for each number, or one for all: row-wise Adagrad sums the mean square of a row's gradient.
    """
    sums = source.optimizer_state(name, "sum")
    if sums is not None:
        return sums
    by_row = source.optimizer_state(name, name_with_columns("sum", 0, table.embedding_dim))
    return None if by_row is None else by_row.unsqueeze(1)


def _total(source: RunAsStock, name: str, table: CompositionalEmbeddingConfig) -> float | None:
    """Returns Adagrad's sum over all numbers of a full weight; None where the run keeps none."""
    sums = squared_gradients(source, name, table)
    return None if sums is None else float(sums.sum(dtype=torch.float64)) * table.embedding_dim / sums.shape[1]
