"""Which items a user takes: Bayesian personalised ranking (Rendle et al., UAI 2009), and ranking of all items.

A row of the dataset is a user and an item that the user took. The loss of a row is the mean over drawn negative items j
of ``-log sigmoid(s_i - s_j)``, and ``lambda`` times the squares of the vectors that the row looks up.

In an evaluation a row is a user of the split, and the user's items of the split are relevant. All items are ranked,
with ``exclude_seen`` without the user's items of earlier splits: a relevant one among them is a miss.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from distembed.data.dataset.schema import ITEM, ITEM_NEGATIVE, SPARSE_FEATURES, USER
from distembed.data.reader import Batch, BatchShares
from distembed.models.queries import Queries
from distembed.tasks.base import BatchPosition, Outputs, Sums, TaskContext
from distembed.tasks.catalogue import CatalogueRanking, NegativeDraws, item_weights
from distembed.tasks.config import batch_schema
from distembed.tasks.pair_columns import PairColumns
from distembed.tasks.ranking_config import RankingConfig
from distembed.tasks.rating import squares
from distembed.tasks.recommendations import (
    HAS_NEGATIVES,
    RELEVANT,
    no_items,
    rank_queries,
    ranked_fields,
    ranked_targets,
    recommendations,
    without_negatives_lines,
)
from distembed.tasks.recommending_task import RecommendingTask
from distembed.tasks.split_items import SplitItems


class RankingTask(RecommendingTask):
    """Ranks items for users by a model that returns queries of users with the rows' items and negative items."""

    batch_fields = (SPARSE_FEATURES,)
    scored_tables = (ITEM,)

    def __init__(self, config: RankingConfig) -> None:
        super().__init__(config)
        self._config = config

    def start(self, context: TaskContext) -> None:
        """Stores the context and the item table's size and reserved ids; users' items are read at first use."""
        self._context = context
        self._schema = batch_schema(self._config, context.schema)
        self._num_items = next(feature.num_embeddings for feature in context.schema.categorical if feature.name == ITEM)
        self.distinct_outputs = {"best": self._num_items}
        self._items = SplitItems(context, PairColumns(), self._config.excludes_seen)
        self._reserved = self._items.reserved_items

    @property
    def num_candidates(self) -> int:
        return self._num_items - len(self._reserved)

    @cached_property
    def _negatives(self) -> NegativeDraws:
        """The draws of negative items, which exclude each user's items in training."""
        training_items = self._items.of(self._context.data.train)
        weights = item_weights(training_items.users_of_items(), self._config.negative_exponent, self._reserved)
        return NegativeDraws(weights, training_items.to(self._context.ranks.device), self._context.seed)

    def start_lines(self) -> list[str]:
        return without_negatives_lines(self._negatives.users_without_items, self._context.dataset)

    def prepare_batch(self, batch: Batch, position: BatchPosition | None) -> Batch:
        """Returns the batch with negative items, drawn on the device of this rank."""
        assert position is not None, "evaluations have batches of their own"
        ids, num_slots = batch[SPARSE_FEATURES], self._config.num_negatives
        assert isinstance(ids, KeyedJaggedTensor)
        counts = [*ids.length_per_key(), ids.stride() * num_slots]
        device = self._context.ranks.device
        users = ids[USER].values().to(device, non_blocking=True).long()
        negatives = self._negatives.draw(position.step, position.first_row, users, num_slots)
        ids = ids.to(device, non_blocking=True)
        with_negatives = KeyedJaggedTensor(
            [*ids.keys(), ITEM_NEGATIVE],
            torch.cat([ids.values(), negatives.flatten().to(ids.values().dtype)]),
            lengths=torch.cat([ids.lengths(), ids.lengths().new_full((len(users),), num_slots)]),
            stride=len(users),
            length_per_key=counts,
            offset_per_key=list(accumulate(counts, initial=0)),
        )
        fields = {**batch.fields, SPARSE_FEATURES: with_negatives}
        if len(self._negatives.users_without_items):
            fields[HAS_NEGATIVES] = self._negatives.has_items(users)
        return Batch(fields, batch.global_batch_size)

    def step(self, outputs: Queries, batch: Batch) -> tuple[Tensor, Outputs]:
        """Returns the BPR loss, and each row's share ``ordered`` of negatives that score below the row's item.

        A row whose user has no negatives has the loss 0 and the share NaN.
        """
        margins = (outputs.scores(ITEM) - outputs.scores(ITEM_NEGATIVE)).float()
        ordered = (margins > 0).sum(1) / self._config.num_negatives
        losses = nn.functional.logsigmoid(margins)
        if HAS_NEGATIVES in batch.fields:
            has_negatives = batch[HAS_NEGATIVES]
            losses = losses.masked_fill(~has_negatives.unsqueeze(1), 0.0)
            ordered = ordered.masked_fill(~has_negatives, torch.nan)
        loss = -losses.sum() / self._config.num_negatives
        if self._config.regularization:
            loss = loss + self._config.regularization * squares(outputs)
        return loss, {"ordered": ordered}

    def evaluation_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        ranks = self._context.ranks
        self._unknown = self._items.count_unknown(split)
        seen_items, relevant = self._items.seen_before(split), self._items.of(split)
        users = (relevant.offsets.diff() > 0).nonzero().flatten()
        steps = BatchShares(len(users), batch_size, ranks.world_size).steps(ranks.rank)
        for rows in list(steps) or [range(0)]:  # one empty batch without users: metrics need outputs of known shapes
            batch_users = users[rows.start : rows.stop]
            lists = ranked_fields(relevant.of(batch_users), seen_items.of(batch_users))
            fields = {SPARSE_FEATURES: self._user_features(batch_users), **lists}
            yield Batch(fields, max(len(users), 1))

    def prediction_batch(self, batch: Batch) -> Batch:
        """Returns a batch of the rows' users without relevant items, and with the excluded items of the test split."""
        features = batch[SPARSE_FEATURES]
        assert isinstance(features, KeyedJaggedTensor)
        users = features[USER].values().long()
        lists = ranked_fields(no_items(len(users)), self._items.seen_before(self._context.data.test).of(users))
        fields = {SPARSE_FEATURES: self._user_features(users), **lists}
        return Batch(fields, batch.global_batch_size)

    def _user_features(self, users: Int64[Tensor, " users"]) -> KeyedJaggedTensor:
        """Returns the features of a batch of users, whose ids alone matter.

        Other features have the placeholder 0, or an empty list: the model's lookups need every key.
        """
        features = self._schema.categorical
        counts = [0 if feature.multi_hot else 1 for feature in features]
        values = [
            users if feature.name == USER else torch.zeros(len(users) * count, dtype=torch.int64)
            for feature, count in zip(features, counts, strict=True)
        ]
        lengths = torch.tensor(counts, dtype=torch.int32).repeat_interleave(len(users))
        return KeyedJaggedTensor(
            [feature.name for feature in features], torch.cat(values), lengths=lengths, stride=len(users)
        )

    def evaluate(self, outputs: Queries, batch: Batch) -> Outputs:
        """Returns each user with its metrics and best items; all ranks call it."""
        features, relevant = batch[SPARSE_FEATURES], batch[RELEVANT]
        assert isinstance(features, KeyedJaggedTensor) and isinstance(relevant, KeyedJaggedTensor)
        ranked = rank_queries(
            CatalogueRanking(outputs.catalogue, self._reserved, self._num_best), outputs.vectors, batch
        )
        return {
            **ranked_targets(ranked, relevant.lengths().long(), self._metrics),
            **recommendations(features[USER].values(), outputs, ranked),
        }

    def training_sums(self, outputs: Outputs) -> Outputs:
        """Returns ``ordered`` [2]: the sum over rows of the share of negatives scored below the item, and the rows.

        Rows whose user has no negatives have the share NaN, and are not counted.
        """
        shares = outputs["ordered"].double()
        has_negatives = ~shares.isnan()
        return {"ordered": torch.stack([shares.nansum(), has_negatives.sum().double()])}

    def training_metrics(self, sums: Sums) -> dict[str, float]:
        """Returns the mean share of a row's negative items that score below the row's item."""
        ordered, num_rows = sums["ordered"].tolist()
        return {"ordered": ordered / num_rows if num_rows else float("nan")}

    def describe_training(self, metrics: Mapping[str, Any]) -> str:
        return f"ordered {metrics['ordered']:.4f}"
