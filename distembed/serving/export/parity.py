"""Whether an exported model scores as the trained one: row by row on a sample, and by the task's metric on a split.

The trained model recommends items by :class:`~distembed.tasks.catalogue.CatalogueRanking`, as in its evaluations. Both
models are compared by the NDCG of the recommended items alone, since a program does not return the ranks of other
items. For one target a row it is the task's ``ndcg@k``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import RunError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import (
    DENSE_FEATURES,
    DENSE_SEQUENCES,
    ITEM,
    ITEM_TARGET,
    LABELS,
    SPARSE_FEATURES,
    WEIGHTS,
    Schema,
)
from distembed.data.reader import Batch, BatchOrder, BatchReader
from distembed.data.table.vocabulary import FIRST_ID
from distembed.serving.export.recommenders import RecommendingModel
from distembed.serving.export.score_program import ScoredModel
from distembed.serving.export.two_towers import TowerModel
from distembed.serving.model_folder.manifest import Parity, Precision
from distembed.serving.model_folder.programs import Program, load_program
from distembed.serving.whole_model import WholeModel
from distembed.tasks import RetrievalTask, Task
from distembed.tasks.catalogue import CatalogueRanking
from distembed.tasks.ranking_metrics import RankingMetrics
from distembed.tasks.recommendations import RELEVANT

MOST_DIFFERENCE = 1e-6
"""Largest difference of a score from the trainer's where tables are in fp32; relative to scores above 1."""
MOST_METRIC_DIFFERENCE = 5e-4
"""Largest difference of the headline metric, for example AUC."""
_SPLITS = ("test", "validation", "train")
_MADE_UP_LIST = 3
_BATCH_SIZE = 8192
_RECOMMENDED_BATCH_SIZE = 256
_MOST_SCORES = 1 << 32
"""Most scores of rows and items for a metric of recommendations."""

ModelT = TypeVar("ModelT", bound=ScoredModel | RecommendingModel | TowerModel)


@dataclass(frozen=True)
class SplitRows:
    """The rows of a dataset's split."""

    dataset: str
    split: str
    num_rows: int

    @classmethod
    def find(cls, dataset: str) -> SplitRows | None:
        """Returns the rows of the test split, else of validation, else of training; None for a dataset without rows."""
        if not Path(dataset).exists():
            return None
        manifest = Manifest.load(dataset)
        if manifest.is_without_rows:
            return None
        with_rows = [name for name in _SPLITS if name in manifest.splits and manifest.splits[name].num_rows]
        return cls(dataset, with_rows[0], manifest.splits[with_rows[0]].num_rows) if with_rows else None

    def batches(self, batch_size: int, most_rows: int) -> Iterator[Batch]:
        """Yields the first rows in batches of ``batch_size``; the last batch may have fewer."""
        rows = range(min(most_rows, self.num_rows))
        order = BatchOrder(batch_size, shuffle=False)
        with closing(BatchReader(self.dataset, self.split, order, rows=rows)) as reader:
            yield from reader


def made_up_batch(schema: Schema, num_rows: int, seed: int = 0, least_id: int = 0) -> Batch:
    """Returns a batch of random ids, in lists of at most 3, and random numbers that fit a schema, with labels of 0.

    Numbers in a list ascend, as times do. Ids are ``least_id`` or more, where a table has so many.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, lengths = [], []
    for feature in schema.categorical:
        most = min(feature.max_ids_per_row or _MADE_UP_LIST, _MADE_UP_LIST)
        row_lengths = (
            torch.randint(0, most + 1, (num_rows,), generator=generator)
            if feature.multi_hot
            else torch.ones(num_rows, dtype=torch.int64)
        )
        lengths.append(row_lengths)
        least = min(least_id, feature.num_embeddings - 1)
        ids.append(torch.randint(least, feature.num_embeddings, (int(row_lengths.sum()),), generator=generator))
    features = KeyedJaggedTensor(list(schema.categorical_names), torch.cat(ids), lengths=torch.cat(lengths))
    dense = torch.rand(num_rows, len(schema.dense), generator=generator)
    fields: dict[str, Tensor | KeyedJaggedTensor] = {DENSE_FEATURES: dense, SPARSE_FEATURES: features}
    if schema.dense_sequences:
        beside = torch.cat([features[schema.lists_beside(name)[0]].lengths() for name in schema.dense_sequences])
        numbers = torch.rand(int(beside.sum()), generator=generator).sort().values
        fields[DENSE_SEQUENCES] = KeyedJaggedTensor(list(schema.dense_sequences), numbers, lengths=beside)
    targets = (field for field in schema.fields if field.name in (LABELS, WEIGHTS))
    fields |= {field.name: torch.zeros(field.shape(num_rows)) for field in targets}
    return Batch(fields, num_rows)


@dataclass(frozen=True)
class ParityCheck(ABC, Generic[ModelT]):
    """Compares the program of an exported model, loaded as a server loads it, with the trained model in float32."""

    whole: WholeModel
    model: ModelT
    program: Program
    precision: Precision

    @abstractmethod
    def sample(self, rows: SplitRows | None, num_rows: int) -> Batch:
        """Returns a batch of the first rows, or of made-up rows where there are none."""

    @abstractmethod
    def outputs(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns the exported model's outputs of a batch in plain values, by their names."""

    @abstractmethod
    def on_sample(self, batch: Batch) -> Parity:
        """Compares the outputs of a batch with the trained model's.

        Raises a :class:`RunError` for scores that are no numbers and, in fp32, for differences beyond rounding.
        """

    @abstractmethod
    def on_split(self, rows: SplitRows, most_rows: int) -> tuple[str, float, float]:
        """Returns a metric's name, and its values on the first rows for the exported and the trained model.

        Raises a :class:`RunError` where they are more than :data:`MOST_METRIC_DIFFERENCE` apart.
        """

    def _run(self, batch: Batch) -> Any:
        with torch.inference_mode():
            return self.program(*self.model.inputs(batch).tensors.values())


