r"""The loss that a trained model is expected to have where a table is smaller, without evaluating it.

A candidate is fitted to a full table. An error e in a vector's number, whose gradients g in the rows of training are
known, costs the second-order term of the loss, with the squared gradients for the curvature (LeCun, Denker and Solla,
"Optimal Brain Damage", NIPS 1989; the diagonal of the empirical Fisher matrix)::

    cost = 1/2 * sum over numbers of  e^2 * mean over rows of g^2

Adagrad keeps these squares: a step of B rows adds the square of the mean gradient of its rows, which is ``sum of
g^2 / B^2`` where few rows of a step look an id up. So ``mean of g^2 = S B^2 / rows`` for the sum S over the rows read.

Trade-off: no evaluation, and no noise of a validation split. Costs order candidates; their unit is only roughly that of
the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from distembed.base.checksums import KEY
from distembed.base.ranks import Ranks
from distembed.checkpoints.saved import SavedCheckpoint
from distembed.checkpoints.store import read_last_file
from distembed.data.dataset.manifest import Manifest
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.serving.convert.code_weights import squared_gradients
from distembed.serving.convert.run_source import RunAsStock
from distembed.serving.convert.tables import fit_table, full_vectors
from distembed.training.build import Blueprint
from distembed.training.resume import load_run_config

_IDS_PER_CHUNK = 65_536


@dataclass(frozen=True)
class TrainedTable:
    """A full table of a run: its vectors, and the mean squared gradients of their numbers.

    ``curvature`` has a column for each number, or one column for all where Adagrad keeps a sum for a row.
    """

    vectors: Float[Tensor, "ids dim"]
    curvature: Float[Tensor, "ids columns"]

    def cost(self, table: CompositionalEmbeddingConfig) -> float:
        """Returns the expected loss with a smaller table, which is fitted with the ids' curvatures as weights."""
        # an id without gradients weighs a thousandth of the least of the others: see fit_table
        of_ids = self.curvature.sum(dim=1)
        is_known = of_ids > 0
        weights = of_ids / of_ids[is_known].min() if bool(is_known.any()) else None
        fitted = full_vectors(table, fit_table(table, self.vectors, weights).weights)
        chunks = zip(
            self.vectors.split(_IDS_PER_CHUNK),
            fitted.split(_IDS_PER_CHUNK),
            self.curvature.split(_IDS_PER_CHUNK),
            strict=True,
        )
        return sum(0.5 * float(((own - new).double().square() * rate).sum()) for own, new, rate in chunks)


class TrainedTables:
    """The full tables of a run, read from its checkpoint when they are asked for.

    Args:
        run: The run's folder.

    Attributes:
        identity: The checksum of the checkpoint, which differs once the run was continued or trained again.
    """

    def __init__(self, run: Path) -> None:
        config = load_run_config(run)
        schema = Manifest.load(config.data.require_path()).schema
        blueprint = Blueprint.for_ranks(config, schema, Ranks(0, 1, 1, torch.device("cpu")), {})
        self._source = RunAsStock(run, config, blueprint)
        steps = SavedCheckpoint.read(self._source.checkpoint).optimizer_steps
        self.identity = str(read_last_file(self._source.checkpoint)[KEY])
        # S B^2 / rows, of B rows a step
        self._rate = config.train.batch_size / max(1, steps)

    def table(self, name: str, table: CompositionalEmbeddingConfig) -> TrainedTable:
        """Returns a table, by the name of its full weight; its optimizer is Adagrad, by element or by row."""
        sums = squared_gradients(self._source, name, table)
        assert sums is not None
        return TrainedTable(self._source[name], sums.double() * self._rate)
