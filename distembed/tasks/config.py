"""Settings and checks that the ``task`` sections of configs share, read and checked without torch.

Each task is two files: ``NAME_config.py`` has its section, a frozen pydantic dataclass, and ``NAME.py`` the task, which
takes the section. ``build`` names the class by its place, so that torch is loaded when a task is built.
"""

from dataclasses import Field as DataclassField
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from distembed.base.errors import UserError
from distembed.data.dataset.schema import Schema
from distembed.models.config import ItemModelConfig

if TYPE_CHECKING:
    from distembed.tasks.base import Task
    from distembed.tasks.binary_metrics import Floats


class TaskConfig(Protocol):
    """A task's section of a config: a frozen pydantic dataclass, from which :func:`build_task` builds the task.

    It is a :class:`PlainTaskConfig` or a :class:`SchemaTaskConfig`.
    """

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def name(self) -> str:
        """The task's name in ``TASKS``."""


@runtime_checkable
class PlainTaskConfig(Protocol):
    """A task's section whose task is built without a dataset."""

    def build(self) -> "Task":
        """Returns the task that the section describes."""


@runtime_checkable
class SchemaTaskConfig(Protocol):
    """A task's section whose task is built for a dataset's columns, for example for its labels."""

    def build_for(self, schema: Schema) -> "Task":
        """Builds the task for a dataset's columns."""


@runtime_checkable
class AddingTaskConfig(Protocol):
    """A task's section whose task adds columns to batches, for example negative items, or takes some away."""

    def batch_schema(self, schema: Schema) -> Schema:
        """Returns the columns of the model's batches, given the dataset's; refuses one without the task's columns."""


@runtime_checkable
class LabelTaskConfig(Protocol):
    """A task's section that tells the valid labels; of other tasks, any finite number is a label.

    Attributes:
        needs_both_labels: Whether the headline metric is defined only on rows with labels 0 and 1.
    """

    needs_both_labels: bool

    def check_labels(self, labels: "Floats", where: str) -> None:
        """Raises :class:`~distembed.base.errors.UserError` for labels that the task does not take.

        Args:
            labels: Labels of any rows [N]; NaN where a row's label is not known.
            where: The place of the rows, for the error.
        """


@runtime_checkable
class DeclaringTaskConfig(Protocol):
    """A task's section that names the model outputs that it takes; other models are refused.

    Attributes:
        takes: The ``returns`` of a :class:`distembed.models.config.DeclaringModelConfig`.
    """

    takes: ClassVar[str]


@runtime_checkable
class RowTaskConfig(Protocol):
    """A task's section whose task has a loss and metrics of single rows, each by the row's weight.

    Weights by age, and metrics by day, are for these tasks alone.

    Attributes:
        weighs_rows: True.
    """

    weighs_rows: ClassVar[bool]


@runtime_checkable
class ItemTaskConfig(Protocol):
    """A task's section that takes the features of the items from the model's section."""

    def for_model(self, model: ItemModelConfig) -> TaskConfig:
        """Returns the section with the model's ``item`` and ``item_features``; refuses others by a ValueError."""


def build_task(config: TaskConfig, schema: Schema) -> "Task":
    """Builds the task of a section for a dataset's columns.

    Raises:
        UserError: The section builds no task, or its settings do not fit the dataset.
    """
    if isinstance(config, SchemaTaskConfig):
        return config.build_for(schema)
    if isinstance(config, PlainTaskConfig):
        return config.build()
    raise UserError(f"{type(config).__name__} builds no task; define its build() or its build_for(schema).")


def batch_schema(task: TaskConfig, schema: Schema) -> Schema:
    """Returns the columns of the batches that a task prepares of a dataset's rows."""
    return task.batch_schema(schema) if isinstance(task, AddingTaskConfig) else schema


def require_one_label(task: str, schema: Schema) -> None:
    """Refuses rows with several labels, since the task learns a single one."""
    if schema.labels:
        raise UserError(
            f"task.name is {task!r}, which predicts one label, and the rows of this dataset have several: "
            f"{', '.join(schema.label_names)}. Train a model of all of them by task={{name: multi}}, or make a dataset "
            "of one of them, with `label: {column: ...}` in the schema in the place of `labels`."
        )
