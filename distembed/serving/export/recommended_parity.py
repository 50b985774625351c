"""Whether an exported model recommends as the trained one: item by item on a sample, and by NDCG on a split.

The trained model's items are found by :class:`~distembed.tasks.catalogue.CatalogueRanking`, as in its evaluations: as
many as the program returns, and without the same items. Both are judged by the NDCG of these items alone, as a program
says nothing of the ranks behind them. It is the task's ``ndcg@k`` for one target a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import RunError
from distembed.data.dataset.schema import ITEM, ITEM_TARGET, SPARSE_FEATURES
from distembed.data.reader import Batch
from distembed.serving.export.batches import SplitRows, made_up_batch
from distembed.serving.export.parity import MOST_DIFFERENCE, require_close_metric
from distembed.serving.export.recommenders import RecommendingModel
from distembed.serving.model_folder.manifest import Parity, Precision
from distembed.serving.model_folder.programs import Program
from distembed.serving.whole_model import WholeModel
from distembed.tasks.catalogue import CatalogueRanking
from distembed.tasks.ranking import RELEVANT
from distembed.tasks.ranking_metrics import RankingMetrics

_BATCH_SIZE = 256
_MOST_SCORES = 1 << 32
"""Scores of rows and items that a metric is computed from."""


@dataclass(frozen=True)
class Best:
    """The best items of rows.

    Attributes:
        items: Their ids; -1 where there are fewer.
        scores: Their scores; -inf where there are fewer.
    """

    items: Int64[Tensor, "rows best"]
    scores: Float[Tensor, "rows best"]


@dataclass(frozen=True)
class RecommendedCheck:
    """Compares the recommendations of an exported model with those of the trained one.

    Attributes:
        whole: The trained model, in float32.
        model: The same as its program is made of it.
        program: Inputs -> items and scores.
        precision: How its tables are stored.
    """

    whole: WholeModel
    model: RecommendingModel
    program: Program
    precision: Precision

    def sample(self, rows: SplitRows | None, num_rows: int) -> Batch:
        """Returns a batch of the first rows, of which the next item or the user's is asked for; made-up ones without.

        Rows of sequences are whole ones, of a split's as of raw rows; users are those of the split.
        """
        if rows is None:
            drawn = made_up_batch(self.whole.blueprint.schema, num_rows)
            return self.whole.task.prediction_batch(drawn)
        own = self.whole.on_dataset(rows.dataset).task.evaluation_batches(rows.split, num_rows)
        if own is not None:
            return next(own)
        return self.whole.task.prediction_batch(next(iter(rows.batches(num_rows, num_rows))))

    def outputs(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns the exported model's items and scores of a batch in plain values; null where there are fewer."""
        best = self.best(batch)
        scores = [[score if np.isfinite(score) else None for score in row] for row in best.scores.tolist()]
        return dict(zip(self.model.outputs, (best.items.tolist(), scores), strict=True))

    def best(self, batch: Batch) -> Best:
        """Returns what the exported model recommends for a batch."""
        with torch.inference_mode():
            return Best(*self.program(*self.model.inputs(batch).tensors.values()))

    def trained_best(self, batch: Batch) -> Best:
        """Returns what the trained model recommends for a batch."""
        with torch.inference_mode():
            model = self.whole.module.model
            queries = model(*[batch[name] for name in model.batch_fields])
            left_out = self.model.left_out(batch)
            none = JaggedTensor(left_out.values()[:0], lengths=torch.zeros_like(left_out.lengths()))
            ranking = CatalogueRanking(queries.catalogue, tuple(self.model.reserved), self.model.num_best)
            ranked = ranking.rank(queries.vectors.float(), none, left_out)
            offsets = 0.0 if queries.offsets is None else queries.offsets.float().unsqueeze(1)
            return Best(ranked.best, ranked.best_scores + offsets)

    def on_sample(self, batch: Batch) -> Parity:
        """Compares the items and scores of a batch; items may change places where their scores are equal but for that.

        Raises:
            RunError: They differ by more than rounding does, or are no numbers.
        """
        found, trained = self.best(batch), self.trained_best(batch)
        if found.scores.isnan().any():
            raise RunError(
                "scores of the exported model are no numbers: the tables have values that "
                f"{self.precision} does not hold; choose --precision fp32."
            )
        differences = _differences(found, trained)
        if self.precision == "fp32":
            scale = trained.scores.abs().clamp(min=1)
            relative = torch.where(trained.scores.isfinite(), differences / scale, differences)
            if relative.numel() and relative.max() > MOST_DIFFERENCE:
                row = int(relative.amax(1).argmax())
                raise RunError(
                    f"the exported model recommends otherwise than the trained one: for row {row} of the sample "
                    f"{_shown(found, row)} in place of {_shown(trained, row)}, and at most {MOST_DIFFERENCE:g} of a "
                    "score is rounding. Nothing was written; please report this with the run's config."
                )
        largest = differences[differences.isfinite()]
        return Parity(len(found.items), float(largest.max()) if len(largest) else 0.0)

    def on_split(self, rows: SplitRows, most_rows: int) -> tuple[str, float, float]:
        """Returns ``ndcg@k``, and its values for the exported and the trained model.

        Args:
            rows: The rows to compare on.
            most_rows: So many of the first are, or fewer of a large catalogue.

        Raises:
            RunError: The values differ by more than they may.
        """
        metrics = RankingMetrics((self.model.num_best,))
        name = f"ndcg@{self.model.num_best}"
        values: tuple[list[Tensor], list[Tensor]] = ([], [])
        for batch in self._split_batches(rows, most_rows):
            relevant = _relevant(batch)
            for own, best in zip(values, (self.best(batch), self.trained_best(batch)), strict=True):
                own.append(metrics.of_queries(_ranks(best, relevant), relevant.lengths().long()))
        found, trained = (metrics.means(torch.cat(own).numpy())[name] for own in values)
        require_close_metric(f"NDCG@{self.model.num_best}", rows.split, (found, trained), self.precision)
        return name, found, trained

    def _split_batches(self, rows: SplitRows, most_rows: int) -> Iterator[Batch]:
        """Yields batches as evaluations have them."""
        num_items = max(table.num_embeddings for table in self.model.tables if ITEM in table.feature_names)
        most = min(most_rows, max(_BATCH_SIZE, _MOST_SCORES // num_items))
        task = self.whole.on_dataset(rows.dataset).task
        own = task.evaluation_batches(rows.split, _BATCH_SIZE)
        if own is not None:
            yield from islice(own, -(-most // _BATCH_SIZE))
            return
        for batch in rows.batches(_BATCH_SIZE, most):
            yield task.prepare_batch(batch, None)


def _differences(found: Best, trained: Best) -> Float[Tensor, "rows best"]:
    """Returns how far each exported item's score is from what the trained model gives it.

    An item that the trained model does not recommend has at most the last score there; where one of the two recommends
    fewer items, the difference is infinite.
    """
    is_same = found.items.unsqueeze(2) == trained.items.unsqueeze(1)
    of_items = trained.scores.gather(1, is_same.int().argmax(2))
    own = torch.where(is_same.any(2), of_items, trained.scores[:, -1:])
    differences = torch.maximum((found.scores - own).abs(), (found.scores - trained.scores).abs())
    # fewer items for both: -inf less -inf
    return torch.where((found.items == -1) & (trained.items == -1), 0.0, differences.nan_to_num(torch.inf, torch.inf))


def _shown(best: Best, row: int) -> str:
    pairs = zip(best.items[row].tolist(), best.scores[row].tolist(), strict=True)
    return ", ".join(f"{item} ({score:.8g})" for item, score in pairs)


def _relevant(batch: Batch) -> JaggedTensor:
    """Returns the items that each row of an evaluation looks for."""
    if RELEVANT in batch.fields:
        found = batch[RELEVANT]
        assert isinstance(found, KeyedJaggedTensor)
        return found[ITEM]
    features = batch[SPARSE_FEATURES]
    assert isinstance(features, KeyedJaggedTensor)
    targets = features[ITEM_TARGET]
    return JaggedTensor(targets.values(), lengths=targets.lengths()[targets.lengths() > 0])


def _ranks(best: Best, relevant: JaggedTensor) -> Int64[Tensor, " relevant"]:
    """Returns the place of each relevant item among the best of its row; k where it is not there."""
    lengths = relevant.lengths().long()
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    is_it = best.items[rows] == relevant.values().long().unsqueeze(1)
    return torch.where(is_it.any(1), is_it.int().argmax(1), best.items.shape[1])
