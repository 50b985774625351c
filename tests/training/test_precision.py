"""What a processor computes in by ``train.precision=auto``, in training and in what the doctor says."""

from pathlib import Path

import pytest
import torch

from distembed.doctor.facts import MachineFacts
from distembed.doctor.findings import check_machine
from distembed.training import build
from distembed.training.build import used_precision

CPU = torch.device("cpu")


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
    assert used_precision("auto", CPU) == expected
    assert [used_precision(own, CPU) for own in ("bf16", "fp32")] == ["bf16", "fp32"]

    machine = MachineFacts("Linux", 2, frozenset(flags), name.startswith("Intel"), 2**34, Path("."), 2**34)
    (found,) = [own for own in check_machine(machine) if own.subject == "processor bf16"]
    assert (found.status == "ok") == (expected == "bf16")
