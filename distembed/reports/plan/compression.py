"""``distembed plan --compress``: the least compression with which a model fits.

A quotient-remainder table of n ids with m buckets (remainder rows) has ceil(n / m) quotient rows; a remainder table has
none. The m most frequent ids have a bucket each (``distembed prepare`` numbers ids by falling frequency), and the rest
share these buckets. The loss is assumed to grow with the number of training rows whose id is beyond the first m, summed
over the tables. For a total number of buckets this sum is least with one threshold for all tables: each id that is
looked up more often than the threshold has a bucket. So tables of few or of frequent ids stay whole.

Where a table's counts are not known its ids are taken to follow Zipf's law. Without any counts, and with ``hash_seed``
where ids are in no order of frequency, all tables then have the same number of rows, or all that they need.

The bytes of all tables are the most with which the plan fits, found by bisection. The rule has two exceptions:

- Each table has at least the number of buckets with the fewest bytes: with fewer, the added quotient rows take more.
- A whole table may be much larger than the compressed one with the most buckets (``concat``). It is whole only if there
  is room for it after all other tables have the buckets of the rule.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from distembed.base.errors import InsufficientMemory, UserError
from distembed.composition import COMPOSITIONS
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding import EmbeddingConfig, TableConfig, build_tables, table_features
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.occurrences import id_occurrences
from distembed.optim.declared import TableOptimizers
from distembed.optim.table_storage import replicated_storage, whole_table_storage
from distembed.partitions.settings import setting_names
from distembed.planning.devices import Cluster
from distembed.reports.plan.assessment import is_fitting
from distembed.reports.plan.plannable import ConfiguredModel
from distembed.reports.plan.remedies import least_enough
from distembed.tasks import build_task
from distembed.training.config import Config


class CountedIds:
    """The counts of a vocabulary's ids, in any order: a vocabulary that has grown is not sorted by count."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self._rising_counts = np.sort(counts)

    def num_ids_above(self, threshold: float) -> int:
        """Returns how many ids are looked up more often than a threshold, which may be between two whole counts.

        These are all ids above ceil(threshold), and the share ceil(threshold) - threshold of the ids with this count.
        """
        count = math.ceil(threshold)
        first, behind = np.searchsorted(self._rising_counts, (count, count + 1))
        return int(len(self._rising_counts) - behind) + round((count - threshold) * int(behind - first))


@dataclass(frozen=True)
class ZipfIds:
    """Ids with Zipf's distribution: id i, from 1, is looked up 1/i times as often as id 1."""

    num_ids: int  # number of ids of the table
    first_count: float = 1.0  # count of the first id

    def num_ids_above(self, threshold: float) -> int:
        """Returns how many ids are looked up more often than a threshold: all i with first_count / i above it."""
        if threshold * self.num_ids <= self.first_count:
            return self.num_ids
        return int(self.first_count / threshold)


IdCounts = CountedIds | ZipfIds
"""How often each id of a table is looked up in training."""


def load_id_counts(config: Config, features: Sequence[CategoricalFeature]) -> dict[str, IdCounts]:
    """Returns the occurrences of each feature's ids in training by feature name, or Zipf's law where unknown."""
    counts: dict[str, IdCounts] = {feature.name: ZipfIds(feature.num_embeddings) for feature in features}
    # hashed ids are not sorted by frequency, so the first m ids are not the most frequent ones
    if config.data.path is None or config.embedding.default.hash_seed is not None:
        return counts
    dataset = config.data.require_path()
    manifest = Manifest.load(dataset)
    if not manifest.vocabularies:
        return counts
    num_rows = manifest.split(config.data.train).num_rows
    tables = build_tables(manifest.schema.categorical, config.embedding)
    occurrences = id_occurrences(dataset, manifest, manifest.schema, tables, config.data.train)
    for feature in features:
        if feature.name in occurrences:
            counts[feature.name] = CountedIds(occurrences[feature.name].numpy())
        else:
            # all counts sum to num_rows x ids per row; the sum of 1/i up to n is about log(n) + Euler's constant
            harmonic = math.log(feature.num_embeddings) + np.euler_gamma
            first_count = max(1.0, num_rows * feature.mean_ids_per_row / harmonic)
            counts[feature.name] = ZipfIds(feature.num_embeddings, first_count)
    return counts


