"""Tasks: the loss, the metrics and the predictions that a model is trained for, listed in a name table.

A task of your own is a config with ``name`` and ``build``, which a plugin registers by ``TASKS["mine"] = MyConfig``;
see :class:`distembed.tasks.TaskConfig`.
"""

from typing import TYPE_CHECKING, Annotated

from distembed.base.lazy import NameTable, imports_on_demand
from distembed.base.names import ByName
from distembed.tasks.click_config import ClickConfig
from distembed.tasks.config import TaskConfig, batch_schema, build_task
from distembed.tasks.multi_config import MultiConfig
from distembed.tasks.next_item_config import NextItemConfig
from distembed.tasks.ranking_config import RankingConfig
from distembed.tasks.rating_config import RatingConfig
from distembed.tasks.retrieval_config import RetrievalConfig

if TYPE_CHECKING:
    from distembed.tasks.base import Task
    from distembed.tasks.click import ClickTask
    from distembed.tasks.multi import MultiTask
    from distembed.tasks.next_item import NextItemTask
    from distembed.tasks.ranking import RankingTask
    from distembed.tasks.rating import RatingTask
    from distembed.tasks.retrieval import RetrievalTask

TASKS: NameTable[type[TaskConfig]] = NameTable(
    {
        "click": ClickConfig,
        "rating": RatingConfig,
        "multi": MultiConfig,
        "ranking": RankingConfig,
        "next_item": NextItemConfig,
        "retrieval": RetrievalConfig,
    }
)
"""Config class by task name."""

TaskSection = Annotated[TaskConfig, ByName(TASKS, "task", default="click")]
"""The ``task`` section of a config, whose key ``name`` says which task it configures."""

__all__ = [
    "TASKS",
    "ClickConfig",
    "ClickTask",
    "MultiConfig",
    "MultiTask",
    "RankingConfig",
    "RankingTask",
    "NextItemConfig",
    "NextItemTask",
    "RatingConfig",
    "RatingTask",
    "RetrievalConfig",
    "RetrievalTask",
    "Task",
    "TaskConfig",
    "TaskSection",
    "batch_schema",
    "build_task",
]
__getattr__ = imports_on_demand(__name__)
