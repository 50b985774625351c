"""The base class of models."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import nn


class Model(nn.Module, ABC):
    """A module that maps fields of a batch to outputs from which a task computes a loss.

    It is unaware of ranks and of tasks. It may have any number of embedding collections, of bags and of sequences, ours
    and TorchRec's, all on the meta device.

    Attributes:
        batch_fields: Names of the batch's fields that ``forward`` takes, in its order.
    """

    batch_fields: ClassVar[tuple[str, ...]]

    @abstractmethod
    def forward(self, *fields: Any) -> Any:
        """Computes the outputs of this rank's rows."""
