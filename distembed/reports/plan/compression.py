"""``distembed plan --compress``: the least compression with which a model fits.

Rows go to the ids that are looked up most. Of a table with m remainder rows, its buckets, the m most frequent ids have
one each (``distembed prepare`` numbers ids by falling frequency); the others share these rows, and differ by the few
rows of the quotient alone. So the expected loss is taken to grow with the number of training rows whose id is beyond
the first m, summed over the tables. For a given number of buckets in all that sum is least if the ids above one count,
the same for every table, have a bucket each, since the count of a table's m-th id falls with m. So tables of few or of
frequent ids stay whole.

Where a table's counts are not known its ids are taken to be as frequent as Zipf's law has them, of as many as training
looks up. Without any counts all tables then have the same number of rows, or all that they need. So it is with
``hash_seed`` too: hashed ids are in no order of frequency, so that a row more is worth as much in any table.

The bytes of all tables are the most with which the plan fits, found by bisection. Two things bend the rule:

- No table has fewer rows than take the fewest bytes: below that number the quotient's rows take more than is saved.
- A table whose last row costs much, since whole it has another shape than compressed (``concat``), is whole only if
  there is room for that when the others have all rows that the rule has for them.
"""

import dataclasses
import math
from collections.abc import Sequence

from distembed.base.errors import InsufficientMemory
from distembed.embedding.settings import TableConfig
from distembed.planning.devices import Cluster
from distembed.reports.plan.assessment import is_fitting
from distembed.reports.plan.compressible_table import CompressibleTable, load_id_counts
from distembed.reports.plan.configured_model import ConfiguredModel
from distembed.training.build import table_optimizers
from distembed.training.config import Config

_PRECISION = 0.002  # share of the tables' bytes to which these are found
_BISECTIONS = 60  # of the range of counts, after which no table's rows change any more
BucketsByTable = dict[str, int | None]
"""Number of remainder rows by the name of the table; None where the table is whole."""


def compress_config(config: Config, cluster: Cluster) -> Config:
    """Returns the config with its tables compressed as little as the cluster asks for; itself where it fits as it is.

    Compressed tables are hashed where the default is, else quotient-remainder ones. Tables that have settings of their
    own keep these.

    Raises:
        InsufficientMemory: Even the most compressed model does not fit.
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
        # there is no room for these as wholes; others may have what that leaves
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
    # those of other schemes may be for more partitions
    dims = default.dims if default.dims is not None and len(default.dims) == 2 else None
    return dataclasses.replace(default, partition=scheme, num_buckets=num_buckets, collisions=None, dims=dims)
