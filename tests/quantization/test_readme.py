"""The examples of README.md, run as they stand there, and its bytes."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.distributed.global_settings import get_propogate_device, set_propogate_device

import distembed.serving.quantization
from distembed.embedding import CompositionalEmbeddingBagCollection, CompositionalEmbeddingBagConfig
from tests.quantization.test_collections import quantize

README = Path(distembed.serving.quantization.__file__).with_name("README.md")


def test_the_examples_run_as_they_stand_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = "".join(re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL))
    before, printed, names = get_propogate_device(), io.StringIO(), {"__name__": "example"}
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(script, str(README), "exec"), names)
    finally:
        set_propogate_device(before)
    rounding, sharding = (float(own) for own in re.findall(r"tensor\(([\d.e-]+)", printed.getvalue()))
    assert 0 < rounding < 0.01
    assert sharding < 1e-6


def test_rows_have_so_many_bytes() -> None:
    header, *rows = [line.strip("| ").split(" | ") for line in README.read_text().splitlines() if "| " in line][:5]
    dtypes = [getattr(torch, name.strip("`").removeprefix("torch.")) for name in header[1:]]
    assert [row[0] for row in rows] == ["16", "32", "64", "128"]
    for dim, *row_bytes in rows:
        table = CompositionalEmbeddingBagConfig("t", 4096, int(dim), ["x"], partition="naive")
        model = nn.Sequential(CompositionalEmbeddingBagCollection([table]))
        found = [quantize(model, dtype)[0].memory_bytes() for dtype in dtypes]
        assert found == [4096 * int(own) for own in row_bytes]
