"""A table that can be compressed as far as memory asks for: its bytes as a function of its remainder rows (buckets).

A quotient-remainder table of n ids with m buckets has m remainder rows and ceil(n / m) quotient rows, so that its bytes
are a linear function of both numbers; a remainder table has no quotient rows.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from distembed.capacity.id_counts import IdCounts
from distembed.data.dataset.schema import CategoricalFeature
from distembed.embedding import EmbeddingConfig, TableConfig, build_tables
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.optim.declared import TableOptimizers
from distembed.planning.storage import replicated_storage, whole_table_storage


@dataclass(frozen=True)
class _LinearSize:
    """A size that grows with each bucket and with each quotient row."""

    per_bucket: int
    per_quotient: int
    fixed: int

    @classmethod
    def through(cls, probes: Sequence[int]) -> "_LinearSize":
        """Returns the function through the sizes of tables of (1, 1), (2, 1) and (1, 2) buckets and quotient rows."""
        one, two_buckets, two_quotients = probes
        per_bucket, per_quotient = two_buckets - one, two_quotients - one
        return cls(per_bucket, per_quotient, one - per_bucket - per_quotient)

    def at(self, num_ids: int, num_buckets: int) -> int:
        """Returns the size of a table."""
        return self.per_bucket * num_buckets + self.per_quotient * -(-num_ids // num_buckets) + self.fixed


class CompressibleTable:
    """A table with as many buckets as it is given; its bytes are those of all ranks together.

    Functions of path-based tables lie on every rank, vectors on one. No table has fewer buckets than take the fewest
    bytes, nor so many that it is no smaller than whole.

    Args:
        feature: Feature that is looked up in the table.
        settings: Settings of the compressed table, but for ``num_buckets``.
        optimizers: Optimizers of the tables.
        world_size: Number of ranks.
        id_counts: How often the ids are looked up.
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
        self._id_counts, self._settings = id_counts, settings
        whole = _build_table(feature.num_embeddings, dataclasses.replace(settings, partition="naive"))
        self.whole_bytes = _bytes_on_all_ranks(whole, optimizers, world_size)
        self._whole_parameters = whole.num_parameters
        probes = [
            _build_table(num_ids, dataclasses.replace(settings, num_buckets=num_buckets, force=True))
            for num_ids, num_buckets in ((1, 1), (2, 2), (2, 1))
        ]
        self._bytes = _LinearSize.through([_bytes_on_all_ranks(probe, optimizers, world_size) for probe in probes])
        self._parameters = _LinearSize.through([probe.num_parameters for probe in probes])
        self._min_buckets = self._find_min_buckets()
        self._max_buckets = self._find_max_buckets()
        self.min_bytes = self.num_bytes(self._min_buckets)  # with the number of buckets that takes the fewest

    def num_bytes(self, num_buckets: int | None) -> int:
        """Returns the bytes with a number of buckets; None stands for the whole table."""
        return self.whole_bytes if num_buckets is None else self._bytes.at(self.num_ids, num_buckets)

    def num_ids_above(self, threshold: float) -> int:
        """Returns how many ids are looked up more often than a threshold."""
        return self._id_counts.num_ids_above(threshold)

    def num_buckets(self, threshold: float, stays_compressed: bool) -> int | None:
        """Returns the buckets for a row to each id that is looked up more often than a threshold; None for whole.

        Args:
            threshold: Count of look-ups in training.
            stays_compressed: Whether the table is not to be whole, though that many rows would make it so.
        """
        if self._min_buckets is None or self._max_buckets is None:
            return None
        num_ids = self.num_ids_above(threshold)
        if num_ids > self._max_buckets and not stays_compressed:
            return None
        return min(max(self._min_buckets, num_ids), self._max_buckets)

    def _saves(self, num_buckets: int) -> bool:
        """Returns whether the table is compressed at all with so many buckets, and smaller than whole."""
        settings, num_ids = self._settings, self.num_ids
        if self._bytes.at(num_ids, num_buckets) >= self.whole_bytes:
            return False
        saves_parameters = self._parameters.at(num_ids, num_buckets) < self._whole_parameters
        return settings.force or (num_ids > settings.threshold and saves_parameters)

    def _find_min_buckets(self) -> int | None:
        """Returns the number of buckets that takes the fewest bytes; None where the whole table does."""
        ratio = self._bytes.per_quotient / self._bytes.per_bucket
        best = math.sqrt(self.num_ids * ratio)
        # of buckets x and quotients n/x, rounding up costs at most one of each; beyond this x itself costs more
        reach = (1 + ratio + math.sqrt((1 + ratio) ** 2 + 4 * (1 + ratio) * best)) / 2
        low, high = max(1, math.floor(best - reach)), min(self.num_ids, math.ceil(best + reach) + 1)
        saving = [num_buckets for num_buckets in range(low, high + 1) if self._saves(num_buckets)]
        return min(saving, key=self.num_bytes, default=None)

    def _find_max_buckets(self) -> int | None:
        """Returns the number of buckets beyond which the table may as well be whole; None where it is whole anyway."""
        low, high = self._min_buckets, self.num_ids
        if low is None:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._saves(middle) else (low, middle)
        return low


def _build_table(num_ids: int, settings: TableConfig) -> CompositionalEmbeddingConfig:
    """Returns the config of a table of so many ids."""
    (table,) = build_tables([CategoricalFeature("table", num_ids)], EmbeddingConfig(default=settings))
    return table


def _bytes_on_all_ranks(table: CompositionalEmbeddingConfig, optimizers: TableOptimizers, world_size: int) -> int:
    """Returns the bytes of a table whose functions are on every rank."""
    whole = whole_table_storage(table, optimizers)
    return whole.total + (world_size - 1) * replicated_storage(table, table.function_tables(), optimizers).total
