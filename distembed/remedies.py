"""What would make a config fit: each remedy is planned before it is named."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from distembed.config import Config
from distembed.fit import find_fit
from distembed.planning.cluster import Cluster
from distembed.planning.devices import DEVICES
from distembed.planning.optimizer_states import IS_ROW_WISE

_MOST_NODES = 64
_MOST_COLLISIONS = 2**20


def find_remedies(config: Config, cluster: Cluster) -> list[str]:
    """One of each kind that makes the config fit, the smallest change of its kind, as it would be typed."""
    found = [remedy(config, cluster) for remedy in (_nodes, _device, _sharding, _optimizer, _collisions)]
    return [remedy for remedy in found if remedy is not None]


def _fits(config: Config, cluster: Cluster) -> bool:
    return find_fit(config, cluster).fits


def _nodes(config: Config, cluster: Cluster) -> str | None:
    nodes = _least(
        lambda n: _fits(config, dataclasses.replace(cluster, nodes=n)), cluster.nodes, cluster.nodes * _MOST_NODES
    )
    return None if nodes is None else f"--nodes {nodes}"


def _device(config: Config, cluster: Cluster) -> str | None:
    of_kind = [device for device in DEVICES.values() if device.kind == cluster.device.kind]
    for device in sorted(of_kind, key=lambda device: device.memory_bytes):
        is_larger = device.memory_bytes > cluster.device.memory_bytes
        if is_larger and _fits(config, dataclasses.replace(cluster, device=device)):
            return f"--gpu {device.name}"
    return None


def _sharding(config: Config, cluster: Cluster) -> str | None:
    """Without what the config says of how tables may be placed."""
    free: dict[str, Any] = {"sharding_types": None, "min_partition": None, "tables": {}}
    changed = {name: value for name, value in free.items() if getattr(config.plan, name) != value}
    if not changed:
        return None
    plan = dataclasses.replace(config.plan, **changed)
    settings = " ".join(f"plan.{name}={'null' if value is None else '{}'}" for name, value in changed.items())
    return settings if _fits(dataclasses.replace(config, plan=plan), cluster) else None


def _optimizer(config: Config, cluster: Cluster) -> str | None:
    sparse = config.train.sparse_optimizer
    if all(IS_ROW_WISE[sparse.name].values()):  # it keeps no number for each weight
        return None
    smaller = dataclasses.replace(sparse, name="row_wise_adagrad")
    changed = dataclasses.replace(config, train=dataclasses.replace(config.train, sparse_optimizer=smaller))
    return f"train.sparse_optimizer.name={smaller.name}" if _fits(changed, cluster) else None


def _collisions(config: Config, cluster: Cluster) -> str | None:
    default = config.embedding.default
    if default.partition not in ("naive", "quotient_remainder", "remainder"):
        return None
    scheme = "quotient_remainder" if default.partition == "naive" else default.partition

    def compressed(collisions: int) -> Config:
        table = dataclasses.replace(default, partition=scheme, collisions=collisions, num_buckets=None)
        embedding = dataclasses.replace(config.embedding, default=table)
        return dataclasses.replace(config, embedding=embedding)

    before = 1 if default.partition == "naive" else default.collisions or 1
    collisions = _least(lambda c: _fits(compressed(c), cluster), before, _MOST_COLLISIONS)
    if collisions is None:
        return None
    partition = f"embedding.default.partition={scheme} " if scheme != default.partition else ""
    return f"{partition}embedding.default.collisions={collisions}"


def _least(fits: Callable[[int], bool], known_not: int, most: int) -> int | None:
    """The least number above ``known_not`` for which something fits, up to ``most``: by doubling, then halving."""
    low, high = known_not, next((n for n in _doubled(known_not, most) if fits(n)), None)
    if high is None:
        return None
    low = max(low, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _doubled(start: int, most: int) -> Iterator[int]:
    number = 2 * start
    while number <= most:
        yield number
        number *= 2