class CompressibleTable:
    """The bytes of one table, over all ranks, as a function of its number of buckets; ``settings`` leave that out.

    Functions of path-based tables lie on every rank, vectors on one. The allowed numbers of buckets reach from the one
    with the fewest bytes to the largest with which the table is still smaller than whole; they may be none.
    """

    def __init__(
        self,
        feature: CategoricalFeature,
        settings: TableConfig,
        optimizers: TableOptimizers,
        world_size: int,
        id_counts: IdCounts,
    ) -> None:
        self.name, self.num_ids = feature.name, feature.num_embeddings
        self._settings, self.num_ids_above = settings, id_counts.num_ids_above

        def num_bytes(table: CompositionalEmbeddingConfig) -> int:
            functions = (world_size - 1) * replicated_storage(table, table.function_tables(), optimizers).total
            return whole_table_storage(table, optimizers).total + functions

        full_table = _build_table(self.num_ids, replace(settings, partition="naive"))
        self.whole_bytes, self._whole_parameters = num_bytes(full_table), full_table.num_parameters
        # tiny tables with (buckets, quotient rows) = (1, 1), (2, 1) and (1, 2)
        probes = [
            _build_table(num_ids, replace(settings, num_buckets=num_buckets, force=True))
            for num_ids, num_buckets in ((1, 1), (2, 2), (2, 1))
        ]
        sizes = [num_bytes(probe) for probe in probes]
        self._bytes, self._parameters = self._linear(*sizes), self._linear(*(probe.num_parameters for probe in probes))
        fewest = self._find_min_buckets((sizes[2] - sizes[0]) / (sizes[1] - sizes[0]))
        self.min_bytes, self._range = self.num_bytes(fewest), None if fewest is None else (fewest, fewest)
        if fewest is not None:  # the most buckets: one less than the least number that saves nothing
            too_many = least_enough(fewest, self.num_ids, lambda number: not self._saves(number))
            self._range = fewest, max(fewest, too_many - 1)

    def num_bytes(self, num_buckets: int | None) -> int:
        """Returns the bytes with a number of buckets; None stands for the whole table."""
        return self.whole_bytes if num_buckets is None else self._bytes(num_buckets)

    def num_buckets(self, threshold: float, stays_compressed: bool) -> int | None:
        """Returns the allowed number of buckets nearest to the ids above a threshold; None for the whole table.

        It is whole if more ids than the most buckets are above (unless ``stays_compressed``) or no number is allowed.
        """
        num_ids = self.num_ids_above(threshold)
        if self._range is None or (num_ids > self._range[1] and not stays_compressed):
            return None
        return min(max(self._range[0], num_ids), self._range[1])

    def _linear(self, one_each: int, two_buckets: int, two_quotients: int) -> Callable[[int], int]:
        """Returns a * m + b * ceil(n / m) + c as a function of the buckets m, from the sizes of the three probes."""
        per_bucket, per_quotient = two_buckets - one_each, two_quotients - one_each
        fixed = one_each - per_bucket - per_quotient
        return lambda num_buckets: per_bucket * num_buckets + per_quotient * -(-self.num_ids // num_buckets) + fixed

    def _saves(self, num_buckets: int) -> bool:
        """Returns whether ``build_tables`` compresses the table with so many buckets, and to fewer bytes."""
        if self._bytes(num_buckets) >= self.whole_bytes:
            return False
        saves_parameters = self._parameters(num_buckets) < self._whole_parameters
        return self._settings.force or (self.num_ids > self._settings.threshold and saves_parameters)

    def _find_min_buckets(self, ratio: float) -> int | None:
        """Returns the number of buckets with the fewest bytes, or None if no number saves any.

        ``ratio`` r is a quotient row's bytes over a bucket's: m + r n / m is least at m = sqrt(r n).
        """
        best = math.sqrt(self.num_ids * ratio)
        # at m = best + d the cost m + best^2 / m exceeds its least, 2 best, by d^2 / (best + d), and rounding up costs
        # at most 1 + r (a bucket and a quotient row). Both are equal at d = reach: no number further away costs less
        reach = (1 + ratio + math.sqrt((1 + ratio) ** 2 + 4 * (1 + ratio) * best)) / 2
        low, high = max(1, math.floor(best - reach)), min(self.num_ids, math.ceil(best + reach) + 1)
        return min(filter(self._saves, range(low, high + 1)), key=self.num_bytes, default=None)


def _build_table(num_ids: int, settings: TableConfig) -> CompositionalEmbeddingConfig:
    (table,) = build_tables([CategoricalFeature("table", num_ids)], EmbeddingConfig(default=settings))
    return table


_PRECISION = 0.002  # relative precision of the tables' total bytes
_BISECTIONS = 60  # halvings of the range of thresholds, after which no table's buckets change any more
BucketsByTable = dict[str, int | None]
"""Number of remainder rows by the name of the table; None where the table is whole."""


def compress_config(config: Config, cluster: Cluster) -> Config:
    """Returns the config with its tables compressed as little as makes it fit; the given config if that fits.

    Compressed tables use the remainder scheme where the default does, else quotient-remainder. Tables with settings of
    their own keep them. Raises ``InsufficientMemory`` where no compression makes the model fit.
    """
    if is_fitting(ConfiguredModel(config), cluster):
        return config
    # features whose tables have no settings of their own
    schema = config.data.load_schema()
    own_tables, dense_tables = config.embedding.tables, build_task(config.task, schema).dense_tables
    features = [each for each in table_features(schema.categorical, config.embedding) if each.name not in own_tables]
    id_counts, optimizers = load_id_counts(config, features), config.train.table_optimizers
    tables = [
        CompressibleTable(
            feature,
            _compressed_settings(config, None),
            optimizers.for_dense_gradient() if feature.name in dense_tables else optimizers,
            cluster.world_size,
            id_counts[feature.name],
        )
        for feature in features
    ]

    def compressed(num_bytes: float) -> Config:
        """Returns the config with settings for each compressible table, whose buckets take ``num_bytes`` in all."""
        full = dataclasses.replace(config.embedding.default, partition="naive")
        buckets = allocate_buckets(tables, num_bytes).items()
        settings = {name: full if num is None else _compressed_settings(config, num) for name, num in buckets}
        embedding = dataclasses.replace(config.embedding, tables=settings | own_tables)
        return dataclasses.replace(config, embedding=embedding)

    def fits(num_bytes: float) -> bool:
        return is_fitting(ConfiguredModel(compressed(num_bytes)), cluster)

    low, high = sum(table.min_bytes for table in tables), sum(table.whole_bytes for table in tables)
    if not fits(low):
        raise InsufficientMemory(
            "no compression of the tables makes the model fit: with the rows that take the fewest bytes it still does "
            "not. Use more or larger devices, or a smaller embedding_dim."
        )
    if fits(high):
        low = high
    while high > (1 + _PRECISION) * low:
        # the geometric mean, since the answer may be a thousandth of the largest size
        middle = math.isqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return compressed(low)


def allocate_buckets(tables: Sequence[CompressibleTable], max_bytes: float) -> BucketsByTable:
    """Returns each table's buckets by the module's rule, within ``max_bytes`` in all or with the fewest possible."""
    # 1. The threshold is lowered by bisection, which gives all tables more buckets, until the bytes are used up.
    # 2. At the next lower threshold some table may turn whole (None in place of buckets), and no longer fit: its jump
    #    leaves bytes unused. It stays compressed (`compressed`), and step 1 is repeated for the other tables.
    # 3. Tables that would be whole become whole while there is room, the smallest first.
    compressed: set[str] = set()

    def buckets_above(threshold: float) -> BucketsByTable:
        """Returns the buckets with which every id above the threshold has one."""
        return {table.name: table.num_buckets(threshold, table.name in compressed) for table in tables}

    def total_bytes(buckets: BucketsByTable) -> int:
        return sum(table.num_bytes(buckets[table.name]) for table in tables)

    def lowest_threshold() -> tuple[float, float]:
        """Returns the lowest threshold within the bytes, and one just below it that is not; twice 0 if all fits."""
        if total_bytes(buckets_above(0.0)) <= max_bytes:
            return 0.0, 0.0
        high = 1.0
        while any(table.num_ids_above(high) for table in tables):
            high *= 2
        low = 0.25 / max(table.num_ids for table in tables)  # so low that all ids are above it
        for _ in range(_BISECTIONS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if total_bytes(buckets_above(middle)) <= max_bytes else (middle, high)
        return high, low

    while True:
        threshold, too_low = lowest_threshold()
        buckets = buckets_above(threshold)
        turned_whole = _whole_tables(buckets_above(too_low)) - _whole_tables(buckets)
        if not turned_whole:
            break
        compressed |= turned_whole
    used_bytes = total_bytes(buckets)
    for table in sorted(tables, key=lambda table: table.num_ids):
        more = table.whole_bytes - table.num_bytes(buckets[table.name])
        if table.num_buckets(threshold, False) is None and used_bytes + more <= max_bytes:
            buckets[table.name], used_bytes = None, used_bytes + more
    return buckets


def _compressed_settings(config: Config, num_buckets: int | None) -> TableConfig:
    default = config.embedding.default
    scheme = "remainder" if default.partition == "remainder" else "quotient_remainder"
    composition = COMPOSITIONS[default.composition]
    chosen = {name: getattr(default, name) for name in setting_names(composition.settings)}
    try:
        composition(**chosen).partition_dims(default.embedding_dim, 1 if scheme == "remainder" else 2)
    except UserError:  # settings for another number of partitions, such as dims of three
        chosen = dataclasses.asdict(composition.settings())
    return dataclasses.replace(default, partition=scheme, num_buckets=num_buckets, collisions=None, **chosen)


def _whole_tables(buckets: BucketsByTable) -> set[str]:
    """Returns the names of the tables that stay whole, without buckets."""
    return {name for name, num_buckets in buckets.items() if num_buckets is None}
