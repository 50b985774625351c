"""An id outside of its table ends a run on the device, with a message that says what it was."""

import subprocess
import sys

import pytest
import torch

from distembed.embedding.ids import _REFUSED_ON_DEVICE
from tests.gpu.refused_id import NUM_EMBEDDINGS


@pytest.mark.gpu
@pytest.mark.parametrize("bad_id", [NUM_EMBEDDINGS, -1])
def test_an_id_outside_of_its_table_fails_on_the_device(bad_id: int, device: torch.device) -> None:
    command = [sys.executable, "-m", "tests.gpu.refused_id", device.type, str(bad_id)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stdout.split("\n")[:2] == [f"{NUM_EMBEDDINGS - 1} was accepted", ""], done.stdout
    assert _REFUSED_ON_DEVICE in done.stdout + done.stderr
