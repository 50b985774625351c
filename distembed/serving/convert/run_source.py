"""A run of distembed read as a stock model: full tables by TorchRec's names, and what its optimizers have gathered."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import torch
from torch import Tensor

from distembed.base.errors import UserError
from distembed.data.dataset.manifest import Manifest
from distembed.data.table.vocabulary import FIRST_ID
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.embedding.modules import embedding_modules, weight_names_of_table
from distembed.serving.convert.models import full_table_names
from distembed.serving.convert.stock_checkpoint import StockCheckpoint
from distembed.serving.convert.tables import full_vectors
from distembed.training.build import Blueprint
from distembed.training.config import Config
from distembed.training.resume import find_checkpoint

_MODEL = "model."


@dataclass(frozen=True)
class _ComposedTable:
    """A compositional table of the run, and the names of its weights in the checkpoint."""

    table: CompositionalEmbeddingConfig
    weights: list[str]


class RunAsStock(Mapping[str, Tensor]):
    """The weights that a stock model with full tables has which gives the outputs of a run's model.

    Full tables are read, or composed, when they are asked for.

    Args:
        run_dir: The folder of a run with a checkpoint on this machine.
        config: The run's config.
        blueprint: What the run's model is built from.
        checkpoint_choice: Another checkpoint than the run's best or newest, as for
            :func:`distembed.training.resume.find_checkpoint`.

    Attributes:
        checkpoint: The checkpoint's path.

    Raises:
        UserError: The run has no such checkpoint on this machine.
    """

    def __init__(
        self, run_dir: Path, config: Config, blueprint: Blueprint, checkpoint_choice: str | None = None
    ) -> None:
        self.checkpoint = find_checkpoint(run_dir, config, checkpoint_choice)
        if "://" in self.checkpoint:
            raise UserError(f"the checkpoint {self.checkpoint} is not on this machine; copy the run here first.")
        self._saved = StockCheckpoint(self.checkpoint)
        collections = embedding_modules(blueprint.build_unsharded())
        self._composed: dict[str, _ComposedTable] = {}
        for name, (path, table) in full_table_names(collections).items():
            saved_name = self._saved_name(name)
            if saved_name not in self._saved:  # else it was trained with TorchRec's own collection
                prefix = saved_name.removesuffix(name)
                own = [f"{prefix}{path}.{each}" for each in weight_names_of_table(collections[path], table)]
                self._composed[name] = _ComposedTable(table, own)
        self._names = self._stock_names()

    def _saved_name(self, name: str) -> str:
        """Returns how a weight of the model is called in the checkpoint, where the model stands within its task's."""
        return f"{_MODEL}model.{name}"

    def _stock_names(self) -> list[str]:
        composed = {weight for own in self._composed.values() for weight in own.weights}
        prefix = self._saved_name("")
        others = [key.removeprefix(prefix) for key in self._saved if key.startswith(prefix) and key not in composed]
        return [*others, *self._composed]

    def __getitem__(self, name: str) -> Tensor:
        own = self._composed.get(name)
        if own is None:
            return self._saved[self._saved_name(name)]
        return full_vectors(own.table, [self._saved[weight] for weight in own.weights])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def optimizer_state(self, name: str, state: str) -> Tensor | None:
        """Returns an optimizer's state of a stock weight; None where it has none, or it is that of several partitions.

        Args:
            name: The weight's name in the stock model.
            state: The state's name in a checkpoint.
        """
        own, rows = self._composed.get(name), None
        weight = self._saved_name(name)
        if own is not None:
            if len(own.weights) > 1 or not own.table.scheme.is_complementary():
                return None
            weight = own.weights[0]
            rows = own.table.scheme.rows(torch.arange(own.table.num_embeddings))[0]
        key = f"optimizer.{weight.removeprefix(_MODEL)}.{state}"
        if key not in self._saved:
            return None
        found = self._saved[key]
        return found if rows is None else found[rows]


def id_counts(dataset: str, manifest: Manifest, tables: list[CompositionalEmbeddingConfig]) -> dict[str, Tensor]:
    """Returns how often each id occurs in training, by table, as the vocabularies of a dataset have counted.

    Reserved ids, of missing and of unknown values, count as often as the most frequent value. Tables that hash their
    ids, or whose features have no vocabulary of as many ids, are left out.

    Args:
        dataset: The dataset's folder.
        manifest: Its manifest.
        tables: The tables.
    """
    found = {}
    for table in tables:
        vocabulary = manifest.vocabularies.get(table.feature_names[0])
        if vocabulary is None or table.pre_hash is not None:
            continue
        file = manifest.require_unchanged(dataset, vocabulary.file)
        counted = torch.from_numpy(pq.read_table(file, columns=["count"])["count"].to_numpy().copy())
        reserved = counted.new_full((FIRST_ID,), int(counted.max()) if len(counted) else 1)
        counts = torch.cat([reserved, counted])
        if len(counts) == table.num_embeddings:
            found[table.name] = counts
    return found
