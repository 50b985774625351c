"""TorchRec's own test of sharded modules, with this project's collections and sharders in it.

It builds a model with and without sharding, copies the weights over, trains both for one step of SGD, on the same rows
in one batch or in one part a rank, and compares what they predict afterwards.

It draws no weights for batches with a size for each feature and none for a TensorDict: models have no weighted tables
then. Tables within nodes and grids it runs on CUDA only; :mod:`tests.sharding.test_within_nodes` has them.
"""

import itertools
import os
import random
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.test_utils import test_model as torchrec_models
from torchrec.distributed.test_utils.test_model import ModelInput
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig

from distembed.composition import COMPOSITIONS
from distembed.embedding import (
    CompositionalEmbeddingBagCollection,
    CompositionalEmbeddingBagConfig,
    CompositionalEmbeddingCollection,
    CompositionalEmbeddingConfig,
)
from distembed.partitions import QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder, CompositionalEmbeddingCollectionSharder
from distembed.sharding.shardings import SEQUENCE_SHARDING_TYPES
from tests.processes import run_processes
from tests.ranks import free_port
from tests.versions import HARNESS_MAKES_OFFSETS

WORLD_SIZE = 2
SHARDING_TYPES = ("table_wise", "column_wise", "table_column_wise", "row_wise", "data_parallel")
SEQUENCE_DIM = 8
DIMS = {"product": 16, "sum": 32, "concat": 16, "path_linear": 8, "path_mlp": 16, "weighted_sum": 8, "tensor_train": 16}
DIMS["concat_sum"] = 16


def configs(prefix: str) -> list[EmbeddingBagConfig]:
    """Tables as TorchRec's harness knows them; what they become stands in their names.

    Some have two features, but none of the weighted ones: the harness draws weighted ids for one feature a table.
    """
    return [
        EmbeddingBagConfig(
            name=f"{prefix}_{composition}",
            num_embeddings=40 + 11 * i,
            embedding_dim=dim,
            feature_names=[f"{prefix}_f{i}", f"{prefix}_g{i}"] if prefix == "plain" and i % 2 else [f"{prefix}_f{i}"],
        )
        for i, (composition, dim) in enumerate(DIMS.items())
    ]


def compositional(table: EmbeddingBagConfig) -> CompositionalEmbeddingBagConfig:
    return CompositionalEmbeddingBagConfig(
        table.name,
        table.num_embeddings,
        table.embedding_dim,
        table.feature_names,
        QuotientRemainder(table.num_embeddings, collisions=5),
        COMPOSITIONS[table.name.partition("_")[2]](),
        pooling=table.pooling,
    )


class CompositionalSparseNN(torchrec_models.TestSparseNN):
    """TorchRec's model, with compositional tables in the place of its tables."""

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        weighted_tables: list[EmbeddingBagConfig] | None = None,
        sparse_device: torch.device | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(tables, weighted_tables=weighted_tables, sparse_device=sparse_device, **settings)
        self.sparse.ebc = CompositionalEmbeddingBagCollection(
            [compositional(table) for table in tables], device=sparse_device
        )
        if weighted_tables:
            self.sparse.weighted_ebc = CompositionalEmbeddingBagCollection(
                [compositional(table) for table in weighted_tables], device=sparse_device, is_weighted=True
            )


def add_the_missing_module() -> None:
    """A stand-in for the module that TorchRec's harness imports and that its package lacks."""
    name = "torchrec.distributed.tests"
    tests, sequence_model = ModuleType(name), ModuleType(f"{name}.test_sequence_model")
    sequence_model.TestEmbeddingCollectionSharder = EmbeddingCollectionSharder  # type: ignore[attr-defined]
    sys.modules |= {name: tests, f"{name}.test_sequence_model": sequence_model}


