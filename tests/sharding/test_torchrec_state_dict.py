"""TorchRec's own suite of state dicts, ``ModelParallelStateDictBase``, with compositional tables in its model.

Its tests draw sharding types, kernels and whether a step is trained in between; here each test is called with every
combination that there is without CUDA, 34 of them, and its two tests without arguments.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from distembed.sharding.sharder import default_sharders
from tests.processes import run_processes
from tests.sharding.test_torchrec_harness import CompositionalSparseNN, add_the_missing_module

MODEL_PARALLEL = ("table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise")
Case = tuple[str, dict[str, Any]]
CASES: list[Case] = [
    *itertools.product(
        ("test_load_state_dict", "test_load_state_dict_prefix"),
        [{"sharding_type": kind, "is_training": steps} for kind in MODEL_PARALLEL for steps in (False, True)],
    ),
    *itertools.product(
        ("test_optimizer_load_state_dict", "test_params_and_buffers"),
        [{"sharding_type": kind} for kind in MODEL_PARALLEL],
    ),
    *itertools.product(
        ["test_load_state_dict_dp"],
        [{"sharding_type": "data_parallel", "is_training": steps} for steps in (False, True)],
    ),
]
MULTIPLE_SHARDS: list[Case] = [
    ("test_load_state_dict_cw_multiple_shards", {"sharding_type": "column_wise", "is_training": steps})
    for steps in (False, True)
]
PLAIN_CASES: list[Case] = [("test_parameter_init", {}), ("test_meta_device_dmp_state_dict", {})]
EXPLAINED = {
    # it takes names of weights for those of tables, and one shard for each 4 columns: ours are partitions', and ranges
    # that are neighbours on a rank are one; behind that it has loaded, trained and compared the outputs
    "test_load_state_dict_cw_multiple_shards"
}
"""Tests of TorchRec's that fail, each with the reason."""
COMPOSITIONS = ("product", "sum", "concat", "path_mlp")


def name_of(test: str, arguments: dict[str, Any]) -> str:
    return " ".join([test, *(str(value) for value in arguments.values())])


class OurSharder(CompositionalEmbeddingBagCollectionSharder):
    """As TorchRec's sharders of tests: one sharding type and one kernel."""

    def __init__(self, kind: str, sharding_type: str, kernel: str, fused_params: dict[str, Any] | None = None) -> None:
        super().__init__({"learning_rate": 0.1, **(fused_params or {})})
        self._one, self._kernel = sharding_type, kernel

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [self._one]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [self._kernel]


def make_suite(composition: str) -> Any:
    add_the_missing_module()
    from torchrec.distributed.test_utils import test_model_parallel_base as theirs

    theirs.create_test_sharder = OurSharder
    theirs.get_default_sharders = default_sharders

    class Suite(theirs.ModelParallelStateDictBase):
        backend = "gloo"

        def _create_tables(self) -> None:
            # as wide as halves of a concatenation need; what the tables become stands in their names
            for tables, prefix, count in ((self.tables, "", 4), (self.weighted_tables, "weighted", 2)):
                tables += [
                    EmbeddingBagConfig(
                        num_embeddings=(i + 1) * 10,
                        embedding_dim=(i + 1) * 8,
                        name=f"{prefix}table{i}_{composition}",
                        feature_names=[f"{prefix}feature_{i}"],
                    )
                    for i in range(count)
                ]

        def _create_model(self) -> nn.Module:
            return CompositionalSparseNN(
                tables=self.tables,
                num_float_features=self.num_float_features,
                weighted_tables=self.weighted_tables,
                dense_device=self.device,
                sparse_device=torch.device("meta"),
            )

    return Suite


def run_suite(rank: int, composition: str, cases: list[Case], failed: Path) -> None:
    """Writes the names of the cases that fail, a line each."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    suite, problems = make_suite(composition), {}
    for test, arguments in cases:
        own = suite(test)
        own.setUp()
        try:
            if not arguments:
                getattr(own, test)()
            else:
                kernel = "dense" if arguments["sharding_type"] == "data_parallel" else "fused"
                given = {"sharder_type": "embedding_bag_collection", "kernel_type": kernel, **arguments}
                getattr(suite, test).hypothesis.inner_test(own, **given)
        except Exception as error:
            problems[name_of(test, arguments)] = f"{type(error).__name__}: {error}"
        finally:
            own.tearDown()
    failed.write_text("".join(f"{name}\n" for name in problems))
    unexplained = [f"{name}: {text}" for name, text in problems.items() if name.split()[0] not in EXPLAINED]
    assert not unexplained, "\n".join(unexplained)


@pytest.mark.thorough
@pytest.mark.distributed
def test_what_fails_is_explained(tmp_path: Path) -> None:
    run_and_check("product", [*CASES[::4], *PLAIN_CASES, *MULTIPLE_SHARDS], tmp_path / "failed")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_what_fails_of_all_is_explained(composition: str, tmp_path: Path) -> None:
    run_and_check(composition, [*CASES, *PLAIN_CASES, *MULTIPLE_SHARDS], tmp_path / "failed")


def run_and_check(composition: str, cases: list[Case], failed: Path) -> None:
    run_processes(1, run_suite, composition, cases, failed)
    assert {line.split()[0] for line in failed.read_text().splitlines()} == EXPLAINED
