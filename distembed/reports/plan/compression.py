"""``distembed plan --compress``: the least compression with which a model fits.

A quotient-remainder table of n ids with m buckets (remainder rows) has ceil(n / m) quotient rows; a remainder table has
none. Buckets go to the ids that are looked up most: the m most frequent ids have one each (``distembed prepare``
numbers ids by falling frequency), and the rest share them. So the expected loss is taken to grow with the number of
training rows whose id is beyond the first m, summed over the tables. For a total number of buckets this sum is least if
the ids above one count, equal for all tables, have a bucket each. So tables of few or of frequent ids stay whole.

Where a table's counts are not known its ids are taken to follow Zipf's law. Without any counts, and with ``hash_seed``
where ids are in no order of frequency, all tables then have the same number of rows, or all that they need.

The bytes of all tables are the most with which the plan fits, found by bisection. Two things bend the rule:

- No table has fewer rows than take the fewest bytes: below that number the quotient's rows take more than is saved.
- A table whose last row costs much, since whole it has another shape than compressed (``concat``), is whole only if
  there is room for that when all other tables have the rows of the rule.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.base.errors import InsufficientMemory, UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import CategoricalFeature
from distembed.data.table.vocabulary import FIRST_ID
from distembed.embedding import EmbeddingConfig, TableConfig, build_tables
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.declared import TableOptimizers
from distembed.planning.devices import Cluster
from distembed.planning.storage import replicated_storage, whole_table_storage
from distembed.reports.plan.assessment import is_fitting
from distembed.reports.plan.plannable import ConfiguredModel
from distembed.reports.plan.remedies import least_enough
from distembed.training.build import table_optimizers
from distembed.training.config import Config


class CountedIds:
    """Ids of a vocabulary with their counts, which are in no order where the vocabulary has grown."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self._rising_counts = np.sort(counts)

    def num_ids_above(self, threshold: float) -> int:
        """Returns how many ids are looked up more often than a threshold.

        Between two whole numbers it grows step by step, so that of the ids of one count any number can be taken.
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
        """Returns how many ids are looked up more often than a threshold."""
        if threshold * self.num_ids <= self.first_count:
            return self.num_ids
        return int(self.first_count / threshold)


IdCounts = CountedIds | ZipfIds
"""How often each id of a table is looked up in training."""


def load_id_counts(config: Config, features: Sequence[CategoricalFeature]) -> dict[str, IdCounts]:
    """Returns the counts of each feature's ids by its name, from the config's dataset where that has a vocabulary."""
    counts: dict[str, IdCounts] = {feature.name: ZipfIds(feature.num_embeddings) for feature in features}
    # hashed ids are in no order of frequency
    if config.data.path is None or config.embedding.default.hash_seed is not None:
        return counts
    dataset = config.data.require_path()
    manifest = Manifest.load(dataset)
    if not manifest.vocabularies:
        return counts
    num_rows = manifest.split(config.data.train).num_rows
    for feature in features:
        if feature.name in manifest.vocabularies:
            file = manifest.require_unchanged(dataset, manifest.vocabularies[feature.name].file)
            try:
                counted = pq.read_table(file, columns=["count"])["count"].to_numpy()
            except (pa.ArrowException, OSError) as error:
                raise UserError(f"the vocabulary {file} cannot be read: {error}; prepare the dataset again.") from error
            # the reserved ids come first, and count as much as the most frequent
            counts[feature.name] = CountedIds(np.concatenate([np.full(FIRST_ID, counted.max(initial=1)), counted]))
        else:
            # the sum of 1/i is about the logarithm and Euler's constant
            harmonic = math.log(feature.num_embeddings) + np.euler_gamma
            first_count = max(1.0, num_rows * feature.mean_ids_per_row / harmonic)
            counts[feature.name] = ZipfIds(feature.num_embeddings, first_count)
    return counts


class CompressibleTable:
    """A table with as many buckets as it is given; its bytes are summed over all ranks.

    Functions of path-based tables lie on every rank, vectors on one. The fewest buckets are the number that takes the
    fewest bytes; with the most, the table is still smaller than whole. ``settings`` are the compressed table's without
    ``num_buckets``.
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

        whole = _build_table(self.num_ids, replace(settings, partition="naive"))
        self.whole_bytes, self._whole_parameters = num_bytes(whole), whole.num_parameters
        # of 1 bucket and 1 quotient row, of 2 buckets, and of 2 quotient rows
        probes = [
            _build_table(num_ids, replace(settings, num_buckets=num_buckets, force=True))
            for num_ids, num_buckets in ((1, 1), (2, 2), (2, 1))
        ]
        sizes = [num_bytes(probe) for probe in probes]
        self._bytes, self._parameters = self._linear(*sizes), self._linear(*(probe.num_parameters for probe in probes))
        fewest = self._find_min_buckets((sizes[2] - sizes[0]) / (sizes[1] - sizes[0]))
        self.min_bytes, self._range = self.num_bytes(fewest), None if fewest is None else (fewest, fewest)
        if fewest is not None:  # beyond the second number of buckets the table may as well be whole
            too_many = least_enough(fewest, self.num_ids, lambda number: not self._saves(number))
            self._range = fewest, max(fewest, too_many - 1)

    def num_bytes(self, num_buckets: int | None) -> int:
        """Returns the bytes with a number of buckets; None stands for the whole table."""
        return self.whole_bytes if num_buckets is None else self._bytes(num_buckets)

    def num_buckets(self, threshold: float, stays_compressed: bool) -> int | None:
        """Returns the buckets for a row to each id that is looked up more often than a threshold; None for whole.

        A table that stays compressed is not whole even where that many rows would make it so.
        """
        num_ids = self.num_ids_above(threshold)
        if self._range is None or (num_ids > self._range[1] and not stays_compressed):
            return None
        return min(max(self._range[0], num_ids), self._range[1])

    def _linear(self, one: int, two_buckets: int, two_quotients: int) -> Callable[[int], int]:
        """Returns a size that grows with each bucket and each quotient row, as a function of the buckets."""
        per_bucket, per_quotient = two_buckets - one, two_quotients - one
        fixed = one - per_bucket - per_quotient
        return lambda num_buckets: per_bucket * num_buckets + per_quotient * -(-self.num_ids // num_buckets) + fixed

    def _saves(self, num_buckets: int) -> bool:
        """Returns whether the table is compressed at all with so many buckets, and smaller than whole."""
        if self._bytes(num_buckets) >= self.whole_bytes:
            return False
        saves_parameters = self._parameters(num_buckets) < self._whole_parameters
        return self._settings.force or (self.num_ids > self._settings.threshold and saves_parameters)

    def _find_min_buckets(self, ratio: float) -> int | None:
        """Returns the number of buckets that takes the fewest bytes; None where the whole table does.

        The ratio is that of a quotient row's bytes to a bucket's.
        """
        best = math.sqrt(self.num_ids * ratio)
        # of buckets x and quotients n/x, rounding up costs at most one of each; beyond this x itself costs more
        reach = (1 + ratio + math.sqrt((1 + ratio) ** 2 + 4 * (1 + ratio) * best)) / 2
        low, high = max(1, math.floor(best - reach)), min(self.num_ids, math.ceil(best + reach) + 1)
        return min(filter(self._saves, range(low, high + 1)), key=self.num_bytes, default=None)


def _build_table(num_ids: int, settings: TableConfig) -> CompositionalEmbeddingConfig:
    (table,) = build_tables([CategoricalFeature("table", num_ids)], EmbeddingConfig(default=settings))
    return table


_PRECISION = 0.002  # share of the tables' bytes to which these are found
_BISECTIONS = 60  # of the range of counts, after which no table's rows change any more
BucketsByTable = dict[str, int | None]
"""Number of remainder rows by the name of the table; None where the table is whole."""


def compress_config(config: Config, cluster: Cluster) -> Config:
    """Returns the config with its tables compressed as little as the cluster asks for; itself where it fits as it is.

    Compressed tables are hashed where the default is, else quotient-remainder ones. Tables that have settings of their
    own keep these.
    """
    if is_fitting(ConfiguredModel(config), cluster):
        return config
    # tables that have no settings of their own
    own_tables, dense_tables = config.embedding.tables, config.task.build().dense_tables
    features = [feature for feature in config.data.load_schema().categorical if feature.name not in own_tables]
    id_counts, optimizers = load_id_counts(config, features), table_optimizers(config.train)
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
        """Returns the config with settings for each of these tables; settings that are there stay."""
        whole = dataclasses.replace(config.embedding.default, partition="naive")
        buckets = allocate_buckets(tables, num_bytes).items()
        new = {name: whole if own is None else _compressed_settings(config, own) for name, own in buckets}
        return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, tables=new | own_tables))

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
        # the geometric middle, since the answer may be a thousandth of the whole
        middle = math.isqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return compressed(low)


