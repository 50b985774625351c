"""What a step of training brings along, beside the tables: its rows, its ids, its networks."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from distembed.planning.networks import NetworkEstimate


@dataclass(frozen=True)
class Workload:
    """One step of training.

    Attributes:
        batch_size: B, rows on all ranks.
        ids_per_row: by feature, ids of a row on average; 1 for those that are not named.
        multi_hot: features of which a row may have several ids; any of more than one on average is one.
        num_dense: number of dense features.
        network: of a rank's share of B; None where nothing is known of it.
        bf16: whether the networks compute in bf16.
        logged_steps: steps of which logits and labels are kept for metrics.
        graph_bytes: of the knowledge graphs by which ids are replaced, on every rank, by table.
    """

    batch_size: int
    ids_per_row: Mapping[str, float] = field(default_factory=dict)
    multi_hot: Set[str] = frozenset()
    num_dense: int = 0
    network: NetworkEstimate | None = None
    bf16: bool = False
    logged_steps: int = 0
    graph_bytes: Mapping[str, int] = field(default_factory=dict)

    def has_bags(self, feature: str) -> bool:
        """Whether a row may have several ids of a feature."""
        return feature in self.multi_hot or self.ids_per_row.get(feature, 1.0) > 1

    def kept_bytes(self, world_size: int) -> dict[str, int]:
        """What every rank has beside tables and their exchange, by item, at the fullest moment of the networks.

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

    def rows_of_rank(self, world_size: int) -> int:
        """b: rows of a step on one rank, at most."""
        return math.ceil(self.batch_size / world_size)


def pipeline_depth(device_kind: str, world_size: int) -> int:
    """Batches on a device at once: in TorchRec's ``TrainPipelineSparseDist`` three, in its ``TrainPipelineBase`` two.

    The first is what training takes wherever there is a transfer or an exchange to overlap.
    """
    return 3 if overlaps(device_kind, world_size) else 2


def overlaps(device_kind: str, world_size: int) -> bool:
    """Whether the ids' way is worth overlapping with the step before."""
    return world_size > 1 or device_kind == "cuda"
