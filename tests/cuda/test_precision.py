"""What a GPU multiplies float32 matrices in, by ``train.precision``."""

import pytest
import torch

from distembed.base.errors import UserError
from distembed.base.ranks import Ranks
from distembed.training import build
from distembed.training.build import used_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("precision", "has_bf16", "expected"),
    [
        ("auto", True, "bf16"),
        ("auto", False, "fp32"),
        ("bf16", False, "bf16"),
        ("tf32", True, "tf32"),
        ("fp32", True, "fp32"),
    ],
)
def test_precision_of_a_gpu(precision: str, has_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert used_precision(precision, Ranks(0, 1, 1, CUDA)) == expected


def test_tf32_is_refused_where_there_is_no_gpu() -> None:
    with pytest.raises(UserError, match=r"train\.precision is 'tf32'.* set train\.precision to fp32"):
        used_precision("tf32", Ranks(0, 1, 1, CPU))


@pytest.mark.parametrize(("precision", "expected"), [("tf32", "high"), ("fp32", "highest"), ("bf16", "highest")])
def test_torch_is_told_either_way(precision: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", told.append)
    before = torch.backends.cudnn.allow_tf32
    try:
        build._set_matmul_precision(precision, CPU)
        assert told == [] and torch.backends.cudnn.allow_tf32 == before
        build._set_matmul_precision(precision, CUDA)
        assert told == [expected] and torch.backends.cudnn.allow_tf32 == (precision == "tf32")
    finally:
        torch.backends.cudnn.allow_tf32 = before
