"""What programs are made of, and how they are checked, by the name of the task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distembed.data.dataset.manifest import Manifest
from distembed.data.dataset.schema import ITEM
from distembed.data.table.vocabulary import reserved_ids
from distembed.models import Model
from distembed.serving.export.exportable import Check, Exportable
from distembed.serving.export.parity import ParityCheck
from distembed.serving.export.recommended_parity import RecommendedCheck
from distembed.serving.export.recommenders import RecommendingModel
from distembed.serving.export.score_program import ScoredModel
from distembed.serving.model_folder.manifest import Precision
from distembed.serving.model_folder.programs import Program
from distembed.serving.whole_model import WholeModel
from distembed.tasks import NextItemConfig, RankingConfig


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
    return RecommendingModel.of_next_items(*_recommended(whole, manifest, num_best))


def _rankings(whole: WholeModel, manifest: Manifest, num_best: int) -> RecommendingModel:
    return RecommendingModel.of_rankings(*_recommended(whole, manifest, num_best))


def _recommended(whole: WholeModel, manifest: Manifest, num_best: int) -> tuple[Model, tuple[int, ...], int, bool]:
    """Returns the model, the ids that stand for no item, the number of items, and whether seen ones are left out."""
    task = whole.blueprint.config.task
    assert isinstance(task, NextItemConfig | RankingConfig)
    return whole.module.model, reserved_ids(manifest, ITEM), num_best, task.excludes_seen


EXPORTERS: dict[str, Exporter] = {
    "click": Exporter(_scored, ParityCheck),
    "rating": Exporter(_scored, ParityCheck),
    "ranking": Exporter(_rankings, RecommendedCheck),
    "next_item": Exporter(_next_items, RecommendedCheck),
}
