"""The ``task`` section of a config: one frozen pydantic dataclass for each task, which builds it.

They are apart from the tasks, so that a config is read and checked without torch.
"""

from dataclasses import Field as DataclassField
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import pydantic.dataclasses

from distembed.data.dataset.schema import Schema
from distembed.names import STRICT

if TYPE_CHECKING:
    from distembed.tasks.base import Task


class TaskConfig(Protocol):
    """A task's section of a config: a frozen pydantic dataclass that builds the task."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def name(self) -> str:
        """The task's name in ``TASKS``."""

    def build(self) -> "Task":
        """Builds the task."""


@runtime_checkable
class AddingTaskConfig(Protocol):
    """A task's section whose task adds columns to batches, such as negative items, or takes some away."""

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the columns of the batches that the model is given, of a dataset of these columns.

        Raises:
            UserError: The task cannot be learnt from such a dataset.
        """


def batch_schema(task: TaskConfig, schema: Schema) -> Schema:
    """Returns the columns of the batches that a task prepares of a dataset's rows."""
    return task.batch_schema(schema) if isinstance(task, AddingTaskConfig) else schema


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ClickConfig:
    """The section of :class:`distembed.tasks.ClickTask`, which has no settings."""

    name: Literal["click"] = "click"

    def build(self) -> "Task":
        """Builds the task."""
        from distembed.tasks.click import ClickTask

        return ClickTask()
