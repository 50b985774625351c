"""``distembed plan --fit``: the least compression with which a model fits.

The rule: rows go where they are looked up most. Of a table with m remainder rows the m most frequent ids have one each
(``distembed prepare`` gives out ids by falling frequency); the others share these rows, and are told apart by the few
rows of the quotient alone. So the expected loss is taken to grow with the number of training rows whose id is beyond
the first m, summed over the tables. For a given number of rows in all that sum is least if rows are given out by
falling count, since the count of a table's m-th id falls with m: every table has the ids that were seen more often than
some count, whatever their table. So tables of few or of frequent ids stay whole.

Where a table's counts are not known its ids are taken to be as frequent as Zipf's law has them, of as many as training
looks up. Without any counts all tables then have the same number of rows, or all that they need. So it is with
``hash_seed`` too: hashed ids are in no order of frequency, so that a row more is worth as much in any table.

The bytes of all tables are the most with which the plan fits, found by halving. Two things are not up to the rule:

- No table has fewer rows than take the fewest bytes. On the way there the quotient's rows take more than is saved;
  where they are functions, that is far from the fewest rows.
- A table of which the last row more costs much, since whole it has another shape than compressed (``concat``), is whole
  only if there is room for that when the others have been given all that the rule has for them.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from distembed.capacity.assessment import assess_capacity
from distembed.config import Config
from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import CategoricalFeature
from distembed.data.prepare.vocabulary import FIRST_ID
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.settings import EmbeddingConfig, TableConfig, build_tables
from distembed.errors import DoesNotFit, UserError
from distembed.optim.declared import TableOptimizers
from distembed.planning.cluster import Cluster
from distembed.planning.storage import function_storage, whole_table_storage
from distembed.training.build import table_optimizers

_PRECISION = 0.002
"""Share of the tables' bytes to which these are found."""
_HALVINGS = 60
"""Of the range of counts, after which no table's rows change any more."""

Buckets = dict[str, int | None]
"""By table, its remainder rows; None where it is whole."""


def compress_config(config: Config, cluster: Cluster) -> Config:
    """The config with each table compressed as far as the cluster asks for; the same one where it fits as it is.

    Compressed tables are hashed where the default is, else quotient-remainder ones. Tables that have settings of their
    own keep these.

    Raises:
        DoesNotFit: where even the most compressed model does not fit.
    """
    if assess_capacity(config, cluster).fits:
        return config
    tables = _compressible(config, cluster.world_size)

    def fits(num_bytes: float) -> bool:
        return assess_capacity(_with_buckets(config, give_out(tables, num_bytes)), cluster).fits

    low, high = sum(table.least_bytes for table in tables), sum(table.whole_bytes for table in tables)
    if not fits(low):
        raise DoesNotFit(
            "no compression of the tables makes the model fit: with the rows that take the fewest bytes it still does "
            "not. Use more or larger devices, or a smaller embedding_dim."
        )
    if fits(high):
        low = high
    while high > (1 + _PRECISION) * low:
        # what has to be found may be a thousandth of the whole
        middle = math.isqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return _with_buckets(config, give_out(tables, low))


class Ids(Protocol):
    """How often the ids of a table are looked up in training, the most frequent first."""

    def seen_more_often(self, level: float) -> int:
        """How many ids were looked up more often than so; of ids of one count more and more as that is approached."""


class CountedIds:
    """Ids of a vocabulary.

    Args:
        counts: of each id, falling.
    """

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self._rising = np.ascontiguousarray(counts[::-1])

    def seen_more_often(self, level: float) -> int:
        count = math.ceil(level)
        first, behind = np.searchsorted(self._rising, (count, count + 1))
        return int(len(self._rising) - behind) + round((count - level) * int(behind - first))


@dataclass(frozen=True)
class ZipfIds:
    """Ids of which the i-th is looked up 1/i times as often as the first.

    Attributes:
        num_ids: of the table.
        of_first: how often the first is.
    """

    num_ids: int
    of_first: float = 1.0

    def seen_more_often(self, level: float) -> int:
        return self.num_ids if level * self.num_ids <= self.of_first else int(self.of_first / level)


