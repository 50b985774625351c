"""A run of distembed read as a stock model: full tables by TorchRec's names, and the states of its optimizers."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from distembed.base.errors import UserError
from distembed.checkpoints.optimizer_state import whole_states
from distembed.embedding.collections import embedding_modules, weight_names_of_table
from distembed.embedding.config import CompositionalEmbeddingConfig
from distembed.serving.convert.models import full_table_names
from distembed.serving.convert.stock_checkpoint import StockCheckpoint
from distembed.serving.convert.tables import full_vectors
from distembed.training.build import Blueprint
from distembed.training.config import Config
from distembed.training.resume import find_checkpoint

_MODEL = "model."
_PREFIX = f"{_MODEL}model."
"""Beginning of the names of a model's weights in a checkpoint, where the model is a module of its task's."""


class RunAsStock(Mapping[str, Tensor]):
    """The weights of the stock model with full tables that gives the outputs of a run's model.

    Full tables are read, or composed, when they are asked for. ``checkpoint`` is the path of the run's checkpoint, on
    this machine: its best or newest, or the ``choice`` among them.
    """

    def __init__(self, run_dir: Path, config: Config, blueprint: Blueprint, choice: str | None = None) -> None:
        self.checkpoint = find_checkpoint(run_dir, config, choice)
        if "://" in self.checkpoint:
            raise UserError(f"the checkpoint {self.checkpoint} is not on this machine; copy the run here first.")
        self._saved = StockCheckpoint(self.checkpoint)
        collections = embedding_modules(blueprint.build_unsharded())
        # by the name of a full weight: the compositional table, and the names of its partitions in the checkpoint
        self._composed: dict[str, tuple[CompositionalEmbeddingConfig, list[str]]] = {}
        states = set[str]()  # of partitions, which the tables here take
        for name, (path, table) in full_table_names(collections).items():
            if table.managed is not None:
                raise UserError(
                    f"table {table.name!r} of {run_dir} has managed ids, which convert and compress do not carry over; "
                    f"use `distembed export`, or train without embedding.tables.{table.name}.ids."
                )
            if _PREFIX + name not in self._saved:  # else it was trained with TorchRec's own collection
                weights = weight_names_of_table(collections[path], table)
                self._composed[name] = (table, [f"{_PREFIX}{path}.{weight}" for weight in weights])
                keys = {state: f"{_PREFIX}{path}.{table.name}__{state}" for state in table.scheme.state}
                table.scheme.load_state({state: self._saved[key] for state, key in keys.items()})
                states.update(keys.values())
        composed = {weight for _, weights in self._composed.values() for weight in weights} | states
        copied = [key for key in self._saved if key.startswith(_PREFIX) and key not in composed]
        self._names = dict.fromkeys([*(key.removeprefix(_PREFIX) for key in copied), *self._composed])

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._composed:
            return self._saved[_PREFIX + name]
        table, weights = self._composed[name]
        return full_vectors(table, [self._saved[weight] for weight in weights])

    def __contains__(self, name: object) -> bool:
        return name in self._names  # the mapping's own would compose the table

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def partition_weights(self, name: str) -> Callable[[], list[Tensor]] | None:
        """Returns a function that reads the partitions of a full weight's table; None for a table of TorchRec's own."""
        if name not in self._composed:
            return None
        return lambda: [self._saved[weight] for weight in self._composed[name][1]]

    def partition_state(self, name: str) -> Mapping[str, Tensor]:
        """Returns the state of the partitions of a full weight's table."""
        return self._composed[name][0].scheme.state if name in self._composed else {}

    def saved_states(self, weight: str, only: str | None = None) -> dict[str, Tensor]:
        """Returns the optimizer states of a weight of the run's own model, or one, by ``WEIGHT.STATE``.

        Where a table's columns were cut into slices, states by row are the slices' averages, for whole rows.
        """
        beginning = f"optimizer.{_MODEL}{weight}."
        names = (key.removeprefix(beginning) for key in self._saved if key.startswith(beginning))
        states: dict[str, Tensor] = {}
        for state, shares in whole_states(names).items():
            if only in (None, state):
                own = [self._saved[beginning + name] for name in shares]
                average = torch.stack(own, -1) @ torch.tensor([*shares.values()]) if len(own) > 1 else own[0]
                states[f"{weight}.{state}"] = average
        return states

    def optimizer_state(self, name: str, state: str) -> Tensor | None:
        """Returns the optimizer state of a stock weight, in the order of ids for a table.

        None where the checkpoint lacks the state, or no row belongs to one id alone: several partitions, or ids that
        share a row, mix the states of ids.
        """
        weight, rows = _PREFIX + name, None
        if name in self._composed:
            table, weights = self._composed[name]
            if len(weights) > 1 or not table.scheme.is_complementary():
                return None
            weight = weights[0]
            rows = table.scheme.rows(torch.arange(table.num_embeddings))[0]
        weight = weight.removeprefix(_PREFIX)
        saved_state = self.saved_states(weight, state).get(f"{weight}.{state}")
        if saved_state is None:
            return None
        return saved_state if rows is None else saved_state[rows]
