"""All that ``distembed plan`` finds out: an assessment, and what would make the model fit."""

import dataclasses
from dataclasses import dataclass

from distembed.capacity.assessment import Assessment, assess
from distembed.capacity.plannable import Plannable
from distembed.capacity.remedies import Remedies, find_remedies
from distembed.capacity.smallest import Smallest, find_smallest
from distembed.planning.cluster import Cluster

UNFINISHED_SEARCH = "more remedies were not looked for: planning takes too long here"


@dataclass(frozen=True)
class CapacityReport:
    """Whether a model fits a cluster, and what would make it fit.

    Attributes:
        assessment: How the model fits the cluster.
        remedies: Changes that make it fit; none where it fits.
        smallest: How the cluster was found, where the smallest one was asked for.
    """

    assessment: Assessment
    remedies: Remedies = Remedies()
    smallest: Smallest | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the assessment, and one more where the search for remedies was cut short."""
        return (*self.assessment.notes, *(() if self.remedies.is_complete else (UNFINISHED_SEARCH,)))


def report_capacity(plannable: Plannable, cluster: Cluster, memory_is_given: bool) -> CapacityReport:
    """Plans a model for a cluster and, where it does not fit, looks for remedies.

    Args:
        plannable: Model to plan, with its step and settings.
        cluster: Cluster to plan for.
        memory_is_given: Whether ``--memory`` says what a device has, so that no other device would have more.

    Raises:
        UserError: The settings cannot be planned at all.
    """
    assessment = assess(plannable, cluster)
    if assessment.fits:
        return CapacityReport(assessment)
    return CapacityReport(assessment, find_remedies(plannable, cluster, memory_is_given, assessment))


def report_smallest(plannable: Plannable, cluster: Cluster, memory_is_given: bool) -> CapacityReport:
    """Plans a model for the smallest cluster that it fits; where none is found, for the one given, with remedies.

    Args:
        plannable: Model to plan, with its step and settings.
        cluster: Device of each rank, and the most ranks of a node.
        memory_is_given: Whether ``--memory`` says what a device has, so that no other device would have more.

    Raises:
        UserError: The settings cannot be planned at all.
    """
    smallest = find_smallest(plannable, cluster)
    if smallest.assessment is not None:
        return CapacityReport(smallest.assessment, smallest=smallest)
    return dataclasses.replace(report_capacity(plannable, cluster, memory_is_given), smallest=smallest)
