"""Which items a user takes, by two towers (Yi et al., RecSys 2019; Yang et al., WWW Companion 2020).

A row with the label 1, or any row where labels are not 0 and 1, is a pair of a user and an item. The row's loss is a
softmax over candidates that all rows of the step share, on all ranks: the items of the step's P positive rows and, for
``sampled``, N further items that are drawn from the catalogue. With the score s_j of candidate j and the row's item t::

    loss   log( exp(s_t) + sum over j with another item than t of exp(s_j) / c_j ) - s_t
    c_j    (P - 1) f_j + N d_j      f_j: share of j among the pairs of the training split, d_j: probability of a draw

``c_j`` is the number of times that j is expected among the candidates, so that the sum estimates the sum over the
catalogue (the logQ correction; with both sources, mixed negative sampling). The row's own item is no draw, and is not
corrected (Khrylchenko et al., RecSys 2025).

Rows without a pair are left out before their ids are looked up. The loss of a step is the sum over its pairs, divided
by the number of its rows and by the share of pairs in the training split: about the mean over pairs.

The catalogue has each item of any split, with the features of its last row in the training split, or else in another
split. An evaluation computes the vectors of all items, then ranks all of them exactly for each query.
"""

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from distembed.base.errors import UserError
from distembed.base.ranks import Collectives
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import ITEM, LABELS, SPARSE_FEATURES, USER, WEIGHTS
from distembed.data.reader import Batch, BatchShares, read_share
from distembed.models.queries import Items
from distembed.models.two_tower import TowerVectors
from distembed.tasks.base import BatchPosition, Outputs, TaskContext
from distembed.tasks.catalogue import CatalogueRanking, NegativeDraws, item_weights
from distembed.tasks.catalogue.item_vectors import ItemVectors
from distembed.tasks.catalogue.keyed_rows import KeyedRows, columns_of
from distembed.tasks.catalogue.rank_rows import RankRows, gather_with_gradients
from distembed.tasks.catalogue.softmax import BatchCandidates
from distembed.tasks.catalogue.user_items import count_items
from distembed.tasks.recommendations import (
    RELEVANT,
    no_items,
    rank_queries,
    ranked_fields,
    ranked_targets,
)
from distembed.tasks.recommending_task import RecommendingTask
from distembed.tasks.retrieval_batches import FeatureRows, stacked
from distembed.tasks.retrieval_config import RetrievalConfig
from distembed.tasks.split_items import SplitItems

NUM_ITEMS = "num_items"
"""Name of the numbers of items of each rank's step in :attr:`Batch.counts_by_rank`."""
ITEM_IDS = "item_ids"
"""Name of the field that has the id of each row's item; in evaluations batches of items of the catalogue have it."""


