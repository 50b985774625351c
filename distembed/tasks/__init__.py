"""Tasks, which are what a model learns: each is a file with its config in ``config.py``, listed in a name table.

``base.py`` says what a task is; ``binary_metrics.py`` holds the metrics of binary classifiers, and
``ranking_metrics.py`` those of rankings; ``recommendations.py`` has the best items of users as predictions.

A task of one's own is a config with ``name`` and ``build``, which a plugin registers by ``TASKS["mine"] = MyConfig``;
see :class:`distembed.tasks.TaskConfig`.
"""

from typing import TYPE_CHECKING, Annotated

from distembed.base.lazy import NameTable, imports_on_demand
from distembed.base.names import ByName
from distembed.tasks.config import (
    ClickConfig,
    NextItemConfig,
    RankingConfig,
    RatingConfig,
    TaskConfig,
    batch_schema,
)

if TYPE_CHECKING:
    from distembed.tasks.base import Task
    from distembed.tasks.click import ClickTask
    from distembed.tasks.next_item import NextItemTask
    from distembed.tasks.ranking import RankingTask
    from distembed.tasks.rating import RatingTask

TASKS: NameTable[type[TaskConfig]] = NameTable(
    {
        "click": ClickConfig,
        "rating": RatingConfig,
        "ranking": RankingConfig,
        "next_item": NextItemConfig,
    }
)
"""Config class by task name."""

TaskSection = Annotated[TaskConfig, ByName(TASKS, "task", default="click")]
"""The ``task`` section of a config, whose key ``name`` says which task it configures."""

__all__ = [
    "TASKS",
    "ClickConfig",
    "ClickTask",
    "RankingConfig",
    "RankingTask",
    "NextItemConfig",
    "NextItemTask",
    "RatingConfig",
    "RatingTask",
    "Task",
    "TaskConfig",
    "TaskSection",
    "batch_schema",
]
__getattr__ = imports_on_demand(__name__)
