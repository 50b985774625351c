"""Which item comes next in a user's sequence (Kang and McAuley, ICDM 2018; Hidasi et al., ICLR 2016).

A model returns a query for each target of its rows. One of three losses trains their scores. Evaluations rank the last
item of each row among all items, or all that do not precede it, and among some drawn items.

The loss of a row is the sum over its targets, divided by the mean number of targets of a training row. So every target
weighs alike on any number of ranks, and the loss of a batch is about the mean over its targets.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.ranks import Collectives
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import (
    DENSE_SEQUENCES,
    ITEM,
    ITEM_NEGATIVE,
    ITEM_TARGET,
    SPARSE_FEATURES,
    USER,
)
from distembed.data.reader.batch import Batch
from distembed.data.table.vocabulary import reserved_ids
from distembed.models.queries import Queries
from distembed.models.sequences import feature_lengths, feature_values
from distembed.sse import IdPerturbation
from distembed.tasks.base import BatchPosition, Outputs, Rows, TaskContext
from distembed.tasks.catalogue import NOT_RANKED, CatalogueRanking, NegativeDraws, UserItems, item_weights
from distembed.tasks.catalogue.softmax import catalogue_cross_entropy, drawn_cross_entropy, in_batch_cross_entropy
from distembed.tasks.next_item_config import SAMPLED_KINDS, NextItemConfig
from distembed.tasks.ranking_metrics import RankingMetrics
from distembed.tasks.recommendations import (
    HAS_NEGATIVES,
    recommendations,
    without_negatives_lines,
)
from distembed.tasks.recommending_task import RecommendingTask
from distembed.tasks.sequence_batches import Cuts, columns, cut_lists, item_lengths, jagged

SEEN = "seen"
"""Name of the field of an evaluation's batch that has the items of each row before its target."""
NO_TARGETS = "no_targets"
"""Name of a field of ones [rows] that marks a batch to predict: targets of its rows are placeholders, not known."""
NUM_TARGETS = "num_targets"
"""Name of the numbers of targets of each rank in :attr:`Batch.counts_by_rank`."""
LOG_PROBABILITIES = "log_probabilities"
"""Name of the field that has the logarithm of the probability with which each negative was drawn."""


