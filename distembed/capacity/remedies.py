"""What would make a config fit: each remedy is planned as it would be typed before it is named.

The search is bounded, since a plan for many ranks or columns takes seconds. What cannot help is not planned at all:
tables of more bytes than ranks could have room for if a batch had no rows.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from distembed.capacity.assessment import Assessment, assess_capacity
from distembed.config import Config
from distembed.embedding.settings import TableConfig, build_tables
from distembed.errors import UserError
from distembed.optim.kinds import OPTIMIZERS
from distembed.planning.cluster import Cluster
from distembed.planning.devices import DEVICES
from distembed.planning.storage import TableStorage, whole_table_storage
from distembed.training.build import table_optimizers

SECONDS = 20.0
"""After which no other plan is begun."""
UNFINISHED = "more remedies were not looked for: planning takes too long here"

_MOST_RANKS = 4096
_MOST_NODES = 64
"""Times as many as there are."""
_MOST_GPUS = 8
_MOST_COLLISIONS = 2**20
_GIB = 2**30


class Remedies(list[str]):
    """Remedies, each as it would be typed behind the command.

    Attributes:
        is_complete: whether every kind was looked for to the end; else the reader is to be told ``UNFINISHED``.
    """

    is_complete = True


class _OutOfTimeError(Exception):
    """No other plan may be begun."""


def find_remedies(
    config: Config,
    cluster: Cluster,
    memory_is_given: bool = False,
    found: Assessment | None = None,
    seconds: float = SECONDS,
) -> Remedies:
    """One of each kind that makes the config fit: the smallest change of its kind, or the smallest found in time.

    Args:
        config: that does not fit.
        cluster: that it does not fit.
        memory_is_given: whether ``--memory`` was typed, which holds for any device.
        found: what came of planning it; it is planned once more unless given.
        seconds: after which no other plan is begun.
    """
    search = _Search(config, cluster, found if found is not None else assess_capacity(config, cluster))
    kinds: list[Callable[[], str | None]] = [search.gpus, search.nodes]
    kinds += [search.memory if memory_is_given else search.device, search.batch_size]
    # where networks alone are too large, smaller tables or other places for them are none
    if search.found.left_for_tables:
        kinds += [search.sharding, search.optimizer, search.host_memory, search.collisions]
    remedies, end = Remedies(), time.monotonic() + seconds
    for i, kind in enumerate(kinds):
        # a share of what is left each, so that none takes all
        now = time.monotonic()
        search.until = now + (end - now) / (len(kinds) - i)
        try:
            remedy = kind()
        except _OutOfTimeError:
            remedy = None
        remedies += [] if remedy is None else [remedy]
    remedies.is_complete = not search.was_cut_short
    return remedies


class _Search:
    """Looks for remedies.

    Attributes:
        until: when no other plan is begun.
        was_cut_short: whether there was a plan that was not begun.
    """

    def __init__(self, config: Config, cluster: Cluster, found: Assessment) -> None:
        self._config, self._cluster, self.found = config, cluster, found
        self.until, self.was_cut_short = 0.0, False

    def gpus(self) -> str | None:
        cluster = self._cluster
        if cluster.nodes > 1 or cluster.device.kind == "cpu":  # more ranks on a CPU share its memory
            return None
        numbers = range(cluster.gpus + 1, _MOST_GPUS + 1)
        fitting = (n for n in numbers if self._fits(cluster=dataclasses.replace(cluster, gpus=n)))
        number = next(fitting, None)
        return None if number is None else f"--gpus {number}"

    def nodes(self) -> str | None:
        cluster = self._cluster
        number = self._least(
            lambda n: self._fits(cluster=dataclasses.replace(cluster, nodes=n)),
            cluster.nodes,
            cluster.nodes * _MOST_NODES,
        )
        return None if number is None else f"--nodes {number}"

    def device(self) -> str | None:
        """Another device, with all that it is."""
        for device in self._larger_devices():
            if self._fits(cluster=dataclasses.replace(self._cluster, device=device)):
                return f"--gpu {device.name}"
        return None

    def memory(self) -> str | None:
        """The memory of another device, in place of what was typed."""
        for device in self._larger_devices():
            larger = dataclasses.replace(self._cluster.device, memory_bytes=device.memory_bytes)
            if self._fits(cluster=dataclasses.replace(self._cluster, device=larger)):
                return f"--memory {_typed(device.memory_bytes)}"
        return None

    def _larger_devices(self) -> list[Any]:
        own = self._cluster.device
        larger = [
            device for device in DEVICES.values() if device.kind == own.kind and device.memory_bytes > own.memory_bytes
        ]
        return sorted(larger, key=lambda device: device.memory_bytes)

    def batch_size(self) -> str | None:
        """Halved as seldom as it takes."""
        rows = self._config.train.batch_size

        def fits(halvings: int) -> bool:
            train = dataclasses.replace(self._config.train, batch_size=rows >> halvings)
            return self._fits(dataclasses.replace(self._config, train=train))

        most = (rows // self._cluster.world_size).bit_length() - 1  # with a row for each rank
        if most < 1 or not fits(most):
            return None
        halvings = self._halved(fits, 0, most)
        return f"train.batch_size={rows >> halvings}"

    def sharding(self) -> str | None:
        """Without what the config says of how tables may be placed."""
        free: dict[str, Any] = {"sharding_types": None, "min_partition": None, "tables": {}}
        changed = {name: value for name, value in free.items() if getattr(self._config.plan, name) != value}
        if not changed:
            return None
        plan = dataclasses.replace(self._config.plan, **changed)
        settings = " ".join(f"plan.{name}={'null' if value is None else '{}'}" for name, value in changed.items())
        return settings if self._fits(dataclasses.replace(self._config, plan=plan)) else None

    def optimizer(self) -> str | None:
        sparse = self._config.train.sparse_optimizer
        if not OPTIMIZERS[sparse.name].has_weight_states:
            return None
        smaller = dataclasses.replace(sparse, name="row_wise_adagrad")
        train = dataclasses.replace(self._config.train, sparse_optimizer=smaller)
        changed = dataclasses.replace(self._config, train=train)
        return f"train.sparse_optimizer.name={smaller.name}" if self._fits(changed) else None

    def host_memory(self) -> str | None:
        """In whole gibibytes of each machine, where tables may lie there."""
        cluster = self._cluster
        if not self._config.plan.host_memory or cluster.device.kind == "cpu":
            return None

        def fits(gibibytes: int) -> bool:
            return self._fits(cluster=dataclasses.replace(cluster, host_memory_bytes=gibibytes * _GIB))

        # all tables on any one rank, whose share of its machine's this is
        enough = cluster.gpus * (self.found.needed.total // _GIB + 1)
        known_not = cluster.host_memory_bytes // _GIB
        if known_not >= enough or not fits(enough):
            return None
        return f"--host-memory {self._halved(fits, known_not, enough)}GiB"

    def collisions(self) -> str | None:
        """More ids to a row of the default's tables; those of tables with settings of their own stay."""
        default = self._config.embedding.default
        if default.partition not in ("naive", "quotient_remainder", "remainder"):
            return None
        scheme = "quotient_remainder" if default.partition == "naive" else default.partition

        def compressed(collisions: int) -> Config:
            table = dataclasses.replace(default, partition=scheme, collisions=collisions, num_buckets=None)
            embedding = dataclasses.replace(self._config.embedding, default=table)
            return dataclasses.replace(self._config, embedding=embedding)

        before = 1 if default.partition == "naive" else default.collisions or 1
        collisions = self._least(lambda number: self._fits(compressed(number)), before, _MOST_COLLISIONS)
        if collisions is None:
            return None
        settings = [] if scheme == default.partition else [f"embedding.default.partition={scheme}"]
        settings += [] if default.num_buckets is None else ["embedding.default.num_buckets=null"]
        settings.append(f"embedding.default.collisions={collisions}")
        for name, table in self._config.embedding.tables.items():
            settings += [f"embedding.tables.{name}.{kept}" for kept in _kept(table, default, scheme)]
        return " ".join(settings)

    def _fits(self, config: Config | None = None, cluster: Cluster | None = None) -> bool:
        config, cluster = config or self._config, cluster or self._cluster
        try:
            if _table_bytes(config) > self._most_room(cluster):
                return False
            if cluster.world_size > _MOST_RANKS or time.monotonic() >= self.until:
                self.was_cut_short = True
                raise _OutOfTimeError
            return assess_capacity(config, cluster).fits
        except UserError:  # what does not go with other settings is no remedy
            return False

    def _most_room(self, cluster: Cluster) -> int:
        """For the tables of all ranks if a batch had no rows: more than there can be."""
        network = self.found.workload.network
        assert network is not None
        beside = network.parameters + network.buffers + network.optimizer_state + network.gradients
        beside += sum(self.found.workload.graph_bytes.values()) + round(self.found.reserve * cluster.rank_bytes)
        hosted = cluster.host_bytes if self._config.plan.host_memory else 0
        return (max(0, cluster.rank_bytes - beside) + hosted) * cluster.world_size

    def _least(self, fits: Callable[[int], bool], known_not: int, most: int) -> int | None:
        """The least number above ``known_not`` for which something fits, up to ``most``: by doubling, then halving."""
        low, high = known_not, 2 * known_not
        while high <= most and not fits(high):
            low, high = high, 2 * high
        return self._halved(fits, low, high) if high <= most else None

    def _halved(self, fits: Callable[[int], bool], low: int, high: int) -> int:
        """The least number above ``low``, which is too few, up to ``high``, which fits; or the least found in time."""
        try:
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(middle) else (middle, high)
        except _OutOfTimeError:
            pass
        return high


def _kept(table: TableConfig, default: TableConfig, scheme: str) -> list[str]:
    """What to say of a table that keeps its settings, where it may have them of a default that is changed."""
    kept = []
    if table.partition == default.partition and scheme != default.partition:
        kept.append(f"partition={table.partition}")
    has_rows = table.partition in ("quotient_remainder", "remainder")
    if has_rows and (table.collisions, table.num_buckets) == (default.collisions, default.num_buckets):
        is_given = table.num_buckets is not None
        kept.append(f"num_buckets={table.num_buckets}" if is_given else f"collisions={table.collisions or 4}")
    return kept


def _table_bytes(config: Config) -> int:
    """Of all tables, each of them once."""
    optimizers = table_optimizers(config.train)
    stored = [
        whole_table_storage(table, optimizers.sparse, optimizers.dense, optimizers.is_fused)
        for table in build_tables(config.data.load_schema().categorical, config.embedding)
    ]
    return sum(stored, TableStorage()).total


def _typed(num_bytes: int) -> str:
    """A size that is read back as the same number of bytes."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("GB", 10**9), ("MB", 10**6)):
        if num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)