def constraints(sharding_type: str) -> dict[str, ParameterConstraints]:
    """Every table placed in this way; compositions that are not cut by columns, as a whole."""
    by_table = {}
    for table in configs("plain") + configs("weighted"):
        is_whole = any(name in table.name for name in ("path", "weighted_sum", "tensor_train"))
        kind = "table_wise" if is_whole and "column" in sharding_type else sharding_type
        by_table[table.name] = ParameterConstraints(sharding_types=[kind], min_partition=table.embedding_dim // 2)
    return by_table


class CompositionalSequenceNN(torchrec_models.TestSparseNNBase):
    """One linear layer over the sum of each sequence; the model of TorchRec's suite is not in its package."""

    def __init__(
        self, tables: list[EmbeddingConfig], sparse_device: torch.device | None = None, **settings: Any
    ) -> None:
        super().__init__(tables, sparse_device=sparse_device)
        own = [compositional_sequence(table) for table in tables]
        self.ec = CompositionalEmbeddingCollection(own, device=sparse_device)
        self.names = [name for table in own for name in table.feature_names]
        torch.manual_seed(0)
        self.over = nn.Linear(SEQUENCE_DIM * len(self.names), 1, device=settings.get("dense_device"))

    def forward(self, input: ModelInput) -> Any:
        embedded = self.ec(input.idlist_features)
        sums = []
        for name in self.names:
            rows = torch.arange(len(embedded[name].lengths())).repeat_interleave(embedded[name].lengths())
            sums.append(torch.zeros(len(input.label), SEQUENCE_DIM).index_add(0, rows, embedded[name].values()))
        predicted = self.over(torch.cat(sums, dim=1)).sigmoid().squeeze(1)
        loss = nn.functional.binary_cross_entropy(predicted, input.label)
        return (loss, predicted) if self.training else predicted


def sequence_configs() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=f"plain_{composition}", num_embeddings=40 + 11 * i, embedding_dim=SEQUENCE_DIM, feature_names=[f"f{i}"]
        )
        for i, composition in enumerate(DIMS)
    ]


def compositional_sequence(table: EmbeddingConfig) -> CompositionalEmbeddingConfig:
    return CompositionalEmbeddingConfig(
        table.name,
        table.num_embeddings,
        table.embedding_dim,
        table.feature_names,
        QuotientRemainder(table.num_embeddings, collisions=5),
        COMPOSITIONS[table.name.partition("_")[2]](),
    )


SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
BAGS = {
    "model_class": CompositionalSparseNN,
    "tables": configs("plain"),
    "sharders": [CompositionalEmbeddingBagCollectionSharder(dict(SGD))],
}
SEQUENCES = {
    "model_class": CompositionalSequenceNN,
    "tables": sequence_configs(),
    "sharders": [CompositionalEmbeddingCollectionSharder(dict(SGD))],
}
BATCHES: dict[str, dict[str, Any]] = {
    "equal": {},
    "unequal": {"variable_batch_size": True},
    "perhaps without rows": {"variable_batch_size": True, "allow_zero_batch_size": True},
    "with offsets": {"use_offsets": True, "offsets_dtype": torch.int32},
    "of int32": {"indices_dtype": torch.int32, "lengths_dtype": torch.int32, "offsets_dtype": torch.int32},
    "a size for each feature": {"variable_batch_per_feature": True},
    "a size for each feature, one of rows": {"variable_batch_per_feature": True, "global_constant_batch": True},
    "a TensorDict": {"input_type": "td"},
}
if not HARNESS_MAKES_OFFSETS:
    del BATCHES["with offsets"]
UNWEIGHTED = ("a size for each feature", "a size for each feature, one of rows", "a TensorDict")
MOST = ("equal", "unequal", "a size for each feature")
"""Batches of every sharding type in the slow test; else each type has unequal ones, and one type has all batches."""
Case = tuple[str, str, str]


def check(rank: int, ports: dict[Case, int]) -> None:
    add_the_missing_module()
    from torchrec.distributed.test_utils.test_sharding import sharding_single_rank_test

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    for number, ((kind, sharding_type, batches), port) in enumerate(ports.items()):
        os.environ["MASTER_PORT"] = str(port)
        random.seed(number)  # the same on all ranks: of this the harness draws the number of rows
        model = BAGS if kind == "bags" else SEQUENCES
        names = [name for table in model["tables"] for name in table.feature_names]
        try:
            sharding_single_rank_test(
                rank,
                WORLD_SIZE,
                embedding_groups={"all": names},
                weighted_tables=configs("weighted") if kind == "bags" and batches not in UNWEIGHTED else None,
                backend="gloo",
                optim=EmbOptimType.EXACT_SGD,
                constraints=constraints(sharding_type),
                **model,
                **BATCHES[batches],
            )
        except Exception as error:
            raise AssertionError(f"{kind}, {sharding_type}, batches {batches}: {error}") from error


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("batches", [["unequal"], pytest.param(MOST, marks=pytest.mark.slow)], ids=["", "most"])
@pytest.mark.parametrize(("kind", "types"), [("bags", SHARDING_TYPES), ("sequences", SEQUENCE_SHARDING_TYPES)])
def test_the_sharded_model_predicts_what_the_unsharded_one_does(
    kind: str, types: Sequence[str], batches: Sequence[str]
) -> None:
    cases = [*itertools.product([kind], types, batches), *itertools.product([kind], ["row_wise"], BATCHES)]
    run_processes(WORLD_SIZE, check, {case: free_port() for case in dict.fromkeys(cases)})
