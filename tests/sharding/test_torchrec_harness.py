"""TorchRec's own test of sharded modules, with this project's collection and sharder in it.

It builds a model with and without sharding, copies the weights over, trains both for one step of SGD, on the same rows
in one batch or in one part a rank, and compares what they predict afterwards.
"""

import itertools
import os
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.test_utils import test_model as torchrec_models
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from distembed.composition import COMPOSITIONS
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.partitions import QuotientRemainder
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.processes import run_processes
from tests.ranks import free_port

WORLD_SIZE = 2
SHARDING_TYPES = ("table_wise", "column_wise", "table_column_wise", "row_wise", "data_parallel")
DIMS = {"product": 16, "sum": 32, "concat": 16, "path_linear": 8, "path_mlp": 16}


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
    """Every table placed in this way; paths, whose vectors are not cut by columns, as a whole."""
    by_table = {}
    for table in configs("plain") + configs("weighted"):
        kind = "table_wise" if "path" in table.name and "column" in sharding_type else sharding_type
        by_table[table.name] = ParameterConstraints(sharding_types=[kind], min_partition=table.embedding_dim // 2)
    return by_table


def check(rank: int, ports: dict[tuple[str, bool], int]) -> None:
    add_the_missing_module()
    from torchrec.distributed.test_utils.test_sharding import sharding_single_rank_test

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    for (sharding_type, has_unequal_batches), port in ports.items():
        os.environ["MASTER_PORT"] = str(port)
        tables = configs("plain")
        sharder = CompositionalEmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
        )
        sharding_single_rank_test(
            rank,
            WORLD_SIZE,
            model_class=CompositionalSparseNN,
            embedding_groups={"all": [name for table in tables for name in table.feature_names]},
            tables=tables,
            weighted_tables=configs("weighted"),
            sharders=[sharder],
            backend="gloo",
            optim=EmbOptimType.EXACT_SGD,
            constraints=constraints(sharding_type),
            variable_batch_size=has_unequal_batches,
        )


@pytest.mark.distributed
def test_the_sharded_model_predicts_what_the_unsharded_one_does() -> None:
    cases = list(itertools.product(SHARDING_TYPES, [False, True]))
    run_processes(WORLD_SIZE, check, {case: free_port() for case in cases})