class ScoreCheck(ParityCheck[ScoredModel]):
    """Compares the numbers that each model gives a row: one, or one for each label."""

    def sample(self, rows: SplitRows | None, num_rows: int) -> Batch:
        if rows is None:
            return made_up_batch(self.whole.blueprint.batch_schema, num_rows)
        return self.whole.task.prepare_batch(next(iter(rows.batches(num_rows, num_rows))), None)

    def outputs(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        return dict(zip(self.model.outputs, self._scores(batch).T.tolist(), strict=True))

    def _scores(self, batch: Batch) -> NDArray[np.float32]:
        """Returns the exported model's scores [rows, scores]."""
        outputs = self._run(batch)
        scores: NDArray[np.float32] = torch.stack([outputs] if isinstance(outputs, Tensor) else [*outputs], 1).numpy()
        return scores

    def on_sample(self, batch: Batch) -> Parity:
        exported = self._scores(batch)
        predictions = self.whole.task.predictions(self.whole.outputs(batch))
        trained = np.stack([predictions[name] for name in self.model.outputs], axis=1)
        if not np.isfinite(exported).all():
            raise RunError(
                f"{np.count_nonzero(~np.isfinite(exported))} of {exported.size} scores of the exported model are no "
                f"numbers: the tables have values that {self.precision} does not hold; choose --precision fp32."
            )
        differences = np.abs(exported - trained)
        relative = differences / np.maximum(1, np.abs(trained))
        if self.precision == "fp32" and relative.size and relative.max() > MOST_DIFFERENCE:
            row, column = np.unravel_index(relative.argmax(), relative.shape)
            raise RunError(
                f"the exported model scores otherwise than the trained one: row {row} of the sample has the "
                f"{self.model.outputs[column]} {exported[row, column]:.8g} in place of {trained[row, column]:.8g}, "
                f"and at most {MOST_DIFFERENCE:g} is rounding. "
                "Nothing was written; please report this with the run's config."
            )
        return Parity(len(exported), float(differences.max(initial=0.0)))

    def on_split(self, rows: SplitRows, most_rows: int) -> tuple[str, float, float]:
        whole = self.whole.on_dataset(rows.dataset)
        exported: list[Mapping[str, NDArray[Any]]] = []
        trained: list[Mapping[str, NDArray[Any]]] = []
        for batch in rows.batches(_BATCH_SIZE, most_rows):
            outputs = whole.outputs(whole.task.prepare_batch(batch, None))
            trained.append(outputs)
            scores = self._scores(batch)
            scores = scores[:, 0] if scores.shape[1] == 1 else scores
            exported.append({**outputs, **whole.task.rows_of_scores(scores)})
        headline = whole.task.headline.name
        metrics = [float(whole.task.metrics(_joined(outputs))[headline]) for outputs in (exported, trained)]
        require_close_metric(whole.task.headline.heading, rows.split, (metrics[0], metrics[1]), self.precision)
        return headline, metrics[0], metrics[1]


def _joined(outputs: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([batch_outputs[name] for batch_outputs in outputs]) for name in outputs[0]}


@dataclass(frozen=True)
class _Best:
    """The best items of rows; where there are fewer, ids are -1 and scores -inf."""

    items: Int64[Tensor, "rows best"]
    scores: Float[Tensor, "rows best"]


class RecommendedCheck(ParityCheck[RecommendingModel | TowerModel]):
    """Compares the items that each model recommends for a row."""

    def sample(self, rows: SplitRows | None, num_rows: int) -> Batch:
        # as a server gets rows: whole sequences without targets, or the users of the split with the items they have
        if rows is None:
            # raw rows have no reserved ids: unknown items are left out of a history
            drawn = made_up_batch(self.whole.blueprint.schema, num_rows, least_id=FIRST_ID)
            return self.whole.task.prediction_batch(drawn)
        task_batches = _queries(self.whole.on_dataset(rows.dataset).task, rows.split, num_rows)
        if task_batches is not None:
            return next(task_batches)
        return self.whole.task.prediction_batch(next(iter(rows.batches(num_rows, num_rows))))

    def outputs(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        best = self._best(batch)
        scores = [[score if np.isfinite(score) else None for score in row] for row in best.scores.tolist()]
        return dict(zip(self.model.outputs, (best.items.tolist(), scores), strict=True))

    def _best(self, batch: Batch) -> _Best:
        return _Best(*self._run(batch))

    def _trained_best(self, batch: Batch) -> _Best:
        with torch.inference_mode():
            model = self.whole.module.model
            queries = self.model.trained_queries(model(*[batch[name] for name in model.batch_fields]))
            left_out = self.model.left_out(batch)
            none = JaggedTensor(left_out.values()[:0], lengths=torch.zeros_like(left_out.lengths()))
            ranking = CatalogueRanking(queries.catalogue, tuple(self.model.reserved), self.model.num_best)
            ranked = ranking.rank(queries.vectors, none, left_out)
            offsets = 0.0 if queries.offsets is None else queries.offsets.float().unsqueeze(1)
            return _Best(ranked.best, ranked.best_scores + offsets)

    def on_sample(self, batch: Batch) -> Parity:
        exported, trained = self._best(batch), self._trained_best(batch)
        if exported.scores.isnan().any():
            raise RunError(
                "scores of the exported model are no numbers: the tables have values that "
                f"{self.precision} does not hold; choose --precision fp32."
            )
        differences = _differences(exported, trained)
        if self.precision == "fp32":
            relative = _relative(differences, trained)
            if relative.numel() and relative.max() > MOST_DIFFERENCE:
                row = int(relative.amax(1).argmax())
                raise RunError(
                    f"the exported model recommends otherwise than the trained one: for row {row} of the sample "
                    f"{_shown(exported, row)} in place of {_shown(trained, row)}, and at most {MOST_DIFFERENCE:g} of a "
                    "score is rounding. Nothing was written; please report this with the run's config."
                )
        largest = differences[differences.isfinite()]
        return Parity(len(exported.items), float(largest.max()) if len(largest) else 0.0)

    def on_split(self, rows: SplitRows, most_rows: int) -> tuple[str, float, float]:
        metrics = RankingMetrics((self.model.num_best,))
        name = f"ndcg@{self.model.num_best}"
        values: tuple[list[Tensor], list[Tensor]] = ([], [])
        for batch in self._split_batches(rows, most_rows):
            relevant, both = _relevant(batch), (self._best(batch), self._trained_best(batch))
            lengths = relevant.lengths().long()
            of_exported, of_trained = (metrics.by_query(_ranks(best, relevant), lengths) for best in both)
            # items that share a vector have equal scores, and each model may list others of them
            is_equal = (_relative(_differences(*both), both[1]) <= MOST_DIFFERENCE).all(1)
            values[0].append(torch.where(is_equal.unsqueeze(1), of_trained, of_exported))
            values[1].append(of_trained)
        exported, trained = (metrics.means(torch.cat(model_metrics).numpy())[name] for model_metrics in values)
        require_close_metric(f"NDCG@{self.model.num_best}", rows.split, (exported, trained), self.precision)
        return name, exported, trained

    def _split_batches(self, rows: SplitRows, most_rows: int) -> Iterator[Batch]:
        """Yields prepared batches of an evaluation; fewer rows of a large catalogue, as a row scores all items."""
        most = min(most_rows, max(_RECOMMENDED_BATCH_SIZE, _MOST_SCORES // self.model.num_items))
        task = self.whole.on_dataset(rows.dataset).task
        task_batches = _queries(task, rows.split, _RECOMMENDED_BATCH_SIZE)
        if task_batches is not None:
            yield from islice(task_batches, -(-most // _RECOMMENDED_BATCH_SIZE))
            return
        for batch in rows.batches(_RECOMMENDED_BATCH_SIZE, most):
            yield task.prepare_batch(batch, None)


def tower_differences(
    trained: WholeModel, model: TowerModel, folder: Path, queries: Batch, precision: Precision
) -> tuple[float, float]:
    """Compares the saved programs of both towers with the trained towers, on queries and on the first items.

    Returns the largest difference of a number of a user's vector, and of an item's vector.

    Raises:
        RunError: Vectors are no numbers or, in fp32, differ beyond rounding.
    """
    assert isinstance(trained.task, RetrievalTask)
    items = trained.task.item_batch(np.arange(min(_RECOMMENDED_BATCH_SIZE, len(model.index.ids))))
    found = []
    for side, batch, name in ((model.user, queries, "queries"), (model.item_side, items, "items")):
        expected = getattr(trained.model_outputs(batch), name).float()
        with torch.inference_mode():
            vectors = load_program(folder / side.file)(*side.inputs(batch).tensors.values())
        differences = (vectors - expected).abs()
        relative = differences / expected.norm(dim=1, keepdim=True).clamp(min=1)
        is_beyond = not bool((relative <= MOST_DIFFERENCE).all()) if precision == "fp32" else False
        if is_beyond or not bool(vectors.isfinite().all()):
            raise RunError(
                f"the program {side.file} gives vectors that differ from the trained tower's by up to "
                f"{float(differences.max()):.3g}, and at most {MOST_DIFFERENCE:g} of a vector's length is rounding. "
                f"Nothing was written; --precision is {precision}, and fp32 holds all values."
            )
        found.append(float(differences.max()) if differences.numel() else 0.0)
    return found[0], found[1]


def _queries(task: Task, split: str, batch_size: int) -> Iterator[Batch] | None:
    """Returns an evaluation's batches of queries, without items whose vectors the model would compute."""
    if isinstance(task, RetrievalTask):
        return task.query_batches(split, batch_size)
    return task.evaluation_batches(split, batch_size)


def require_close_metric(heading: str, split: str, values: tuple[float, float], precision: Precision) -> None:
    """Raises a :class:`RunError` where a metric of the exported and the trained model differs by too much."""
    exported, trained = values
    is_undefined = math.isnan(exported) and math.isnan(trained)  # such as the AUC of one class
    if not (is_undefined or abs(exported - trained) <= MOST_METRIC_DIFFERENCE):
        raise RunError(
            f"the exported model's {heading} on {split} is {exported:.6f}, and the trained one's {trained:.6f}: more "
            f"than {MOST_METRIC_DIFFERENCE} apart, so that nothing was written. Choose another "
            f"--precision than {precision}."
        )


def _differences(exported: _Best, trained: _Best) -> Float[Tensor, "rows best"]:
    """Returns for each place of a row the larger of two differences of scores; 0 where both models have no item.

    One is between the exported item's score and the trained model's score of this item, found by its id, since items
    whose scores differ by rounding may change places; an item that the trained model does not recommend is compared
    with the trained model's last score. The other is between the scores in this place, which shows an item that the
    exported model misses. Where one model has an item and the other none, the difference is infinite.
    """
    is_same = exported.items.unsqueeze(2) == trained.items.unsqueeze(1)
    scores_of_same = trained.scores.gather(1, is_same.int().argmax(2))
    trained_scores = torch.where(is_same.any(2), scores_of_same, trained.scores[:, -1:])
    differences = torch.maximum((exported.scores - trained_scores).abs(), (exported.scores - trained.scores).abs())
    # padding has the score -inf: -inf less -inf is NaN where both are padding, and infinite where one is
    is_padding = (exported.items == -1) & (trained.items == -1)
    return torch.where(is_padding, 0.0, differences.nan_to_num(torch.inf, torch.inf))


def _relative(differences: Float[Tensor, "rows best"], trained: _Best) -> Float[Tensor, "rows best"]:
    """Returns differences of scores divided by the trained model's scores, where these are above 1."""
    return torch.where(trained.scores.isfinite(), differences / trained.scores.abs().clamp(min=1), differences)


def _shown(best: _Best, row: int) -> str:
    pairs = zip(best.items[row].tolist(), best.scores[row].tolist(), strict=True)
    return ", ".join(f"{item} ({score:.8g})" for item, score in pairs)


def _relevant(batch: Batch) -> JaggedTensor:
    """Returns the items that each row of an evaluation should find."""
    if RELEVANT in batch.fields:
        relevant = batch[RELEVANT]
        assert isinstance(relevant, KeyedJaggedTensor)
        return relevant[ITEM]
    features = batch[SPARSE_FEATURES]
    assert isinstance(features, KeyedJaggedTensor)
    targets = features[ITEM_TARGET]
    return JaggedTensor(targets.values(), lengths=targets.lengths()[targets.lengths() > 0])


def _ranks(best: _Best, relevant: JaggedTensor) -> Int64[Tensor, " relevant"]:
    """Returns the place, from 0, of each relevant item among its row's k best items; k if it is not among them."""
    lengths = relevant.lengths().long()
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    is_it = best.items[rows] == relevant.values().long().unsqueeze(1)
    return torch.where(is_it.any(1), is_it.int().argmax(1), best.items.shape[1])
