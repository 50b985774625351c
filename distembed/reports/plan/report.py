"""All that ``distembed plan`` finds out: an assessment, and what would make the model fit."""

from dataclasses import dataclass

from distembed.planning.devices import Cluster
from distembed.reports.plan.assessment import Assessment, assess
from distembed.reports.plan.plannable import Plannable
from distembed.reports.plan.remedies import Remedies, find_remedies
from distembed.reports.plan.smallest import Smallest, find_smallest
from distembed.reports.plan.training_cost import TrainingCost, TrainingRun, training_cost


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
    def lines(self) -> list[str]:
        """Lines of the training run's cost, and of the search for the smallest cluster."""
        return [line for own in (self.cost, self.smallest) if own is not None for line in own.lines]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the assessment, and one more where the search for remedies was cut short."""
        unfinished = "more remedies were not looked for: planning takes too long here"
        return (*self.assessment.notes, *([] if self.remedies.is_complete else [unfinished]))


def report_capacity(
    plannable: Plannable, cluster: Cluster, memory_is_given: bool, find_cluster: bool = False
) -> CapacityReport:
    """Plans a model for a cluster or the smallest that it fits; where it does not fit, looks for remedies.

    ``memory_is_given`` says that ``--memory`` was typed, so that no other device would have more.
    """
    smallest = find_smallest(plannable, cluster) if find_cluster else None
    found = None if smallest is None else smallest.assessment
    assessment = found or assess(plannable, cluster)
    remedies = Remedies() if assessment.fits else find_remedies(plannable, cluster, memory_is_given, assessment)
    return CapacityReport(assessment, remedies, smallest)
