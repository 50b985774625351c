"""What ``distembed plan`` can plan: a model with its step and settings, of which remedies change some."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from distembed.planning import PlanConfig, PlanRequest
from distembed.planning.devices import Cluster
from distembed.planning.saved_plan import PlanInputs


@dataclass(frozen=True)
class ModelOnCluster:
    """A model with its training step on a cluster."""

    request: PlanRequest
    plan_inputs: PlanInputs  # compared when the saved plan is applied
    notes: Sequence[str] = ()  # remarks on the workload for the reader, a sentence each


class Plannable(ABC):
    """A model with its step and settings, to be planned for any cluster.

    Methods that change a setting return the option to type for the change, and the changed model.

    Args:
        plan: Ways in which tables may be placed.
        batch_size: Rows of a step on all ranks.
        sparse_optimizer: Name of the optimizer of the tables; None where it cannot be changed.
        collisions: Ids that share a row of a table, 1 where none do; None where that cannot be changed.
    """

    def __init__(
        self, plan: PlanConfig, batch_size: int, sparse_optimizer: str | None, collisions: int | None = None
    ) -> None:
        self.plan, self.batch_size = plan, batch_size
        self.sparse_optimizer, self.collisions = sparse_optimizer, collisions

    @abstractmethod
    def on_cluster(self, cluster: Cluster) -> ModelOnCluster:
        """Returns the request of a plan for a cluster; refuses settings that cannot be planned at all."""

    @abstractmethod
    def table_bytes(self) -> int:
        """Returns the bytes of all tables with their optimizer's state, each of them once."""

    @abstractmethod
    def with_plan(self, plan: PlanConfig) -> Self:
        """Returns the model whose tables may be placed in other ways."""

    @abstractmethod
    def with_batch_size(self, num_rows: int) -> tuple[str, Self]:
        """Changes the rows of a step."""

    @abstractmethod
    def with_sparse_optimizer(self, name: str) -> tuple[str, Self]:
        """Changes the optimizer of the tables."""

    def max_collisions(self) -> int:
        """Returns the largest number of collisions to try; 0 where they cannot be changed."""
        return 0

    def with_collisions(self, collisions: int) -> tuple[str, Self]:
        """Compresses the tables; called only where ``collisions`` is a number."""
        raise NotImplementedError
