"""The ``task`` section of a config: one frozen pydantic dataclass for each task, which builds it.

They are apart from the tasks, so that a config is read and checked without torch.
"""

from dataclasses import Field as DataclassField
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import pydantic.dataclasses

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


@pydantic.dataclasses.dataclass(frozen=True, config=STRICT)
class ClickConfig:
    """The section of :class:`distembed.tasks.ClickTask`, which has no settings."""

    name: Literal["click"] = "click"

    def build(self) -> "Task":
        """Builds the task."""
        from distembed.tasks.click import ClickTask

        return ClickTask()