def allocate_buckets(tables: Sequence[CompressibleTable], max_bytes: float) -> BucketsByTable:
    """Returns the buckets of each table by the rule above, within so many bytes or with the fewest there can be."""
    compressed: set[str] = set()

    def buckets_above(threshold: float) -> BucketsByTable:
        """Returns the buckets with which every id above a count has one."""
        return {table.name: table.num_buckets(threshold, table.name in compressed) for table in tables}

    def total_bytes(buckets: BucketsByTable) -> int:
        return sum(table.num_bytes(buckets[table.name]) for table in tables)

    def lowest_threshold() -> tuple[float, float]:
        """Returns a count above which all ids have a bucket within the bytes, and a lower one that is too low."""
        if total_bytes(buckets_above(0.0)) <= max_bytes:
            return 0.0, 0.0
        high = 1.0
        while any(table.num_ids_above(high) for table in tables):
            high *= 2
        low = 0.25 / max(table.num_ids for table in tables)  # all ids of one count, but for less than half of one
        for _ in range(_BISECTIONS):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if total_bytes(buckets_above(middle)) <= max_bytes else (middle, high)
        return high, low

    while True:
        threshold, too_low = lowest_threshold()
        buckets = buckets_above(threshold)
        turned_whole = {name for name, own in buckets_above(too_low).items() if own is None}
        turned_whole -= {name for name, own in buckets.items() if own is None}
        if not turned_whole:
            break
        # these do not fit as wholes; other tables may have the bytes that this leaves
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
    # dims of other schemes may be for more partitions
    dims = default.dims if default.dims is not None and len(default.dims) == 2 else None
    return dataclasses.replace(default, partition=scheme, num_buckets=num_buckets, collisions=None, dims=dims)
