"""What ``distembed plan`` can plan: a model with its step and settings, of which remedies change some."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from distembed.planning import PlanConfig, PlanRequest
from distembed.planning.cluster import Cluster
from distembed.planning.plan_inputs import PlanInputs

PlannableT = TypeVar("PlannableT", bound="Plannable")


@dataclass(frozen=True)
class ModelOnCluster:
    """A model with its training step on a cluster."""

    request: PlanRequest
    plan_inputs: PlanInputs  # compared when the saved plan is applied
    notes: Sequence[str] = ()  # remarks on the workload for the reader, a sentence each


class Plannable(ABC):
    """A model with its step and settings, to be planned for any cluster."""

    @property
    @abstractmethod
    def plan(self) -> PlanConfig:
        """Ways in which tables may be placed."""

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Rows of a step on all ranks."""

    @property
    @abstractmethod
    def sparse_optimizer(self) -> str | None:
        """Name of the optimizer of the tables; None where it cannot be changed."""

    @property
    def collisions(self) -> int | None:
        """Ids that share a row of the compressed partition, 1 where none do; None where that cannot be changed."""
        return None

    @abstractmethod
    def on_cluster(self, cluster: Cluster) -> ModelOnCluster:
        """Returns what a plan for a cluster is made from.

        Raises:
            UserError: The settings cannot be planned at all.
            InsufficientMemory: This machine cannot make the networks.
        """

    @abstractmethod
    def table_bytes(self) -> int:
        """Returns the bytes of all tables with their optimizer's state, each of them once."""

    @abstractmethod
    def with_plan(self: PlannableT, plan: PlanConfig) -> PlannableT:
        """Returns the same whose tables may be placed in other ways."""

    @abstractmethod
    def with_batch_size(self: PlannableT, num_rows: int) -> tuple[PlannableT, str]:
        """Returns the same with so many rows a step, and what is typed for that."""

    @abstractmethod
    def with_sparse_optimizer(self: PlannableT, name: str) -> tuple[PlannableT, str]:
        """Returns the same with another optimizer of the tables, and what is typed for that."""

    def with_collisions(self: PlannableT, collisions: int) -> tuple[PlannableT, str]:
        """Returns the same with tables compressed so far, and what is typed for that.

        It is called only where :attr:`collisions` is a number.
        """
        raise NotImplementedError