@dataclass(frozen=True)
class _Linear:
    """What grows with a compressed table's rows: of each remainder and quotient row, and beside them."""

    of_bucket: int
    of_quotient: int
    rest: int

    def at(self, num_ids: int, buckets: int) -> int:
        return self.of_bucket * buckets + self.of_quotient * -(-num_ids // buckets) + self.rest


class CompressibleTable:
    """A table with as many rows as it is given; bytes are those of all ranks together.

    Functions of path-based tables lie on every rank, vectors on one.

    Attributes:
        least_bytes: with the buckets that take the fewest.
        whole_bytes: of the whole table.

    Args:
        feature: that it is of.
        settings: of the compressed table, but for ``num_buckets``.
        optimizers: of the tables.
        world_size: number of ranks.
        ids: how often they are looked up.
    """

    def __init__(
        self, feature: CategoricalFeature, settings: TableConfig, optimizers: TableOptimizers, world_size: int, ids: Ids
    ) -> None:
        self.name, self.num_ids, self.ids = feature.name, feature.num_embeddings, ids
        self._settings = settings
        whole = _table(feature.num_embeddings, dataclasses.replace(settings, partition="naive"))
        self.whole_bytes = _bytes_of(whole, optimizers, world_size)
        self._whole_parameters = whole.num_parameters
        probes = [
            _table(size, dataclasses.replace(settings, num_buckets=buckets, force=True))
            for size, buckets in ((1, 1), (2, 2), (2, 1))
        ]
        self._bytes = _linear([_bytes_of(probe, optimizers, world_size) for probe in probes])
        self._parameters = _linear([probe.num_parameters for probe in probes])
        self._least = self._least_buckets()
        self._most = self._most_buckets()
        self.least_bytes = self.num_bytes(self._least)

    def num_bytes(self, buckets: int | None) -> int:
        """Of the table with so many buckets."""
        return self.whole_bytes if buckets is None else self._bytes.at(self.num_ids, buckets)

    def buckets(self, level: float, stays_compressed: bool) -> int | None:
        """To give to the ids that were seen more often than so; None where the table is to be whole."""
        if self._least is None or self._most is None:
            return None
        rows = self.ids.seen_more_often(level)
        if rows > self._most and not stays_compressed:
            return None
        return min(max(self._least, rows), self._most)

    def _saves(self, buckets: int) -> bool:
        """Whether the table is compressed at all with so many, and worth it."""
        settings, size = self._settings, self.num_ids
        if self._bytes.at(size, buckets) >= self.whole_bytes:
            return False
        saves_parameters = self._parameters.at(size, buckets) < self._whole_parameters
        return settings.force or (size > settings.threshold and saves_parameters)

    def _least_buckets(self) -> int | None:
        """Those that take the fewest bytes; None where the whole table does."""
        ratio = self._bytes.of_quotient / self._bytes.of_bucket
        best = math.sqrt(self.num_ids * ratio)
        # of buckets x and quotients n/x, rounding up costs at most one of each; beyond this x itself costs more
        reach = (1 + ratio + math.sqrt((1 + ratio) ** 2 + 4 * (1 + ratio) * best)) / 2
        low, high = max(1, math.floor(best - reach)), min(self.num_ids, math.ceil(best + reach) + 1)
        saving = [buckets for buckets in range(low, high + 1) if self._saves(buckets)]
        return min(saving, key=self.num_bytes, default=None)

    def _most_buckets(self) -> int | None:
        """Those beyond which the table may as well be whole."""
        low, high = self._least, self.num_ids
        if low is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._saves(middle) else (low, middle)
        return low


def give_out(tables: Sequence[CompressibleTable], num_bytes: float) -> Buckets:
    """Buckets of each table, by the rule above, within so many bytes, or with the least bytes that there can be."""
    compressed: set[str] = set()
    while True:
        level, below = _lowest_level(tables, num_bytes, compressed)
        buckets = _at_level(tables, level, compressed)
        turned = {name for name, own in _at_level(tables, below, compressed).items() if own is None}
        turned -= {name for name, own in buckets.items() if own is None}
        if not turned:
            break
        # there is no room for these as wholes; others may have what that leaves
        compressed |= turned
    spent = _bytes_at(tables, buckets)
    wanted = [table for table in tables if table.buckets(level, False) is None and buckets[table.name] is not None]
    for table in sorted(wanted, key=lambda table: table.num_ids):
        more = table.whole_bytes - table.num_bytes(buckets[table.name])
        if spent + more <= num_bytes:
            buckets[table.name], spent = None, spent + more
    return buckets


def _lowest_level(
    tables: Sequence[CompressibleTable], num_bytes: float, compressed: Collection[str]
) -> tuple[float, float]:
    """A count down to which ids have rows within so many bytes, and a lower one down to which they have not."""
    if _bytes_at(tables, _at_level(tables, 0.0, compressed)) <= num_bytes:
        return 0.0, 0.0
    high = 1.0
    while any(table.ids.seen_more_often(high) for table in tables):
        high *= 2
    low = 0.25 / max(table.num_ids for table in tables)  # all ids of one count, but for less than half of one
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        is_within = _bytes_at(tables, _at_level(tables, middle, compressed)) <= num_bytes
        low, high = (low, middle) if is_within else (middle, high)
    return high, low


def _at_level(tables: Sequence[CompressibleTable], level: float, compressed: Collection[str]) -> Buckets:
    return {table.name: table.buckets(level, table.name in compressed) for table in tables}


def _bytes_at(tables: Sequence[CompressibleTable], buckets: Mapping[str, int | None]) -> int:
    return sum(table.num_bytes(buckets[table.name]) for table in tables)


def _table(num_ids: int, settings: TableConfig) -> CompositionalEmbeddingConfig:
    (table,) = build_tables([CategoricalFeature("table", num_ids)], EmbeddingConfig(default=settings))
    return table


def _bytes_of(table: CompositionalEmbeddingConfig, optimizers: TableOptimizers, world_size: int) -> int:
    whole = whole_table_storage(table, optimizers.sparse, optimizers.dense, optimizers.is_fused)
    return whole.total + (world_size - 1) * function_storage(table, optimizers.dense).total


def _linear(probes: Sequence[int]) -> _Linear:
    """Of tables of one bucket and one quotient row, of two and one, and of one and two."""
    one, buckets, quotients = probes
    of_bucket, of_quotient = buckets - one, quotients - one
    return _Linear(of_bucket, of_quotient, one - of_bucket - of_quotient)


def _compressible(config: Config, world_size: int) -> list[CompressibleTable]:
    """Tables without settings of their own."""
    features = [
        feature for feature in config.data.load_schema().categorical if feature.name not in config.embedding.tables
    ]
    ids, optimizers, settings = _ids(config, features), table_optimizers(config.train), _compressed(config, None)
    return [CompressibleTable(feature, settings, optimizers, world_size, ids[feature.name]) for feature in features]


def _ids(config: Config, features: Sequence[CategoricalFeature]) -> dict[str, Ids]:
    unknown: dict[str, Ids] = {feature.name: ZipfIds(feature.num_embeddings) for feature in features}
    if config.data.path is None or config.embedding.default.hash_seed is not None:
        return unknown
    manifest = Manifest.load(config.data.path)
    if not manifest.vocabularies:
        return unknown
    num_rows = manifest.split(config.data.train).num_rows
    found: dict[str, Ids] = {}
    for feature in features:
        if feature.name in manifest.vocabularies:
            found[feature.name] = CountedIds(_counts(Path(config.data.path) / manifest.vocabularies[feature.name].file))
        else:
            # the sum of 1/i is about the logarithm and Euler's constant
            harmonic = math.log(feature.num_embeddings) + np.euler_gamma
            of_first = max(1.0, num_rows * feature.mean_ids_per_row / harmonic)
            found[feature.name] = ZipfIds(feature.num_embeddings, of_first)
    return found


def _counts(vocabulary: Path) -> NDArray[np.int64]:
    """How often each id was seen in training, those of no single value first, as often as any."""
    try:
        own = pq.read_table(vocabulary, columns=["count"])["count"].to_numpy()
    except OSError as error:
        raise UserError(f"the vocabulary {vocabulary} cannot be read: {error}; prepare the dataset again.") from error
    return np.concatenate([np.full(FIRST_ID, own.max(initial=1)), own])


def _compressed(config: Config, buckets: int | None) -> TableConfig:
    default = config.embedding.default
    scheme = "remainder" if default.partition == "remainder" else "quotient_remainder"
    # those of other schemes may be for more partitions
    dims = default.dims if default.dims is not None and len(default.dims) == 2 else None
    return dataclasses.replace(default, partition=scheme, num_buckets=buckets, collisions=None, dims=dims)


def _with_buckets(config: Config, buckets: Mapping[str, int | None]) -> Config:
    whole = dataclasses.replace(config.embedding.default, partition="naive")
    tables = {
        name: whole if own is None else _compressed(config, own) for name, own in buckets.items()
    } | config.embedding.tables
    return dataclasses.replace(config, embedding=dataclasses.replace(config.embedding, tables=tables))