class RetrievalTask(RecommendingTask):
    """Finds items for users by a model that returns the vectors of queries and of items."""

    batch_fields = (SPARSE_FEATURES,)

    def __init__(self, config: RetrievalConfig) -> None:
        super().__init__(config, has_users=config.user is not None)
        self._config = config
        self._num_negatives = config.num_negatives if config.loss == "sampled" else 0
        self.added_rows = dict.fromkeys(config.item_side, self._num_negatives) if self._num_negatives else {}
        self.id_features = {USER: config.user or USER, ITEM: config.item_name}
        self._context: TaskContext | None = None
        self._on_hosts: Collectives | None = None

    def start(self, context: TaskContext) -> None:
        """Stores the context and the reserved ids of items and users; the catalogue is read at first use.

        Several ranks make a group, in which they exchange their numbers of items; all of them call it.
        """
        if context.data.skip_unreadable:
            raise UserError(
                f"data.skip_unreadable is {context.data.skip_unreadable}, and task.name=retrieval reads the items and "
                "pairs of all row groups before it trains; set it to 0, and restore or prepare the dataset again."
            )
        self._context = context
        self._item, self._pairs = self._config.item_name, self._config.pair_columns(context.schema)
        items = next(feature for feature in context.schema.categorical if feature.name == self._item)
        self.distinct_outputs = {"best": items.num_embeddings}
        self._items = SplitItems(context, self._pairs, self._config.excludes_seen)
        self._reserved = self._items.reserved_items
        self._group = dist.group.WORLD if context.ranks.world_size > 1 else None
        if context.ranks.world_size > 1:
            self._on_hosts = Collectives.in_own_group()
        self.scored_items = ItemVectors(self._group)

    @property
    def _started(self) -> TaskContext:
        assert self._context is not None
        return self._context

    @property
    def dataset(self) -> str:
        """The folder of the dataset that the task was started on."""
        return self._started.dataset

    @property
    def num_candidates(self) -> int:
        return len(self.catalogue)

    @cached_property
    def catalogue(self) -> KeyedRows:
        """The items of all splits with their features.

        Raises:
            UserError: Only the metadata of the dataset is here.
        """
        data, dataset = self._started.data, self._started.dataset
        manifest = Manifest.load(dataset)
        if manifest.is_without_rows:
            raise UserError(
                f"the catalogue of items is read from the rows of the dataset, and {dataset} has none; give the "
                "dataset's folder by --data, or data= of load()."
            )
        # the last row counts: of the training split where it has the item
        last = [name for name in (data.test, data.validation, data.train) if name and name in manifest.splits]
        splits = [*(name for name in manifest.splits if name not in last), *last]
        columns = columns_of(self._started.schema, self._config.item_side)
        rows = KeyedRows.of_splits(dataset, splits, columns, self._item, "last")
        return rows.without(self._reserved)

    @cached_property
    def _item_counts(self) -> Int64[Tensor, " items"]:
        """How many pairs of the training split each item is in; 0 for reserved ids."""
        counts = count_items(self._started.dataset, self._started.data.train, self._pairs)
        counts[list(self._reserved)] = 0
        return counts

    @cached_property
    def _draws(self) -> NegativeDraws:
        """The draws of further items, which are items of the catalogue."""
        weights = item_weights(self._item_counts, self._config.negative_exponent, self._reserved)
        is_item = torch.zeros(len(weights), dtype=torch.bool)
        is_item[torch.from_numpy(self.catalogue.ids)] = True
        return NegativeDraws(weights.masked_fill(~is_item, 0.0), None, self._started.seed, "catalogue")

    @cached_property
    def _log_shares(self) -> tuple[Float[Tensor, " items"], Float[Tensor, " items"]]:
        """The logarithms of each item's share of the training pairs, f, and of its probability of a draw, d."""
        counts, device = self._item_counts.double(), self._started.ranks.device
        log_frequencies = (counts / counts.sum().clamp(min=1)).log().float()
        log_drawn = torch.full_like(log_frequencies, -torch.inf)
        if self._num_negatives:
            log_drawn = self._draws.log_probabilities(torch.arange(len(counts)).unsqueeze(1)).squeeze(1)
        return log_frequencies.to(device), log_drawn.to(device)

    @cached_property
    def _pair_share(self) -> float:
        """The share of pairs with a known item among the rows of the training split."""
        data, num_pairs = self._started.data, int(self._item_counts.sum())
        if not num_pairs:
            raise UserError(
                f"data.train is {data.train!r}, which has no pair: no row with a known item and, where there are "
                "labels, the label 1; name another split."
            )
        return num_pairs / Manifest.load(self._started.dataset).splits[data.train].num_rows

    def start_lines(self) -> list[str]:
        """Returns no line; reads the inputs of the first step, so that no rank waits for another in a collective.

        They take 16 bytes for each id of an item, on the device half of them; with ``sampled`` 8 bytes more, and the
        features of the catalogue's items.
        """
        _ = self._log_shares, self._pair_share
        return []

    def prepare_batch(self, batch: Batch, position: BatchPosition | None) -> Batch:
        """Returns the pairs of the batch with their weights and the ids of their items, and drawn items.

        Rows without a pair are left out, so that no table, tower or collective has them; a rank may have no row. A
        batch of an evaluation, ``position`` None, has a query for each pair, with its item as the relevant one.
        """
        features = batch[SPARSE_FEATURES]
        assert isinstance(features, KeyedJaggedTensor)
        items = features[self._item].values().long()
        is_pair = self._is_pair(batch, items)
        if position is None:
            relevant = JaggedTensor(items[is_pair], lengths=torch.ones(int(is_pair.sum()), dtype=torch.int64))
            rows = FeatureRows.of(batch, self._started.schema).without(self._config.item_side)
            return self._queries(rows.where(is_pair.numpy()), relevant, no_items(int(is_pair.sum())))
        self.scored_items = ItemVectors(self._group)  # frees the item vectors of the last evaluation
        parts, ids = [FeatureRows.of(batch, self._started.schema).where(is_pair.numpy())], [items[is_pair]]
        weights = torch.full(ids[0].shape, 1 / self._pair_share)
        if self._num_negatives:
            ranks = self._started.ranks
            first, stop = (rank * self._num_negatives // ranks.world_size for rank in (ranks.rank, ranks.rank + 1))
            drawn = self._draws.draw_for_all(position.step, first, stop - first, 1).flatten()
            rows = self.catalogue.batch(self.catalogue.positions(drawn.numpy()))
            parts.append(FeatureRows.of(rows, self.catalogue.schema))
            ids.append(drawn)
        fields = {**stacked(self._started.schema, *parts), WEIGHTS: weights, ITEM_IDS: torch.cat(ids)}
        # the counts are exchanged here, a step ahead and on the hosts: within the step, the host would wait for a GPU
        num_items = sum(map(len, ids))
        counts = [num_items] if self._on_hosts is None else self._on_hosts.gather_counts(num_items)
        return Batch(fields, batch.global_batch_size, {NUM_ITEMS: counts})

    def _is_pair(self, batch: Batch, items: Int64[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
        """Returns whether each row of a batch is a pair of a user and an item that is known."""
        is_pair = ~torch.isin(items, torch.tensor(self._reserved, dtype=torch.int64))
        if self._pairs.label is None:
            return is_pair
        labels = batch[LABELS]
        assert isinstance(labels, Tensor)
        return is_pair & (labels == 1)

    def step(self, outputs: TowerVectors, batch: Batch) -> tuple[Tensor, Outputs]:
        weights = batch[WEIGHTS]
        assert isinstance(weights, Tensor)
        candidates = self._candidates(outputs.items.float(), batch)
        return (candidates.cross_entropy(outputs.queries.float()) * weights).sum(), {}

    def _candidates(self, items: Float[Tensor, "rows dim"], batch: Batch) -> BatchCandidates:
        """Returns the candidate items of a step, gathered from all ranks; all ranks call it."""
        if self._context is None:  # not started: the planner's estimate of a step, whose values are not used
            num_candidates = batch.global_batch_size + self._num_negatives
            gathered = items.repeat(-(-num_candidates // len(items)), 1)[:num_candidates]
            return BatchCandidates(Items(torch.arange(num_candidates), gathered), items.new_zeros(num_candidates))
        ids = batch[ITEM_IDS]
        assert isinstance(ids, Tensor)
        ranks = RankRows(batch.counts_by_rank[NUM_ITEMS], self._group)
        ids = ranks.gather(ids)
        log_frequencies, log_drawn = (shares[ids] for shares in self._log_shares)
        num_others = len(ids) - self._num_negatives - 1
        log_counts = log_frequencies + (math.log(num_others) if num_others > 0 else -math.inf)
        if self._num_negatives:
            log_counts = torch.logaddexp(log_counts, log_drawn + math.log(self._num_negatives))
        shifts = math.log(max(1, len(ids))) - log_counts
        vectors = gather_with_gradients(items, ranks)
        return BatchCandidates(Items(ids, vectors), shifts, first=ranks.own_place.start)

    def catalogue_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yields this rank's batches of the catalogue's items, whose vectors :meth:`evaluate` then stores."""
        ranks = self._started.ranks
        steps = list(BatchShares(len(self.catalogue), batch_size, ranks.world_size).steps(ranks.rank))
        self.scored_items = ItemVectors(self._group, sum(map(len, steps)))
        for rows in steps or [range(0)]:
            yield self.item_batch(np.arange(rows.start, rows.stop))

    def item_batch(self, positions: npt.NDArray[np.int64]) -> Batch:
        """Returns a batch of items alone, given their positions in the catalogue."""
        rows = self.catalogue.batch(positions)
        fields = stacked(self._started.schema, FeatureRows.of(rows, self.catalogue.schema))
        ids = torch.from_numpy(self.catalogue.ids[positions])
        return Batch({**fields, WEIGHTS: torch.zeros(0), ITEM_IDS: ids}, max(1, len(positions)))

    def evaluation_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        yield from self.catalogue_batches(batch_size)
        yield from self.query_batches(split, batch_size)

    def query_batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        """Yields this rank's queries of a split: one for each user, from its first row, or one for each row."""
        ranks, dataset, user = self._started.ranks, self._started.dataset, self._config.user
        self._unknown = self._items.count_unknown(split)
        if user is None:
            for batch in read_share(dataset, split, batch_size, rank=ranks.rank, world_size=ranks.world_size):
                yield self.prepare_batch(batch, None)
            return
        columns = columns_of(self._started.schema, self._config.user_side(self._started.schema), self._pairs.label)
        rows = KeyedRows.of_splits(dataset, [split], columns, user, "first").without(self._items.reserved_users)
        relevant, seen = self._items.of(split), self._items.seen_before(split)
        steps = BatchShares(len(rows), batch_size, ranks.world_size).steps(ranks.rank)
        for step in list(steps) or [range(0)]:
            positions = np.arange(step.start, step.stop)
            users = torch.from_numpy(rows.ids[positions])
            queries = FeatureRows.of(rows.batch(positions), columns)
            yield self._queries(queries, relevant.of(users), seen.of(users))

    def _queries(self, rows: FeatureRows, relevant: JaggedTensor, excluded: JaggedTensor) -> Batch:
        """Returns a batch of queries, given the features of users alone."""
        fields = {
            **stacked(self._started.schema, rows),
            WEIGHTS: torch.ones(rows.num_rows),
            **ranked_fields(relevant, excluded),
        }
        return Batch(fields, max(1, rows.num_rows))

    def prediction_batch(self, batch: Batch) -> Batch:
        """Returns queries of the rows' users, as in the test split; the rows' items are not looked at."""
        user, rows = self._config.user, FeatureRows.of(batch, self._started.schema).without(self._config.item_side)
        seen = no_items(rows.num_rows)
        if user is not None:
            seen = self._items.seen_before(self._started.data.test).of(rows.ids[user][0].long())
        return self._queries(rows, no_items(rows.num_rows), seen)

    def evaluate(self, outputs: TowerVectors, batch: Batch) -> Outputs:
        """Stores the vectors of a batch of items; ranks all items for a batch of queries. All ranks call it."""
        if RELEVANT not in batch:
            ids = batch[ITEM_IDS]
            assert isinstance(ids, Tensor)
            self.scored_items.add(ids, outputs.items)
            return self._no_outputs(outputs.items)
        features, relevant = batch[SPARSE_FEATURES], batch[RELEVANT]
        assert isinstance(features, KeyedJaggedTensor) and isinstance(relevant, KeyedJaggedTensor)
        ranked = rank_queries(CatalogueRanking(self.scored_items, num_best=self._num_best), outputs.queries, batch)
        found = {"best": ranked.best, "best_scores": ranked.best_scores}
        if self._config.user is not None:
            found = {"users": features[self._config.user].values(), **found}
        return {**ranked_targets(ranked, relevant.lengths().long(), self._metrics), **found}

    def _no_outputs(self, items: Float[Tensor, "rows dim"]) -> Outputs:
        """Returns the outputs of no rows."""
        ids, scores = (items.new_zeros(0, self._num_best, dtype=dtype) for dtype in (torch.int64, torch.float32))
        outputs = {
            "metrics": items.new_zeros(0, len(self._metrics.names), dtype=torch.float32),
            "excluded_targets": ids[:, 0],
            "users": ids[:, 0],
            "best": ids,
            "best_scores": scores,
        }
        return {name: outputs[name] for name in self.outputs}
