"""The programs of an exported model, loaded: plain tensors -> scores, also where shards have the tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.export.pt2_archive._package import load_pt2

from distembed.serving.model_folder.compiled import load_compiled, require_same_rows
from distembed.serving.model_folder.manifest import ExportManifest
from distembed.serving.model_folder.program_check import require_plain_program

Program = Callable[..., Any]
"""A loaded program: tensors -> a tensor, or several."""


def load_program(file: Path) -> Program:
    """Loads the program of a file without running code of the file; when called it refuses inputs of unequal rows.

    Raises:
        UserError: It is damaged, or holds more than plain tensors and operators of PyTorch.
    """
    program = read_program(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: Any = program.module(check_guards=False)
    module.validate_inputs = False  # solves equations of sizes at every call: half a millisecond
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    module.register_forward_pre_hook(lambda _, inputs: require_same_rows(names, inputs))
    loaded: Program = module
    return loaded


def read_program(file: Path) -> torch.export.ExportedProgram:
    """Checks that a file holds a plain program, and reads it; raises the errors of :func:`load_program`."""
    require_plain_program(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # not torch.export.load, which tries formats of earlier versions too, which are pickled
        return load_pt2(str(file)).exported_programs["model"]


def load_programs(folder: Path, manifest: ExportManifest, compiled: bool = False) -> Program:
    """Returns the whole model of a folder: ids, lengths and numbers -> its outputs, with all shards in this process.

    ``compiled`` takes the compiled program, which runs code of the person who made it.

    Raises:
        UserError: A program is damaged, holds more than it may, or is not there.
    """
    if compiled:
        return load_compiled(folder, manifest)
    shards = [load_program(folder / shard.file) for shard in manifest.shards]
    return join_programs(load_program(folder / manifest.network.file), shards, manifest)


def join_programs(network: Program, shards: Sequence[Program], manifest: ExportManifest) -> Program:
    """Returns a network that has all tables, or joins it with the shards that have them."""
    if not shards:
        return network
    feature_indices = {feature.name: index for index, feature in enumerate(manifest.features)}
    features = [[feature_indices[name] for name in shard.features] for shard in manifest.shards]
    return ShardedProgram(network, shards, features)


class ShardedProgram:
    """Shards of tables and the network that takes their vectors, called like a program that has all tables.

    ``features`` has the positions of each shard's features in ``lengths``.
    """

    def __init__(self, network: Program, shards: Sequence[Program], features: Sequence[Sequence[int]]) -> None:
        self.network, self.shards, self._features = network, shards, features

    def __call__(
        self,
        values: Int64[Tensor, " ids"],
        lengths: Int64[Tensor, "features batch"],
        *dense: Float[Tensor, "batch numbers"],
    ) -> Any:
        """Returns the outputs of each row."""
        ids_by_feature = values.split(lengths.sum(1).tolist())
        vectors = [
            shard(torch.cat([ids_by_feature[index] for index in indices]), lengths[indices])
            for shard, indices in zip(self.shards, self._features, strict=True)
        ]
        return self.network(torch.cat(vectors, dim=1), *dense)
