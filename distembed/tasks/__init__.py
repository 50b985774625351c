"""Tasks, which are what a model learns: each is a file with its config beside it, listed in a name table.

``base.py`` says what a task and its config are; ``binary_metrics.py`` holds the metrics of binary classifiers.

A task of one's own is a config with ``name`` and ``build``, registered by ``TASKS["mine"] = MyConfig``; see
:mod:`distembed.tasks.base`.
"""

from typing import Annotated

from distembed.names import ByName
from distembed.tasks.base import Task, TaskConfig
from distembed.tasks.click import ClickConfig, ClickTask

TASKS: dict[str, type[TaskConfig]] = {"click": ClickConfig}
"""Config class by task name."""

TaskSection = Annotated[TaskConfig, ByName(TASKS, "task", default="click")]
"""The ``task`` section of a config, whose key ``name`` says which task it configures."""

__all__ = ["TASKS", "ClickConfig", "ClickTask", "Task", "TaskConfig", "TaskSection"]
