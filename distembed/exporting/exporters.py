"""What programs are made of, and how they are checked, by the name of the task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import ITEM
from distembed.data.prepare.vocabulary import reserved_ids
from distembed.exported.manifest import Precision
from distembed.exported.programs import Program
from distembed.exporting.exportable import Check, Exportable
from distembed.exporting.parity import ParityCheck
from distembed.exporting.recommended_parity import RecommendedCheck
from distembed.exporting.recommenders import RecommendingModel
from distembed.exporting.score_program import ScoredModel
from distembed.serving.whole_model import WholeModel


@dataclass(frozen=True)
class Exporter:
    """Exports models of a task.

    Attributes:
        make: Makes what programs are made of, of a trained model, the manifest of its dataset, and how many items are
            recommended for a row, which other tasks do not look at.
        check: Makes the check of a program that was written, of the trained model, what :attr:`make` made of it, the
            program as it is loaded, and how its tables are stored.
    """

    make: Callable[[WholeModel, Manifest, int], Exportable]
    check: Callable[[WholeModel, Any, Program, Precision], Check]


def _scored(whole: WholeModel, manifest: Manifest, num_best: int) -> ScoredModel:
    return ScoredModel.of(whole.module.model, whole.task, manifest.schema)


def _next_items(whole: WholeModel, manifest: Manifest, num_best: int) -> RecommendingModel:
    return RecommendingModel.of_next_items(whole.module.model, reserved_ids(manifest, ITEM), num_best)


def _rankings(whole: WholeModel, manifest: Manifest, num_best: int) -> RecommendingModel:
    return RecommendingModel.of_rankings(whole.module.model, reserved_ids(manifest, ITEM), num_best)


EXPORTERS: dict[str, Exporter] = {
    "click": Exporter(_scored, ParityCheck),
    "rating": Exporter(_scored, ParityCheck),
    "ranking": Exporter(_rankings, RecommendedCheck),
    "next_item": Exporter(_next_items, RecommendedCheck),
}
