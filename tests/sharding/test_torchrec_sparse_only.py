"""TorchRec's own suite of a model that is one collection of bags and nothing else, with this project's in its place."""

import unittest
from pathlib import Path

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from distembed.sharding import CompositionalEmbeddingBagCollectionSharder
from tests.processes import run_processes
from tests.sharding.test_torchrec_harness import add_the_missing_module
from tests.versions import SPARSE_ONLY_LACKS

EXPLAINED = {
    # every batch is checked, without TorchRec's check of the first one and its line in the log
    "test_sharding_ebc_validate_input_only_once",
    # it replaces a private method of TorchRec's module by one that registers no tables, and ours adds to these
    "test_initialize_torch_state_error_includes_table_name",
}
"""Tests of TorchRec's that fail, each with the reason."""


def run_suite(rank: int, composition: str, failed: Path) -> None:
    """Writes the names of the tests that fail, a line each."""
    add_the_missing_module()
    from torchrec.distributed.test_utils.test_model_parallel_base import ModelParallelSparseOnlyBase

    class Suite(ModelParallelSparseOnlyBase):
        backend = "gloo"

        def _create_sharded_model(
            self, embedding_dim: int = 128, num_embeddings: int = 256
        ) -> DistributedModelParallel:
            table = CompositionalEmbeddingBagConfig(
                "large_table", num_embeddings, embedding_dim, ["my_feature"], "quotient_remainder", composition
            )
            return DistributedModelParallel(
                CompositionalEmbeddingBagCollection([table], device="meta"),
                device=self.device,
                sharders=[CompositionalEmbeddingBagCollectionSharder()],
            )

    torch.set_num_threads(1)
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(Suite).run(result)
    assert result.testsRun == 5 - len(SPARSE_ONLY_LACKS) and not result.skipped
    problems = [(case.id().rpartition(".")[2], text) for case, text in result.failures + result.errors]
    failed.write_text("".join(f"{name}\n" for name, _ in problems))
    unexplained = [text for name, text in problems if name not in EXPLAINED]
    assert not unexplained, "\n".join(unexplained)


@pytest.mark.distributed
@pytest.mark.parametrize("composition", ["product", "feature", "path_mlp"])
def test_what_fails_is_explained(composition: str, tmp_path: Path) -> None:
    run_processes(1, run_suite, composition, tmp_path / "failed")
    assert set((tmp_path / "failed").read_text().split()) == EXPLAINED - SPARSE_ONLY_LACKS
