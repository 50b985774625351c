"""A card for the tests of this folder or, where ``DISTEMBED_DRY_GPU`` is 1, a processor in its place."""

import os
from collections.abc import Iterator

import pytest
import torch

from distembed.base.ranks import Ranks, process_group


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu") if os.environ.get("DISTEMBED_DRY_GPU") == "1" else torch.device("cuda", 0)


@pytest.fixture(scope="module")
def ranks(device: torch.device) -> Iterator[Ranks]:
    """This process as the only rank, of nccl on a card."""
    with process_group(device.type) as alone:
        yield alone
