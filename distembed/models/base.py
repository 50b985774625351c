"""The base class of models."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import nn

from distembed.data.dataset.schema import DENSE_SEQUENCES, Schema


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

    def lists_read(self, schema: Schema) -> tuple[str, ...]:
        """Returns the names of a dataset's lists, of ids and of numbers, that ``forward`` reads.

        Rows to score may lack other lists. Unless a model overrides this, it reads all lists of ids, and all lists of
        numbers where ``batch_fields`` has their field.
        """
        numbers = schema.dense_sequences if DENSE_SEQUENCES in self.batch_fields else ()
        return (*(feature.name for feature in schema.categorical if feature.multi_hot), *numbers)
