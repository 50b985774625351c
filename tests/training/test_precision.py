"""What a processor computes in by ``train.precision=auto``, in training and in what the doctor says."""

from pathlib import Path

import pytest
import torch

from distembed.base.ranks import Ranks
from distembed.data.dataset.schema import Schema
from distembed.reports.doctor.facts import MachineFacts
from distembed.reports.doctor.findings import check_machine
from distembed.training import build
from distembed.training.build import Blueprint, used_precision
from distembed.training.config import Config
from distembed.training.train_config import TrainConfig
from tests.ranks import run_on_ranks

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 1, CPU)


@pytest.mark.parametrize(
    ("name", "flags", "expected"),
    [
        ("Intel Xeon", {"avx512_bf16", "amx_bf16"}, "bf16"),
        ("Intel Xeon", {"avx512_bf16"}, "fp32"),
        ("AMD EPYC", {"avx512_bf16"}, "bf16"),
        ("AMD EPYC", {"avx2"}, "fp32"),
        ("Neoverse V2", {"bf16"}, "bf16"),
    ],
)
def test_bf16_is_taken_where_it_multiplies_faster(
    name: str, flags: set[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_flags = ("avx2", "avx512_bf16", "amx_bf16", "bf16")
    capabilities = {"l2_cache_size": 1, **{flag: flag in flags for flag in all_flags}}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(build, "is_intel_processor", lambda: name.startswith("Intel"))
    assert used_precision("auto", ALONE) == expected
    assert [used_precision(own, ALONE) for own in ("bf16", "fp32")] == ["bf16", "fp32"]

    machine = MachineFacts("Linux", 2, frozenset(flags), name.startswith("Intel"), 2**34, Path("."), 2**34)
    (found,) = [own for own in check_machine(machine) if own.subject == "processor bf16"]
    assert (found.status == "ok") == (expected == "bf16")


@pytest.mark.distributed
@pytest.mark.parametrize("slow", [[], [0], [1], [0, 1]])
def test_ranks_compute_alike_on_unlike_processors(slow: list[int]) -> None:
    run_on_ranks(2, _require_one_precision, slow, "fp32" if slow else "bf16")


def _require_one_precision(rank: int, world_size: int, slow: list[int], expected: str) -> None:
    build.multiplies_faster_in_bf16 = lambda flags, is_intel: rank not in slow
    ranks = Ranks(rank, world_size, world_size, CPU)
    assert used_precision("auto", ranks) == expected
    assert [used_precision(own, ranks) for own in ("bf16", "fp32")] == ["bf16", "fp32"]
    for precision, computed in (("auto", expected), ("bf16", "bf16"), ("fp32", "fp32")):
        config = Config(train=TrainConfig(precision=precision))
        blueprint = Blueprint.for_ranks(config, Schema("label", (), ()), ranks, {})
        assert (blueprint.precision, blueprint.bf16) == (computed, computed == "bf16")
