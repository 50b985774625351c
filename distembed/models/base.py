"""The base class of models, and the protocol of their configs."""

from abc import ABC, abstractmethod
from dataclasses import Field as DataclassField
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field, PositiveInt
from torch import nn

from distembed.models.inputs import ModelInputs

Sizes = Annotated[list[PositiveInt], Field(min_length=1)]
"""Layer sizes of a network: at least one."""


class Model(nn.Module, ABC):
    """A module that maps fields of a batch to outputs that a task computes a loss from.

    It is unaware of ranks and of tasks. It may have any number of embedding collections, of bags and of sequences, ours
    and TorchRec's, all of them made on the meta device.

    Attributes:
        batch_fields: Names of the batch's fields that ``forward`` takes, in its order.
    """

    batch_fields: ClassVar[tuple[str, ...]]

    @abstractmethod
    def forward(self, *fields: Any) -> Any:
        """Computes the outputs of this rank's rows."""


class ModelConfig(Protocol):
    """A model's section of a config: a frozen pydantic dataclass beside the model that it builds."""

    __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @property
    def name(self) -> str:
        """The model's name in ``MODELS``."""

    def build(self, inputs: ModelInputs) -> Model:
        """Builds the model for a dataset."""
