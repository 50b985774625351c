"""What an exporter gives of a trained model: its programs, and a check that they score as the model does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from distembed.data.reader import Batch
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.serving.export.batches import SplitRows
from distembed.serving.export.feature_vectors import PlainFeature
from distembed.serving.export.programs import ProgramInputs
from distembed.serving.export.table_groups import TableStorage
from distembed.serving.model_folder.manifest import Parity, RecommendedItems


class Check(Protocol):
    """Compares an exported model with the trained one."""

    def sample(self, rows: SplitRows | None, num_rows: int) -> Batch:
        """Returns a batch of the first rows, or of made-up ones where there are none."""

    def outputs(self, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns the exported model's outputs of a batch in plain values, by their names."""

    def on_sample(self, batch: Batch) -> Parity:
        """Compares the outputs of a batch.

        Raises:
            RunError: They differ by more than rounding does, or are no numbers.
        """

    def on_split(self, rows: SplitRows, most_rows: int) -> tuple[str, float, float]:
        """Returns the name of a metric, and its values for the exported and the trained model.

        Args:
            rows: The rows to compare on.
            most_rows: At most so many of the first are.

        Raises:
            RunError: The values differ by more than the exported model's may.
        """


class Exportable(Protocol):
    """A trained model, and what programs are made of.

    Attributes:
        outputs: Names of what its programs return.
        features: The features that they take, in their order.
        tables: Its tables.
        takes_numbers: Whether they take numbers.
        recommends: What the outputs are, where it recommends items.
    """

    @property
    def outputs(self) -> Sequence[str]: ...  # noqa: D102

    @property
    def features(self) -> Sequence[PlainFeature]: ...  # noqa: D102

    @property
    def tables(self) -> Sequence[CompositionalEmbeddingConfig]: ...  # noqa: D102

    @property
    def takes_numbers(self) -> bool: ...  # noqa: D102

    @property
    def recommends(self) -> RecommendedItems | None: ...  # noqa: D102

    def inputs(self, batch: Batch) -> ProgramInputs:
        """Returns the inputs of the whole program for the rows of a batch."""

    def whole_program(self, storage: TableStorage) -> nn.Module:
        """Returns the program that has all tables."""