class NextItemTask(RecommendingTask):
    """Predicts the next item of sequences from a model that returns a query for each target."""

    batch_fields = (SPARSE_FEATURES,)
    replaced_features = (ITEM_TARGET, ITEM_NEGATIVE)
    scored_tables = (ITEM,)

    def __init__(self, config: NextItemConfig) -> None:
        self._config = config
        self._losses = {
            "softmax": self._softmax_losses,
            "binary": self._binary_losses,
            "sampled_softmax": self._drawn_losses if config.draws_negatives else self._in_batch_losses,
        }[config.loss]
        self.dense_tables = (ITEM,) if config.loss == "softmax" else ()
        num_ranked = config.sampled_candidates + 1
        shown = tuple(f"{kind}@{max(config.cutoffs)}" for kind in SAMPLED_KINDS)
        self._sampled = RankingMetrics(tuple(config.cutoffs), num_ranked) if config.sampled_candidates else None
        super().__init__(config, self._sampled.reported(SAMPLED_KINDS, shown) if self._sampled else ())
        self._row_name = "rows"
        self.outputs = (*self.outputs, *(("sampled",) if self._sampled else ()))
        self.unknown_columns = (USER,)
        self._targets_per_row = 1.0
        self._context: TaskContext | None = None
        self._on_hosts: Collectives | None = None

    def start(self, context: TaskContext) -> None:
        """Stores the dataset's list columns, and makes the modules that replace ids of targets and negatives (SSE).

        Several ranks of a softmax make a group, in which they exchange their numbers of targets; all of them call it.
        """
        self._context = context
        if self._config.loss == "softmax" and context.ranks.world_size > 1:
            self._on_hosts = Collectives.in_own_group()
        items = next(feature for feature in context.schema.categorical if feature.name == ITEM)
        self._num_items = items.num_embeddings
        self.distinct_outputs = {"best": self._num_items}
        self._reserved = reserved_ids(Manifest.load(context.dataset), ITEM)
        lists = [feature.name for feature in context.schema.categorical if feature.multi_hot]
        self._lists = frozenset([*lists, *context.schema.dense_sequences])
        self._targets_per_row = max(1.0, min(items.mean_ids_per_row - 1, self._config.max_length))
        for name, rule in context.sse.items():
            rank = context.ranks.rank
            self.perturbations[name] = IdPerturbation(self._num_items, rule, name, seed=context.seed, rank=rank)

    @property
    def num_candidates(self) -> int:
        return self._num_items - len(self._reserved)

    @property
    def _started(self) -> TaskContext:
        assert self._context is not None
        return self._context

    @cached_property
    def _training_items(self) -> UserItems:
        """The distinct items of each user in the training split, read at first use."""
        return UserItems.of_splits(self._started.dataset, [self._started.data.train])

    @cached_property
    def _draws(self) -> NegativeDraws:
        weights = item_weights(self._training_items.users_of_items(), self._config.negative_exponent, self._reserved)
        return NegativeDraws(weights, self._training_items, self._started.seed)

    @cached_property
    def _log_frequencies(self) -> Float[Tensor, " items"]:
        """The logarithm of each item's share of all targets, estimated by its share of (user, distinct item) pairs."""
        counts = item_weights(self._training_items.users_of_items(), 1.0, ())
        return (counts / counts.sum()).log().float().to(self._started.ranks.device)

    @cached_property
    def _uniform(self) -> Float[Tensor, " items"]:
        """Weights of a uniform draw: 1 for each item, 0 for reserved ids."""
        return item_weights(torch.zeros(self._num_items), 0.0, self._reserved)

    def start_lines(self) -> list[str]:
        if not self._config.draws_negatives:
            return []
        return without_negatives_lines(self._draws.users_without_items, self._started.dataset)

    def prepare_batch(self, batch: Batch, position: BatchPosition | None) -> Batch:
        """Returns a batch of the model's inputs, with targets, and with negatives where the loss needs them.

        A batch of an evaluation (``position`` is None) gets seen items, no negatives, and no replaced ids. All ranks
        call it for training.
        """
        features = _jagged_field(batch, SPARSE_FEATURES)
        lengths = item_lengths(features)
        cut = Cuts.of_evaluation if position is None else Cuts.of_training
        cuts = cut(lengths, self._config.max_length)
        feature_columns = columns(features)
        prepared = cut_lists(features, self._lists, lengths, cuts)
        targets = feature_columns[ITEM][0][torch.from_numpy(cuts.targets.entries)]
        prepared[ITEM_TARGET] = self._replaced(ITEM_TARGET, targets, position), cuts.targets.counts
        fields = {**batch.fields}
        if self._config.draws_negatives:
            users = feature_columns[USER][0].long()
            prepared[ITEM_NEGATIVE], log_probabilities = self._negatives(users, cuts.targets.counts, position)
            if position is not None:
                fields[LOG_PROBABILITIES] = log_probabilities
                if len(self._draws.users_without_items):
                    counts = torch.from_numpy(cuts.targets.counts)
                    fields[HAS_NEGATIVES] = self._draws.has_items(users).repeat_interleave(counts)
        num_rows = features.stride()
        fields[SPARSE_FEATURES] = jagged(prepared, num_rows)
        if DENSE_SEQUENCES in fields:
            numbers = cut_lists(_jagged_field(batch, DENSE_SEQUENCES), self._lists, lengths, cuts)
            fields[DENSE_SEQUENCES] = jagged(numbers, num_rows)
        if position is None:
            seen = feature_columns[ITEM][0][torch.from_numpy(cuts.seen.entries)], cuts.seen.counts
            fields[SEEN] = jagged({ITEM: seen}, num_rows)
        counts_by_rank: dict[str, Sequence[int]] = {}
        if position is not None and self._on_hosts is not None:
            # here, a step ahead and on the hosts: within the step, the host would wait for a GPU to know the sizes of
            # the tensors to gather
            counts_by_rank[NUM_TARGETS] = self._on_hosts.gather_counts(len(targets))
        return Batch(fields, batch.global_batch_size, counts_by_rank)

    def prediction_batch(self, batch: Batch) -> Batch:
        """Returns a batch of sequences whose next item is not known: all of their items are inputs, and seen items."""
        features = _jagged_field(batch, SPARSE_FEATURES)
        fields = {**batch.fields, SPARSE_FEATURES: self._with_next(features)}
        if DENSE_SEQUENCES in fields:
            fields[DENSE_SEQUENCES] = self._with_next(_jagged_field(batch, DENSE_SEQUENCES))
        prepared = self.prepare_batch(Batch(fields, batch.global_batch_size), None)
        return Batch({**prepared.fields, NO_TARGETS: torch.ones(features.stride())}, batch.global_batch_size)

    def _with_next(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns a batch's features with a 0 appended to each list, in the place of the unknown next item.

        An evaluation's cut then takes the 0 as the target, and all real items as inputs.
        """
        longer = {}
        for name, (values, lengths) in columns(features).items():
            if name in self._lists:
                values = torch.from_numpy(np.insert(values.numpy(), np.cumsum(lengths), 0))
                lengths = lengths + 1
            longer[name] = values, lengths
        return jagged(longer, features.stride())

    def _negatives(
        self, users: Int64[Tensor, " rows"], num_targets: npt.NDArray[np.int64], position: BatchPosition | None
    ) -> tuple[tuple[Tensor, npt.NDArray[np.int64]], Float[Tensor, "targets negatives"]]:
        """Returns drawn items, target after target, their number by row, and the logarithms of their probabilities.

        An evaluation, ``position`` None, has none. Items may be replaced (SSE) after the draw; a probability is that of
        the replaced item.
        """
        per_target = self._config.num_negatives
        if position is None:
            return (users[:0], num_targets * 0), torch.empty(0, per_target)
        counts = num_targets * per_target
        # A row has at most max_length targets, so ``row in the global batch * max_length * per_target + slot`` is
        # unique among the draws of a step, and the same on any number of ranks.
        rows = np.repeat(np.arange(len(counts)), counts)
        slots = np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
        numbers = torch.from_numpy((position.first_row + rows) * self._config.max_length * per_target + slots)
        owners = users[torch.from_numpy(rows)]
        drawn = self._draws.draw_numbered(position.step, numbers, owners)
        drawn = self._replaced(ITEM_NEGATIVE, drawn, position)
        log_probabilities = self._draws.log_probabilities(drawn.unsqueeze(1), owners)
        return (drawn, counts), log_probabilities.view(-1, per_target)

    def _replaced(self, feature: str, ids: Int64[Tensor, " ids"], position: BatchPosition | None) -> Tensor:
        """Returns ids of a feature after SSE's replacement; unchanged in an evaluation, or where no rule is set."""
        if position is None or feature not in self.perturbations:
            return ids
        perturb = self.perturbations[feature]
        assert isinstance(perturb, IdPerturbation)
        perturb.step = position.step
        replaced: Tensor = perturb(ids)
        return replaced

    def step(self, outputs: Queries, batch: Batch) -> tuple[Tensor, Outputs]:
        queries = dataclasses.replace(outputs, vectors=outputs.vectors.float())
        return self._losses(queries, batch).sum() / self._targets_per_row, {}

    def _softmax_losses(self, queries: Queries, batch: Batch) -> Float[Tensor, " queries"]:
        targets = feature_values(_jagged_field(batch, SPARSE_FEATURES), ITEM_TARGET)
        return catalogue_cross_entropy(
            queries.catalogue, queries.vectors, targets, batch.counts_by_rank.get(NUM_TARGETS)
        )

    def _binary_losses(self, queries: Queries, batch: Batch) -> Float[Tensor, " queries"]:
        """Returns ``-log sigmoid(s_target) - sum log(1 - sigmoid(s_negative))`` (Kang and McAuley, equation 6)."""
        target, negatives = queries.scores(ITEM_TARGET), queries.scores(ITEM_NEGATIVE)
        negative_losses = nn.functional.softplus(negatives)
        if HAS_NEGATIVES in batch.fields:
            negative_losses = negative_losses.masked_fill(~batch[HAS_NEGATIVES].unsqueeze(1), 0.0)
        return nn.functional.softplus(-target).sum(1) + negative_losses.sum(1)

    def _drawn_losses(self, queries: Queries, batch: Batch) -> Float[Tensor, " queries"]:
        """Returns the sampled softmax's loss of each target with its own negatives."""
        # the planner's example batch has no drawn negatives, hence no probabilities: only the shape matters there
        log_probabilities = batch.fields.get(
            LOG_PROBABILITIES, queries.vectors.new_zeros(len(queries.vectors), self._config.num_negatives)
        )
        assert isinstance(log_probabilities, Tensor)
        return drawn_cross_entropy(queries, ITEM_TARGET, ITEM_NEGATIVE, log_probabilities)

    def _in_batch_losses(self, queries: Queries, batch: Batch) -> Float[Tensor, " queries"]:
        """Returns the sampled softmax's loss of each target, with this rank's other targets as its negatives."""
        ids = queries.items[ITEM_TARGET].ids
        # the planner calls a task that was not started, and has no counts of items: only the shape matters there
        log_frequencies = queries.vectors.new_zeros(len(ids)) if self._context is None else self._log_frequencies[ids]
        return in_batch_cross_entropy(queries, ITEM_TARGET, log_frequencies)

    def evaluate(self, outputs: Queries, batch: Batch) -> Outputs:
        """Returns metrics and best items of each row that has a target; all ranks call it."""
        vectors = outputs.vectors.float()
        features, seen = (_jagged_field(batch, name) for name in (SPARSE_FEATURES, SEEN))
        targets, has_target = feature_values(features, ITEM_TARGET), feature_lengths(features, ITEM_TARGET) > 0
        # rows without a target have no seen items either, so seen.values() needs no selection
        lengths = feature_lengths(seen, ITEM)[has_target].long()
        one_target = torch.ones_like(lengths)
        excluded = JaggedTensor(seen.values(), lengths=lengths)
        if not self._config.excludes_seen:
            excluded = JaggedTensor(seen.values()[:0], lengths=lengths * 0)
        ranking = CatalogueRanking(outputs.catalogue, self._reserved, self._num_best)
        if NO_TARGETS in batch.fields:
            ranked = ranking.rank(vectors, JaggedTensor(targets[:0], lengths=one_target * 0), excluded)
            return recommendations(feature_values(features, USER), outputs, ranked)
        ranked = ranking.rank(vectors, JaggedTensor(targets, lengths=one_target), excluded)
        users = feature_values(features, USER)[has_target]
        recommended = recommendations(users, outputs, ranked)
        is_excluded = ranked.ranks == NOT_RANKED
        metrics = self._metrics.by_query(ranked.ranks, one_target)
        outputs_by_name = {"metrics": metrics, "excluded_targets": is_excluded.long(), **recommended}
        if self._sampled is not None:
            candidates, has_enough = self._candidates(users, targets, excluded)
            ranks = ranking.rank_among(vectors, targets, candidates).masked_fill(is_excluded, NOT_RANKED)
            outputs_by_name["sampled"] = self._sampled.by_query(ranks, one_target).masked_fill(
                ~has_enough.unsqueeze(1), torch.nan
            )
        return outputs_by_name

    def _candidates(
        self, users: Int64[Tensor, " queries"], targets: Int64[Tensor, " queries"], excluded: JaggedTensor
    ) -> tuple[Int64[Tensor, "queries candidates"], Bool[Tensor, " queries"]]:
        """Draws ``sampled_candidates`` items for each query, without its target and its excluded items.

        Draws depend on the run's seed and the user, so that every evaluation of a split has the same. The second tensor
        is false for a query that has fewer candidates than that: its items are arbitrary, and to be ignored.
        """
        # each query is a "user" of its own, who has the target and the excluded items
        rows = torch.arange(len(users), device=users.device)
        row_of_excluded = rows.repeat_interleave(excluded.lengths(), output_size=len(excluded.values()))
        owners, items = torch.cat([rows, row_of_excluded]), torch.cat([targets, excluded.values()])
        owners, items = owners.cpu(), items.cpu()
        has = UserItems.from_pairs(owners, items, len(users), self._num_items)
        num_left = self._num_items - len(self._reserved) - has.offsets.diff()
        has_enough = num_left >= self._config.sampled_candidates
        if not has_enough.all():
            is_drawn_for = has_enough[owners]
            has = UserItems.from_pairs(owners[is_drawn_for], items[is_drawn_for], len(users), self._num_items)
        draws = NegativeDraws(self._uniform, has.to(users.device), self._started.seed, "candidates")
        slots = torch.arange(self._config.sampled_candidates, device=users.device)
        numbers = users.unsqueeze(1) * len(slots) + slots
        drawn = draws.draw_numbered(0, numbers, rows.unsqueeze(1).expand_as(numbers))
        return drawn, has_enough.to(users.device)

    def metrics(self, rows: Rows) -> dict[str, float]:
        metrics = super().metrics(rows)
        if self._sampled is not None:
            metrics["sampled_rows"] = self._sampled.num_known(rows["sampled"])
            metrics |= self._sampled.means(rows["sampled"])
        return metrics

    def _remarks(self, metrics: Mapping[str, Any]) -> str:
        lacking = metrics["rows"] - metrics.get("sampled_rows", metrics["rows"])
        return f"; {lacking:,} have fewer than {self._config.sampled_candidates} others" if lacking else ""


def _jagged_field(batch: Batch, name: str) -> KeyedJaggedTensor:
    features = batch[name]
    assert isinstance(features, KeyedJaggedTensor)
    return features
