"""The programs of an exported model, loaded: plain tensors -> scores, also where shards have the tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from distembed.exported.manifest import ExportManifest

Program = Callable[..., Any]
"""A loaded program: tensors -> a tensor, or several."""


def load_program(file: Path) -> Program:
    """Returns the program of a file of ``torch.export.save``, whose maker is trusted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Program = torch.export.load(file).module()
    return module


def load_programs(folder: Path, manifest: ExportManifest) -> Program:
    """Returns the whole model of a folder: ids, lengths and numbers -> its outputs, with all shards in this process."""
    network = load_program(folder / manifest.network.file)
    if not manifest.shards:
        return network
    places = {feature.name: place for place, feature in enumerate(manifest.features)}
    shards = [load_program(folder / shard.file) for shard in manifest.shards]
    return ShardedProgram(network, shards, [[places[name] for name in shard.features] for shard in manifest.shards])


class ShardedProgram:
    """Shards of tables and the network behind them, called like a program that has all tables.

    Args:
        network: Vectors, numbers -> outputs.
        shards: Ids and lengths of a shard's features -> their vectors.
        features: Places of each shard's features, in the order of ``lengths``.
    """

    def __init__(self, network: Program, shards: Sequence[Program], features: Sequence[Sequence[int]]) -> None:
        self._network, self._shards, self._features = network, shards, features

    def __call__(
        self,
        values: Int64[Tensor, " ids"],
        lengths: Int64[Tensor, "features batch"],
        *dense: Float[Tensor, "batch numbers"],
    ) -> Any:
        """Returns the outputs of each row."""
        pieces = values.split(lengths.sum(1).tolist())
        vectors = [
            shard(torch.cat([pieces[place] for place in places]), lengths[places])
            for shard, places in zip(self._shards, self._features, strict=True)
        ]
        return self._network(torch.cat(vectors, dim=1), *dense)
