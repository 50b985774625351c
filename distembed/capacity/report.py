"""All that ``distembed plan`` finds out: an assessment, and what would make the model fit."""

from dataclasses import dataclass

from distembed.capacity.assessment import Assessment, assess
from distembed.capacity.plannable import Plannable
from distembed.capacity.remedies import Remedies, find_remedies
from distembed.capacity.smallest import Smallest, find_smallest
from distembed.capacity.training_cost import TrainingCost, TrainingRun, training_cost
from distembed.planning.cluster import Cluster

UNFINISHED_SEARCH = "more remedies were not looked for: planning takes too long here"


@dataclass(frozen=True)
class CapacityReport:
    """Whether a model fits a cluster, and what would make it fit."""

    assessment: Assessment
    remedies: Remedies = Remedies()  # none where it fits
    smallest: Smallest | None = None  # how the cluster was found, where the smallest one was asked for
    training_run: TrainingRun | None = None  # to cost, where one was asked for

    @property
    def cost(self) -> TrainingCost | None:
        """Hours and money of the training run; None where no run is given, or the model does not fit."""
        if self.training_run is None or not self.assessment.fits:
            return None
        return training_cost(self.assessment, self.training_run)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the assessment, and one more where the search for remedies was cut short."""
        return (*self.assessment.notes, *(() if self.remedies.is_complete else (UNFINISHED_SEARCH,)))


def report_capacity(
    plannable: Plannable, cluster: Cluster, memory_is_given: bool, find_cluster: bool = False
) -> CapacityReport:
    """Plans a model for a cluster and, where it does not fit, looks for remedies.

    Args:
        plannable: Model to plan, with its step and settings.
        cluster: Cluster to plan for.
        memory_is_given: Whether ``--memory`` says what a device has, so that no other device would have more.
        find_cluster: Whether the smallest cluster that the model fits is planned, with at most as many ranks a node;
            where none is found, the one given is.

    Raises:
        UserError: The settings cannot be planned at all.
    """
    smallest = find_smallest(plannable, cluster) if find_cluster else None
    if smallest is not None and smallest.assessment is not None:
        return CapacityReport(smallest.assessment, smallest=smallest)
    assessment = assess(plannable, cluster)
    if assessment.fits:
        return CapacityReport(assessment, smallest=smallest)
    return CapacityReport(assessment, find_remedies(plannable, cluster, memory_is_given, assessment), smallest)
