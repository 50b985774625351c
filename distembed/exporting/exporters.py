"""What programs are made of, by the name of the task."""

from __future__ import annotations

from collections.abc import Callable

from distembed.data.dataset.schema import Schema
from distembed.exporting.score_program import ScoredModel
from distembed.models import Model
from distembed.tasks import Task

EXPORTERS: dict[str, Callable[[Model, Task, Schema], ScoredModel]] = {"click": ScoredModel.of, "rating": ScoredModel.of}
