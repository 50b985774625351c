"""What a training step works on beside the tables: its rows, its ids, its networks."""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

import torch

from distembed.planning.networks import NetworkEstimate


@dataclass(frozen=True)
class Workload:
    """One training step."""

    batch_size: int  # rows on all ranks, B
    # mean number of ids of a row, by feature; 1 for features that are not named
    ids_per_row: Mapping[str, float] = field(default_factory=dict)
    # features of which a row may have several ids; any of more than one on average is one
    multi_hot: Set[str] = frozenset()
    # number of 4-byte values of a row beside its ids and label: dense features, and numbers in lists with their
    # lengths, on average
    num_dense: int = 0
    # memory and operations of the networks for a rank's share of B; None where nothing is known of them
    network: NetworkEstimate | None = None
    bf16: bool = False  # whether the networks compute in bf16
    weighted: Set[str] = frozenset()  # features whose ids have weights, which are sent with them
    # bytes of the knowledge graphs by which ids are replaced, on every rank, by table
    graph_bytes: Mapping[str, int] = field(default_factory=dict)
    # number of threads that a rank computes in on a CPU; as many as this process does unless given
    num_threads: int = field(default_factory=torch.get_num_threads)

    def has_bags(self, feature: str) -> bool:
        """Returns whether a row may have several ids of a feature."""
        return feature in self.multi_hot or self.ids_per_row.get(feature, 1.0) > 1

    def weight_bytes(self, features: Iterable[str]) -> int:
        """Returns the bytes of the weight that each id of some features has; 0 where ids have none."""
        return 4 if not self.weighted.isdisjoint(features) else 0

    def bytes_beside_tables(self, world_size: int) -> dict[str, int]:
        """Returns the bytes of a rank beside tables and their exchange, by item, at the networks' fullest moment.

        On one rank gradients are counted among the activations, as they come.
        """
        network = self.network or NetworkEstimate()
        return {
            "sse_graphs": sum(self.graph_bytes.values()),
            "network_weights": network.parameters + network.buffers,
            "network_optimizer_state": network.optimizer_state,
            "gradients": network.gradients if world_size > 1 else 0,
            "activations": network.peak,
        }

    def on_machines_like_this(self, ranks_per_node: int) -> "Workload":
        """Returns the step where as many ranks divide the threads of a machine, of which this process has all."""
        return replace(self, num_threads=max(1, torch.get_num_threads() // ranks_per_node))

    def rows_of_rank(self, world_size: int) -> int:
        """Returns b, the most rows of a step on one rank."""
        return math.ceil(self.batch_size / world_size)


def pipeline_depth(device_kind: str, world_size: int) -> int:
    """Returns the number of batches on a device: 3 of TorchRec's ``TrainPipelineSparseDist``, 2 of its base."""
    return 3 if overlaps(device_kind, world_size) else 2


def overlaps(device_kind: str, world_size: int) -> bool:
    """Returns whether sending ids is worth overlapping with the step before."""
    return world_size > 1 or device_kind == "cuda"
